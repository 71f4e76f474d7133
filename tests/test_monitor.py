"""The drift guard: a confidence sequence of the mean set size that may be looked at any time."""

import json
import logging
import math

import numpy as np
import pytest
import torch
from datasets import load_dataset
from PIL import Image
from transformers import pipeline

from avgk_hf import AvgKForImageClassification, SetSizeMonitor, load_splits
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import load_classifier
from avgk_hf.cli import main
from avgk_hf.evaluation import calibrate, evaluate
from avgk_hf.pipeline import TASK
from conftest import CLASSES, save_vit

DRAWS = {  # all with mean 5
    "geometric": lambda rng, n: rng.geometric(1 / 5, n),
    "rare large sets": lambda rng, n: np.where(rng.random(n) < 0.04, 101, 1),
    "all or nothing": lambda rng, n: np.where(rng.random(n) < 0.5, 10, 0),
}


def by_hand(sizes, k, largest, confidence=0.95):
    """The interval after all these images, as the docstring writes it, from whole arrays."""
    x, i = np.asarray(sizes, float), np.arange(1, len(sizes) + 1)
    evidence = math.log(2 / (1 - confidence))
    mean = (k + np.concatenate([[0], np.cumsum(x)[:-1]])) / i
    variance = (k**2 + np.concatenate([[0], np.cumsum((x - mean) ** 2)[:-1]])) / i
    bounds = []
    for scale, sign in ((mean, 1), (largest - mean, -1)):
        a = np.minimum(np.sqrt(2 * evidence / (variance * i * np.log(1 + i))), 0.5 / scale)
        won = np.log(1 + sign * a * (x - mean)).sum()
        bounds.append(((a * mean).sum() + sign * (won - evidence)) / a.sum())
    return max(bounds[0], 0), min(bounds[1], largest)


@pytest.mark.parametrize("draw", DRAWS)
def test_interval_is_the_formula(draw):
    for n in (1, 2, 50, 700):
        sizes = DRAWS[draw](np.random.default_rng(n), n)
        monitor = SetSizeMonitor(5, 1081, max_size=200, confidence=0.9)
        monitor.update(sizes)
        assert monitor.interval == pytest.approx(by_hand(sizes, 5, 200, 0.9), rel=1e-9)
        assert monitor.mean == pytest.approx(sizes.mean()) and monitor.num_images == n


def ever_excluded(draw, streams, images, confidence, seed):
    """Share of streams of mean 5 whose interval excludes 5 after any batch, and the same of the textbook interval."""
    rng, z = np.random.default_rng(seed), {0.95: 1.96, 0.5: 0.674}[confidence]
    sequence = fixed = 0
    for _ in range(streams):
        sizes = draw(rng, images)
        monitor = SetSizeMonitor(5, 200, confidence, tolerance=1e6)  # the interval alone is tested
        left = wrong = False
        for end in range(20, images + 1, 20):
            monitor.update(sizes[end - 20 : end])
            low, high = monitor.interval
            left |= not low <= 5 <= high
            wrong |= abs(sizes[:end].mean() - 5) > z * sizes[:end].std() / math.sqrt(end)
        sequence, fixed = sequence + left, fixed + wrong
    return sequence / streams, fixed / streams


@pytest.mark.long
def test_interval_is_valid_at_any_time():
    """500 streams, looked at after each of 100 batches; an interval for one look is left by far more of them."""
    share, textbook = ever_excluded(DRAWS["geometric"], 500, 2000, 0.95, seed=1)
    assert share <= 0.05 + 3 * math.sqrt(0.05 * 0.95 / 500)
    assert textbook > 0.3, "the test could not tell a wrong interval"


@pytest.mark.parametrize("draw", ["rare large sets", "all or nothing"])
def test_interval_is_valid_for_odd_sizes(draw):
    share, textbook = ever_excluded(DRAWS[draw], 100, 600, 0.5, seed=2)
    assert share <= 0.5 + 3 * math.sqrt(0.25 / 100)
    assert textbook > 0.8


def test_calibration_on_few_images_is_allowed_for():
    """The threshold is itself an estimate: streams like the calibration data must not be called drift for it."""
    rng, without, alarms = np.random.default_rng(3), 0, 0
    for _ in range(60):
        # Algorithm 1 makes the mean on its own 100 images exactly K; on others it is off by as much as those were
        true_mean = 5 * 5 / rng.geometric(1 / 5, 100).mean()
        sizes = rng.geometric(1 / true_mean, 4000)
        for number in (100, None):
            monitor = SetSizeMonitor(5, 1081, tolerance=0, num_calibrated=number, max_size=150)
            monitor.update(sizes)
            alarms, without = (
                alarms + (monitor.drifted and number == 100),
                without + (monitor.drifted and number is None),
            )
    assert alarms <= 60 * 0.1 and without > 60 * 0.2


def test_larger_sets_are_found_within_a_few_hundred_images(caplog):
    rng = np.random.default_rng(4)
    found = []
    for _ in range(40):
        monitor = SetSizeMonitor(5, 1081, num_calibrated=2000, source="trees")
        sizes = rng.geometric(1 / 9, 1000)
        for number, size in enumerate(sizes, 1):
            monitor.update([size])
            if monitor.drifted:
                found.append(number)
                break
    assert len(found) == 40 and np.median(found) < 100 and max(found) < 400


def test_smaller_sets_are_found_when_the_largest_size_is_known():
    monitor = SetSizeMonitor(5, 1081, max_size=100)
    monitor.update(np.random.default_rng(5).geometric(1 / 2.5, 600).clip(max=100))
    assert monitor.drifted and monitor.interval[1] < 4.75


def test_warns_once_and_says_what_to_do(caplog):
    rng = np.random.default_rng(6)
    monitor = SetSizeMonitor(5, 1081, num_calibrated=2000, source="trees")
    monitor.update(rng.geometric(1 / 5, 500))
    assert not caplog.records and monitor.message().startswith(
        "no drift so far: calibrated on 2000 images of trees for sets"
    )
    monitor = SetSizeMonitor(5, 1081, num_calibrated=2000, source="trees")
    with caplog.at_level(logging.WARNING):
        for _ in range(20):
            monitor.update(rng.geometric(1 / 9, 100))
    (record,) = caplog.records
    message = record.getMessage()
    for part in ("calibrated on 2000 images of trees", "sets of 5 classes", "95% interval", "avgk calibrate MODEL"):
        assert part in message
    assert "after 2000 images" not in message and monitor.drifted


def test_any_split_into_batches_and_any_form_give_the_same():
    rng = np.random.default_rng(7)
    mask = torch.from_numpy(rng.random((300, 40)) < 0.2)
    whole = SetSizeMonitor(5, 40)
    whole.update(mask)
    for step in (1, 7, 64):
        for form in (lambda m: m, lambda m: m.sum(1), lambda m: [row.nonzero()[:, 0].tolist() for row in m],
                     lambda m: m.sum(1).numpy(), lambda m: m.sum(1).tolist()):  # fmt: skip
            parts = SetSizeMonitor(5, 40)
            for batch in mask.split(step):
                parts.update(form(batch))
            assert (parts.interval, parts.mean, parts.drifted) == (whole.interval, whole.mean, whole.drifted)
            assert parts.history == whole.history
    assert whole.drifted and whole.mean == mask.sum().item() / 300  # 8 instead of 5


def test_memory_does_not_grow_with_the_stream():
    monitor = SetSizeMonitor(2, 10)
    monitor.update(np.random.default_rng(8).integers(0, 5, 20_000))
    assert len(monitor.history) < 520 and monitor.history[-1][0] <= 20_000 < 1.02 * monitor.history[-1][0] + 1
    assert set(vars(monitor)) == set(vars(SetSizeMonitor(2, 10)))


def test_before_the_first_image():
    monitor = SetSizeMonitor(2, 10)
    monitor.update([])
    assert math.isnan(monitor.mean) and monitor.interval == (0, 10) and not monitor.drifted


@pytest.mark.parametrize(
    ("sizes", "message"),
    [
        ([3, -1], "a set of -1 classes"),
        ([11], r"a set of 11 classes: sizes lie in \[0, 10\]"),
        ([1.5], "expected whole numbers"),
        ([math.nan], "expected whole numbers"),
        (["3"], "expected whole numbers"),
        ("3", "expected whole numbers"),
        (3, "expected whole numbers"),
        (None, "expected whole numbers"),
        ([[1, 2], 3], "expected whole numbers"),
        (torch.ones(2, 9, dtype=torch.bool), "expected whole numbers"),
        (torch.ones(2, 10), "expected whole numbers"),
        ([[True, False], [True, True]], "expected whole numbers"),
    ],
)
def test_bad_sizes_are_refused_and_nothing_is_counted(sizes, message):
    monitor = SetSizeMonitor(2, 10)
    with pytest.raises(ValueError, match=message):
        monitor.update(sizes)
    assert monitor.num_images == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 0}, "k=0 must be a number in"),
        ({"k": 10}, "k=10 must be a number in"),
        ({"num_labels": 0}, "num_labels=0 must be a whole number"),
        ({"num_labels": None}, "num_labels=None must be a whole number"),
        ({"confidence": 1}, "confidence=1 must lie strictly between"),
        ({"confidence": math.nan}, "confidence=nan must lie strictly between"),
        ({"tolerance": -0.1}, "tolerance=-0.1 must be a finite number"),
        ({"num_calibrated": 0}, "num_calibrated=0 must be a whole number"),
        ({"max_size": 2}, r"max_size=2 must lie in \(2, 10\]"),
        ({"max_size": 11}, r"max_size=11 must lie in \(2, 10\]"),
    ],
)
def test_bad_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        SetSizeMonitor(**{"k": 2, "num_labels": 10, **arguments})


@pytest.fixture(scope="module")
def saved(tmp_path_factory, splits):
    """A model calibrated on the validation images; images of pure noise get other sets."""
    torch.manual_seed(0)
    labels = dict(enumerate(CLASSES))
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32)
    torch.nn.init.normal_(model.ml_head.weight, std=3)
    calibrate(model, splits["validation"], [1, 2], dataset_name="trees")
    folder = tmp_path_factory.mktemp("monitor") / "model"
    model.save_pretrained(folder)
    return folder


def test_monitor_of_a_config(saved):
    config = AvgKForImageClassification.from_pretrained(saved).config
    monitor = SetSizeMonitor.from_config(config)
    assert (monitor.k, monitor.num_labels, monitor.num_calibrated, monitor.source) == (2, 6, 30, "trees")
    assert monitor.max_size == min(6, max(3, math.floor(1.0001 / Calibration.of(config).threshold())))
    assert SetSizeMonitor.from_config(config, 1, tolerance=0.5).tolerance == 0.5
    config.thresholds["2"] = 1e-9
    assert SetSizeMonitor.from_config(config).max_size == 6
    Calibration.drop(config)
    with pytest.raises(ValueError, match="no thresholds"):
        SetSizeMonitor.from_config(config)


def test_pipeline_watches_its_own_k(saved, image_folder, caplog):
    images = [str(path) for path in sorted((image_folder / "test").rglob("*.png"))]
    classify = pipeline(TASK, model=str(saved))
    plain = [len(found) for found in classify(images, min_size=0)]
    assert classify.monitor.num_images == 30 and classify.monitor.mean == pytest.approx(np.mean(plain))
    classify(images[:5], k=1)
    classify(images[:5], lambda_val=0.1)
    assert classify.monitor.num_images == 30
    # the sizes that were calibrated are counted, whatever smallest or largest size the answer has
    classify(images[:5], k=2, max_size=1)
    classify(images[5], min_size=6)
    assert classify.monitor.num_images == 36
    assert classify.monitor.mean == pytest.approx((sum(plain) + sum(plain[:6])) / 36)
    assert pipeline(TASK, model=str(saved), k=1).monitor.k == 1
    silent = pipeline(TASK, model=str(saved), monitor=False)
    assert silent.monitor is None and len(silent(images[:2])) == 2
    assert pipeline(TASK, model=str(saved), lambda_val=0.1).monitor is None


def test_pipeline_warns_of_drift_once(saved, image_folder, caplog):
    classify = pipeline(TASK, model=str(saved))
    classify.model.config.thresholds["2"] /= 1e6  # as if other images gave flat scores: every set has all 6 classes
    classify.monitor.max_size = 6
    image = str(image_folder / "test" / "oak" / "0.png")
    with caplog.at_level(logging.WARNING):
        for _ in range(4):
            classify([image] * 25)
    assert [r.getMessage()[:6] for r in caplog.records if "drift" in r.getMessage()] == ["drift:"]
    assert classify.monitor.drifted


def write_flat(folder, number=60, seed=0):
    """Image files without class folders, not like those of the calibration."""
    folder.mkdir()
    rng = np.random.default_rng(seed)
    for i in range(number):
        Image.fromarray(rng.integers(0, 255, (24, 24, 3), dtype=np.uint8)).save(folder / f"{i}.png")
    return folder


def test_evaluate_says_the_interval(saved, image_folder, tmp_path, capsys):
    picture = tmp_path / "course.svg"
    assert main(["evaluate", str(saved), str(image_folder), "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "no drift so far: calibrated on 30 images of trees for sets of 2 cl" in printed
    assert "K  accuracy  mean set size" in printed and "<svg" in picture.read_text()
    assert main(["evaluate", str(saved), str(image_folder), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["monitored_k"] == 2 and metrics["drifted"] is False
    assert metrics["set_size_low"] <= metrics["mean_set_size"] <= metrics["set_size_high"]


def test_order_of_a_sorted_folder_makes_no_drift():
    """Class after class is no fair stream: the monitor of an evaluation sees the images mixed."""
    sizes = np.repeat([0, 4], 400)
    mixed, in_order = SetSizeMonitor(2, 6), SetSizeMonitor(2, 6)
    assert mixed.watch(sizes)["drifted"] is False and mixed.mean == 2
    in_order.update(sizes)
    assert in_order.drifted


@pytest.mark.parametrize("kind", ["folder", "parquet"])
def test_evaluate_on_unlabelled_images(saved, tmp_path, capsys, caplog, kind):
    folder = write_flat(tmp_path / "field")
    if kind == "parquet":
        (tmp_path / "table").mkdir()
        load_dataset(str(folder))["train"].to_parquet(tmp_path / "table" / "test-0.parquet")
    dataset = str(folder if kind == "folder" else tmp_path / "table")
    out = tmp_path / "metrics.json"
    # to_parquet writes the paths of the images, which lie elsewhere
    outside = ["--allow-outside"] if kind == "parquet" else []
    assert main(["evaluate", str(saved), dataset, "--json", "--out", str(out), *outside]) == 0
    captured = capsys.readouterr()
    metrics = json.loads(captured.out)
    assert "does not say which class an image is of" in captured.err and json.loads(out.read_text()) == metrics
    assert set(metrics) == {
        "num_images", "mean_set_size", "monitored_k", "set_size_low", "set_size_high", "drifted"
    }  # fmt: skip
    assert metrics["num_images"] == 60
    model = load_classifier(str(saved))
    images = load_splits(dataset, unlabelled=True, allow_outside=kind == "parquet")
    assert {name: split.column_names for name, split in images.items()} == {next(iter(images)): ["image", "index"]}
    sets = pipeline(TASK, model=model, image_processor=str(saved))(
        list(next(iter(images.values()))["image"]), min_size=0
    )
    assert metrics["mean_set_size"] == pytest.approx(np.mean([len(found) for found in sets]), abs=0.02)


def test_sizes_of_several_k_without_labels(saved, tmp_path, capsys):
    folder = str(write_flat(tmp_path / "field", number=20))
    assert main(["evaluate", str(saved), folder, "--k", "1.5", "1", "2", "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["monitored_k"] == 1.5
    sizes = [metrics[name] for name in ("mean_set_size@1", "mean_set_size", "mean_set_size@2")]
    assert sizes == sorted(sizes) and sizes[0] < sizes[2]
    for options in (["--coverage", "0.9"], ["--method", "raps"], ["--per-class"]):
        assert main(["evaluate", str(saved), folder, *options]) == 2
        assert "no labels, so no coverage can be measured" in capsys.readouterr().err


def test_a_monitor_of_another_k_than_those_evaluated(saved, splits):
    model = load_classifier(str(saved))
    monitor = SetSizeMonitor.from_config(model.config, 1.5)
    metrics = evaluate(model, splits["test"], [1], monitor=monitor)
    assert metrics["monitored_k"] == 1.5 and monitor.mean == pytest.approx(metrics["mean_set_size@1.5"])
    with pytest.raises(ValueError, match="a monitor compares other images"):
        evaluate(model, splits["validation"], [1], calibrate=True, monitor=monitor)


def test_the_warning_stays_what_it_was():
    """Sizes that come back to K later do not change what was said when they were away from it."""
    monitor = SetSizeMonitor(5, 100)
    monitor.update([9] * 60)
    said = monitor.message()
    assert monitor.drifted and "the mean is 9.00" in said
    monitor.update([5] * 2000)
    assert monitor.message() == said


def test_unlabelled_drift_is_said(saved, tmp_path, capsys, caplog):
    folder = write_flat(tmp_path / "field", number=200)
    config = json.loads((saved / "config.json").read_text())
    model = load_classifier(str(saved))
    model.config.thresholds["2"] = 0.02  # so low that noise gets many more than 2 classes
    model.save_pretrained(tmp_path / "model")
    with caplog.at_level(logging.WARNING):
        plot = ["--plot", str(tmp_path / "a.png"), "--all"]
        assert main(["evaluate", str(tmp_path / "model"), str(folder), *plot]) == 0
    printed = capsys.readouterr().out
    mean = float(next(line for line in printed.splitlines() if line.startswith("mean_set_size")).split()[1])
    assert mean > 2.5 and "drifted                         1" in printed and "no drift" not in printed
    warned = [record.getMessage() for record in caplog.records if "drift" in record.getMessage()]
    assert len(warned) == 1 and "calibrate on images like these" in warned[0]
    assert (tmp_path / "a.png").read_bytes()[:4] == b"\x89PNG" and config["thresholds"]["2"] != 0.02


def test_unlabelled_images_of_a_foreign_classifier(tmp_path, splits, capsys):
    torch.manual_seed(0)
    save_vit(tmp_path / "vit")
    model = load_classifier(str(tmp_path / "vit"))
    calibrate(model, splits["validation"], [2])
    monitor = SetSizeMonitor.from_config(model.config)
    images = load_splits(str(write_flat(tmp_path / "field", 10)), unlabelled=True)["train"]
    metrics = evaluate(model, images, monitor=monitor)
    assert metrics["num_images"] == 10 == monitor.num_images
    assert evaluate(model, splits["test"], monitor=SetSizeMonitor.from_config(model.config))["monitored_k"] == 2


def test_a_dozen_images_are_too_few_to_tell(saved, tmp_path, capsys):
    """Until sets half as large again would have been noticed; a drift that was found is one, however few there are."""
    monitor = SetSizeMonitor(k=2, num_labels=20, num_calibrated=200)
    assert not monitor.enough and monitor.message().startswith("too few images to tell")
    monitor.update([2] * 3)
    assert not monitor.enough
    monitor.update([1, 2, 3] * 40)
    assert monitor.enough and monitor.message().startswith("no drift so far: ")
    grown = SetSizeMonitor(k=2, num_labels=20, num_calibrated=200)
    grown.update([19] * 12)
    assert grown.drifted and grown.enough and grown.message().startswith("drift: ")
    folder = write_flat(tmp_path / "field", 2)
    assert main(["evaluate", str(saved), str(folder)]) == 0
    printed = capsys.readouterr().out
    assert "too few images to tell whether these differ" in printed and "no drift" not in printed


def test_broken_unlabelled_images(saved, tmp_path, capsys):
    folder = write_flat(tmp_path / "field", 10)
    (folder / "3.png").write_bytes(b"no image")
    assert main(["evaluate", str(saved), str(folder), "--on-bad-image", "error"]) == 2
    assert "3.png cannot be read as an image" in capsys.readouterr().err
    assert main(["evaluate", str(saved), str(folder), "--json"]) == 1
    printed = capsys.readouterr()
    metrics = json.loads(printed.out)
    assert metrics["num_images"] == 9 and metrics["skipped"] == 1
    assert "left out 1 of 10 images that cannot be read:\n" in printed.err
    assert "3.png cannot be read as an image" in printed.err.splitlines()[-1]


def test_labels_that_are_asked_for_must_be_there(saved, tmp_path, capsys):
    folder = write_flat(tmp_path / "field", 10)
    assert main(["evaluate", str(saved), str(folder), "--label-column", "species"]) == 2
    assert "has no column 'species'" in capsys.readouterr().err
    assert main(["calibrate", str(saved), str(folder), "--k", "2", "--split", "train"]) == 2
    assert "does not say which class its images are of" in capsys.readouterr().err
    assert main(["evaluate", str(saved), str(folder), "--split", "dev"]) == 2
    assert "has no split 'dev'" in capsys.readouterr().err
