"""The comparison: tuned alike on validation, every run done once, and a report that follows from the files."""

import json
import multiprocessing
import shutil
import statistics
import time
from collections import Counter
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest
import torch
from filelock import FileLock
from safetensors.torch import load_file

from avgk_hf.checkpoints import check_checkpoint
from avgk_hf.cli import main
from avgk_hf.configuration import AvgKConfig
from avgk_hf.data import glyphs, load_splits, prepare
from avgk_hf.data.glyphs import CHARACTERS, FACES, noise_bound, outline_bound
from avgk_hf.losses import LOSSES, Hyperparameter, Loss
from avgk_hf.recipes import parse_recipe
from avgk_hf.study.runner import measure, run_arguments
from avgk_hf.study.spec import Run, choose, finished, plan, read_comparison, run_path, tuning_runs
from avgk_hf.study.sweep import Sweep
from avgk_hf.train import load_data, make_trainer
from conftest import CLASSES, write_images

ROOT = Path(__file__).parent.parent
COMPARISON = """\
recipe: recipe.yaml
losses:
  ce: {}
  avgk: {alpha: [0.1, 10.0]}
shared:
  learning_rate: [0.02, 0.1]
  num_train_epochs: [1]
k: [2, 3]
budget: 2
seeds: 2
"""


@pytest.fixture
def config(recipe, tmp_path):
    """A comparison file beside the recipe; results go to tmp_path/out."""
    path = tmp_path / "compare.yaml"
    path.write_text(COMPARISON + f"output_dir: {tmp_path / 'out'}\n")
    return path


def contents(folder: Path) -> dict[str, dict]:
    return {path.name: json.loads(path.read_text()) for path in sorted((folder / "runs").glob("*.json"))}


def test_a_miniature(config, tmp_path, capsys):
    """Two losses, two seeds, one epoch, on an image folder that is not glyphs."""
    folder = tmp_path / "flowers"  # another folder in place of the recipe's
    for split, number in (("train", 12), ("validation", 5), ("test", 6)):
        write_images(folder / split, dict.fromkeys(CLASSES, number), seed=number)
    command = ["compare", str(config), "--dataset", str(folder)]
    assert main([*command, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert "12 trainings, 0 of them finished" in printed and "timed steps of ce" in printed
    assert not (tmp_path / "out").exists()
    assert main(command) == 0
    printed = capsys.readouterr().out
    out = tmp_path / "out"
    runs = contents(out)
    kinds = [(result["phase"], result["loss"], result["k"]) for result in runs.values()]
    assert [kinds.count(("tune", "ce", None)), kinds.count(("tune", "avgk", 2))] == [2, 2]
    assert kinds.count(("tune", "avgk", 3)) == kinds.count(("final", "avgk", 3)) == 2
    assert f"[{len(runs)}/{len(runs)}]" in printed and " left" in printed
    for result in runs.values():
        assert result["error"] is None and len(result["curve"]) == 1 and result["versions"]["torch"]
        assert ("test" in result["images"]) == (result["phase"] == "final")
        assert result["seed"] == 1000 if result["phase"] == "tune" else result["seed"] in (0, 1)
        assert result["config"]["dataset"] == "flowers" and str(tmp_path) not in json.dumps(result)
        for kept in result["kept"]:  # what was measured is what the trainer found after that epoch
            of_epoch = result["curve"][round(kept["epoch"]) - 1]["average_k_accuracy"]
            for k in ("2", "3"):
                assert kept["validation"]["softmax"]["ml"][k]["average_k_accuracy"] == of_epoch[k]
                assert sum(kept["set_sizes"][k]["all"]) == result["images"]["test"] == 36
                assert kept["validation"]["sigmoid"]["ml"][k]["mean_set_size"] == pytest.approx(float(k), abs=0.05)
                plain = kept["variants"]["none"]["ml"][k]  # the same weights in the same pass
                assert plain["test"].items() <= kept["test"]["softmax"]["ml"][k].items()
                assert kept["variants"]["temperature"]["ml"][k]["validation"] >= plain["validation"]

    # the choice is that of validation, and a training that does not depend on K serves every K with the same choice
    comparison = read_comparison(str(config), overrides=["--dataset", str(folder)])
    for k in (2, 3):
        tuned = [result for result in runs.values() if (result["phase"], result["loss"]) == ("tune", "ce")]
        best = max(result["curve"][0]["average_k_accuracy"][str(k)] for result in tuned)
        chosen = choose(comparison, "ce", k)
        assert [r["curve"][0]["average_k_accuracy"][str(k)] for r in tuned if r["values"] == chosen] == [best]
    final = [result for result in runs.values() if (result["phase"], result["loss"]) == ("final", "ce")]
    assert sorted(k for result in final for kept in result["kept"] for k in kept["k"]) == [2, 2, 3, 3]

    # mean, interval and paired difference, by hand
    report = json.loads((out / "report.json").read_text())
    found = {}
    for loss in ("ce", "avgk"):
        for result in (r for r in runs.values() if (r["phase"], r["loss"]) == ("final", loss)):
            for kept in result["kept"]:
                if 3 in kept["k"]:
                    metrics = kept["test"]["softmax"]["ml"]["3"]
                    found[loss, result["seed"]] = metrics["average_k_accuracy"], metrics["mean_set_size"]
    row = next(row for row in report["rows"] if (row["loss"], row["k"]) == ("avgk", 3))
    values = [found["avgk", seed][0] for seed in (0, 1)]
    assert row["metrics"]["average_k_accuracy"]["mean"] == pytest.approx(statistics.mean(values))
    assert row["metrics"]["mean_set_size"]["mean"] == pytest.approx(np.mean([found["avgk", s][1] for s in (0, 1)]))
    differences = [found["avgk", seed][0] - found["ce", seed][0] for seed in (0, 1)]
    difference = row["difference"]["average_k_accuracy"]
    assert difference["mean"] == pytest.approx(statistics.mean(differences))
    assert difference["half_width"] == pytest.approx(12.7062 * statistics.stdev(differences) / 2**0.5, abs=1e-4)
    assert difference["won"] == sum(value > 0 for value in differences)
    text = (out / "report.md").read_text()
    assert text in printed and "2 seed(s) are too few" in text and "## K = 3" in text and "few shot" in text
    size = row["metrics"]["mean_set_size"]["mean"]
    assert f"± {100 * row['metrics']['average_k_accuracy']['half_width']:.2f} ({size:.2f}) |" in text
    won = f"({difference['won']}/2)"
    assert f"{100 * difference['mean']:+.2f} ± {100 * difference['half_width']:.2f} {won} |" in text
    heads = {entry["head"]: entry for entry in report["heads"] if entry["k"] == 3}
    assert heads["ml"]["difference"]["average_k_accuracy"] == difference and list(heads)[-1] == "auto"
    for title in (
        "In short",
        "Which head answers",
        "Which score is thresholded",
        "What else the same weights answer",
        "Trained for one K, calibrated for another",
    ):
        assert f"## {title}" in text
    assert report["limits"] == {}  # known for generated data only
    assert not list(out.glob("learning_curves.*"))  # one epoch makes no curve
    for name in ("accuracy_against_k", "set_sizes", "set_sizes_by_shot"):
        assert (out / f"{name}.png").read_bytes()[:4] == b"\x89PNG" and "<svg" in (out / f"{name}.svg").read_text()

    # nothing is computed again, also not for the plan; one more seed adds to what is there
    times = {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()}
    assert main(command) == 0
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()} == times
    config.write_text(config.read_text().replace("seeds: 2", "seeds: 3"))
    capsys.readouterr()
    assert main([*command, "--so-far"]) == 0  # a report of what there is
    planned = len(plan(read_comparison(str(config), overrides=["--dataset", str(folder)])))
    assert f"**{len(runs)} of {planned} trainings are finished" in capsys.readouterr().out
    assert main([*command, "--dry-run", "--workers", "2"]) == 0
    printed = capsys.readouterr().out
    assert f"{len(runs)} of them finished" in printed and "estimated from the" in printed
    assert {path: path.stat().st_mtime_ns for path in (out / "runs").iterdir()} == times


@pytest.fixture
def two_threads():
    """Of this process, for one test."""
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


def test_tuning_never_reads_the_test_split(config, image_folder, tmp_path, capsys, two_threads):
    """With unreadable test images all losses are tuned, and the first run to report fails on them."""
    data = tmp_path / "data"
    shutil.copytree(image_folder, data)
    for path in (data / "test").rglob("*.png"):
        path.write_bytes(b"no image")
    config.write_text(config.read_text().replace("[0.02, 0.1]", "[0.02, 1.0e+30]") + "tune_k: 2\n")
    assert main(["compare", str(config), "--dataset", str(data)]) == 2
    error = capsys.readouterr().err
    assert "cannot be read as an image" in error and str(data / "test") in error
    runs = contents(tmp_path / "out")
    assert {result["phase"] for result in runs.values()} == {"tune"} and len(runs) == 4
    # a training that diverges is recorded, and not chosen
    comparison = read_comparison(str(config), overrides=["--dataset", str(data)])
    diverged = [r for r in runs.values() if r["values"]["learning_rate"] == 1e30]
    assert diverged and all("not finite" in r["error"] or "loss is" in r["error"] for r in diverged)
    assert choose(comparison, "ce", 3) == {"learning_rate": 0.02, "num_train_epochs": 1}
    assert torch.get_num_threads() == 2  # a run has one, and whoever started it keeps its own


@pytest.mark.long
def test_two_shells_share_the_work_and_one_is_killed(config, tmp_path):
    """What this shell holds is left to it; kill -9 of the other ends its workers, and nothing done is done again."""
    out = tmp_path / "out"
    config.write_text(config.read_text().replace("seeds: 2", "seeds: 1") + "tune_k: 2\n")
    comparison = read_comparison(str(config))
    held = tuning_runs(comparison, "ce", None)[0]  # the first in everyone's order
    (out / ".locks").mkdir(parents=True)
    command = ["compare", str(config), "--workers", "2"]
    other = multiprocessing.get_context("fork").Process(target=main, args=(command,))  # forked: it imports nothing
    with FileLock(out / ".locks" / f"{run_path(comparison, held).stem}.lock"):
        other.start()
        deadline = time.monotonic() + 240
        while not list(out.glob("runs/*.json")) and other.is_alive() and time.monotonic() < deadline:
            time.sleep(0.05)
        other.kill()
        other.join()
        assert finished(comparison, held) is None
    before = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.json")}
    assert before
    assert main(["compare", str(config)]) == 0  # waits for no lock of the dead
    after = {path: path.stat().st_mtime_ns for path in out.glob("runs/*.json")}
    assert {path: after[path] for path in before} == before
    runs = plan(comparison)
    assert all(run.values is not None for run in runs) and {run_path(comparison, run) for run in runs} == set(after)
    assert len(json.loads((out / "report.json").read_text())["rows"]) == 4


@pytest.mark.long
def test_glyphs_come_with_yardsticks(config, tmp_path, monkeypatch):
    """Few images of the real generator: new ones for every seed, bounds, and more data."""
    monkeypatch.setattr(glyphs, "train_counts", lambda: np.repeat([1, 3], len(CHARACTERS) // 2))
    monkeypatch.setattr(glyphs, "VALIDATION_IMAGES", 50)
    monkeypatch.setattr(glyphs, "TEST_IMAGES", 40)
    monkeypatch.setattr("avgk_hf.study.report.BOUND_IMAGES", 20)
    text = config.read_text().replace("  avgk: {alpha: [0.1, 10.0]}\n", "").replace("budget: 2", "budget: 1")
    config.write_text(text + "more_data: 2\n")
    small = ["--dataset", "glyphs", "--in_chans", "1", "--cache_images", "true"]
    assert main(["compare", str(config), *small]) == 0
    out = tmp_path / "out"
    runs = {(result["phase"], result["seed"]): result for result in contents(out).values()}
    assert runs["final", 0]["images"] == {"train": 240, "validation": 50, "test": 40}
    assert runs["more_data", 1000]["images"] == {"train": 480, "validation": 50, "test": 40}
    assert [runs[key]["config"]["glyphs_seed"] for key in (("tune", 1000), ("final", 0), ("final", 1))] == [1000, 0, 1]
    report = json.loads((out / "report.json").read_text())
    assert list(report["limits"]) == ["bound from outlines", "bound from noise", "ce on 2 times the data"]
    row = next(row for row in report["rows"] if row["k"] == 3)
    distance = report["limits"]["bound from outlines"]["3"] - row["metrics"]["average_k_accuracy"]["mean"]
    assert row["to_best"]["bound from outlines"] == pytest.approx(distance) and distance > 0
    text = (out / "report.md").read_text()
    assert "to bound from noise" in text and "upper bound" in text
    assert json.loads((out / "bounds.json").read_text())["images"] == 20


def test_the_study_of_glyphs_is_fair(tmp_path):
    comparison = read_comparison(str(ROOT / "recipes" / "glyphs" / "compare.yaml"))
    assert set(comparison.losses) == {"ce", "avgk", "an", "epr", "role", "topk"}
    assert comparison.k == [2, 3, 5, 10] and comparison.seeds >= 5 and comparison.on_glyphs
    budgets = {loss: len(comparison.configurations(loss)) for loss in comparison.losses}
    assert set(budgets.values()) == {comparison.budget}, budgets
    for loss in comparison.losses:
        configurations = comparison.configurations(loss)
        assert len({json.dumps(values) for values in configurations}) == len(configurations)
        shared = {(values["learning_rate"], values["num_train_epochs"]) for values in configurations}
        assert len(shared) == 8  # every learning rate with every number of epochs
        for name in comparison.losses[loss]:  # and every value of its own about equally often
            counts = Counter(values[name] for values in configurations).values()
            assert len(counts) == len(comparison.losses[loss][name]) and max(counts) - min(counts) <= 1
    model_args, data_args, args = run_arguments(
        comparison, Run("final", "epr", 5, {"beta": 0.1}, 3, (5,)), str(tmp_path)
    )
    assert (model_args.objective, model_args.k, model_args.beta) == ("epr", 5, 0.1)
    assert args.seed == data_args.glyphs_seed == 3 and data_args.cache_images  # other images for every seed


def test_variants_of_a_loss(config, tmp_path):
    """Local candidates of two processes of 8 are those of two accumulated batches of 8."""
    local = "{objective: avgk, per_device_train_batch_size: 8, gradient_accumulation_steps: 2, alpha: [1.0, 3.0]}"
    config.write_text(config.read_text().replace("  ce: {}\n", f"  ce: {{}}\n  avgk-local: {local}\n"))
    comparison = read_comparison(str(config))
    assert comparison.objective("avgk-local") == "avgk" and comparison.tuned_ks("avgk-local") == [2, 3]
    for values in comparison.configurations("avgk-local"):
        assert (values["per_device_train_batch_size"], values["gradient_accumulation_steps"]) == (8, 2)
        args = run_arguments(comparison, Run("tune", "avgk-local", 2, values, 0), str(tmp_path))[2]
        assert args.train_batch_size == 8 and args.gradient_accumulation_steps == 2


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("recipe: recipe.yaml", "recipe: nowhere.yaml", "there is no recipe"),
        ("budget: 2", "budgte: 2", "unknown field 'budgte'"),
        ("budget: 2", "budget: 0", "budget=0 must be a whole number of at least 1"),
        ("seeds: 2", "tune_seed: 0", "tune_seed=0 must not be a seed that is reported"),
        ("k: [2, 3]", "k: [2, 2]", "must be a list of different sizes"),
        ("k: [2, 3]", "k: [0, 2]", "k=0"),
        ("seeds: 2", "tune_k: 4", "tune_k=4 must be one of"),
        ("  ce: {}", "  hinge: {}", "'hinge' is unknown"),
        ("  ce: {}", "  an: {}", "baseline='ce' is unknown; choose one of ['an', 'avgk']"),
        ("alpha: [", "aplha: [", "'aplha' cannot be set here"),
        ("alpha: [0.1, 10.0]", "seed: [1, 2]", "'seed' cannot be set here"),
        ("alpha: [0.1, 10.0]", "beta: [0.1, 10.0]", "avgk: 'beta' cannot be set here"),
        ("learning_rate: [", "alpha: [", "shared: 'alpha' cannot be set here"),
        ("[0.02, 0.1]", "0.1", "learning_rate=0.1 must be a list of different values"),
    ],
)
def test_bad_files_are_refused(config, capsys, old, new, message):
    assert old in config.read_text()
    config.write_text(config.read_text().replace(old, new))
    assert main(["compare", str(config), "--dry-run"]) == 2
    assert message in capsys.readouterr().err


def test_what_the_comparison_sets_cannot_be_overridden(config, capsys, tmp_path):
    assert main(["compare", str(config), "--learning_rate", "0.1"]) == 2
    assert "--learning_rate is set by the comparison itself" in capsys.readouterr().err
    assert main(["compare", str(config), "--workers", "0"]) == 2
    assert "workers=0 must be a whole number" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


# ------------------------------------------------------------------------------------------------ the best possible


def test_the_best_sets_by_hand():
    posteriors = np.array([[0.6, 0.3, 0.1], [1.0, 0.0, 0.0]])
    found = glyphs._best_accuracy(posteriors, np.array([0.5, 0.5]), [1, 1.5, 1.25, 2])
    assert found == pytest.approx({1: 0.8, 1.5: 0.95, 1.25: 0.875, 2: 1.0})


def test_bounds_of_glyphs_enclose_each_other():
    counts = glyphs.train_counts()
    exact = outline_bound([1, 1.2, 2, 3])
    right = 0  # at K = 1 the most frequent class of every group is the answer
    for face in FACES:
        groups: dict[bytes, list[int]] = {}
        for label, character in enumerate(CHARACTERS):
            groups.setdefault(glyphs._outline(character, face).tobytes(), []).append(counts[label])
        right += sum(max(group) for group in groups.values())
    # by average size one, an answer may also be left out in favour of a second one elsewhere, which never pays here
    assert exact[1] == pytest.approx(right / counts.sum() / len(FACES), abs=1e-9) and 0.8 < exact[1] < 0.95
    assert exact[1] < exact[1.2] < exact[2] <= exact[3] == pytest.approx(1)
    noisy = noise_bound([1, 2], images=60)
    assert 0.6 < noisy[1]["accuracy"] < exact[1] + 3 * noisy[1]["standard_error"]
    assert noisy[1]["accuracy"] < noisy[2]["accuracy"] <= 1


def test_class_probabilities_of_one_pixel():
    """A Gaussian cut off at black and rounded down, against numbers drawn from it."""
    means, rng = np.array([[[20.0]], [[-10.0]]]), np.random.default_rng(0)
    drawn = np.floor(np.clip(means + rng.normal(0, 15, (2, 1, 400_000)), 0, 255))[:, 0]
    for value in (0, 5, 30):
        counts = (drawn == value).sum(1) * np.array([0.25, 0.75])
        found = glyphs._class_probabilities(np.array([[value]], np.uint8), means, 15.0, np.array([0.25, 0.75]))
        assert found == pytest.approx(counts / counts.sum(), abs=0.02)


# ----------------------------------------------------------------------------------------------- images kept in memory


def test_kept_images_give_the_same_model(recipe, tmp_path):
    weights = []
    for keep in ("false", "true"):
        options = ["--cache_images", keep, "--output_dir", str(tmp_path / keep), "--save_strategy", "no"]
        blocks = parse_recipe([str(recipe), *options, "--load_best_model_at_end", "false"])
        data, _ = load_data(*blocks[1:])
        trainer = make_trainer(*blocks, data)
        trainer.train()
        weights.append(trainer.model.state_dict())
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    kept = trainer.train_dataset.format["format_kwargs"]["transform"].kept
    assert sorted(kept) == list(range(72))
    again = prepare(trainer.train_dataset, trainer.model.config, keep=True)
    assert again[3]["pixel_values"] is kept[3]  # the next training finds them

    # in one pass, the numbers of the trainer's own evaluation
    metrics = trainer.evaluate()
    found, head = measure(trainer, trainer.eval_dataset, [2])["softmax"].results, trainer.model.config.head
    assert found[head][2]["average_k_accuracy"] == metrics["eval_average_k_accuracy"]


@pytest.mark.parametrize("augmentation", ["timm", "resize_crop", "pad_crop_flip"])
def test_kept_images_are_changed_as_others_are(augmentation, splits, make_model):
    """What is kept is the image before the first random change, and it stays as it is."""
    both = [prepare(splits["train"], make_model().config, augmentation, keep=keep) for keep in (False, True)]
    seen = []
    for epoch in (0, 1, 0):
        for images in both:
            images.format["format_kwargs"]["transform"].seed(7, epoch)
        fresh, kept = (torch.stack(images[:8]["pixel_values"]) for images in both)
        assert torch.equal(fresh, kept)
        seen.append(kept)
    assert torch.equal(seen[0], seen[2])
    assert torch.equal(seen[0], seen[1]) == (augmentation == "resize_crop")  # these are resized to what is cropped
    assert len(both[1].format["format_kwargs"]["transform"].kept) == 8


def test_kept_images_belong_to_one_process(recipe):
    blocks = parse_recipe([str(recipe), "--cache_images", "true", "--dataloader_num_workers", "2"])
    with pytest.raises(ValueError, match="dataloader_num_workers=2"):
        make_trainer(*blocks, load_splits(blocks[1].dataset))


class FocalLoss(Loss):
    """A loss of somebody else: cross-entropy in which easy images count less, at a temperature that is learnt."""

    sentence = "Trained with the focal loss, which comes from outside."
    hyperparameters: ClassVar = {"gamma": Hyperparameter(2.0, "How much less.", least=0.5, most=4.0)}
    needs_k, has_state, learning_rate_factor = False, True, 0.5
    ends_at: ClassVar = None  # the number of images after which the process is stopped

    def __init__(self, **hyperparameters):
        super().__init__(**hyperparameters)
        self.temperature = torch.nn.Parameter(torch.ones(()))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def compute(self, logits, labels):
        if torch.is_grad_enabled():
            self.seen += len(labels)
            if self.ends_at and self.seen >= self.ends_at:
                raise KeyboardInterrupt
        own = (logits / self.temperature).log_softmax(1).gather(1, labels[:, None])
        return ((1 - own.exp()) ** self.gamma * -own).mean() * (1 + self.seen / 100)


def test_a_loss_from_outside(recipe, config, tmp_path, monkeypatch, capsys):
    """One class and one line: it is trained, resumed, carded, searched and compared, and its parameter checked."""
    monkeypatch.setitem(LOSSES, "focal", FocalLoss)
    recipe.write_text(recipe.read_text().replace("objective: avgk", "objective: focal") + "gamma: 3.0\n")

    assert main(["train", "--help"]) == 0
    assert "gamma" in capsys.readouterr().out
    for flags, message in (
        (["--gamma", "5"], "gamma=5.0 must be a finite number in [0.5, 4], e.g. 2.0."),
        (["--gama", "1"], "unknown field 'gama' in the command line. Did you mean 'gamma'?"),
        (["--alpha", "1"], "'alpha' in the command line is no hyperparameter of objective 'focal', which has gamma."),
        (["--objective", "ce", "--gamma", "1"], "'gamma' in the command line is no hyperparameter of objective 'ce'"),
    ):
        assert main(["train", str(recipe), *flags]) == 2
        assert message in capsys.readouterr().err

    whole, stopped = tmp_path / "whole", tmp_path / "stopped"
    assert main(["train", str(recipe), "--output_dir", str(whole)]) == 0
    again = ["train", str(recipe), "--output_dir", str(stopped), "--resume_from_checkpoint", "last"]
    monkeypatch.setattr(FocalLoss, "ends_at", 72 + 40)  # in the second of two epochs
    assert main(again) != 0 and [path.name for path in stopped.glob("checkpoint-*")] == ["checkpoint-5"]
    monkeypatch.setattr(FocalLoss, "ends_at", None)
    assert main(again) == 0
    assert (stopped / "train.log").read_text().count("training goes on") == 1
    capsys.readouterr()
    for name in ("model.safetensors", "results.json", "config.json"):
        assert (whole / name).read_bytes() == (stopped / name).read_bytes(), name
    states = [load_file(run / "checkpoint-10" / "objective.safetensors") for run in (whole, stopped)]
    assert states[0] == states[1] and states[0]["seen"] == 2 * 72 and states[0]["temperature"] != 1
    (stopped / "checkpoint-10" / "objective.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"objective\.safetensors is missing"):
        check_checkpoint(stopped / "checkpoint-10")

    saved = AvgKConfig.from_pretrained(whole)
    assert (saved.objective, saved.hyperparameters, saved.sccp_head) == ("focal", {"gamma": 3.0}, False)
    assert main(["card", str(whole), "--out", str(tmp_path / "card.md")]) == 0
    for card in ((whole / "README.md").read_text(), (tmp_path / "card.md").read_text()):
        assert FocalLoss.sentence in card and "| gamma | 3.0 |" in card

    assert Sweep(str(recipe), {"gamma": [1, 3]}).combinations() == [{"gamma": 1}, {"gamma": 3}]
    config.write_text(config.read_text().replace("avgk: {alpha: [0.1, 10.0]}", "focal: {gamma: [1.0, 3.0]}"))
    assert main(["compare", str(config), "--gamma", "1"]) == 2
    assert "--gamma is set by the comparison itself" in capsys.readouterr().err
    assert main(["compare", str(config)]) == 0
    runs = contents(tmp_path / "out").values()
    assert {(result["loss"], result["k"]) for result in runs} == {("ce", None), ("focal", None)}
    assert {result["config"].get("gamma") for result in runs if result["loss"] == "focal"} == {1.0, 3.0}
    assert all("gamma" not in result["config"] for result in runs if result["loss"] == "ce")
    assert "| focal |" in (tmp_path / "out" / "report.md").read_text()
