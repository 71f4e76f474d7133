"""Any existing classifier becomes a set-valued one: calibrated, not trained."""

import datetime
import json
import math
import shutil
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import timm
import torch
from asking import answer
from transformers import (
    AutoConfig,
    AutoModelForImageClassification,
    TimmWrapperForImageClassification,
    ViTForImageClassification,
    pipeline,
)

from avgk_hf import AvgKForImageClassification, SetSizeMonitor, load_splits
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import best_device, forward, load_classifier, model_scores, transform_for, write_thresholds
from avgk_hf.cli import main
from avgk_hf.configuration import readable_json
from avgk_hf.evaluation import calibrate, evaluate
from avgk_hf.questions import Question
from avgk_hf.sets import average_k_threshold, predict_sets, ranked_sets
from avgk_hf.statistics import SetStatistics
from conftest import CLASSES, save_vit, write_images


@pytest.fixture(scope="module", params=["vit", "timm"])
def classifier(request, tmp_path_factory):
    """Folder of a classifier that knows nothing of this package."""
    folder = tmp_path_factory.mktemp("foreign") / request.param
    torch.manual_seed(0)
    if request.param == "vit":
        save_vit(folder)
    else:
        model = timm.create_model("test_resnet", num_classes=6)
        config = {"num_classes": 6, "label_names": CLASSES}
        timm.models.save_for_hf(model, folder, model_config=config, safe_serialization=True)
    return folder


def test_calibrate_and_use_any_classifier(classifier, image_folder, splits, tmp_path, capsys):
    out = tmp_path / "calibrated"
    arguments = ["calibrate", str(classifier), str(image_folder), "--k", "1", "2", "2.5", "--out", str(out)]
    assert main(arguments) == 0
    # stock transformers 5.23 cannot open what timm 1.0.31 writes, which names its classes twice; calibrated it can
    before, after = load_classifier(str(classifier)), AutoModelForImageClassification.from_pretrained(out).eval()
    assert type(after) is type(before)
    assert all(torch.equal(a, b) for a, b in zip(before.parameters(), after.parameters(), strict=True))

    model = load_classifier(str(out))
    transform = transform_for(model)
    pixels = torch.stack([transform.image(row["image"]) for row in splits["validation"]])
    scores = model_scores(model, pixels)
    thresholds = AutoConfig.from_pretrained(out).thresholds
    assert thresholds == {k: pytest.approx(average_k_threshold(scores, float(k)), rel=1e-5) for k in ("1", "2", "2.5")}
    assert model.config.calibration["num_examples"] == 30 and model.config.calibration["dataset"] == image_folder.name
    card = (out / "README.md").read_text()
    assert "was not trained for sets" in card and "calibrated for\nK in 1, 2, 2.5" in card

    images = [str(path) for path in sorted((image_folder / "test" / "oak").glob("*.png"))]
    capsys.readouterr()
    assert main(["predict", str(out), *images, "--k", "2.5", "--json"]) == 0
    by_command = [[item["label"] for item in found["set"]] for found in json.loads(capsys.readouterr().out)]
    sets = pipeline("average-k-image-classification", model=str(out))(images, k=2.5)
    assert [[item["label"] for item in found] for found in sets] == by_command
    pixels = torch.stack([transform.image(path) for path in images])
    mask = predict_sets(model_scores(model, pixels), thresholds["2.5"], min_size=1)
    assert [sorted(found) for found in by_command] == [[CLASSES[j] for j in row.nonzero()[:, 0]] for row in mask]

    assert main(["evaluate", str(out), str(image_folder), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    assert metrics["lambda_val@2"] == thresholds["2"] and 0 <= metrics["average_k_accuracy@2"] <= 1


def test_calibrate_in_place_keeps_the_rest_of_the_config(classifier, image_folder, tmp_path):
    folder = tmp_path / "copy"
    shutil.copytree(classifier, folder)
    before = json.loads((folder / "config.json").read_text())
    assert main(["calibrate", str(folder), str(image_folder), "--k", "2"]) == 0
    after = json.loads((folder / "config.json").read_text())
    assert set(after["thresholds"]) == {"2"}
    assert {name: after[name] for name in before} == before
    assert type(load_classifier(str(folder))) is type(load_classifier(str(classifier)))


def test_calibrate_in_place_replaces_the_whole_calibration(make_model, splits, image_folder, tmp_path):
    """Nothing of an older calibration stays, and nothing of the new one is lost."""
    sizes = ("1", "2", "2.5")
    model = make_model(head="auto")
    calibrate(model, splits["validation"], k=map(float, sizes), dataset_name=image_folder.name)
    wanted = {name: getattr(model.config, name) for name in ("heads", "calibration")}
    other = {"ml": "sccp", "sccp": "mean", "mean": "ml"}
    stale = dict.fromkeys(sizes, 0.5)
    Calibration.store(
        model.config,
        {float(k): 0.5 for k in sizes},
        {"num_examples": 1},
        heads={float(k): other[head] for k, head in wanted["heads"].items()},
        head_thresholds={head: {float(k): 0.5 for k in sizes} for head in other},
        coverage={"lac": {"0.5": 0.5}},
    )
    assert model.config.thresholds == stale and set(model.config.heads) == set(sizes) == set(wanted["heads"])
    model.config.note = "épicéa"
    model.save_pretrained(tmp_path / "model")
    names = {path.name for path in (tmp_path / "model").iterdir()}
    assert main(["calibrate", str(tmp_path / "model"), str(image_folder), "--k", *sizes]) == 0
    text = (tmp_path / "model" / "config.json").read_text(encoding="utf-8")
    written = json.loads(text)
    assert text == readable_json(written) and "épicéa" in text
    assert {path.name for path in (tmp_path / "model").iterdir()} == names
    details = json.loads((tmp_path / "model" / "calibration.json").read_text())
    assert details.pop("num_labels") == 6
    assert written["heads"] == wanted["heads"] and {**written["calibration"], **details} == wanted["calibration"]
    lambdas = details["head_thresholds"]
    assert written["thresholds"] == {k: lambdas[head][k] for k, head in wanted["heads"].items()}


def test_what_is_stored_for_a_classifier_of_another_class(splits, tmp_path):
    """Everything that a set can be asked by, from one pass; evaluation changes none of it."""
    torch.manual_seed(0)
    save_vit(tmp_path / "vit")
    model, validation = load_classifier(str(tmp_path / "vit")), splits["validation"]
    levels = {"coverage": [0.8, 0.5], "per_class": True}
    metrics = calibrate(model, validation, k=[3, 2.5], dataset_name="trees", batch_size=7, **levels)
    config, transform = model.config, transform_for(model)
    scores = model_scores(model, torch.stack([transform.image(row["image"]) for row in validation]))
    stats = SetStatistics([3, 2.5], 30, mass=True)
    stats.update(scores, torch.tensor(validation["label"]))
    approximately = {"rel": 1e-5}  # batches of another size round differently
    assert list(config.thresholds) == ["2.5", "3"] and config.score == "softmax"
    for k, result in stats.compute().items():
        assert config.thresholds[f"{k:g}"] == pytest.approx(result["lambda_val"], **approximately)
        for name in set(result) - {"top1_accuracy", "lambda_val"}:
            assert metrics[f"{name}@{k:g}"] == pytest.approx(result[name], **approximately)
    assert metrics["top1_accuracy"] == result["top1_accuracy"] and "top1_accuracy@3" not in metrics
    assert not any(name.startswith("coverage") for name in metrics)
    record = stats.coverage([0.5, 0.8], True, k=2.5)
    found = Calibration.of(config).coverage
    assert set(found) == set(record) and found["k_reg"] == record["k_reg"] == 2
    assert found["class_counts"] == [5] * 6
    for method in ("lac", "aps", "raps"):
        assert found[method] == pytest.approx(record[method], **approximately)
    assert set(found["per_class"]["0.8"]["own"]) == set(record["per_class"]["0.8"]["own"]) == set("012345")
    curve = Calibration.of(config).curve
    assert [row[:2] for row in curve] == [pytest.approx(row[:2], **approximately) for row in stats.curve()]
    today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
    source = {"num_examples": 30, "dataset": "trees", "split": "validation", "date": today}
    assert Calibration.of(config).source == source
    stored = config.to_dict()

    monitor = SetSizeMonitor.from_config(config, 3)
    found = evaluate(model, splits["test"], k=[3], monitor=monitor, **levels)
    assert config.to_dict() == stored
    assert found["lambda_val@3"] == config.thresholds["3"] and "average_k_accuracy@2.5" not in found
    test = model_scores(model, torch.stack([transform.image(row["image"]) for row in splits["test"]]))
    sets = answer(test, config, coverage=0.8, per_class=True)
    assert found["coverage_per_class_0.8_size"] == pytest.approx(sets.sum().item() / 30, abs=0.1)
    assert {"coverage_per_class_0.5", "coverage_per_class_0.8_worst_class"} <= set(
        found
    ) and "coverage_0.5" not in found
    assert found["monitored_k"] == 3 and monitor.num_images == 30
    alone = evaluate(model, splits["test"], k=[2.5], method="aps", coverage=[0.5])
    assert "coverage_aps_0.5" in alone and "monitored_k" not in alone
    write_thresholds(model, tmp_path / "vit")
    written = json.loads((tmp_path / "vit" / "config.json").read_text())
    assert (written["thresholds"], written["score"]) == (config.thresholds, "softmax") and "heads" not in written
    with pytest.raises(ValueError, match=r"k=6 must be a number in \[1, 6\)"):
        calibrate(model, validation, k=[2, 6])
    config.score = "sigmoid"  # which does not sum to 1
    calibrate(model, splits["test"], k=[2], **levels)
    assert config.calibration["split"] == "test"
    nameless = splits["test"].select(range(30))
    nameless._split = None
    calibrate(model, nameless, k=[2], **levels)
    assert config.calibration["split"] == "validation"
    assert (
        set(Calibration.of(config).coverage) == {"num_examples", "lac", "class_counts", "per_class"}
        and config.score == "sigmoid"
    )


def test_numbers_of_numpy_are_numbers(splits, image_folder, tmp_path):
    """As K, coverage, threshold or bound they give what Python's own give, down to the files and the metrics."""
    save_vit(tmp_path / "vit")
    single, whole = np.float32, np.int64
    written, metrics, answers = [], [], []
    for fraction, number in ((float, int), (single, whole), (np.float64, np.uint8), (torch.tensor, torch.tensor)):
        model = load_classifier(str(tmp_path / "vit"))
        ks, levels = [fraction(1.1), number(2), fraction(2.3)], [fraction(0.8), fraction(0.9)]
        found = calibrate(model, splits["validation"], k=ks, coverage=levels)
        found |= evaluate(model, splits["test"], k=ks, coverage=levels)
        assert all(type(value) in (int, float) for value in found.values())
        write_thresholds(model, tmp_path / "vit")
        config, details = (tmp_path / "vit" / name for name in ("config.json", "calibration.json"))
        written.append((config.read_text(), details.read_text(), repr(model.config.calibration)))
        metrics.append(found)
        sets = pipeline("average-k-image-classification", model=str(tmp_path / "vit"), k=fraction(1.7))
        image = str(image_folder / "test" / "oak" / "0.png")
        asked = ({"k": number(2)}, {"coverage": fraction(0.8)}, {"cumulative": fraction(0.3)})
        asked += ({"lambda_val": fraction(0.1)}, {"min_size": number(2), "max_size": number(3)})
        answers.append([sets(image, **question) for question in asked])
        assert type(sets.question.k) is float and type(sets.monitor.k) is float
    assert written == written[:1] * 4 and metrics == metrics[:1] * 4 and answers == answers[:1] * 4


@pytest.mark.parametrize("k", [np.float32(2.5), np.float64(2.5), torch.tensor(2.5)])
def test_numbers_of_numpy_in_a_model(k, make_trainer, tmp_path):
    """From the config to the card and results of a training."""
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=dict(enumerate(CLASSES)), k=k, image_size=32)
    trainer = make_trainer(model=model, calibrate_k=[np.int64(2), k], calibrate_coverage=[np.float32(0.8)])
    metrics = trainer.evaluate()
    assert json.loads(json.dumps(metrics)) == metrics and "eval_average_k_accuracy@2" in metrics
    model.save_pretrained(tmp_path)
    stored = json.loads((tmp_path / "config.json").read_text())
    assert stored["k"] == 2.5 and set(stored["thresholds"]) == {"2", "2.5"} and type(model.config.k) is float
    assert AvgKForImageClassification.from_pretrained(tmp_path, k=np.float32(2)).config.k == 2
    assert predict_sets(torch.tensor([[0.1, 0.3]]), np.float32(0.1), np.int64(1)).all()
    assert average_k_threshold(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), np.float32(2.1)) == 2.5


def test_python_twin_and_refusals(classifier, splits):
    model = load_classifier(str(classifier))
    with pytest.raises(ValueError, match="no thresholds"):
        evaluate(model, splits["test"])
    with pytest.raises(ValueError, match="name the average set sizes"):
        calibrate(model, splits["validation"], k=[])
    with pytest.raises(ValueError, match=r"k=6 must be a number in \[1, 6\)"):
        calibrate(model, splits["validation"], k=[6])
    metrics = calibrate(model, splits["validation"], k=[2], dataset_name="trees")
    assert metrics["mean_set_size@2"] == pytest.approx(2, abs=0.2)  # ties of an untrained model may enlarge it
    assert evaluate(model, splits["test"])["lambda_val@2"] == model.config.thresholds["2"]
    assert isinstance(model, (ViTForImageClassification, TimmWrapperForImageClassification))


def test_unknown_models_are_refused():
    with pytest.raises(ValueError, match="'resnet81' is neither a folder, a Hub id, nor a timm model"):
        load_classifier("resnet81")
    with pytest.raises(FileNotFoundError, match="there is no model folder"):
        load_classifier("./nowhere")


@pytest.fixture
def some_trees(tmp_path):
    """Validation and test images of four of the model's six classes."""
    for seed, split in enumerate(("validation", "test"), 1):
        write_images(tmp_path / "some" / split, dict.fromkeys(CLASSES[1:5], 8), seed=seed)
        for empty in (CLASSES[0], CLASSES[5]):
            (tmp_path / "some" / split / empty).rmdir()
    return tmp_path / "some"


def test_fewer_classes_than_the_model_has_are_said(classifier, some_trees, tmp_path, monkeypatch):
    said = []
    monkeypatch.setattr("avgk_hf.data.classes.logger.warning", said.append)
    assert main(["calibrate", str(classifier), str(some_trees), "--k", "2", "--out", str(tmp_path / "out")]) == 0
    (line,) = said
    assert "the dataset has 4 of the model's 6 classes" in line and "--classes-from-dataset" in line


def test_sets_of_the_classes_of_a_dataset(classifier, some_trees, image_folder, tmp_path, capsys, monkeypatch):
    """Scores, K and sets are those of a model that has no other classes, through every door."""
    said, out = [], tmp_path / "out"
    monkeypatch.setattr("avgk_hf.data.classes.logger.warning", said.append)
    command = ["calibrate", str(classifier), str(some_trees), "--classes-from-dataset", "--out", str(out)]
    assert main([*command, "--k", "4"]) == 2
    assert "k=4 must be a number in [1, 4) for 4 classes" in capsys.readouterr().err
    assert main([*command, "--k", "1.5", "3", "--coverage", "0.8"]) == 0
    assert not said
    assert "Sets hold only the 4 classes of that dataset" in (out / "README.md").read_text()
    model = load_classifier(str(out))
    found = Calibration.of(model.config)
    assert found.classes == [1, 2, 3, 4] and set(found.ks) == {1.5, 3}
    pixels = {}
    for split, images in load_splits(str(some_trees)).items():
        pixels[split] = torch.stack([transform_for(model).image(row["image"]) for row in images])
    with torch.no_grad():
        scores = {split: model(images).logits[:, 1:5].softmax(-1) for split, images in pixels.items()}
    for k in (1.5, 3):
        assert found.threshold(k) == pytest.approx(average_k_threshold(scores["validation"], k), rel=1e-5)
    # sums of probabilities are those of the four classes, too
    wanted = [[1 + j for j in row] for row in ranked_sets(scores["test"], torch.ones(32, 4, dtype=torch.bool))]
    for question in ({"k": 3}, {"coverage": 0.8}, {"coverage": 0.8, "method": "aps"}, {"cumulative": 1.0}):
        sets = found.answer(Question(**question)).classes(model_scores(model, pixels["test"]))
        assert all(classes == order[: len(classes)] for classes, order in zip(sets, wanted, strict=True))
    assert {len(classes) for classes in sets} <= {3, 4}
    assert model_scores(model, pixels["test"])[:, [0, 5]].tolist() == [[-math.inf] * 2] * 32

    capsys.readouterr()
    assert main(["predict", str(out), str(some_trees / "test"), "--k", "3", "--min-size", "4", "--json"]) == 0
    predicted = json.loads(capsys.readouterr().out)
    assert {frozenset(item["label"] for item in each["set"]) for each in predicted} == {frozenset(CLASSES[1:5])}
    assert main(["predict", str(out), str(some_trees / "test"), "--k", "3", "--min-size", "5"]) == 2
    assert "[0, 4]" in capsys.readouterr().err
    path = str(some_trees / "test" / "elm" / "0.png")
    (best, *_) = pipeline("average-k-image-classification", model=str(out))(path, k=3)
    assert best["label"] in CLASSES[1:5]

    assert main(["evaluate", str(out), str(some_trees), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    labels = torch.tensor(load_splits(str(some_trees))["test"]["label"])
    assert metrics["top1_accuracy"] == pytest.approx((scores["test"].argmax(1) == labels).float().mean().item())
    sets = predict_sets(scores["test"], found.threshold(3))
    assert metrics["mean_set_size@3"] == pytest.approx(sets.sum(1).float().mean().item(), abs=0.1) and not said
    assert main(["evaluate", str(out), str(image_folder), "--json"]) == 0  # which has all six
    assert "2 of the dataset's 6 classes are none of the 4" in said.pop()
    # another calibration is for all classes again
    assert main(["calibrate", str(out), str(image_folder), "--k", "4"]) == 0
    assert Calibration.of(load_classifier(str(out)).config).classes is None


def test_a_restriction_that_cannot_be(classifier, splits, image_folder, some_trees, capsys):
    command = ["calibrate", str(classifier), str(image_folder), "--k", "2", "--classes-from-dataset"]
    assert main(command) == 2
    assert "it has all 6 of the model: leave it out" in capsys.readouterr().err
    model = load_classifier(str(classifier))
    with pytest.raises(ValueError, match="classes_from_dataset says what K counts: calibrate with it"):
        evaluate(model, splits["test"], classes_from_dataset=True)
    calibrate(model, load_splits(str(some_trees))["validation"], k=[2], classes_from_dataset=True)
    for wrong in ([], [1, 1], [4, 2], [0, 6], [0, True], "all", [[1]]):
        model.config.calibration = {**model.config.calibration, "classes": wrong}
        with pytest.raises(ValueError, match=r"calibration\.classes must list ids below 6"):
            Calibration.of(model.config)


def test_commands_use_the_accelerator(classifier, image_folder, tmp_path, monkeypatch):
    """On a device that computes nothing they cannot answer; before, they stayed on the CPU."""
    out = tmp_path / "out"
    assert main(["calibrate", str(classifier), str(image_folder), "--k", "2", "--out", str(out)]) == 0
    monkeypatch.setattr("avgk_hf.classifiers.best_device", lambda **_: torch.device("meta"))
    for command in (["calibrate", str(out), str(image_folder)], ["evaluate", str(out), str(image_folder)],
                    ["predict", str(out), str(image_folder / "test")]):  # fmt: skip
        with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
            main(command)


def test_the_best_device_is_that_of_this_process(monkeypatch):
    monkeypatch.setattr(
        "avgk_hf.classifiers.PartialState", lambda cpu: SimpleNamespace(device="cpu" if cpu else "cuda:1")
    )
    for available, device in ((True, "cuda:1"), (False, "cpu")):
        monkeypatch.setattr(torch.accelerator, "is_available", lambda found=available: found)
        assert best_device() == device


def test_predict_in_batches(classifier, image_folder, tmp_path, capsys, monkeypatch):
    out, found, sizes = tmp_path / "out", {}, []
    assert main(["calibrate", str(classifier), str(image_folder), "--k", "2", "--out", str(out)]) == 0
    images = [str(image_folder / "test"), str(tmp_path / "broken.png")]
    Path(images[1]).write_text("no image")

    def counted(model, pixels):
        sizes.append(len(pixels))
        return forward(model, pixels)

    monkeypatch.setattr("avgk_hf.prediction.forward", counted)
    for size in (1, 13, 64):
        capsys.readouterr()
        command = ["predict", str(out), *images, "--on-bad-image", "skip", "--batch-size", str(size), "--json"]
        assert main(command) == 1
        found[size] = json.loads(capsys.readouterr().out)
    assert sizes == [1] * 30 + [13, 13, 4] + [30]
    for size in (13, 64):
        for one, other in zip(found[1], found[size], strict=True):
            assert one["image"] == other["image"]
            assert [item["label"] for item in one["set"]] == [item["label"] for item in other["set"]]
            assert [item["score"] for item in one["set"]] == pytest.approx([item["score"] for item in other["set"]])
    monkeypatch.setattr("avgk_hf.prediction.forward", lambda *_: SimpleNamespace(logits=torch.full((30, 6), math.nan)))
    assert main(["predict", str(out), images[0]]) == 2
    assert "ash/0.png on, counted from 0: the logits of image(s) 0, 1" in capsys.readouterr().err
    assert main(["predict", str(out), images[0], "--batch-size", "0"]) == 2
    assert "--batch-size=0 must be a whole number of at least 1" in capsys.readouterr().err


def test_images_that_it_may_have_learnt_are_said(classifier, image_folder, tmp_path, capsys):
    """A classifier of another package does not say what it was trained on."""
    some = tmp_path / "some"
    shutil.copytree(image_folder / "train", some / "train")
    command = ["calibrate", str(classifier), str(some), "--k", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    only = "only if the classifier was not trained on the images in 'train'"
    assert f"has no split 'validation': {only}, --validation-per-class 20 takes 20" in capsys.readouterr().err
    assert main([*command, "--validation-per-class", "2"]) == 0
    assert f"{only}: if it was, what they show is too good" in capsys.readouterr().err


def test_a_classifier_that_guesses_is_asked_about_its_names(image_folder, make_model, tmp_path, caplog):
    folder, words = str(tmp_path / "model"), "is that of guessing among 6 classes: are the model's names in the order"
    model = make_model()
    with torch.no_grad():
        model.ml_head.weight.zero_()
        model.ml_head.bias.copy_(torch.arange(6.0))  # whatever the image
    model.save_pretrained(folder)
    for command in ("calibrate", "evaluate"):
        assert main([command, folder, str(image_folder), "--k", "2", "--split", "test"]) == 0
        assert words in caplog.text
        caplog.clear()


def _said(capsys, arguments):
    main(arguments)
    return capsys.readouterr().err


def test_k_beyond_the_classes_is_refused_with_a_k_that_can_be(classifier, image_folder, tmp_path, capsys):
    out = str(tmp_path / "out")
    assert main(["calibrate", str(classifier), str(image_folder), "--k", "1", "2", "--out", out]) == 0
    said = capsys.readouterr()
    assert "Requested torchvision backend" not in said.err and "method is disabled" not in said.err
    assert "--coverage 0.9, 0.95 by lac, aps, raps" in said.out  # in one line
    image = str(next((image_folder / "test" / "oak").glob("*.png")))
    said = _said(capsys, ["predict", out, image, "--k", "6"])
    assert "no threshold is stored for k=6" in said and "Ask for one in [1, 2]: there are 6 classes in all." in said
    assert "or calibrate again with `avgk calibrate" in _said(capsys, ["predict", out, image, "--k", "3"])
    assert f"did you mean '{out}'?" in _said(capsys, ["predict", str(tmp_path), image])
    assert main(["info", out]) == 0
    assert "calibrated: 1, 2; without --k it is 1)" in capsys.readouterr().out


def test_names_that_are_matched_by_position_are_kept(image_folder, tmp_path, capsys):
    model = timm.create_model("test_resnet", num_classes=6)
    timm.models.save_for_hf(model, tmp_path / "model", model_config={"num_classes": 6}, safe_serialization=True)
    command = ["calibrate", str(tmp_path / "model"), str(image_folder), "--k", "2", "--out", str(tmp_path / "out")]
    assert "--labels-by-position" in _said(capsys, command)
    assert main([*command, "--labels-by-position"]) == 0
    assert list(load_classifier(str(tmp_path / "out")).config.id2label.values()) == CLASSES
    assert main(["evaluate", str(tmp_path / "out"), str(image_folder)]) == 0
