"""`avgk check`, `avgk init` and `avgk info`, and images kept aside for calibration: a first day with photographs."""

import csv
import json
import logging
import shlex
import shutil
import sys
from collections import Counter
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import timm
import torch
from datasets import DatasetDict
from datasets import Image as StoredImage
from PIL import Image
from safetensors.torch import save_file
from transformers import pipeline

from avgk_hf import (
    AvgKConfig,
    AvgKForImageClassification,
    AvgKTrainer,
    AvgKTrainingArguments,
    load_splits,
    prepare,
)
from avgk_hf.calibration import Calibration
from avgk_hf.checks import near_folder
from avgk_hf.cli import main
from avgk_hf.commands.init import BACKBONES
from avgk_hf.data.datasets import class_counts, keep_aside, take_from_train, taken_as
from avgk_hf.evaluation import calibrate, evaluate
from avgk_hf.recipes import parse_recipe
from avgk_hf.scope import promise, taken_in_training
from avgk_hf.train import load_data
from conftest import CLASSES, save_vit, write_images

SHORT = "6 classes, 72 images, 4 to 30 each, 5 classes with fewer than 20; validation 30, test 30"


@pytest.fixture
def photographs(tmp_path):
    """A folder with faults: a broken image, a copy in test, a copy under another class, names that are alike."""
    folder = tmp_path / "photos"
    write_images(folder / "train", dict.fromkeys(CLASSES, 4) | {"fir": 21}, seed=0)
    write_images(folder / "test", {"ash": 2, "oak": 2}, seed=1)
    (folder / "train" / "oak" / "0.png").write_bytes(b"no image")
    shutil.copy(folder / "train" / "elm" / "1.png", folder / "train" / "fir" / "copy.png")
    (folder / "test" / "elm" / "copy.png").write_bytes((folder / "train" / "elm" / "2.png").read_bytes())
    names = (("train", "Épicéa [中文]"), ("train", "epicea_[中文]"), ("test", "only here"))
    for i, (split, name) in enumerate(names):
        (folder / split / name).mkdir()
        pixels = np.full((24, 24, 3), i, np.uint8)
        Image.fromarray(pixels).save(folder / split / name / "0.png")
    return folder


def test_a_readme_beside_photographs_is_no_news(tmp_path, capsys, caplog):
    write_images(tmp_path / "train", dict.fromkeys(CLASSES, 2), seed=0)
    (tmp_path / "README.md").write_text("Photographs of trees, 2026.")
    logging.getLogger("huggingface_hub.repocard").addHandler(caplog.handler)
    assert main(["check", str(tmp_path)]) == 0
    assert not caplog.records and not capsys.readouterr().err


def test_check_finds_what_would_spoil_a_training(photographs, tmp_path, capsys):
    picture = tmp_path / "counts.svg"
    assert main(["check", str(photographs), "--json", "--plot", str(picture)]) == 1
    found = json.loads(capsys.readouterr().out)
    problems = found["problems"]
    assert [len(problems[kind]) for kind in sorted(problems)] == [1, 6, 3, 1, 1, 1], problems
    assert problems["empty folders"] == [f"test/{name} has no image" for name in ("beech", "cedar", "fir")]
    assert "oak/0.png" in problems["broken images"][0].replace("\\", "/")
    assert set(problems["classes in one split only, or without training images"]) == {
        "only here (only in test)",
        *(f"{name} (only in train)" for name in ("beech", "cedar", "fir", "Épicéa [中文]", "epicea_[中文]")),
    }
    assert "Épicéa [中文]" in problems["names that differ by accents, case or spaces"][0]
    assert "(train, elm)" in problems["images in more than one split"][0]
    assert "(test, elm)" in problems["images in more than one split"][0]
    assert "(train, fir)" in problems["images under more than one class"][0]
    assert found["classes"]["ash"] == {"train": 4, "test": 2} and found["images"] == {"train": 44, "test": 6}
    assert found["shots"]["medium"] == {"classes": 1, "train": 22, "test": 0}
    assert found["summary"] == "9 classes, 44 images, 0 to 22 each, 8 classes with fewer than 20; test 6"
    assert "fir" in picture.read_text(encoding="utf-8") and "train images" in picture.read_text(encoding="utf-8")
    assert main(["check", str(photographs)]) == 1
    text = capsys.readouterr().out
    assert text.startswith(found["summary"]) and "broken images: 1" in text and "few shot: fewer than 20" in text


def test_check_of_sound_data(image_folder, capsys):
    assert main(["check", str(image_folder)]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{SHORT}\n")
    assert "nothing to complain about" in text and "          30           5           5  ash\n" in text
    assert main(["check", "./nowhere"]) == 2 and main(["check", str(image_folder), "--train-split", "dev"]) == 2


def test_train_begins_with_the_short_form(recipe, capsys):
    assert main(["train", str(recipe), "--max_steps", "1", "--eval_strategy", "no", "--save_strategy", "no",
                 "--load_best_model_at_end", "false"]) == 0  # fmt: skip
    assert f"{SHORT}\n" in capsys.readouterr().out


def test_the_recipe_of_init_trains(image_folder, tmp_path, monkeypatch, capsys):
    """Of a folder without validation images, with names that YAML could misread; only the weights are not loaded."""
    monkeypatch.chdir(tmp_path)
    photos = tmp_path / "it's: my photos #1"
    shutil.copytree(image_folder / "train", photos / "train")
    shutil.copytree(image_folder / "test", photos / "test")
    assert main(["init", photos.name, "--out", "plants.yaml"]) == 0
    printed = capsys.readouterr().out
    looks = f"`avgk check {shlex.quote(photos.name)}` looks at every image before that"
    assert printed.endswith(f"written to plants.yaml; train with `avgk train plants.yaml`\n{looks}\n")
    model, data, args = parse_recipe(["plants.yaml"])
    assert (model.model, model.pretrained, model.in_chans, model.head, model.k) == (
        "resnet50.a1_in1k",
        True,
        3,
        "auto",
        1.5,
    )
    assert (model.image_size, data.dataset, data.validation_per_class) == (64, photos.name, 5)
    assert printed.startswith(
        "6 classes, 48 images, 2 to 25 each, 5 classes with fewer than 20; validation 24, test 30"
    )
    assert (data.calibration_split, args.output_dir, args.calibrate_k) == ("auto", "runs/plants", [1, 1.5, 2, 3, 5])
    assert (args.per_device_train_batch_size, args.num_train_epochs, args.load_best_model_at_end) == (6, 20, True)
    assert (model.freeze_backbone, model.objective, data.cache_features, data.augmentation) == (
        True,
        "ce",
        True,
        "none",
    )
    comments = [line for line in Path("plants.yaml").read_text().splitlines() if "  # " in line]
    assert len(comments) >= 12 and any("network" in line for line in comments)
    small = ["--model", "test_resnet", "--pretrained", "false", "--num_train_epochs", "1", "--image_size", "32"]
    assert main(["train", "plants.yaml", *small]) == 0
    trained = capsys.readouterr().out
    assert printed.splitlines()[0] in trained  # what is trained on was counted
    commands = "`avgk predict runs/plants PHOTOS --out sets.csv`, or `avgk evaluate runs/plants"
    assert trained.endswith(f"saved to runs/plants\nnext: {commands} {shlex.quote(photos.name)}`\n")
    before = Path("runs/plants/results.json").read_text()
    assert main(["train", "plants.yaml", *small, "--seed", "1"]) == 2
    assert "runs/plants holds a finished training, which is kept" in capsys.readouterr().err
    assert Path("runs/plants/results.json").read_text() == before
    assert main(["train", "plants.yaml", *small, "--seed", "1", "--overwrite"]) == 0
    assert json.loads(Path("runs/plants/results.json").read_text())["seed"] == 1
    assert AvgKConfig.from_pretrained("runs/plants").thresholds.keys() == {"1", "1.5", "2", "3", "5"}
    assert main(["init", photos.name, "--out", "plants.yaml"]) == 2
    assert "plants.yaml exists and is kept" in capsys.readouterr().err


def test_init_follows_the_data(tmp_path, capsys):
    folder = tmp_path / "grey"
    for split in ("train", "valid"):
        for i in range(12):
            (folder / split / f"{i}").mkdir(parents=True)
            for j in range(2):
                pixels = np.random.default_rng(i * j).integers(0, 255, (150, 170), dtype=np.uint8)
                Image.fromarray(pixels).save(folder / split / f"{i}" / f"{j}.png")
    assert main(["init", str(folder), "--out", str(tmp_path / "recipe.yaml")]) == 0
    model, data, _ = parse_recipe([str(tmp_path / "recipe.yaml")])
    text = (tmp_path / "recipe.yaml").read_text()
    assert (model.image_size, model.k, data.validation_per_class) == (160, 2, None)
    assert data.validation_split in ("valid", "validation")  # `datasets` may know the folder's name
    assert "grey images" in text and "only validation is reported" in text
    assert main(["init", str(tmp_path / "nothing"), "--out", str(tmp_path / "other.yaml")]) == 2
    weights, other = tmp_path / "weights.safetensors", tmp_path / "other.yaml"
    capsys.readouterr()
    for given, reason in ((["test_resnet"], "there is no such file"), ([], "say with --model which timm model")):
        named = ["--checkpoint", str(weights), *(["--model", *given] if given else [])]
        assert main(["init", str(folder), "--out", str(other), *named]) == 2 and reason in capsys.readouterr().err
    save_file(timm.create_model("test_resnet").state_dict(), weights)
    given = ["--model", "test_resnet", "--checkpoint", str(weights)]
    assert main(["init", str(folder), "--out", str(other), *given]) == 0
    model, _, _ = parse_recipe([str(other)])
    assert (model.model, model.checkpoint, model.pretrained) == ("test_resnet", str(weights), None)


def test_backbones_have_weights_on_the_hub():
    for _, name, _ in BACKBONES:
        assert timm.get_pretrained_cfg(name).hf_hub_id, name


def test_info_of_a_run(trained_run, tmp_path, capsys):
    run = shutil.copytree(trained_run, tmp_path / "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    assert main(["info", str(run), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["classes"] == CLASSES and found["backbone"] == "test_resnet" and found["objective"] == "avgk"
    assert found["can_be_asked"]["k"] == [1, 2, 3] and found["can_be_asked"]["heads"] == dict.fromkeys("123", "ml")
    assert set(found["can_be_asked"]["coverage"]) == {"0.9", "0.95"} and found["calibrated_on"]["num_examples"] == 30
    assert found["stale"] == [] and set(found["results"]) == {"validation", "test"}
    assert "the checkpoint was chosen" in found["promise"]
    assert main(["info", str(run)]) == 0
    text = capsys.readouterr().out
    for part in ("6 (ash, beech, cedar, ...); 72 training images", "--k 1 to 3", "on 30 images of trees validation"):
        assert part in text, text
    config = AvgKForImageClassification.from_pretrained(run)
    Calibration.store(config.config, {2: 0.123456}, {"num_examples": 30})
    config.save_pretrained(run)
    (run / "onnx").mkdir()
    (run / "onnx" / "export.json").write_text('{"thresholds": {"2": 0.5}}')
    assert main(["info", str(run)]) == 0
    text = capsys.readouterr().out
    anew = f"`avgk evaluate MODEL DATASET --out {run / 'results.json'}` measures them anew"
    old = f"validation and test above ({anew})"
    assert f"out of date   {old}, README.md (`avgk card`), onnx (`avgk export`)" in text


def test_info_of_other_classifiers(tmp_path, capsys):
    save_vit(tmp_path / "vit")
    assert main(["info", str(tmp_path / "vit")]) == 0
    text = capsys.readouterr().out
    assert "ViTForImageClassification" in text and "avgk calibrate MODEL DATASET" in text and "objective" not in text
    assert main(["info", str(tmp_path / "vit"), "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["classes"] == CLASSES and found["can_be_asked"]["k"] == [] and found["calibrated_on"] is None
    assert main(["info", "./nowhere"]) == 2 and main(["info", str(tmp_path)]) == 2
    assert "there is no model folder './nowhere'" in capsys.readouterr().err


def test_a_missing_validation_split_is_taken_from_train(recipe, image_folder, trained_run, tmp_path, capsys):
    """The message offers that, never the test images; of small classes half is taken."""
    folder = tmp_path / "trees"
    for split in ("train", "test"):
        shutil.copytree(image_folder / split, folder / split)
    assert main(["train", str(recipe), "--dataset", str(folder)]) == 2
    error = capsys.readouterr().err
    assert "`validation_per_class: 20` in the recipe takes 20 images of each class from 'train'" in error
    assert "'test'" not in error
    assert main(["calibrate", str(trained_run), str(folder)]) == 2
    assert "--validation-per-class 20 takes" in capsys.readouterr().err
    splits = take_from_train(load_splits(str(folder)), 20)
    assert class_counts(splits["validation"], 6).tolist() == [15, 7, 5, 4, 3, 2]
    assert class_counts(splits["train"], 6).tolist() == [15, 7, 5, 4, 3, 2]


def test_calibrate_takes_the_validation_images_of_the_training(recipe, image_folder, tmp_path, capsys):
    """A calibration of the same data gives the thresholds of the training, whatever was calibrated in between."""
    folder, run = tmp_path / "trees", tmp_path / "run"
    for split in ("train", "test"):
        shutil.copytree(image_folder / split, folder / split)
    taken = ["--validation_per_class", "3", "--split_seed", "5"]
    assert main(["train", str(recipe), "--dataset", str(folder), *taken, "--num_train_epochs", "1"]) == 0
    config = AvgKConfig.from_pretrained(run)
    assert config.calibration["taken"] == {"dataset": "trees", "per_class": 3, "seed": 5}
    assert main(["calibrate", str(run), str(folder), "--split", "test"]) == 0
    assert AvgKConfig.from_pretrained(run).thresholds != config.thresholds
    capsys.readouterr()
    assert main(["calibrate", str(run), str(folder), "--k", "1", "3"]) == 0
    said = "validation: 17 images that the training of this model took from train (of each class 3 at most, seed 5)"
    assert said in capsys.readouterr().err
    again = AvgKConfig.from_pretrained(run)
    assert again.thresholds == config.thresholds and again.calibration["num_examples"] == 17
    assert again.calibration["taken"] == config.calibration["taken"]
    # those of another dataset are offered, not taken
    shutil.move(folder, tmp_path / "others")
    assert main(["calibrate", str(run), str(tmp_path / "others")]) == 2
    assert "--validation-per-class 3 takes 3 images of each class from 'train'" in capsys.readouterr().err


def test_images_that_a_model_was_trained_on_are_noticed(make_model, image_folder, tmp_path, capsys):
    """Training in Python records no split, but how many images of each class it had."""
    folder, model = tmp_path / "trees", make_model()
    for split in ("train", "test"):
        shutil.copytree(image_folder / split, folder / split)
    left = take_from_train(load_splits(str(folder)), 3)
    model.config.train_counts = class_counts(left["train"], 6).tolist()
    model.save_pretrained(tmp_path / "model")
    command = ["calibrate", str(tmp_path / "model"), str(folder), "--k", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 2
    assert "--validation-per-class 3 takes 3 images of each class" in capsys.readouterr().err
    assert main([*command, "--validation-per-class", "3"]) == 0
    assert "it has learnt" not in capsys.readouterr().err
    assert main([*command, "--validation-per-class", "5"]) == 0
    left = class_counts(take_from_train(load_splits(str(folder)), 5)["train"], 6)
    number = int((model.config.train_counts - left).sum())
    assert f"it has learnt at least {number} of these validation images" in capsys.readouterr().err


def test_a_name_that_is_nearly_that_of_a_folder(tmp_path, monkeypatch, capsys):
    """Is not looked for on the Hub, and a misspelt option is told from the options of its command."""
    monkeypatch.chdir(tmp_path)
    for name in ("runs/birds", "photographs"):
        Path(name).mkdir(parents=True)
    for command, words in (
        (["predict", "runs/bird", "x.png"], "there is no model folder 'runs/bird'; did you mean 'runs/birds'?"),
        (["info", "runs/brids"], "did you mean 'runs/birds'?"),
        (["check", "photograph"], "there is no such folder; did you mean 'photographs'?"),
    ):
        assert main(command) == 2
        assert words in capsys.readouterr().err
    assert near_folder("google/vit-base") is None and near_folder("beans") is None
    Path("weights.safetensors").touch()
    assert main(["info", "weights.safetensors"]) == 2
    assert "is a file; name the folder of a saved model" in capsys.readouterr().err
    for option, meant in (("--ot", "--out"), ("--K", "--k"), ("--batchsize=3", "--batch-size")):
        with pytest.raises(SystemExit):
            main(["predict", "runs/birds", "x.png", option])
        error = capsys.readouterr().err
        line = f"avgk predict: unrecognized arguments: {option}; did you mean {meant}?"
        assert error == f"{line} (`avgk predict --help` lists the options)\n"


def test_weights_of_another_model_are_refused(make_model, tmp_path):
    save_file(make_model("test_resnet").backbone.state_dict(), tmp_path / "weights.safetensors")
    build = partial(AvgKForImageClassification.from_timm, num_labels=3, k=2)
    for name in ("test_vit", "test_convnext", "test_efficientnet"):  # timm only warns for the first two
        with pytest.raises(ValueError, match=f"are not those of '{name}'.*name the timm model that they are of"):
            build(name, checkpoint=str(tmp_path / "weights.safetensors"))
    assert build("test_resnet", checkpoint=str(tmp_path / "weights.safetensors"), model_args={"in_chans": 1})
    with pytest.raises(FileNotFoundError, match=r"none\.safetensors': there is no such file"):
        build("test_vit", checkpoint=str(tmp_path / "none.safetensors"))


def test_arguments_of_from_timm_are_honoured_or_refused():
    build = partial(AvgKForImageClassification.from_timm, "test_resnet", 3, k=2)
    assert {name.split("_")[0] for name, p in build(freeze_backbone=True).named_parameters() if p.requires_grad} == {
        "ml",
        "sccp",
    }
    for name in ("colour", "frozen"):
        with pytest.raises(ValueError, match=f"'{name}' is neither an argument of from_timm nor a field"):
            build(**{name: True})
    with pytest.raises(ValueError, match=r"Did you mean 'alpha'"):
        build(alpa=3)
    for name, meant in (("freeze_bacbone", "freeze_backbone"), ("chekpoint", "checkpoint")):
        with pytest.raises(ValueError, match=f"'{name}' is no argument of from_timm; did you mean '{meant}'"):
            build(**{name: True})


def test_what_newcomers_mistyped(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    """A name that is nearly right is offered; what is not there is said before anything is computed."""
    shutil.copytree(image_folder, tmp_path / "trees")
    shutil.move(tmp_path / "trees" / "train", tmp_path / "trees" / "trian")
    shutil.move(tmp_path / "trees" / "test" / "oak", tmp_path / "trees" / "test" / "oaks")
    monkeypatch.chdir(tmp_path)
    Path("runs").mkdir()
    run, cases = str(trained_run), []
    cases.append((["check", "trees"], "has no split 'train', only ['validation', 'test']; name"))
    cases.append((["check", "trees", "--train-split", "validation"], "oaks (only in test; oak?)"))
    cases.append((["predict", run, "tree"], "tree: there is no such file; did you mean 'trees'?"))
    cases.append((["predict", "nobody/nothing", "trees"], "there is no such folder here either; check the name"))
    Path("notes.txt").write_text("field notes\nof May\n")
    line = "line 1 of notes.txt names no file: 'field notes' (a .txt is read as a list of images)."
    cases.append((["predict", run, "notes.txt"], line))
    Path("raw").mkdir()
    Path("raw/a.HEIC").touch()
    line = "raw holds no images; 1 file is left out: 1 .heic; convert it to JPEG."
    cases.append((["predict", run, "raw"], line))
    for command, words in cases:
        assert main(command) in (1, 2)
        printed = capsys.readouterr()
        assert words in printed.err + printed.out
    shutil.copy("trees/test/ash/0.png", "raw")
    Path("raw/b.cr2").touch()
    assert main(["predict", run, "raw", "--csv"]) == 0
    assert "2 files are left out: 1 .heic, 1 .cr2; convert them to JPEG.\n" in capsys.readouterr().err
    Path("empty.jpg").touch()
    assert main(["predict", run, "empty.jpg"]) == 2 and "(it is empty)" in capsys.readouterr().err
    monkeypatch.setattr("avgk_hf.commands.options.find_spec", lambda name: None)
    assert main(["evaluate", run, "trees", "--per-species", "a.csv"]) == 2
    assert "pip install matplotlib" in capsys.readouterr().err and not Path("a.csv").exists()
    sets = pipeline("average-k-image-classification", model=run)
    with pytest.raises(ValueError, match="a set cannot be asked for by 'K'; did you mean 'k'"):
        sets(str(image_folder / "test/oak/0.png"), K=2)


@pytest.mark.parametrize(
    "taken",
    [None, 3, {"per_class": 3}, *({"per_class": n, "seed": s} for n, s in (("3", 0), (True, 0), (0, 0), (3, -1)))],
)
def test_a_strangers_record_of_taken_images_is_harmless(taken):
    config = AvgKConfig(architecture="test_resnet", num_labels=3, k=1)
    Calibration.store(config, {1: 0.5}, {"taken": taken})
    assert taken_in_training(Calibration.of(config)) == (None, {})


def test_calibration_images_are_kept_aside(splits):
    """Two random halves without a common image, where each is large enough."""
    validation = splits["validation"]
    chosen, kept = keep_aside(validation, 0, 15)
    assert (str(chosen.split), str(kept.split), len(chosen), len(kept)) == ("validation", "calibration", 15, 15)
    assert list(kept["index"]) == list(range(15))
    files = [{image.filename for image in part["image"]} for part in (chosen, kept)]
    assert not files[0] & files[1] and len(files[0] | files[1]) == 30
    again, other = keep_aside(validation, 0)[1], keep_aside(validation, 1)[1]
    assert [image.filename for image in again["image"]] == [image.filename for image in kept["image"]]
    assert {image.filename for image in other["image"]} != files[1]
    assert keep_aside(validation, 0, 16) is None


def test_recipes_keep_images_aside(recipe, image_folder, monkeypatch):
    monkeypatch.setattr("avgk_hf.train.LEAST_ASIDE", 15)
    for how, sizes in (("none", {"validation": 30}), ("auto", {"validation": 15, "calibration": 15})):
        _, data, args = parse_recipe([str(recipe), "--calibration_split", how])
        used, _ = load_data(data, args)
        assert {name: len(used[name]) for name in used if name not in ("train", "test")} == sizes
    for wrong, message in (("test", "is used for something else"), ("dev", "has no split 'dev'")):
        _, data, args = parse_recipe([str(recipe), "--calibration_split", wrong])
        with pytest.raises(ValueError, match=message):
            load_data(data, args)


def test_a_calibration_says_what_was_chosen_on_its_images(recipe, image_folder, tmp_path, monkeypatch, capsys):
    """Training, `avgk calibrate` and `avgk predict` say where coverage is approximate, and only there."""
    monkeypatch.setattr("avgk_hf.train.LEAST_ASIDE", 15)
    run, image = tmp_path / "run", str(image_folder / "test" / "oak" / "0.png")
    options = [str(recipe), "--head", "auto", "--num_train_epochs", "1"]
    assert main(["train", *options, "--calibration_split", "auto"]) == 0
    assert "approximate" not in capsys.readouterr().out
    exact = AvgKConfig.from_pretrained(run)
    results = json.loads((run / "results.json").read_text())
    assert exact.calibration["split"] == "calibration" and "chosen" not in exact.calibration
    assert exact.calibration["num_examples"] == 15 and promise(Calibration.of(exact)) is None
    assert results["validation"]["lambda_val"] == exact.thresholds["2"] == results["test"]["lambda_val"]
    assert results["data"]["calibration_split"] == "auto"

    # the same images as those that chose the checkpoint, and the head chosen on them
    assert main(["calibrate", str(run), str(image_folder), "--coverage", "0.9"]) == 0
    assert "coverage is approximate: the checkpoint and the head were chosen" in capsys.readouterr().out
    assert main(["predict", str(run), image, "--coverage", "0.9"]) == 0
    assert "coverage is approximate" in capsys.readouterr().err
    assert main(["predict", str(run), image]) == 0
    assert "approximate" not in capsys.readouterr().err
    heads = AvgKConfig.from_pretrained(run).heads
    # other images, the heads as they are
    arguments = ["calibrate", str(run), str(image_folder), "--split", "test", "--coverage", "0.9", "--keep-heads"]
    assert main(arguments) == 0
    assert "approximate" not in capsys.readouterr().out and AvgKConfig.from_pretrained(run).heads == heads


def test_kept_heads_are_not_chosen_anew(make_model, splits):
    """Whatever head is best on the images of a calibration, `keep_heads` answers with the one of before."""
    for head in ("ml", "sccp", "mean"):
        model = make_model()
        Calibration.store(model.config, {2: 0.2}, {"head": head}, heads={2: head})
        evaluate(model, splits["validation"], [1, 3], calibrate=True, keep_heads=True)
        found = Calibration.of(model.config)
        assert [found.head(k) for k in (1, 2, 3)] == [head] * 3 and "chosen" not in found.source
        assert found.source_head == head and found.levels()
    evaluate(model, splits["validation"], [1, 3], calibrate=True)
    assert Calibration.of(model.config).source["chosen"] == ["head"]


@pytest.mark.parametrize("chosen", [None, 3, "head", {}, ["\x1b[2J"], []])
def test_a_strangers_record_of_choices_is_harmless(chosen):
    config = AvgKConfig(architecture="test_resnet", num_labels=3, k=1)
    Calibration.store(config, {1: 0.5}, {"chosen": chosen}, coverage={"lac": {"0.9": 0.3}})
    assert promise(Calibration.of(config)) is None


def test_an_image_that_lies_deeper_or_higher_than_others_is_named(tmp_path, monkeypatch, capsys):
    """Beside what else is wrong; what needs the classes says it in one line."""
    monkeypatch.chdir(tmp_path)
    write_images(Path("birds/train"), dict.fromkeys(CLASSES, 2), seed=0)
    for place, words in (
        ("train/oak/2024/sub.png", "lies deeper than the others: move it up"),
        ("train/sub.png", "lies higher than the others: move it to those of its class"),
    ):
        file = Path("birds", place)
        file.parent.mkdir(exist_ok=True)
        shutil.copy("birds/train/ash/0.png", file)
        assert main(["init", "birds"]) == 2
        assert capsys.readouterr().err == f"avgk init: dataset 'birds': {place} {words}.\n"
        file.write_text("no image")
        assert main(["check", "birds"]) == 1
        printed = capsys.readouterr().out
        assert f"  {place} {words}\n" in printed and "broken images: 1\n" in printed and "no class is known" in printed
        file.unlink()


def test_check_looks_at_photographs_without_classes(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(Path("trees"), dict.fromkeys(CLASSES, 3), seed=0)
    shutil.move("trees/oak", "walk")
    Path("walk/broken.png").write_text("no image")
    assert main(["check", "walk"]) == 1
    printed = capsys.readouterr().out
    assert printed.startswith("4 images without classes\nbroken images: 1\n")
    assert "one folder for each of two or more classes" in printed and "`avgk predict`" in printed
    assert main(["check", "walk", "--json"]) == 1
    found = json.loads(capsys.readouterr().out)
    assert found["summary"] == "4 images without classes" and found["classes"] == {} and len(found["problems"]) == 2
    assert main(["check", "walk", "--plot", "counts.png"]) == 2 and main(["check", "walk", "--label-column", "x"]) == 2
    printed = capsys.readouterr().err
    assert "--plot counts.png draws" in printed and "no column 'x'" in printed and not Path("counts.png").exists()


def test_check_names_other_formats_and_empty_folders(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    write_images(Path("birds/train"), dict.fromkeys(CLASSES, 2), seed=0)
    write_images(Path("birds/test"), dict.fromkeys(CLASSES, 1), seed=1)
    Path("birds/train/Ivory Gull").mkdir()
    Path("birds/train/.cache").mkdir()
    Path("birds/.git/hooks").mkdir(parents=True)
    for name in ("ash/a.HEIC", "oak/b.cr2", "oak/c.nef", "oak/d.nef"):
        Path("birds/train", name).touch()
    assert main(["check", "birds", "--json"]) == 1
    printed = capsys.readouterr()
    assert json.loads(printed.out)["problems"] == {
        "other formats": ["4 files are left out: 2 .nef, 1 .heic, 1 .cr2; convert them to JPEG"],
        "empty folders": ["train/Ivory Gull has no image"],
    }
    assert not printed.err
    assert main(["check", "birds/train"]) == 1
    hint = "birds/train is one split, and there is `test` beside it: did you mean birds?\n"
    assert capsys.readouterr().err == hint
    monkeypatch.chdir("birds/train")
    assert main(["init", ".", "--out", str(tmp_path / "recipe.yaml")]) == 0
    assert "there is `test` beside it: did you mean ..?" in capsys.readouterr().err


def test_what_is_wrong_is_said_in_one_line_before_anything_is_loaded(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("my birds").mkdir()
    Path("model").mkdir()
    Path("model/config.json").write_text("{}")
    missing = "there is no model folder 'runs/birds': train one first (`avgk train RECIPE`), or check the name."
    share = "must be a number between 0 and 1, the share of images whose set holds the true class; did you mean 0.95?"
    recipe = "my birds is a folder of images, no recipe: `avgk init 'my birds' --out recipe.yaml` writes one."
    cases = [(f"{command} runs/birds", missing) for command in ("info", "app", "export --onnx", "export --endpoint x")]
    cases += [(f"{command} runs/birds x", missing) for command in ("predict", "evaluate", "calibrate")]
    cases += [
        (f"{command} model model --coverage 95", f"coverage=95.0 {share}") for command in ("evaluate", "calibrate")
    ]
    cases += [
        ("predict model x.jpg --coverage 95", f"coverage=95.0 {share}"),
        ("predict model x.jpg --cumulative 90", "cumulative=90 is no probability; did you mean 0.9?"),
        ("predict model x.jpg --out sets.xlsx", "ends with none of .csv, .jsonl, .parquet; Excel opens .csv."),
    ]
    monkeypatch.setitem(sys.modules, "avgk_hf.classifiers", None)  # what loads models
    for words, message in cases:
        assert main(words.split()) == 2
        error = capsys.readouterr().err
        assert error.startswith(f"avgk {words.split()[0]}: ") and error.endswith(f"{message}\n"), (words, error)
        assert error.count("\n") == 1
    assert main(["train", "my birds"]) == 2
    assert capsys.readouterr().err == f"avgk train: {recipe}\n"


def test_init_refuses_a_model_or_weights_that_training_would(image_folder, tmp_path, capsys):
    weights = tmp_path / "weights.safetensors"
    save_file(timm.create_model("test_vit").state_dict(), weights)
    out = tmp_path / "recipe.yaml"
    asked = ["init", str(image_folder), "--out", str(out), "--model"]
    assert main([*asked, "test_resnett"]) == 2
    assert "Did you mean test_resnet" in capsys.readouterr().err
    assert main([*asked, "test_resnet", "--checkpoint", str(weights)]) == 2
    assert "weights.safetensors" in capsys.readouterr().err
    assert not out.exists()
    assert main([*asked, "test_vit", "--checkpoint", str(weights)]) == 0


def test_a_recipe_that_is_nearly_there(tmp_path, capsys):
    (tmp_path / "plants.yaml").write_text("k: 2\n")
    assert main(["train", str(tmp_path / "plants.yml")]) == 2
    assert f"did you mean '{tmp_path / 'plants.yaml'}'?" in capsys.readouterr().err


def test_predict_says_which_names_are_forced_and_which_heads_answer(make_model, image_folder, tmp_path, capsys):
    model = make_model(head="auto")
    Calibration.store(model.config, {1: 1.0, 2: 0.0}, heads={1: "ml", 2: "sccp"})
    model.save_pretrained(tmp_path / "model")
    photos = str(image_folder / "test" / CLASSES[0])
    number = len(list(Path(photos).iterdir()))
    assert main(["predict", str(tmp_path / "model"), photos, "--k", "1", "2"]) == 0
    error = capsys.readouterr().err
    assert f"of these, {number} show no class that reaches the threshold" in error
    assert error.count("reaches the threshold") == 1  # K = 1 alone
    assert "different heads answer for these K" in error
    assert main(["predict", str(tmp_path / "model"), photos, "--k", "2"]) == 0
    error = capsys.readouterr().err
    assert "reaches the threshold" not in error and "different heads" not in error


def test_both_tables_name_photographs_alike(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(image_folder / "test" / CLASSES[0], "new")
    Path("new/broken.jpg").write_bytes(b"no image")
    run, sets, unsure = str(trained_run), tmp_path / "sets.csv", tmp_path / "unsure"
    assert main(["predict", run, "new", "--out", str(sets)]) == 1
    assert main(["evaluate", run, "new", "--unsure", "3", "--unsure-out", str(unsure)]) == 1
    printed = capsys.readouterr()
    assert printed.err.count("\n  new/broken.jpg cannot be read") == 2
    assert (
        "\nnew: " in f"\n{printed.out}" and "too few images to tell" in printed.out
    )  # photographs without names are no split
    assert "called train" not in printed.err
    first = {line.split(",")[0] for line in sets.read_text(encoding="utf-8-sig").splitlines()[1:]}
    second = {line.split(",")[0] for line in (unsure / "unsure.csv").read_text(encoding="utf-8-sig").splitlines()[1:]}
    assert len(second) == 3 and second <= first


def test_calls_from_python_that_newcomers_made(make_model, make_trainer, splits, image_folder, tmp_path):
    model = make_model()
    names = list(model.config.id2label.values())
    with pytest.raises(ValueError, match=r"dict\(enumerate\(names\)\)"):
        AvgKForImageClassification.from_timm("test_resnet", id2label=names)
    assert prepare(splits["train"], model)[0]["pixel_values"].ndim == 3
    with pytest.raises(ValueError, match="prepare takes one split"):
        prepare(splits, model)
    with pytest.raises(TypeError, match="did you mean 'num_train_epochs'"):
        AvgKTrainingArguments(str(tmp_path), num_train_epoch=3)
    for near, field in (("num_epochs", "num_train_epochs"), ("batch_size", "per_device_train_batch_size")):
        with pytest.raises(TypeError, match=f"did you mean '{field}'"):
            AvgKTrainingArguments(str(tmp_path), **{near: 3})
    with pytest.raises(TypeError, match="`from_timm`"):
        AvgKTrainingArguments(str(tmp_path), objective="ce")
    args = AvgKTrainingArguments(str(tmp_path), report_to=[])
    with pytest.raises(ValueError, match="train_dataset holds images as they are stored"):
        AvgKTrainer(model, args, splits["train"])
    with pytest.raises(ValueError, match="train_dataset are the splits"):
        AvgKTrainer(model, args, splits)
    pairs = [(torch.zeros(3, 32, 32), 0)] * 4  # as datasets of torchvision have them
    with pytest.raises(ValueError, match="an example of the dataset is a tuple, and not a mapping"):
        AvgKTrainer(model, args, pairs).train()
    for wrong, given in (("photos", "a str"), (splits, "the splits"), (pairs, "a list")):
        with pytest.raises(ValueError, match=f"the dataset is {given}.*give one split"):
            calibrate(model, wrong, k=[1, 2])
    trainer = AvgKTrainer(model, args, None, prepare(splits["validation"], model))
    trainer.evaluate()
    with pytest.raises(ValueError, match="the dataset to evaluate holds images"):
        trainer.evaluate(splits["test"])
    assert evaluate(model, splits["validation"], 2, calibrate=True)["mean_set_size"] == 2


def test_pictures_of_a_run_from_python_whose_validation_was_taken(image_folder, tmp_path, capsys):
    shutil.copytree(image_folder, tmp_path / "plants")
    shutil.rmtree(tmp_path / "plants" / "validation")
    splits = load_splits(str(tmp_path / "plants"), validation_per_class=2, split_seed=1)
    labels = dict(enumerate(splits["train"].features["label"].names))
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32)
    args = AvgKTrainingArguments(str(tmp_path / "run"), num_train_epochs=1, report_to=[], calibrate_k=[1])
    train, validation, test = (prepare(splits[name], model) for name in ("train", "validation", "test"))
    trainer = AvgKTrainer(model, args, train, validation, dataset_name=str(tmp_path / "plants"))
    trainer.train()
    trainer.evaluate()
    trainer.evaluate(test, metric_key_prefix="test")
    trainer.save_model()
    assert main(["plot", str(tmp_path / "run"), "--out", str(tmp_path / "pictures")]) == 0
    assert (tmp_path / "pictures" / "accuracy_against_k.png").is_file()
    taken = AvgKConfig.from_pretrained(tmp_path / "run").calibration["taken"]
    assert taken == {"dataset": "plants", "per_class": 2, "seed": 1}


def test_an_older_card_of_a_foreign_classifier_names_a_command_that_works(image_folder, tmp_path, capsys):
    save_vit(tmp_path / "vit")
    out, again = str(tmp_path / "sets"), str(tmp_path / "again")
    assert main(["calibrate", str(tmp_path / "vit"), str(image_folder), "--k", "2", "--out", out]) == 0
    assert main(["calibrate", out, str(image_folder), "--k", "1"]) == 0
    assert "README.md (`avgk calibrate` with --out another folder" in capsys.readouterr().out
    assert main(["calibrate", out, str(image_folder), "--k", "1", "--out", again]) == 0
    capsys.readouterr()
    assert main(["info", again]) == 0
    assert "with --out another folder" not in capsys.readouterr().out


def test_nothing_is_left_of_a_command_that_failed(image_folder, tmp_path, monkeypatch, capsys):
    """Nor of its folders; one that was there before stays."""
    monkeypatch.chdir(tmp_path)
    assert main(["init", str(image_folder), "--out", "trees.yaml", "--model", "test_resnet"]) == 0
    capsys.readouterr()
    for wrong in (["--k", "50"], ["--dataset", str(tmp_path / "nowhere")], ["--checkpoint", "no.safetensors"]):
        assert main(["train", "trees.yaml", "--output_dir", "deep/run", *wrong]) == 2
    assert main(["plot", "no_run", "--out", "deep/plots"]) == 2
    assert main(["card", "no_run", "--out", "deep/card.md"]) == 2
    assert [path.name for path in tmp_path.iterdir()] == ["trees.yaml"]
    (tmp_path / "there").mkdir()
    assert main(["train", "trees.yaml", "--output_dir", "there/run", "--k", "50"]) == 2
    assert not list((tmp_path / "there").iterdir())
    assert "k=50 must be a number in [1, 6)" in capsys.readouterr().err


def test_init_says_what_it_takes_from_train(image_folder, tmp_path, capsys):
    shutil.copytree(image_folder, tmp_path / "photos", ignore=shutil.ignore_patterns("validation"))
    assert main(["init", str(tmp_path / "photos"), "--out", str(tmp_path / "photos.yaml")]) == 0
    said = capsys.readouterr().out.splitlines()
    taken = "no validation split, so 24 of 72 training images are taken for it, 5 of each class, half at most"
    assert said[1] == taken and "downloads weights" in said[2] and said[3].startswith("written to")
    assert f"# {taken}\n" in (tmp_path / "photos.yaml").read_text()


def test_test_images_are_taken_from_train_where_there_are_none(image_folder):
    """Before those of validation, of a class with few images a third each, and the same ones for the same seed."""
    whole = load_splits(str(image_folder))
    whole = DatasetDict({"train": whole["train"]})
    splits = take_from_train(whole, 5, 4, seed=3)
    counts = {name: class_counts(split, 6).tolist() for name, split in splits.items()}
    before = class_counts(whole["train"], 6).tolist()
    assert counts["test"] == [min(4, n // 3) for n in before]
    assert counts["validation"] == [min(5, (n - t) // 2) for n, t in zip(before, counts["test"], strict=True)]
    left = zip(before, counts["test"], counts["validation"], strict=True)
    assert counts["train"] == [n - t - v for n, t, v in left]

    def files(part):
        return {each["path"] for each in splits[part].cast_column("image", StoredImage(decode=False))["image"]}

    assert len(files("train") | files("validation") | files("test")) == sum(before)
    fields = {"validation_per_class": 5, "test_per_class": 4, "split_seed": 3}
    assert all(taken_as(splits[name]) == fields for name in splits) and taken_as(whole["train"]) == {}
    again = load_splits(str(image_folder / "train"), validation_per_class=5, test_per_class=4, split_seed=3)
    assert list(again["test"]["label"]) == list(splits["test"]["label"])
    with pytest.raises(ValueError, match=r"test_per_class=4 takes images .* where there is no 'test'"):
        take_from_train(load_splits(str(image_folder)), test=4)
    for text in ("[]", "{", "7", '{"validation_per_class": "5", "test_per_class": 4, "split_seed": 3}'):
        splits["test"].info.description = text  # a stranger's
        assert taken_as(splits["test"]) == {}


def test_an_unsplit_folder_gets_an_honest_number(recipe, image_folder, tmp_path, monkeypatch, capsys):
    """What init keeps aside is evaluated by name; of images that were learnt from it is said what they are worth."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(image_folder / "train", tmp_path / "plants")
    assert main(["init", "plants", "--out", "plants.yaml"]) == 0
    _, data, _ = parse_recipe(["plants.yaml"])
    assert (data.test_per_class, data.validation_per_class) == (5, 5)
    assert "no test split, so" in capsys.readouterr().out
    taken = ["--test_per_class", "5", "--validation_per_class", "5", "--split_seed", "2"]
    assert main(["train", str(recipe), "--dataset", "plants", *taken, "--num_train_epochs", "1"]) == 0
    printed = capsys.readouterr().out
    assert "; validation 19, test 17\n" in printed and "test average-2 accuracy" in printed
    assert printed.rstrip().endswith("or `avgk evaluate run plants`".replace("run", str(tmp_path / "run")))
    run, results = tmp_path / "run", json.loads(Path("run/results.json").read_text())
    config = AvgKConfig.from_pretrained(run)
    assert taken_in_training(Calibration.of(config)) == ("plants", {"validation": 5, "test": 5, "seed": 2})
    assert main(["evaluate", "run", "plants", "--json"]) == 0
    printed = capsys.readouterr()
    assert (
        "test: 17 images that the training of this model took from train (of each class 5 at most, seed 2)"
        in printed.err
    )
    found, stored = json.loads(printed.out), results["test"]
    assert found["average_k_accuracy"] == stored["average_k_accuracy"] and "drift" not in printed.err
    assert main(["evaluate", "run", "plants", "--split", "validation"]) == 0
    printed = capsys.readouterr()
    assert "images of the calibration, by which thresholds were set" in printed.err and "drift" not in printed.out
    assert main(["evaluate", "run", "plants", "--split", "train"]) == 0
    printed = capsys.readouterr()
    assert "says nothing of its accuracy on others" in printed.err and "drift" not in printed.out + printed.err
    assert main(["plot", "run", "--out", "plots"]) == 0
    assert str(Path("plots/contact_sheet_run.png")) in capsys.readouterr().out
    assert main(["evaluate", "run", "plants", "--split", "seed"]) == 2
    assert "no split 'seed'" in capsys.readouterr().err
    without = [*taken[2:4], "--output_dir", "other", "--num_train_epochs", "1"]
    assert main(["train", str(recipe), "--dataset", "plants", *without]) == 0
    printed = capsys.readouterr().out
    assert "too good to report: `test_per_class: 5` keeps others" in printed and "avgk evaluate" not in printed
    assert main(["plot", "other"]) == 2 and "train with `test_per_class: 5`" in capsys.readouterr().err


def test_predict_counts_first_names_and_tables_mark_guesses(trained_run, image_folder, tmp_path, capsys):
    out = tmp_path / "sets.csv"
    source = [str(trained_run), str(image_folder / "test")]
    assert main(["predict", *source, "--lambda-val", "0.99", "--out", str(out)]) == 0
    said = capsys.readouterr().err
    with open(out, encoding="utf-8-sig", newline="") as file:
        rows = list(csv.DictReader(file))
    common = Counter(row["best"] for row in rows).most_common()
    assert f"named first: {common[0][0]} {common[0][1]}" in said
    assert all((row["below_threshold"] == "yes") == (float(row["best_score"]) < 0.99) for row in rows)
    assert main(["predict", *source, "--lambda-val", "0.99", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert all(row["below_threshold"] is (row["set"][0]["score"] < 0.99) for row in found)
    assert main(["predict", source[0], str(next((image_folder / "test").rglob("*.png")))]) == 0
    assert "named first" not in capsys.readouterr().err  # of one image that says nothing


def test_a_misspelt_class_is_not_let_through_by_init(tmp_path, monkeypatch, capsys):
    """`init` allows classes that cannot be learnt, but not one that has nearly the name of another."""
    monkeypatch.chdir(tmp_path)
    for split, number, name in (("train", 9, "Érable rouge"), ("test", 2, "erable_rouge")):
        write_images(tmp_path / "trees" / split, dict.fromkeys(CLASSES, number))
        (tmp_path / "trees" / split / "elm").rename(tmp_path / "trees" / split / name)
    assert main(["init", "trees", "--out", "trees.yaml", "--model", "test_resnet"]) == 0
    assert "no training image of erable_rouge (did you mean Érable rouge?)\n" in capsys.readouterr().out
    assert "\nallow_new_classes" not in Path("trees.yaml").read_text()
    assert main(["train", "trees.yaml", "--pretrained", "false"]) == 2
    assert "split 'test' has 1 class without an image in 'train', e.g. 'erable_rouge'" in capsys.readouterr().err
    (tmp_path / "trees" / "test" / "erable_rouge").rename(tmp_path / "trees" / "test" / "水杉")
    assert main(["init", "trees", "--out", "others.yaml", "--model", "test_resnet"]) == 0
    assert "no training image of 水杉\n" in capsys.readouterr().out
    assert "\nallow_new_classes: true" in Path("others.yaml").read_text()


def test_mistakes_of_a_hurry(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    run, photos = str(trained_run), str(image_folder / "test")

    def said(*command):
        assert main(list(command)) == 2
        return capsys.readouterr().err

    for command in (["predict", photos, run], ["evaluate", photos, run], ["calibrate", photos, run]):
        assert f"{photos} is no model, and {run} is one: name the model first." in said(*command)
    Path("sets.csv").write_text("mine")
    assert "--out sets.csv gets metrics as JSON" in said("evaluate", run, str(image_folder), "--out", "sets.csv")
    assert Path("sets.csv").read_text() == "mine"
    for command, others in ((("predict", run, photos, "--per-species", "x.csv"), "`avgk evaluate`"),):
        with pytest.raises(SystemExit):
            main(list(command))
        assert f"--per-species is an option of {others}" in capsys.readouterr().err
    assert main(["evaluate", run, str(image_folder), "--unsure", "2"]) == 0
    assert Path(f"runs/unsure-{trained_run.name}-{image_folder.name}/unsure.csv").is_file()
    Path("stopped/checkpoint-3").mkdir(parents=True)
    Path("stopped/checkpoint-3/config.json").write_text("{}")
    assert (
        "its training is not finished; if it was stopped, `avgk train RECIPE --resume_from_checkpoint last`"
        in said("info", "stopped")
    )


def test_a_training_that_was_stopped_is_kept(recipe, tmp_path, capsys):
    command = ["train", str(recipe), "--output_dir", str(tmp_path / "run"), "--num_train_epochs", "1"]
    command += ["--save_strategy", "epoch"]
    assert main(command) == 0
    (tmp_path / "run" / "results.json").unlink()  # as if it had been stopped after its checkpoint
    assert main(command) == 2
    assert "holds a training that was stopped: go on with `--resume_from_checkpoint last`" in capsys.readouterr().err
    assert main([*command, "--k", "two"]) == 2
    assert "k='two' is no number, e.g. 2." in capsys.readouterr().err
    assert main([*command, "--resume_from_checkpoint", "last"]) == 0
    (tmp_path / "run" / "checkpoint-900").mkdir()  # of a longer one
    assert main([*command, "--overwrite"]) == 0
    assert "checkpoint-900" not in {path.name for path in (tmp_path / "run").iterdir()}


def test_a_balance_leaves_a_trace(trained_run, image_folder, tmp_path, capsys):
    source, out = [str(trained_run), str(image_folder / "test")], tmp_path / "sets.csv"
    for options, column in (([], False), (["--balance", "0.5"], True)):
        assert main(["predict", *source, *options, "--out", str(out)]) == 0
        said = capsys.readouterr().err
        with open(out, encoding="utf-8-sig", newline="") as file:
            rows = list(csv.DictReader(file))
        assert all(row.get("balance") == ("0.5" if column else None) for row in rows)
        assert (", balance 0.5: " in said) == ("so they are no probabilities" in said) == column
    assert main(["evaluate", *source[:1], str(image_folder), "--balance", "0.5", "--per-species", f"{out}.csv"]) == 0
    assert ": 30 images, balance 0.5\n" in capsys.readouterr().out
    with open(f"{out}.csv", encoding="utf-8-sig", newline="") as file:
        assert {row["balance"] for row in csv.DictReader(file)} == {"0.5"}
    assert main(["info", str(trained_run)]) == 0
    assert "(without --balance it is 0)" in capsys.readouterr().out


def test_a_split_of_its_own_is_evaluated(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    """`my_plants/test` is the split that is asked for; a folder that is no split of another is not taken for one."""
    found = []
    for dataset in (image_folder, image_folder / "test"):
        assert main(["evaluate", str(trained_run), str(dataset), "--json"]) == 0
        found.append(json.loads(capsys.readouterr().out))
    assert found[0] == found[1]
    shutil.copytree(image_folder / "test", tmp_path / "alone" / "photos")
    assert main(["evaluate", str(trained_run), str(tmp_path / "alone" / "photos")]) == 2
    assert "has no splits: `--split train` takes all of it" in capsys.readouterr().err


def test_files_that_are_replaced_are_said(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    command = ["evaluate", str(trained_run), str(image_folder), "--per-species", "a.csv", "--unsure", "2"]
    for number in (0, 3):  # metrics, a table and a picture of the classes; the least sure images get a new folder
        assert main([*command, "--out", "a.json"]) == 0
        assert capsys.readouterr().out.count("in place of the file that was there") == number


def test_names_of_files_for_others(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("trees.yaml").write_text("k: 2\n")
    for command, words in (
        (["init", "trees.yaml", "--out", "b.yaml"], "a recipe is trained with `avgk train trees.yaml`"),
        (["train", str(trained_run)], "is a model, no recipe: name the YAML file"),
        (["init", str(image_folder), "--out", "trees.yaml"], "or replace it with --overwrite"),
    ):
        assert main(command) == 2
        assert words in capsys.readouterr().err
    assert main(["init", str(image_folder), "--out", "trees.yaml", "--overwrite"]) == 0
    with pytest.raises(SystemExit):
        main(["predict", str(trained_run), str(image_folder), "--k", "1,2"])
    assert "a fraction has a point, 1.2, several have spaces, 1 2" in capsys.readouterr().err


def test_further_calls_from_python(trained_run, splits):
    model = AvgKForImageClassification.from_pretrained(trained_run)
    with pytest.raises(ValueError, match="a set cannot be asked for by 'K'; did you mean 'k'"):
        model.predict_sets(torch.zeros(1, 3, 32, 32), K=2)
    with pytest.raises(ValueError, match="is it the wrong way round"):
        AvgKForImageClassification.from_timm("test_resnet", id2label={"oak": 0, "elm": 1}, k=1)
    assert "coverage_0.9" in evaluate(model, splits["test"], coverage=0.9)


def test_a_timm_folder_is_named_when_it_is_loaded_as_ours(tmp_path):
    network = timm.create_model("test_resnet", num_classes=2)
    timm.models.save_for_hf(network, tmp_path, model_config={"label_names": ["elm", "oak"]}, safe_serialization=True)
    with pytest.raises(ValueError, match="it is a classifier of timm: "):
        AvgKForImageClassification.from_pretrained(tmp_path)


def test_a_label_column_of_another_name_is_said(trained_run, splits, caplog):
    model = AvgKForImageClassification.from_pretrained(trained_run)
    assert "num_images" in evaluate(model, splits["test"].rename_column("label", "species"))
    assert "there is no column 'label'" in caplog.text and "'species' may be it" in caplog.text
