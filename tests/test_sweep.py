"""Sweeps: the trials are trainings of the recipe, they survive a crash, and only the winner sees the test split."""

import contextlib
import json
import multiprocessing
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import optuna
import pytest
import torch

from avgk_hf.cli import build_parser, main
from avgk_hf.recipes import parse_recipe
from avgk_hf.study.sweep import Sweep, _scaled, read_sweep, run_sweep
from avgk_hf.train import main as train
from avgk_hf.trainer import AvgKTrainer

ROOT = Path(__file__).parent.parent
SWEEPS = sorted((ROOT / "recipes").glob("*/sweep_*.yaml"))
SEARCH = ["--search", "alpha=0.01,30", "--seeds", "2"]


def completed(folder: Path) -> list[tuple[dict, float]]:
    storage = f"sqlite:///{folder / 'study.db'}"
    (name,) = optuna.get_all_study_names(storage)
    trials = optuna.load_study(study_name=name, storage=storage).trials
    return [(trial.params, trial.value) for trial in trials if trial.state.name == "COMPLETE"]


def number_completed(folder: Path) -> int:
    """Read without optuna, which would make the tables of a study that a worker is about to make."""
    try:
        with contextlib.closing(sqlite3.connect(f"file:{folder / 'study.db'}?mode=ro", uri=True)) as database:
            return database.execute("SELECT COUNT(*) FROM trials WHERE state = 'COMPLETE'").fetchone()[0]
    except sqlite3.OperationalError:  # no file yet, or no tables
        return 0


def test_a_sweep_chooses_on_validation_and_tests_the_winner_once(recipe, tmp_path, capsys):
    out = tmp_path / "sweep"
    assert main(["sweep", str(recipe), *SEARCH, "--out", str(out), "--learning_rate", "0.1"]) == 0
    found = json.loads((out / "sweep.json").read_text())
    values = {(trial["values"]["alpha"], trial["seed"]): trial["value"] for trial in found["trials"]}
    assert len(found["trials"]) == len(values) == 4
    means = {alpha: (values[alpha, 0] + values[alpha, 1]) / 2 for alpha in (0.01, 30)}
    assert found["winner"]["alpha"] == max(means, key=means.get)
    assert {row["values"]["alpha"]: row["mean"] for row in found["summary"]} == pytest.approx(means)

    # a trial is the training that `avgk train` does with its values and its seed
    runs = sorted(Path(found["runs"]).glob("seed-*/results.json"))
    results = [json.loads(path.read_text()) for path in runs]
    assert [result["seed"] for result in results] == [0, 1]
    for result in results:
        assert result["hyperparameters"]["learning rate"] == 0.1
        own = values[result["hyperparameters"]["alpha"], result["seed"]]
        assert own == result["validation"]["average_k_accuracy"]
        assert 0 <= result["test"]["average_k_accuracy"] <= 1
    loser = next(alpha for alpha in means if alpha != found["winner"]["alpha"])
    other = ["--alpha", str(loser), "--seed", "1", "--learning_rate", "0.1", "--output_dir", str(tmp_path / "loser")]
    train([str(recipe), *other])
    result = json.loads((tmp_path / "loser" / "results.json").read_text())
    assert result["validation"]["average_k_accuracy"] == values[loser, 1]

    assert (out / "alpha.png").read_bytes()[:4] == b"\x89PNG"
    assert "| **" in (out / "sweep.md").read_text() and not (out / "trials").exists()
    times = {path: path.stat().st_mtime_ns for path in runs}
    capsys.readouterr()
    assert main(["sweep", str(recipe), *SEARCH, "--out", str(out), "--learning_rate", "0.1"]) == 0
    assert "4 trainings, 4 of them finished" in capsys.readouterr().out
    assert {path: path.stat().st_mtime_ns for path in runs} == times and len(completed(out)) == 4


def test_trials_never_read_the_test_split(recipe, image_folder, tmp_path, capsys):
    """With unreadable test images the search succeeds, and only the winner fails on them."""
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for path in (data / "test").rglob("*.png"):
        path.write_bytes(b"no image")
    out = tmp_path / "sweep"
    assert main(["sweep", str(recipe), "--search", "alpha=1,2", "--out", str(out), "--dataset", str(data)]) == 2
    error = capsys.readouterr().err
    assert "cannot be read as an image" in error and f"{data / 'test'}" in error
    assert len(completed(out)) == 2


@pytest.mark.long
def test_a_killed_sweep_goes_on_and_workers_share_it(recipe, tmp_path):
    """kill -9 after the first trial; then two workers finish the rest together."""
    out = tmp_path / "sweep"
    command = ["sweep", str(recipe), "--search", "alpha=0.01,1,30", "--num_train_epochs", "1", "--out", str(out)]

    def work():
        torch.set_num_threads(1)  # a fork cannot use the threads of OpenMP that this process has begun
        sys.exit(main(command))

    process = multiprocessing.get_context("fork").Process  # forked: it imports nothing
    worker = process(target=work)
    worker.start()
    deadline = time.monotonic() + 240
    while not number_completed(out) and worker.is_alive() and time.monotonic() < deadline:
        time.sleep(0.05)
    worker.kill()
    worker.join()
    before = completed(out)
    assert before
    workers = [process(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join(200)
    assert [worker.exitcode for worker in workers] == [0, 0]
    after = completed(out)
    assert all(trial in after for trial in before)
    assert {parameters["alpha"] for parameters, _ in after} == {0.01, 1, 30}
    assert len({(parameters["alpha"], value) for parameters, value in after}) == 3  # trained once or twice, the same
    assert [row["n"] for row in json.loads((out / "sweep.json").read_text())["summary"]] == [1, 1, 1]


@pytest.mark.long
def test_no_trial_is_cut_short(recipe, tmp_path):
    """Trainings below the median of those before are finished too, so that every mean is over the same seeds."""
    out = tmp_path / "sweep"
    search = ["--search", "learning_rate=0.1,1.0e-6", "--seeds", "3", "--num_train_epochs", "2"]
    assert main(["sweep", str(recipe), *search, "--out", str(out)]) == 0
    assert len(completed(out)) == 6  # optuna would begin to cut after five
    found = json.loads((out / "sweep.json").read_text())
    assert [(row["n"], row["diverged"]) for row in found["summary"]] == [(3, 0)] * 2


def test_an_interrupted_trial_is_trained_again(recipe, tmp_path, capsys, caplog, monkeypatch):
    """Ctrl-C in the first of two trials; the same command trains both, and nothing a third time."""
    out = tmp_path / "sweep"
    command = ["sweep", str(recipe), "--search", "alpha=1,2", "--num_train_epochs", "1", "--out", str(out)]

    def interrupted(self, *args, **kwargs):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(AvgKTrainer, "training_step", interrupted)
        assert main(command) == 130
    assert f"finished trainings are kept in {out}, and the same command goes on" in capsys.readouterr().err
    assert completed(out) == [] and not any(record.exc_info for record in caplog.records)
    assert main(command) == 0
    assert sorted(parameters["alpha"] for parameters, _ in completed(out)) == [1, 2]
    assert "2 trainings, 0 of them finished" in capsys.readouterr().out
    assert main(command) == 0
    assert "2 trainings, 2 of them finished" in capsys.readouterr().out and len(completed(out)) == 2


def test_a_training_that_diverges_ends_its_trial_only(recipe, tmp_path, capsys):
    out = tmp_path / "sweep"
    search = ["--search", "learning_rate=1e38,0.05", "--max_grad_norm", "0", "--num_train_epochs", "1"]
    command = ["sweep", str(recipe), *search, "--out", str(out)]
    for finished in (0, 2):
        assert main(command) == 0
        assert f"2 trainings, {finished} of them finished" in capsys.readouterr().out
        found = json.loads((out / "sweep.json").read_text())
        assert found["winner"] == {"learning_rate": 0.05}
        assert [(row["n"], row["diverged"]) for row in found["summary"]] == [(0, 1), (1, 0)]
        assert "| 1e+38 | 1 diverged | 0 |" in (out / "sweep.md").read_text()
    none = ["sweep", str(recipe), *search[:1], "learning_rate=1e37,1e38", *search[2:], "--out", str(tmp_path / "none")]
    for _ in range(2):
        assert main(none) == 2
        assert "a training of every combination diverged" in capsys.readouterr().err


def test_the_rate_is_scaled_from_the_one_that_is_searched(recipe):
    sweep = Sweep(str(recipe), {"learning_rate": [0.1], "per_device_train_batch_size": [8]}, scale_learning_rate=True)
    (values,) = sweep.combinations()
    assert _scaled(sweep, values) == {"learning_rate": pytest.approx(0.1 * 8 / 16)}


RAY = """
import ray, sys
ray.init(num_cpus=1, include_dashboard=False)
from avgk_hf.cli import main
sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.long
@pytest.mark.timeout(900)
def test_ray_does_the_same_and_goes_on(recipe, tmp_path):
    """In a process of its own, as ray cannot send a trainer to its workers after another one was used; kill -9 after
    the first of two trainings, which is not done again."""
    pytest.importorskip("ray")
    search = ["--search", "per_device_train_batch_size=8,16", "--scale-learning-rate", "--num_train_epochs", "1"]
    command = ["sweep", str(recipe), *search, "--out"]
    assert main([*command, str(tmp_path / "optuna")]) == 0
    ray = [sys.executable, "-c", RAY, *command, str(tmp_path / "ray"), "--backend", "ray"]
    # on loopback only; ray's workers would yield to whatever else the machine does
    env = {**os.environ, "OMP_NUM_THREADS": "1", "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0"}
    env["PYTHONPATH"] = str(ROOT)
    if " " in sys.executable:
        done = subprocess.run(ray, env=env, capture_output=True, text=True, timeout=500)
        assert done.returncode == 2 and "because of the space in its path" in done.stderr
        return

    def kept() -> list[Path]:
        texts = [path.read_text() for path in (tmp_path / "ray").glob("ray/*/experiment_state-*.json")]
        ended = any(text.count("TERMINATED") for text in texts)
        return (
            [path for path in (tmp_path / "ray").glob("ray/*/*/result.json") if path.stat().st_size] if ended else []
        )

    first = subprocess.Popen(ray, env=env, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    while not kept() and first.poll() is None:
        time.sleep(0.1)
    first.kill()
    assert first.wait() == -signal.SIGKILL
    (before,) = kept()
    time_of_it = before.stat().st_mtime_ns
    done = subprocess.run(ray, env=env, capture_output=True, text=True, timeout=500)
    assert done.returncode == 0, done.stderr
    assert len(kept()) == 2 and before.stat().st_mtime_ns == time_of_it
    of_ray, of_optuna = (
        json.loads((tmp_path / name / "sweep.json").read_text())["summary"] for name in ("ray", "optuna")
    )
    assert of_ray == of_optuna


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "nothing to search"),
        (["--search", "alpha"], "write the field and its values"),
        (["--search", "aplha=1,2"], "'aplha' cannot be set here"),
        (["--search", "seed=1,2"], "'seed' cannot be set here"),
        (["--search", "alpha=1,1"], "different values"),
        (["--search", "alpha=1,1.0"], "different values"),
        (["--search", "alpha=[1,2]"], "invalid float value: '[1'"),
        (["--search", "alpha=1,high"], "invalid float value: 'high'"),
        (["--search", "head=ml,none"], "invalid choice: 'none'"),
        (["--search", "alpha=1,2", "--seed", "3"], "--seed: a sweep has the seeds 0, 1, ..."),
        (["--search", "alpha=1,2", "--output_dir=runs/x"], "its own folder (`--out`)"),
        (["--search", "alpha=1,2", "--seeds", "0"], "seeds=0 must be a whole number"),
        (["--search", "alpha=1,2", "--seeds", "-1"], "seeds=-1 must be a whole number"),
        (["--search", "alpha=1,2", "--no_such_field", "3"], "unknown field 'no_such_field'"),
    ],
)
def test_bad_sweeps_are_refused(recipe, tmp_path, capsys, arguments, message):
    assert main(["sweep", str(recipe), "--out", str(tmp_path / "sweep"), *arguments]) == 2
    assert message in capsys.readouterr().err and not (tmp_path / "sweep").exists()


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_the_studies_of_the_appendix(path):
    """alpha over decades; the batch size with learning rate / batch size held at that of the recipe."""
    sweep = read_sweep(str(path))
    assert Path(sweep.recipe).is_file() and sweep.seeds >= 3
    (name,) = sweep.search
    values = sweep.search[name]
    assert values == sorted(values)
    if path.stem == "sweep_alpha":
        assert name == "alpha" and values[-1] / values[0] >= 100
        return
    assert name == "per_device_train_batch_size" and sweep.scale_learning_rate
    ratios = [_scaled(sweep, {name: value})["learning_rate"] / value for value in values]
    _, _, args = parse_recipe([sweep.recipe])
    assert ratios == pytest.approx([args.learning_rate / args.per_device_train_batch_size] * len(values))


@pytest.mark.parametrize("folder", ["cifar100", "plantnet300k"])
def test_the_readmes_describe_the_studies(folder, monkeypatch):
    """Their commands are read as they stand, and the numbers of trainings are those of the files."""
    monkeypatch.chdir(ROOT)
    text = (ROOT / "recipes" / folder / "README.md").read_text()
    commands = [line.split()[1:] for line in text.splitlines() if line.startswith("CUDA_VISIBLE_DEVICES=0 avgk sweep")]
    assert [Path(words[2]).stem for words in commands] == ["sweep_alpha", "sweep_batch", "sweep_batch"]
    folders = set()
    for _, *words in commands:
        args, overrides = build_parser().parse_known_args(words)
        sweep = read_sweep(args.recipe, output_dir=args.out, overrides=overrides)
        model_args, _, _ = parse_recipe([sweep.recipe, *overrides])
        assert model_args.objective == ("ce" if overrides else "avgk")
        folders.add(sweep.output_dir)
        ((_, values),) = sweep.search.items()
        row = next(line for line in text.splitlines() if line.startswith(f"| [{Path(args.recipe).name}]"))
        cells = [cell.strip() for cell in row.strip("|").split("|")]
        assert cells[1].startswith(f"{len(values)} ") and cells[1].endswith(f"from {values[0]:g} to {values[-1]:g}")
        assert cells[2] == str((len(values) + 1) * sweep.seeds) and cells[-1] == "not run here"
    assert len(folders) == 3


def test_a_sweep_file_refuses_unknown_fields(tmp_path, recipe):
    path = tmp_path / "sweep.yaml"
    path.write_text(f"recipe: {recipe}\nsearch: {{alpha: [1, 2]}}\nsedes: 3\n")
    with pytest.raises(ValueError, match="unknown field 'sedes'"):
        read_sweep(str(path))
    for text, message in (
        (f"recipe: {recipe}\n", "nothing to search"),
        (f"recipe: {recipe}\nsearch: {{alpha: [1, 2]}}\noutput_dir: 3\n", "output_dir=3 must be the name"),
        ("recipe: 3\nsearch: {alpha: [1, 2]}\n", "there is no recipe"),
    ):
        path.write_text(text)
        with pytest.raises((ValueError, OSError), match=message):
            run_sweep(read_sweep(str(path)))
    path.write_text(f"recipe: {recipe}\nsearch: {{learning_rate: [1e-3, 1e-2]}}\n")
    assert read_sweep(str(path)).search == {"learning_rate": [0.001, 0.01]}  # YAML takes these for text
    path.write_text(f"recipe: {recipe}\nsearch: {{alpha: [1, 2]}}\nseeds: 3\n")
    assert read_sweep(str(path), seeds=5) == Sweep(str(recipe), {"alpha": [1, 2]}, seeds=5)
