"""What a kill, a full disk, Ctrl-C, a half-written or malicious file and a diverging loss do to a run."""

import json
import os
import pickle
import re
import resource
import shlex
import shutil
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForImageClassification, EarlyStoppingCallback, TrainerCallback, pipeline

from avgk_hf import AvgKConfig, AvgKForImageClassification, AvgKTrainingArguments, checkpoints, prepare
from avgk_hf.cli import main
from avgk_hf.data import transforms
from conftest import save_vit

# imports once and runs every command it is given in a process of its own, which can be killed like any other
DRIVER = """
import json, os, resource, signal, sys, traceback
import avgk_hf.evaluation, avgk_hf.train
from avgk_hf.cli import main
from avgk_hf.trainer import AvgKTrainer

for line in sys.stdin:
    job = json.loads(line)
    reading, writing = os.pipe()  # no file, so that a limit on their size does not reach it
    child = os.fork()
    if child == 0:
        os.dup2(writing, 1), os.dup2(writing, 2)
        if job["pid_file"]:
            open(job["pid_file"], "w").write(str(os.getpid()))
        if job["file_size"]:
            resource.setrlimit(resource.RLIMIT_FSIZE, (job["file_size"], resource.RLIM_INFINITY))
        step = AvgKTrainer.training_step
        def training_step(self, *args, **kwargs):
            if self.state.global_step + 1 == job["kill_in"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return step(self, *args, **kwargs)
        AvgKTrainer.training_step = training_step
        save = AvgKTrainer._save_rng_state
        def save_rng_state(self, folder):
            if self.state.global_step == job["kill_saving"]:
                os.kill(os.getpid(), signal.SIGKILL)
            return save(self, folder)
        AvgKTrainer._save_rng_state = save_rng_state
        code = 1
        try:
            code = main(job["arguments"]) if job["arguments"] else exec(job["code"]) or 0
        except BaseException:
            traceback.print_exc()
        finally:
            sys.stdout.flush(), sys.stderr.flush(), os._exit(code)
    os.close(writing)
    with open(reading, errors="replace") as pipe:
        text = pipe.read()
    print(json.dumps([os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text]), flush=True)
"""


@pytest.fixture(scope="module")
def environment():
    path = os.pathsep.join([str(Path(__file__).parent.parent), os.environ.get("PYTHONPATH", "")])
    own = {"PYTHONUTF8": "0"}  # so that a locale decides, as it does where nobody asked for UTF-8
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", **own}


@pytest.fixture(scope="module")
def command(environment):
    """Run an `avgk` command in its own process; gives the exit code (negative: the signal) and what it printed."""
    pipe = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True, "env": environment}
    with subprocess.Popen([sys.executable, "-c", DRIVER], **pipe) as driver:

        def run(*arguments, **job):
            nothing = dict.fromkeys(("kill_in", "kill_saving", "file_size", "pid_file", "code"))
            job = {**nothing, **job, "arguments": [str(argument) for argument in arguments]}
            driver.stdin.write(json.dumps(job) + "\n")
            driver.stdin.flush()
            return json.loads(driver.stdout.readline())

        yield run
        driver.stdin.close()


@pytest.fixture
def model_folder(trained_run, tmp_path):
    return shutil.copytree(trained_run, tmp_path / "copy", ignore=shutil.ignore_patterns("checkpoint-*"))


def often(**fields):
    """Checkpoints every 3 of 5 steps in an epoch, so that most of them fall inside one."""
    fields = {
        **{"eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 3, "save_steps": 3, "logging_steps": 1},
        **{"num_train_epochs": 3, "save_total_limit": 1, "resume_from_checkpoint": "last"},
        **fields,
    }
    return [text for name, value in fields.items() for text in (f"--{name}", str(value))]


CASES = {
    "avgk": {"augmentation": "timm", "optim": "adamw_torch", "learning_rate": 0.003, "early_stopping_patience": 3},
    "role": {"optim_args": "momentum=0.9", "theta_lr": 10, "max_grad_norm": 0, "save_total_limit": 5},
    "topk": {"augmentation": "timm", "lr_scheduler_type": "cosine"},
}


@pytest.mark.parametrize(
    "objective", [pytest.param(name, marks=pytest.mark.long) if name in ("role", "topk") else name for name in CASES]
)
def test_a_killed_run_ends_as_if_nothing_had_happened(objective, recipe, tmp_path, command):
    """SIGKILL in steps 5 and 11, each after a checkpoint inside an epoch, and the same command each time."""

    def train(name, **kwargs):
        options = often(objective=objective, output_dir=tmp_path / name, **CASES[objective])
        return command("train", recipe, *options, **kwargs)

    code, text = train("whole")
    assert code == 0 and "training starts from the beginning: there is no complete checkpoint in" in text
    code, text = train("killed", kill_in=5)
    assert code == -signal.SIGKILL and "from the beginning" in text
    code, text = train("killed", kill_in=11)
    assert code == -signal.SIGKILL and f"training goes on from {tmp_path / 'killed' / 'checkpoint-3'}." in text
    code, text = train("killed")
    assert code == 0 and f"training goes on from {tmp_path / 'killed' / 'checkpoint-9'}." in text

    whole, killed = tmp_path / "whole", tmp_path / "killed"
    results = [json.loads((run / "results.json").read_text()) for run in (whole, killed)]
    assert results[0] == results[1]
    states = [json.loads((run / "trainer_state.json").read_text()) for run in (whole, killed)]
    histories = [
        [
            {k: v for k, v in entry.items() if not k.endswith(("runtime", "per_second"))}
            for entry in state["log_history"]
        ]
        for state in states
    ]
    of_training = [[entry for entry in history if "train_loss" not in entry] for history in histories]
    assert of_training[0] == of_training[1] and len(of_training[0]) > 15
    for field in ("best_metric", "best_global_step", "global_step"):
        assert states[0][field] == states[1][field]
    best = [Path(state["best_model_checkpoint"]) for state in states]
    assert best[1].parent == killed and best[0].name == best[1].name
    names = sorted(path.name for path in whole.iterdir())
    assert names == sorted(path.name for path in killed.iterdir()) and ".unfinished" not in names
    for one, other in ((whole, killed), best):
        assert (one / "model.safetensors").read_bytes() == (other / "model.safetensors").read_bytes()
        thresholds = [AvgKConfig.from_pretrained(folder).thresholds for folder in (one, other)]
        assert thresholds[0] == thresholds[1] != {}
    assert (best[0] / "objective.safetensors").exists() == (objective == "role")
    if objective == "role":
        thetas = [load_file(folder / "objective.safetensors") for folder in best]
        assert all(torch.equal(thetas[0][name], thetas[1][name]) for name in ("theta", "seen"))
    log = (killed / "train.log").read_text()
    assert log.count("training starts") == 1 and log.count("training goes on") == 2


def test_early_stopping_counts_on_and_a_stopped_run_stays_stopped(make_trainer, tmp_path):
    """With learning rate 0 nothing improves; the counter must come back with the checkpoint."""

    def make(patience=3, **kwargs):
        kwargs = {"learning_rate": 0.0, "num_train_epochs": 9, "save_total_limit": 9, **kwargs}
        return make_trainer(callbacks=[EarlyStoppingCallback(patience)], **kwargs)

    trainer = make()
    trainer.train()
    assert trainer.state.epoch == 4
    trainer = make()
    trainer.train(resume_from_checkpoint=str(tmp_path / "run" / "checkpoint-10"))
    assert trainer.state.epoch == 4
    trainer = make()
    trainer.train(resume_from_checkpoint="last")
    assert trainer.state.global_step == 20
    trainer = make(patience=4)
    trainer.train(resume_from_checkpoint="last")
    assert trainer.state.epoch == 5


def test_a_finished_run_takes_no_further_step_and_can_be_moved(make_trainer, tmp_path):
    fields = {"max_steps": 7, "save_strategy": "steps", "eval_strategy": "steps", "save_steps": 7, "eval_steps": 7}
    trainer = make_trainer(**fields)
    trainer.train()
    validation = trainer.card.results(trainer.model.config)["validation"]
    shutil.move(tmp_path / "run", tmp_path / "moved")
    again = make_trainer(**fields, output_dir=str(tmp_path / "moved"))
    again.train(resume_from_checkpoint=True)
    assert again.state.global_step == 7
    assert again.state.best_model_checkpoint == str(tmp_path / "moved" / "checkpoint-7")
    assert again.model.config.thresholds == trainer.model.config.thresholds
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True))
    assert again.card.results(again.model.config)["validation"] == validation


@pytest.fixture
def said(monkeypatch):
    messages = []
    monkeypatch.setattr(checkpoints.logger, "warning", messages.append)
    return messages


CHECKPOINT_FILES = [
    "config.json",
    "model.safetensors",
    "objective.safetensors",
    "optimizer.pt",
    "rng_state.pth",
    "scheduler.pt",
    "trainer_state.json",
]


def test_an_incomplete_checkpoint_is_passed_over_or_refused(make_trainer, make_model, tmp_path, said):
    def make():
        return make_trainer(model=make_model(objective="role"), save_total_limit=3)

    make().train()
    run = tmp_path / "run"
    first, last = run / "checkpoint-5", run / "checkpoint-10"
    assert set(CHECKPOINT_FILES) < {path.name for path in last.iterdir()}
    assert checkpoints.last_checkpoint(run) == last and said == []
    trainer = make()
    for name in CHECKPOINT_FILES:
        whole = (last / name).read_bytes()
        for size in (None, 0, 5, len(whole) // 2, len(whole) - 3):
            (last / name).unlink(missing_ok=True)
            if size is not None:
                (last / name).write_bytes(whole[:size])
            said.clear()
            assert checkpoints.last_checkpoint(run) == first
            assert len(said) == 1 and said[0].startswith(f"{last} is passed over: ") and name in said[0]
            with pytest.raises((OSError, ValueError)) as refusal:
                trainer.train(resume_from_checkpoint=str(last))
            assert name in str(refusal.value) and str(last) in str(refusal.value) and "\n" not in str(refusal.value)
        (last / name).write_bytes(whole)
    with pytest.raises(FileNotFoundError, match="there is no checkpoint folder"):
        trainer.train(resume_from_checkpoint=str(run / "checkpoint-7"))
    (first / "model.safetensors").write_bytes(b"")  # best or not: found now, not when it is loaded in the end
    state = json.loads((last / "trainer_state.json").read_text())
    (last / "trainer_state.json").write_text(json.dumps({**state, "best_model_checkpoint": str(first)}))
    with pytest.raises(OSError, match=r"checkpoint-5/model.safetensors is missing, cut off or damaged"):
        trainer.train(resume_from_checkpoint="last")


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.mark.parametrize("as_zip", [True, False])
def test_no_pickle_is_ever_run(as_zip, trained_run, make_trainer, make_model, tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker))).close()
    assert marker.exists(), "the bomb does not work: this test shows nothing"
    marker.unlink()

    def plant(path):
        torch.save({"state": Bomb(marker)}, path) if as_zip else path.write_bytes(pickle.dumps(Bomb(marker)))

    run = shutil.copytree(trained_run, tmp_path / "run")
    last = checkpoints.last_checkpoint(run)
    for name in ("optimizer.pt", "scheduler.pt", "rng_state.pth", "scaler.pt"):
        whole = (last / name).read_bytes() if (last / name).exists() else None
        plant(last / name)
        with pytest.raises(ValueError, match=rf"{name} is cut off or damaged, or holds more than") as refusal:
            make_trainer().train(resume_from_checkpoint=str(last))
        assert "\n" not in str(refusal.value) and not marker.exists()
        (last / name).write_bytes(whole) if whole else (last / name).unlink()
    plant(last / "training_args.bin")  # read by nobody
    checkpoints.check_checkpoint(last)
    model = make_model()
    for name in ("pytorch_model.bin", "model.pt", "last.ckpt"):
        folder = tmp_path / name
        model.save_pretrained(folder)
        (folder / "model.safetensors").unlink()
        plant(folder / name)
        for load in (AvgKForImageClassification, AutoModelForImageClassification):
            with pytest.raises(
                ValueError, match=rf"only as {name}, a pickle.*convert it once: `safetensors.torch.save"
            ):
                load.from_pretrained(folder)
        assert not marker.exists()


def test_the_way_to_convert_weights_works(make_model, tmp_path, monkeypatch):
    model = make_model()
    model.save_pretrained(tmp_path)
    torch.save(load_file(tmp_path / "model.safetensors"), tmp_path / "pytorch_model.bin")
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match="convert it once") as refusal:
        AvgKForImageClassification.from_pretrained(tmp_path)
    monkeypatch.chdir(tmp_path)
    exec("import torch, safetensors.torch\n" + str(refusal.value).split("`")[1])
    loaded = AvgKForImageClassification.from_pretrained(tmp_path)
    assert torch.equal(loaded.ml_head.weight, model.ml_head.weight)


def edit(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **fields}))


def cut(name, size):
    return lambda folder: (folder / name).write_bytes((folder / name).read_bytes()[:size])


DAMAGE = {
    "weights without a byte": (cut("model.safetensors", 0), "model.safetensors is missing, cut off or damaged"),
    "weights cut in the length": (cut("model.safetensors", 5), "model.safetensors is missing, cut off or damaged"),
    "weights cut in the header": (cut("model.safetensors", 400), "model.safetensors is missing, cut off or damaged"),
    "weights cut in a tensor": (cut("model.safetensors", -1), "model.safetensors is missing, cut off or damaged"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "holds no model.safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "holds no config.json"),
    "config cut": (cut("config.json", 300), "config.json is not valid JSON"),
    "config without a byte": (cut("config.json", 0), "config.json is not valid JSON"),
    "config of bytes": (lambda f: (f / "config.json").write_bytes(b"\xff\x00"), "config.json is not valid JSON"),
    "config a list": (
        lambda f: (f / "config.json").write_text("[1]"),
        "config.json must hold a mapping, but holds list",
    ),
    "threshold NaN": (lambda f: edit(f, thresholds={"2": float("nan")}), "config.json: config.thresholds['2']=nan"),
    "threshold text": (lambda f: edit(f, thresholds={"2": "high"}), "config.json: .*thresholds"),
    "K too large": (lambda f: edit(f, thresholds={"6": 0.1}), "config.json: config.thresholds has the key '6'"),
    "thresholds a list": (lambda f: edit(f, thresholds=[0.1]), "config.json: .*thresholds"),
}


@pytest.mark.parametrize("damage", DAMAGE)
def test_a_damaged_model_is_refused_by_file_and_field(damage, model_folder, image_folder, tmp_path, capsys):
    break_it, message = DAMAGE[damage]
    break_it(model_folder)
    image, model = str(image_folder / "test" / "oak" / "0.png"), str(model_folder)
    commands = [
        ["predict", model, image],
        ["evaluate", model, str(image_folder)],
        ["calibrate", model, str(image_folder)],
        ["push", model, "user/name"],
        ["card", model],
        ["plot", model, "--out", str(tmp_path / "plots")],
    ]
    parts = message.split(".*")
    before = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    for arguments in commands:
        if (arguments[0], damage) == ("card", "no weights"):
            continue  # which a card does not need
        capsys.readouterr()
        assert main(arguments) == 2, arguments
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"avgk {arguments[0]}: ") and all(part in error for part in (model, *parts)), error
    assert before == {path.name: path.read_bytes() for path in model_folder.iterdir()}
    with pytest.raises((OSError, ValueError)) as refusal:
        AvgKForImageClassification.from_pretrained(model_folder)
    assert all(part in str(refusal.value) for part in (model, *parts)) and "\n" not in str(refusal.value)


@pytest.mark.parametrize(
    "thresholds",
    [{"2": float("nan")}, {"2": "high"}, {"2": -0.5}, {"2": 7}, {"2": None}, {"6": 0.1}, {"a": 0.1}, [0.1]],
)
def test_thresholds_of_another_class_of_model_are_refused_too(thresholds, image_folder, tmp_path, capsys):
    """A classifier of transformers itself, whose config takes any value."""
    save_vit(tmp_path)
    edit(tmp_path, thresholds=thresholds)
    image = str(image_folder / "test" / "oak" / "0.png")
    for arguments in (["predict", str(tmp_path), image, "--k", "2"], ["evaluate", str(tmp_path), str(image_folder)]):
        assert main(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"avgk {arguments[0]}: {tmp_path / 'config.json'}: config.thresholds"), error
    with pytest.raises(ValueError, match=r"^config\.thresholds"):
        pipeline("average-k-image-classification", model=str(tmp_path))


def test_the_way_to_mend_thresholds_works(model_folder, image_folder, capsys):
    edit(model_folder, thresholds={"2": -1})
    assert main(["predict", str(model_folder), str(image_folder / "test" / "oak" / "0.png")]) == 2
    assert "Take the field out of config.json and calibrate again: `avgk calibrate" in capsys.readouterr().err
    config = json.loads((model_folder / "config.json").read_text())
    del config["thresholds"]
    (model_folder / "config.json").write_text(json.dumps(config))
    assert main(["calibrate", str(model_folder), str(image_folder)]) == 0
    assert AvgKConfig.from_pretrained(model_folder).thresholds


def test_broken_results_are_refused_by_file_and_field(model_folder, tmp_path, capsys):
    whole = (model_folder / "results.json").read_text()
    for text, message in (
        (whole[: len(whole) // 2], "results.json is not valid JSON"),
        ("", "results.json is not valid JSON"),
        ("[]", "results.json must hold a mapping, but holds list"),
        (json.dumps({**json.loads(whole), "validation": 3}), "results.json: the field 'validation' must be a mapping"),
        (json.dumps({k: v for k, v in json.loads(whole).items() if k != "hyperparameters"}), "'hyperparameters'"),
    ):
        (model_folder / "results.json").write_text(text)
        for arguments in (["card", str(model_folder)], ["plot", str(model_folder), "--out", str(tmp_path / "plots")]):
            assert main(arguments) == 2
            assert message in capsys.readouterr().err


def sizes(folder):
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.is_file()}


def test_a_write_that_fails_leaves_the_old_model(model_folder, image_folder, command):
    """Files larger than the limit cannot be written, as on a full disk."""
    before = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    config_size, weights_size = (sizes(model_folder)[name] for name in ("config.json", "model.safetensors"))
    load = f"from avgk_hf import *\nmodel = AvgKForImageClassification.from_pretrained({str(model_folder)!r})\n"
    change = "model.ml_head.weight.data.zero_()\nfrom avgk_hf.calibration import Calibration\n"
    change += "Calibration.store(model.config, {2: 0.5}, {})\n"
    for size, code in (
        (weights_size // 2, f"{load}{change}model.save_pretrained({str(model_folder)!r})"),
        (600, f"{load}{change}model.save_pretrained({str(model_folder)!r})"),  # less than any config.json takes
        (600, f"{load}{change}model.config.save_pretrained({str(model_folder)!r})"),
    ):
        status, text = command(code=code, file_size=size)
        assert status == 1 and "File too large" in text
        assert "what was there before is unchanged" in text or "config.save" in code
        assert before == {path.name: path.read_bytes() for path in model_folder.iterdir()}
    arguments = ["calibrate", model_folder, image_folder, "--k", "4"]
    status, text = command(*arguments, file_size=config_size // 2)
    assert status == 2 and "File too large" in text.splitlines()[-1] and "Traceback" not in text
    assert (model_folder / "config.json").read_bytes() == before["config.json"]
    status, text = command(*arguments, "--out", model_folder, file_size=weights_size // 2)
    assert status == 2 and "what was there before is unchanged" in text and "Traceback" not in text
    assert (model_folder / "config.json").read_bytes() == before["config.json"]
    assert AvgKForImageClassification.from_pretrained(model_folder).config.thresholds
    status, _ = command(code=f"{load}{change}model.save_pretrained({str(model_folder)!r}, max_shard_size='300KB')")
    assert status == 0
    loaded = AvgKForImageClassification.from_pretrained(model_folder)
    assert loaded.config.thresholds == {"2": 0.5} and not loaded.ml_head.weight.any()
    assert not (model_folder / "model.safetensors").exists(), "old weights would be loaded instead of the new shards"


def test_class_names_survive_any_locale(make_model, tmp_path, command):
    """A locale without UTF-8, as Windows has by default: what is written must be what is read."""
    names = {0: "Eiche", 1: "дуб", 2: "chêne"}
    make_model(num_labels=None, id2label=names).save_pretrained(tmp_path)
    code = (
        "import locale\nfrom avgk_hf import AvgKForImageClassification\n"
        "from avgk_hf.calibration import Calibration\nfrom avgk_hf.classifiers import write_thresholds\n"
        "locale.setlocale(locale.LC_ALL, 'C')\nassert open(os.devnull).encoding != 'UTF-8'\n"
        f"model = AvgKForImageClassification.from_pretrained({str(tmp_path)!r})\n"
        f"Calibration.store(model.config, {{2: 0.5}}, {{}})\nwrite_thresholds(model, {str(tmp_path)!r})"
    )
    status, text = command(code=code)
    assert status == 0, text
    config = AvgKConfig.from_pretrained(tmp_path)
    assert config.id2label == names and config.thresholds == {"2": 0.5}


def test_a_checkpoint_that_cannot_be_written_leaves_the_last_one(recipe, tmp_path, command):
    fields = often(optim="adamw_torch", num_train_epochs=2, save_total_limit=2)
    assert command("train", recipe, *fields, "--output_dir", tmp_path / "whole")[0] == 0
    run = tmp_path / "run"
    assert command("train", recipe, *fields, kill_saving=6)[0] == -signal.SIGKILL
    assert (run / ".unfinished" / "checkpoint-6").is_dir() and not (run / "checkpoint-6").exists()
    whole = sizes(run / "checkpoint-3")
    assert whole["optimizer.pt"] > 1.5 * whole["model.safetensors"]
    for limit in (int(1.2 * whole["model.safetensors"]), whole["model.safetensors"] // 2):
        code, text = command("train", recipe, *fields, file_size=limit)
        last = text.strip().splitlines()[-1]
        assert code == 2 and "Traceback" not in text
        assert last.startswith(f"avgk train: {run / 'checkpoint-6'} could not be written (")
        assert f"The last checkpoint is {run / 'checkpoint-3'}; go on with `--resume_from_checkpoint last`." in last
        assert sizes(run / "checkpoint-3") == whole and not (run / "checkpoint-6").exists()
        assert not (run / ".unfinished").exists()
    assert command("train", recipe, *fields)[0] == 0
    results = [json.loads((tmp_path / name / "results.json").read_text()) for name in ("whole", "run")]
    assert results[0] == results[1]


def test_results_that_cannot_be_written_can_be_written_again(recipe, tmp_path, capsys):
    run, fields = tmp_path / "run", ["--num_train_epochs", "1", "--resume_from_checkpoint", "last"]
    (run / "results.json").mkdir(parents=True)
    assert main(["train", str(recipe), *fields]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith(f"avgk train: the results could not be written to {run} (Is a directory), the model was.")
    assert f"The last checkpoint is {run / 'checkpoint-5'}; go on with `--resume_from_checkpoint last`." in error
    weights = (run / "model.safetensors").read_bytes()
    (run / "results.json").rmdir()
    assert main(["train", str(recipe), *fields]) == 0
    assert (run / "results.json").is_file() and (run / "model.safetensors").read_bytes() == weights


def test_an_output_folder_that_cannot_hold_the_run_is_found_first(recipe, make_trainer, tmp_path, capsys):
    (tmp_path / "file").write_text("")
    for place in (tmp_path / "file", tmp_path / "file" / "run", Path("/proc/run")):
        assert main(["train", str(recipe), "--output_dir", str(place), "--dataset", "./is-not-even-looked-for"]) == 2
        assert f"output_dir={str(place)!r} cannot be written to (" in capsys.readouterr().err
    with pytest.raises(OSError, match="cannot be written to"):
        make_trainer(output_dir=str(tmp_path / "file" / "run"))
    trainer = make_trainer(num_train_epochs=10**9)
    with pytest.raises(
        OSError, match=r"MiB free, but 1,000,000,000 checkpoint\(s\) of about 1\.\d MiB.*save_total_limit"
    ):
        trainer.train()
    assert trainer.state.global_step == 0 and sorted(path.name for path in (tmp_path / "run").iterdir()) == []


def test_the_size_of_a_checkpoint_is_foreseen(make_trainer, make_model, tmp_path, monkeypatch):
    asked = []
    monkeypatch.setattr(checkpoints, "check_space", lambda *args: asked.append(args))
    for optim, options in (("adamw_torch", None), ("sgd", "momentum=0.9"), ("sgd", None)):
        trainer = make_trainer(model=make_model(objective="role"), optim=optim, optim_args=options, save_total_limit=4)
        trainer.train()
        _, size, planned, model_size = asked[-1]
        # the code that travels with a model is little beside any real one
        found = sum(n for name, n in sizes(tmp_path / "run" / "checkpoint-10").items() if not name.endswith(".py"))
        assert 0.9 < size / found < 1.02 and planned == 2
        assert model_size == pytest.approx(sizes(tmp_path / "run" / "checkpoint-10")["model.safetensors"], rel=0.05)
        shutil.rmtree(tmp_path / "run")


def test_ctrl_c_says_how_to_go_on(recipe, tmp_path, command):
    arguments = ["train", str(recipe), *often(num_train_epochs=5000, save_total_limit=2)[:-2]]
    run, pid_file = tmp_path / "run", tmp_path / "pid"
    for number, expected, more in (
        (signal.SIGINT, 130, []),
        (signal.SIGTERM, 143, ["--seeds", "2"]),
    ):
        log = (run / "seed-1" if more else run) / "train.log"
        with ThreadPoolExecutor(1) as pool:
            ended = pool.submit(command, *arguments, *more, pid_file=str(pid_file))
            while not (log.exists() and "saved checkpoint-6" in log.read_text()):
                assert not ended.done(), ended.result()
                time.sleep(0.05)
            os.kill(int(pid_file.read_text()), number)
            code, text = ended.result()
        assert code == expected and "Traceback" not in text
        last = f"The last checkpoint is {checkpoints.last_checkpoint(run)}"
        where = f"Finished seeds and checkpoints are in {run}" if more else last
        resume = shlex.join(["avgk", *arguments, *more, "--resume_from_checkpoint", "last"])
        line = f"avgk train: training was stopped. {where}; go on with `{resume}`."
        assert text.strip().splitlines()[-1] == line
        shutil.rmtree(run)


@pytest.mark.parametrize("name", ["demo", "calibrate", "evaluate"])
def test_other_commands_stop_in_one_line(name, model_folder, image_folder, tmp_path, monkeypatch, capsys):
    """A real SIGINT from inside the pass over the images."""
    read, count = transforms.open_image, []

    def open_image(*args):
        count.append(1)
        if len(count) == 9:
            os.kill(os.getpid(), signal.SIGINT)
        return read(*args)

    monkeypatch.setattr(transforms, "open_image", open_image)
    arguments = {"demo": ["--out", str(tmp_path / "demo")]}.get(name, [str(model_folder), str(image_folder)])
    before = signal.getsignal(signal.SIGTERM)
    assert main([name, *arguments]) == 130
    assert capsys.readouterr().err.endswith(f"\navgk {name}: stopped.\n")
    assert signal.getsignal(signal.SIGTERM) is before


class Poison(TrainerCallback):
    """Makes the weights or the input of the loss useless before a step."""

    def __init__(self, step, value):
        self.step, self.value = step, value

    def on_step_begin(self, args, state, control, model, **kwargs):
        if state.global_step == self.step:
            model.ml_head.bias.data.fill_(self.value)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_loss_that_is_not_finite_ends_the_training(value, make_trainer, tmp_path):
    trainer = make_trainer(callbacks=[Poison(7, value)], num_train_epochs=3)
    before = []
    trainer.add_callback(type("Steps", (TrainerCallback,), {"on_step_end": lambda *a, **k: before.append(1)}))
    with pytest.raises(ValueError, match=r"the loss is (nan|inf) in step 8 of 15, so training was ended") as refusal:
        trainer.train()
    message = str(refusal.value)
    assert "Lower learning_rate=0.05;" in message and "\n" not in message
    assert f"The last checkpoint is {tmp_path / 'run' / 'checkpoint-5'}" in message
    assert len(before) == 7  # the weights never saw it
    with pytest.raises(ValueError, match="or train without bf16"):
        make_trainer(callbacks=[Poison(0, value)], bf16=True, use_cpu=True).train()
    assert AvgKTrainingArguments(str(tmp_path)).logging_nan_inf_filter is False  # it would ask the device once more


def test_weights_that_are_not_finite_are_no_checkpoint(make_trainer, tmp_path):
    spoil = {"on_step_end": lambda self, args, state, control, model, **k: Poison(4, float("nan")).on_step_begin(
        args, type("State", (), {"global_step": state.global_step}), control, model)}  # fmt: skip
    spoiler = type("Spoiler", (TrainerCallback,), spoil)
    fields = {"eval_strategy": "no", "load_best_model_at_end": False, "save_strategy": "steps", "save_steps": 2}
    trainer = make_trainer(callbacks=[spoiler()], **fields)
    with pytest.raises(ValueError, match=r"the loss is nan in step 5|weights are not finite any more in step 5"):
        trainer.train()
    assert checkpoints.last_checkpoint(tmp_path / "run").name == "checkpoint-2"
    assert not (tmp_path / "run" / "checkpoint-4").exists()


def test_progress_log_and_tensorboard(recipe, image_folder, tmp_path, monkeypatch, capsys):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    run = tmp_path / "run"
    shown = ["--disable_tqdm", "false", "--logging_steps", "2", "--report_to", "tensorboard"]
    assert main(["train", str(recipe), *shown]) == 0
    printed = capsys.readouterr()
    assert "it/s" not in printed.err  # bars are for terminals
    lines = [line for line in printed.out.splitlines() if line.startswith("epoch ")]
    form = r"epoch {}/2  loss [0-9.]+  average-2 [0-9.]+% \(best [0-9.]+%\)  few shot [0-9]+%  0:0[0-9] left"
    assert [bool(re.fullmatch(form.format(i), line)) for i, line in enumerate(lines, 1)] == [True, True], lines
    lines = (run / "train.log").read_text().splitlines()
    assert "  step 0/10  training starts" in lines[0]
    assert sum("  loss " in line and "learning_rate" in line for line in lines) == 5
    assert any("step 10/10  eval_" in line and "eval_average_k_accuracy " in line for line in lines)
    assert any(line.endswith("saved checkpoint-5") for line in lines) and any(
        "test_average_k" in line for line in lines
    )
    files = list(run.rglob("events.out.tfevents*"))
    assert files
    found = {}
    for file in files:
        events = event_accumulator.EventAccumulator(str(file.parent)).Reload()
        found.update({tag: events.Scalars(tag) for tag in events.Tags()["scalars"]})
    history = json.loads((run / "trainer_state.json").read_text())["log_history"]
    accuracies = {entry["step"]: entry["eval_average_k_accuracy"] for entry in history if "eval_loss" in entry}
    written = {event.step: event.value for event in found["eval/average_k_accuracy"]}
    assert written == pytest.approx(accuracies) and [event.step for event in found["train/loss"]] == [2, 4, 6, 8, 10]
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for name in ("evaluate", "calibrate"):
        assert main([name, str(run), str(image_folder), "--batch-size", "3"]) == 0
        assert "| 10/10 [" in capsys.readouterr().err
    assert main(["plot", str(run), "--out", str(tmp_path / "plots")]) == 0
    assert "evaluate: 100%" in capsys.readouterr().err


def test_augmentation_is_a_matter_of_seed_epoch_and_image(splits, make_model):
    """Not of what was drawn before, nor of which process draws."""
    train = prepare(splits["train"], make_model().config, "timm")
    transform = train.format["format_kwargs"]["transform"]
    transform.seed(3, 1)
    torch.manual_seed(0)
    first = train[5]["pixel_values"]
    state = torch.get_rng_state()
    torch.manual_seed(1)
    train[4], train[6]
    assert torch.equal(train[5]["pixel_values"], first)
    torch.manual_seed(0)
    assert torch.equal(torch.get_rng_state(), state)  # nothing is drawn from the generator of the model
    transform.seed(3, 2)
    assert not torch.equal(train[5]["pixel_values"], first)
    loader = torch.utils.data.DataLoader(
        train.select([5, 6]), collate_fn=lambda rows: rows[0]["pixel_values"], num_workers=1, persistent_workers=True
    )
    seeded = loader.dataset.format["format_kwargs"]["transform"]
    seeded.seed(3, 1)
    assert torch.equal(next(iter(loader)), first)
    seeded.seed(3, 2)
    assert not torch.equal(next(iter(loader)), first)
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY  # limits stay in their processes
