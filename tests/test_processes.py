"""Several processes give the answer of one: two real ones against this one, and the command that starts them."""

import json
import os
import shlex
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from datasets import load_from_disk
from hub_server import HubServer
from safetensors.torch import load_file
from two_processes import BATCH, CLASSES, OBJECTIVES, SIZES, everything

from avgk_hf import AverageKThreshold, AvgKConfig, AvgKForImageClassification
from avgk_hf.evaluation import evaluate
from conftest import THREADS, save_vit

ROOT = Path(__file__).parent.parent
LAUNCH = ["-m", "accelerate.commands.launch", "--config_file", str(ROOT / "recipes/accelerate_configs/cpu.yaml")]


def launch(*arguments, **env) -> str:
    command = [sys.executable, *LAUNCH, "--num_processes", "2", *map(str, arguments)]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, cwd=ROOT, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stdout + done.stderr


def run_two(fresh, *arguments, **env) -> None:
    """`two_processes.py` in two processes, with what accelerate tells those that it launches on a CPU."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    of_each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    code = "import runpy, sys; del sys.argv[0]; runpy.run_path(sys.argv[0], run_name='__main__')"
    group["OMP_NUM_THREADS"] = THREADS  # those of the process that they are compared with
    env = {**os.environ, **group, "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT), **env}
    given = [ROOT / "tests/two_processes.py", *arguments]
    for done in fresh.run_together(code, [given, given], ROOT, env, of_each):
        assert done.code == 0, done.err


@pytest.fixture(scope="module")
def found(splits, fresh, tmp_path_factory):
    """What one process and what two processes found, by the same code."""
    one, two = tmp_path_factory.mktemp("one"), tmp_path_factory.mktemp("two")
    splits.save_to_disk(one / "images")
    recipe = two / "recipe.yaml"
    recipe.write_text(
        f"model: test_resnet\nimage_size: 32\nk: 2\ndataset: {one / 'images'}\noutput_dir: {two / 'run'}\n"
        "num_train_epochs: 2\nper_device_train_batch_size: 16\nper_device_eval_batch_size: 4\ncalibrate_k: [1, 3]\n"
        "eval_strategy: epoch\nsave_strategy: epoch\nload_best_model_at_end: true\ndataloader_pin_memory: false\n"
        "push_to_hub: true\nhub_model_id: someone/trees\nhub_strategy: end\n"
    )
    with HubServer() as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1", "HF_HUB_OFFLINE": "0"}
        run_two(fresh, two, one / "images", recipe, **env)
        requests = hub.requests
    everything(one, str(one / "images"))
    read = [json.loads((folder / "found.json").read_text()) for folder in (one, two)]
    assert [part["world"] for part in read] == [1, 2]
    return {"one": one, "two": two, "requests": requests, "of_one": read[0], "of_two": read[1]}


def test_global_candidates_are_those_of_one_process(found):
    assert found["of_two"]["candidates"] == found["of_one"]["candidates"]
    for name, positions in found["of_two"]["candidates"].items():
        assert len(set(positions)) == round((float(name.split()[-1]) - 1) * BATCH)
    assert min(found["of_two"]["candidates"]["one process 2"]) >= BATCH // 2 * CLASSES


@pytest.mark.parametrize("objective", OBJECTIVES)
def test_gradients_are_those_of_one_process(found, objective):
    """After two steps, on a model without BatchNorm; ROLE's estimates too. Local candidates are others."""
    one, two = (load_file(found[where] / f"{objective}.safetensors") for where in ("one", "two"))
    assert one.keys() == two.keys()
    close = {name: torch.allclose(two[name].float(), one[name].float(), rtol=0, atol=1e-5) for name in one}
    if objective == "local":
        assert not close["ml_head.weight"]
    else:
        assert all(close.values()), [name for name, same in close.items() if not same]
        assert max(one[name].abs().max() for name in one if name.startswith("backbone")) > 1e-3


def test_only_the_scores_that_can_matter_are_sent(found):
    """And none at all for local candidates."""
    for k, values in found["of_two"]["sent"].items():
        assert values == min(round((float(k) - 1) * BATCH), BATCH // 2 * (CLASSES - 1))
    assert found["of_two"]["sent"]["2"] == BATCH < BATCH // 2 * CLASSES


@pytest.mark.parametrize("n", SIZES)
def test_evaluation_is_that_of_one_process(found, n):
    """Every image once, also where a process has none; thresholds to the last bit, and O(K n) scores held."""
    one, two = (found[where]["evaluations"][str(n)] for where in ("of_one", "of_two"))
    for metrics in (one["metrics"], two["metrics"]):
        assert metrics["eval_loss"] == metrics["test_loss"] == pytest.approx(one["metrics"]["eval_loss"], rel=1e-6)
    losses = ("eval_loss", "test_loss")
    for part in (one, two):
        part["metrics"] = {name: value for name, value in part["metrics"].items() if name not in losses}
    assert two == one and {"eval_in_order", "test_in_order"} <= set(two["metrics"])  # of the user's own metric too
    assert two["examples"] == n == len(two["sets"])
    assert list(two["coverage"].get("aps", {})) == [key for key, least in (("0.5", 1), ("0.9", 9)) if n >= least]
    assert two["held"] <= 2 * (3 * n + 1)


def test_only_the_main_process_writes(found):
    assert found["of_two"]["written"] == []
    assert sum("POST /api/repos/create" in request for request in found["requests"]) <= 2
    commits = [request for request in found["requests"] if "/commit/" in request]
    assert len(commits) == 1, commits
    assert {"README.md", "results.json", "config.json"} <= {path.name for path in (found["two"] / "run").iterdir()}


def test_a_model_trained_by_two_processes_is_calibrated_for_one(found):
    """The thresholds that two processes wrote, and the accuracies they reported, are what one process computes."""
    run = found["two"] / "run"
    model = AvgKForImageClassification.from_pretrained(run)
    stored = dict(model.config.thresholds)
    results = json.loads((run / "results.json").read_text())
    splits = load_from_disk(found["one"] / "images")
    test = evaluate(model, splits["test"], [2], batch_size=4)
    assert list(stored) == ["1.5", "2"]
    assert {name: test[name] for name in test if name in results["test"] and name != "loss"} == {
        name: value for name, value in results["test"].items() if name != "loss" and "@" not in name
    }
    evaluate(model, splits["validation"], [1.5, 2], calibrate=True, batch_size=4)
    assert model.config.thresholds == stored


def test_two_processes_go_on_where_they_stopped(found):
    """ROLE, whose label estimates come back too: weights, estimates, thresholds and metrics to the last bit."""
    whole, killed = found["two"] / "whole", found["two"] / "killed"
    for name in ("model.safetensors", "results.json", "checkpoint-6/objective.safetensors"):
        assert (whole / name).read_bytes() == (killed / name).read_bytes()
    thresholds = [AvgKConfig.from_pretrained(run).thresholds for run in (whole, killed)]
    assert thresholds[0] == thresholds[1] != {}
    assert "step 2/6  training goes on" in (killed / "train.log").read_text()


@pytest.mark.long  # two processes that import everything; what they compute is tested above
def test_the_command_of_the_page(recipe, tmp_path):
    """`accelerate launch --config_file ... -m avgk_hf.train RECIPE`, and it says that two processes train."""
    command = "accelerate launch --config_file recipes/accelerate_configs/cpu.yaml -m avgk_hf.train"
    assert f"\n{command} recipes/glyphs/avgk.yaml\n" in (ROOT / "docs" / "processes.md").read_text()
    text = launch("-m", "avgk_hf.train", recipe, "--num_train_epochs", "1")
    assert "2 processes" in text and text.count("saved to") == 1
    assert (tmp_path / "run" / "config.json").is_file()


@pytest.mark.long  # the same for a classifier of another class, which test_streams.py looks at
def test_the_commands_that_calibrate_and_evaluate(image_folder, tmp_path):
    """`accelerate launch --config_file ... -m avgk_hf.cli calibrate ...`, and then `evaluate`."""
    save_vit(tmp_path / "vit")
    names = {"my_classifier": tmp_path / "vit", "my_plants": image_folder, "runs/two": tmp_path / "two"}
    page = (ROOT / "docs" / "processes.md").read_text().splitlines()
    commands = [shlex.split(line) for line in page if line.startswith("accelerate") and " -m avgk_hf.cli " in line]
    calibrated, evaluated = (launch(*(names.get(word, word) for word in each[4:])) for each in commands)
    assert calibrated.count("thresholds written to") == evaluated.count("no drift so far") == 1
    assert (tmp_path / "two" / "config.json").is_file()


def test_streams_merge_exactly():
    """Many shares, any order, ties at the cut: thresholds and mean sizes as from one stream, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    for trial in range(300):
        n, classes = (
            int(torch.randint(1, 40, (), generator=generator)),
            int(torch.randint(3, 12, (), generator=generator)),
        )
        scores = torch.rand(n, classes, generator=generator)
        if trial % 3:
            scores = (scores * 4).round() / 4 if trial % 3 == 1 else scores.bfloat16().float()
        ks = [1, 1.5, 2.25][: 1 + trial % 3]
        whole, merged = AverageKThreshold(ks, n), AverageKThreshold(ks, n)
        whole.update(scores)
        shares = torch.randint(0, 4, (n,), generator=generator)
        for part in range(4):
            stream = AverageKThreshold(ks, n)
            for rows in scores[shares == part].split(3):
                stream.update(rows)
            merged.merge(stream.survivors(), *stream.facts())
        assert merged.compute() == whole.compute() and merged.mean_set_sizes() == whole.mean_set_sizes()
