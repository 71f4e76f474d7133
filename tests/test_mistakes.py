"""What people typed and passed by mistake on a first day: they are told the remedy, before anything is lost."""

import csv
import json
import os
import shutil
import time
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from datasets import DatasetDict
from datasets import config as datasets_config
from huggingface_hub import constants

from avgk_hf import AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments, prepare
from avgk_hf.app.answers import Answers, example_images
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import image_processor, load_classifier
from avgk_hf.cli import main
from avgk_hf.data import load_splits
from avgk_hf.data.datasets import take_from_train
from avgk_hf.evaluation import calibrate, evaluate
from avgk_hf.features import cached_features
from avgk_hf.recipes import parse_recipe
from avgk_hf.scope import promise
from avgk_hf.study.columns import by_k
from avgk_hf.study.drawing import whole
from avgk_hf.study.plots import contact_sheet
from conftest import save_vit


def refused(capsys, *arguments: str) -> str:
    """What a command says that ends with the exit code of a mistake."""
    try:
        assert main([*map(str, arguments)]) == 2
    except SystemExit as stop:
        assert stop.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["predict", "m", "x", "--coverage", "90%"], "a share is written without %: 0.9 for 90%"),
        (["predict", "m", "x", "--coverage", "0,9"], "a fraction has a point, 0.9, several have spaces, 0 9"),
        (["predict", "m", "x", "--k", "1,2,5"], "several have spaces between them and no commas, e.g. 1 2 5"),
        (["predict", "m", "x", "--k", "2", "."], "'.' is no number; images and folders stand before this option"),
        (["predict", "m", "x", "--coverage", "0.9", "0.95"], "--coverage takes one number here: leave out 0.95"),
        (["predict", "m", "x", "--log", "a.log"], "--log stands before the command: `avgk --log FILE predict ...`"),
        (["evaluate", "--model", "m", "x"], "--model is given by its place: `avgk evaluate MODEL DATASET`"),
    ],
)
def test_numbers_and_options_as_they_are_typed(words, remedy, capsys):
    assert remedy in refused(capsys, *words)


def test_a_path_that_leads_nowhere_is_not_looked_for_on_the_hub(
    trained_run, image_folder, tmp_path, monkeypatch, capsys
):
    """A folder that is here has no such folder; a bare name may be one of the Hub, which is asked once."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(image_folder / "train", "photos/train")
    began = time.monotonic()
    for command in (["check", "photos/field"], ["init", "photos/field"], ["evaluate", trained_run, "photos/field"]):
        assert "photos holds no field, only train." in refused(capsys, *command)
    assert "photos/field: there is no such file" in refused(capsys, "predict", trained_run, "photos/field")
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")  # nobody listens
    for command in (["check", "orchids"], ["predict", trained_run, "kew/orchids"]):
        said = refused(capsys, *command)
        assert "orchids' here" in said and "check the name" in said
    assert time.monotonic() - began < 60  # it was tried again and again for half a minute each time


def test_a_folder_that_was_read_elsewhere_is_not_found_by_its_name(image_folder, tmp_path, monkeypatch, capsys):
    """`datasets` keeps what it read by the folder's name, and would take that for a dataset of the Hub."""
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    shutil.copytree(image_folder / "train", tmp_path / "there" / "orchids" / "train")
    load_splits(str(tmp_path / "there" / "orchids"), allow_new_classes=True)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(OSError, match="there is no folder 'orchids' here, and as a Hub id it cannot be loaded"):
        load_splits("orchids")


def test_names_of_outputs_that_cannot_be_meant(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("notes.txt").write_text("mine")
    Path("mine").mkdir()
    shutil.copy("notes.txt", "mine")
    for command, words in (
        (["init", image_folder, "--out", "plants.txt"], "gets a recipe: name a file that ends with .yaml"),
        (["card", trained_run, "--out", "card.html"], "that ends with .md"),
        (["plot", trained_run, "--out", "curve.png"], "there are several pictures, so name a folder for them"),
        (["calibrate", trained_run, image_folder, "--out", "notes.txt"], "notes.txt is a file: name a folder"),
        (["predict", trained_run, image_folder / "test", "--out", "mine"], "mine holds other files"),
    ):
        assert words in refused(capsys, *command)
    assert sorted(path.name for path in Path("mine").iterdir()) == ["notes.txt"]
    assert main(["predict", str(trained_run), str(image_folder / "test"), "--out", "sets"]) == 0
    assert "written to sets, as Parquet; a name that ends with .csv gives a spreadsheet" in capsys.readouterr().err


def test_notes_in_the_table_of_the_least_sure_images_are_kept(
    trained_run, image_folder, tmp_path, monkeypatch, capsys
):
    monkeypatch.chdir(tmp_path)
    for number in ("", "-2", "-3"):
        assert main(["evaluate", str(trained_run), str(image_folder), "--unsure", "2"]) == 0
        table = Path(f"runs/unsure-run-{image_folder.name}{number}/unsure.csv")
        assert str(table) in capsys.readouterr().out
        table.write_text("my notes")
    assert table.read_text() == "my notes" and len(list(Path("runs").iterdir())) == 3


def test_a_broken_image_has_no_size(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("photos").mkdir()
    shutil.copy(image_folder / "test" / "ash" / "0.png", "photos/a.png")
    Path("photos/b.png").write_text("no image")
    for out in ("sets.csv", "sets.jsonl", "sets.parquet"):
        assert main(["predict", str(trained_run), "photos", "--k", "2", "--out", out]) == 1
    with open("sets.csv", encoding="utf-8-sig", newline="") as file:
        assert [row["size"] != "" for row in csv.DictReader(file)] == [True, False]
    rows = [json.loads(line) for line in Path("sets.jsonl").read_text().splitlines()]
    assert rows[0]["size"] >= 1 and rows[1]["size"] is None and "cannot be read" in rows[1]["error"]
    assert pq.read_table("sets.parquet").column("size").to_pylist() == [rows[0]["size"], None]


def test_what_evaluate_says_of_the_images(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(image_folder / "test", "field")
    said = refused(capsys, "evaluate", trained_run, "field")
    assert "has no splits: `--split train` takes all of it, if the model has not learnt from these images" in said
    assert main(["evaluate", str(trained_run), "field", "--split", "train", "--k", "3"]) == 0
    printed = capsys.readouterr()
    assert "called train" in printed.err and "30 images" in printed.out
    assert main(["evaluate", str(trained_run), str(image_folder), "--k", "3", "1"]) == 0
    assert "of 30 images at K = 3; of many more" in capsys.readouterr().out
    shutil.copytree(trained_run, "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    assert main(["calibrate", "run", str(image_folder), "--balance", "0.5"]) == 0
    assert main(["evaluate", "run", str(image_folder)]) == 0
    assert "split test: 30 images, balance 0.5\n" in capsys.readouterr().out


def test_the_note_below_a_table_is_about_the_monitored_size():
    metrics = {"average_k_accuracy": 0.5, "average_k_accuracy@3": 0.75, "mean_set_size": 2, "mean_set_size@3": 3}
    assert "10 of 20 images at K = 2" in by_k(metrics, 2.0, 20)
    assert "15 of 20 images at K = 3" in by_k(metrics | {"monitored_k": 3.0}, 2.0, 20)
    classes = {
        "coverage_0.9": 0.9,
        "coverage_0.9_size": 2,
        "coverage_0.9_mean_class": 0.8,
        "coverage_0.9_worst_class": 0,
    }
    assert "0.9: mean over classes 80.00%, worst class 0.00%" in by_k(metrics | classes, 2.0, 20)


def test_calls_with_what_was_meant_for_another_place(make_model, splits, tmp_path):
    model = make_model(k=2, id2label=dict(enumerate(splits["train"].features["label"].names)))
    train, validation = (prepare(splits[name], model.config) for name in ("train", "validation"))
    args = AvgKTrainingArguments(str(tmp_path), report_to="none")
    with pytest.raises(ValueError, match="the model comes first"):
        AvgKTrainer(args, model, train, validation)
    with pytest.raises(ValueError, match=r"metric_for_best_model='eval_average_k_acuracy' .*Did you mean"):
        wrong = AvgKTrainingArguments(str(tmp_path), report_to="none", metric_for_best_model="eval_average_k_acuracy")
        AvgKTrainer(model, wrong, train, validation)
    with pytest.raises(ValueError, match=r"calibrate\(dataset\) got the training images"):
        AvgKTrainer(model, args, train, validation).calibrate(train)
    with pytest.raises(ValueError, match="takes the model first and the split second"):
        cached_features(splits["train"], model)
    features = cached_features(model.freeze_backbone(), splits["train"])
    with pytest.raises(ValueError, match="learns"):
        AvgKTrainer(make_model(k=2, id2label=model.config.id2label), args, features, validation)
    with pytest.raises((TypeError, ValueError), match="load_classifier"):
        evaluate(str(tmp_path), splits["test"])
    other = make_model(k=2, id2label=model.config.id2label, image_size=48)
    with pytest.raises(ValueError, match=r"48"):
        AvgKTrainer(other, args, train, validation)


def test_thresholds_from_images_called_train_promise_nothing(make_model, splits):
    model = make_model(k=2, id2label=dict(enumerate(splits["train"].features["label"].names)))
    calibrate(model, splits["validation"], k=[1, 2])
    assert "train" not in (promise(Calibration.of(model.config)) or "")
    calibrate(model, splits["train"], k=[1, 2])
    said = promise(Calibration.of(model.config))
    assert "images called train" in said and "`avgk calibrate` takes other images" in said


def test_folders_of_models_that_are_not_there(trained_run, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, "runs/plants", ignore=shutil.ignore_patterns("checkpoint-*"))
    for name, near in (("runs/plant", "runs/plants"), ("plants", "runs/plants")):
        with pytest.raises(FileNotFoundError, match=f"did you mean '{near}'"):
            AvgKForImageClassification.from_pretrained(name)
    with pytest.raises(ValueError, match="from_pretrained` loads it"):
        AvgKForImageClassification.from_timm("runs/plants", num_labels=6, k=2)
    with pytest.raises(ValueError, match="image_size"):
        AvgKForImageClassification.from_timm("test_resnet", num_labels=6, k=2, image_size=0)


def test_a_size_that_was_not_calibrated_is_asked_for_with_the_others(trained_run, image_folder, capsys):
    said = refused(capsys, "predict", trained_run, image_folder / "test", "--k", "2", "4", "5")
    assert "calibrate again with `avgk calibrate MODEL DATASET --k 1 2 3 4 5`" in said


def test_files_that_were_written_can_be_read_by_others(make_model, tmp_path):
    before = os.umask(0o022)
    try:
        make_model(k=2, num_labels=6).save_pretrained(tmp_path / "model")
    finally:
        os.umask(before)
    modes = {path.name: path.stat().st_mode & 0o777 for path in (tmp_path / "model").iterdir()}
    assert set(modes.values()) == {0o644} and "model.safetensors" in modes


def test_several_images_are_answered_for_the_size_of_the_slider(trained_run, image_folder):
    """Between recorded sizes, too; the file has all that are recorded besides."""
    answers = Answers(AvgKForImageClassification.from_pretrained(trained_run))
    path = image_folder / "test" / "fir" / "1.png"
    scores = answers.scores(answers.transform.image(path))
    html = answers.table_html([("a.png", scores)], k=2.5)
    assert "1 image for K = 2.5" in html.replace("</span>", "")
    found = answers.rows("a.png", scores, "k", 2.5, 0.0)
    assert [row["k"] for row in found] == [1, 2, 2.5, 3]
    assert found[2]["size"] == len(answers.image_set(scores, k=2.5)[0])


def test_a_guess_that_is_right_is_marked_as_a_guess(image_folder, tmp_path, monkeypatch):
    """A set that no class reaches is empty, so that a tick beside its best guess would say too much."""
    written = []
    monkeypatch.setattr("matplotlib.figure.Figure.text", lambda self, x, y, text, **how: written.append(text))
    images = [str(image_folder / "test" / "ash" / f"{i}.png") for i in (0, 1)]
    how = {"scores": [[0.9], [0.1]], "lambda_val": 0.5}
    contact_sheet(images, [[0], [0]], [0, 0], ["ash", "elm"], tmp_path / "sheet.png", **how)
    assert "✓ ash" in written and "(✓) ash" in written and any("(✓) guessed" in text for text in written)


def test_the_curve_of_a_run_has_the_sizes_that_were_recorded(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    assert main(["calibrate", "run", str(image_folder), "--k", "1", "1.5", "2", "3"]) == 0
    assert main(["plot", "run", "--out", "plots"]) == 0
    assert list(json.loads(Path("plots/accuracy_against_k.json").read_text())["run"]) == ["1", "1.5", "2", "3"]


def test_a_card_says_what_was_trained_and_how(make_model, make_trainer, splits, tmp_path):
    labels = dict(enumerate(splits["train"].features["label"].names))
    model = make_model(k=2, id2label=labels, objective="ce", freeze_backbone=True)
    how = {"num_train_epochs": 1.0, "optim": "sgd", "optim_args": "momentum=0.9", "report_to": "none"}
    args = AvgKTrainingArguments(str(tmp_path / "run"), **how)
    data = [prepare(splits[name], model.config) for name in ("train", "validation")]
    trainer = AvgKTrainer(model, args, *data, dataset_name="trees")
    trainer.train()
    trainer.evaluate()
    trainer.save_model()
    trainer.create_model_card()
    card = (tmp_path / "run" / "README.md").read_text()
    assert "frozen: only the heads learn" in card and "sgd, momentum=0.9" in card
    assert (
        "| input | 3 x" in card and "| epochs | 1 |" in card and "medium shot |" in card and "many shot |" not in card
    )


def test_a_training_that_is_stopped_at_once_names_its_command(recipe, monkeypatch, capsys):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("avgk_hf.train.run", stopped)
    assert main(["train", str(recipe)]) == 130
    assert "no checkpoint in" in (said := capsys.readouterr().err) and f"start `avgk train {recipe}` again" in said


def test_weights_that_fit_a_twin_are_said(image_folder, tmp_path, monkeypatch, caplog):
    import timm
    from safetensors.torch import save_file

    monkeypatch.chdir(tmp_path)
    save_file(timm.create_model("tf_efficientnet_lite0").state_dict(), "weights.safetensors")
    assert (
        main(["init", str(image_folder), "--model", "tf_efficientnet_lite0", "--checkpoint", "weights.safetensors"])
        == 0
    )
    assert "these weights fit efficientnet_lite0 as well as tf_efficientnet_lite0" in caplog.text


def test_results_of_an_earlier_calibration_are_called_so(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    """What was measured belongs to thresholds that are gone: card, info, report and pictures do not pass it off."""
    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained_run, "run", ignore=shutil.ignore_patterns("checkpoint-*"))
    assert main(["card", "run"]) == 0
    assert "of an earlier calibration" not in Path("run/README.md").read_text()
    assert main(["calibrate", "run", str(image_folder), "--k", "1", "2", "--balance", "1"]) == 0
    assert main(["card", "run"]) == 0
    assert "**These numbers are of an earlier calibration**" in Path("run/README.md").read_text()
    capsys.readouterr()
    assert main(["info", "run"]) == 0
    again = "`avgk evaluate MODEL DATASET --out run/results.json` measures them anew"
    assert f"out of date   test above ({again})" in capsys.readouterr().out  # validation was measured
    assert main(["report", "run", "--out", "report"]) == 0
    assert "**run was calibrated again: some of its numbers are of the thresholds before**" in capsys.readouterr().out
    assert "calibrated again" in Path("report/report.md").read_text()
    titles = []
    monkeypatch.setattr("avgk_hf.study.plots.contact_sheet", lambda *_, **how: titles.append(how["title"]))
    assert main(["plot", "run", "--out", "plots"]) == 0
    assert main(["evaluate", "run", str(image_folder), "--json"]) == 0
    accuracy = json.loads("{" + capsys.readouterr().out.partition("{")[2])["average_k_accuracy"]
    assert f"K = 2, balance 1: average-K accuracy {100 * accuracy:.1f}% on test" in titles[0].replace(
        " (lowers scores)", ""
    )
    shutil.copytree(image_folder, "others")
    said = refused(capsys, "evaluate", "run", "others", "--out", "run/results.json")
    assert "is the record of a training, of its own validation and test images" in said
    assert main(["evaluate", "run", str(image_folder), "--out", "run/results.json"]) == 0
    assert "what it said of test is renewed" in capsys.readouterr().out
    assert json.loads(Path("run/results.json").read_text())["test"]["average_k_accuracy"] == accuracy
    assert main(["info", "run"]) == 0
    assert "test above" not in capsys.readouterr().out
    assert main(["card", "run"]) == 0
    assert "of an earlier calibration" not in Path("run/README.md").read_text()


def test_copies_inside_one_class_are_named_where_test_images_are_drawn(image_folder, tmp_path, capsys):
    shutil.copytree(image_folder / "train", tmp_path / "photos")
    assert main(["check", str(tmp_path / "photos")]) == 0
    shutil.copy(tmp_path / "photos" / "oak" / "1.png", tmp_path / "photos" / "oak" / "1 (1).png")
    assert main(["check", str(tmp_path / "photos")]) == 1
    said = capsys.readouterr().out
    assert "images that are there twice: keep one, or its copy is tested after it was learnt: 1" in said
    assert "1 (1).png" in said


def test_an_image_that_lies_higher_is_named_where_labels_get_lost(trained_run, image_folder, tmp_path, capsys):
    shutil.copytree(image_folder / "test", tmp_path / "photos")
    shutil.copy(tmp_path / "photos" / "oak" / "1.png", tmp_path / "photos")
    assert main(["evaluate", str(trained_run), str(tmp_path / "photos")]) == 0
    assert "1.png lies higher than the others: move it to those of its class" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("line", "remedy"),
    [
        ("learning_rate: 0,1", "learning_rate: invalid float value: '0,1'; a fraction has a point, 0.1"),
        ("objective: CE", "objective: invalid choice: 'CE' .* did you mean 'ce'"),
        ("calibrate_k: 1, 2, 5", "calibrate_k: invalid float value: '1, 2, 5'; several have spaces"),
    ],
)
def test_values_of_a_recipe_as_they_are_typed(line, remedy, tmp_path):
    (tmp_path / "recipe.yaml").write_text(f"dataset: glyphs\noutput_dir: x\n{line}\n")
    with pytest.raises(ValueError, match=remedy):
        parse_recipe([str(tmp_path / "recipe.yaml")])
    (tmp_path / "recipe.yaml").write_text("dataset: glyphs\noutput_dir: x\n")
    with pytest.raises(ValueError, match="there is no option -k; did you mean --k"):
        parse_recipe([str(tmp_path / "recipe.yaml"), "-k", "3"])


def test_what_a_model_cannot_be_told(trained_run, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    shutil.copytree(image_folder / "test" / "oak", "my photos")
    assert "in quotes, 'my photos'" in refused(capsys, "predict", trained_run, "my", "photos")
    assert "is a model: name the folder of images" in refused(capsys, "check", trained_run)
    shutil.copytree(trained_run, "runs/plants", ignore=shutil.ignore_patterns("checkpoint-*"))
    assert "did you mean 'runs/plants'?" in refused(capsys, "plot", "runs/plant")
    said = refused(capsys, "predict", trained_run, "my photos", "--coverage", "0.99")
    assert "on more images than the 30 of this calibration. It takes 99" in said


def test_features_of_another_network_are_refused(make_model, splits, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets_config, "HF_DATASETS_CACHE", tmp_path / "cache")
    labels = dict(enumerate(splits["train"].features["label"].names))
    model = make_model(k=2, id2label=labels).freeze_backbone()
    train, validation = (cached_features(model, splits[name]) for name in ("train", "validation"))
    args = AvgKTrainingArguments(str(tmp_path / "run"), report_to="none", num_train_epochs=1)
    other = make_model("test_vit", k=2, id2label=labels).freeze_backbone()
    with torch.no_grad():
        same = make_model(k=2, id2label=labels).freeze_backbone()
        next(same.backbone.parameters()).add_(1)
    for wrong in (other, same):
        with pytest.raises(ValueError, match=r"another network than the model's|another model"):
            AvgKTrainer(wrong, args, train, validation)
    with pytest.raises(ValueError, match="cached_features takes one split"):
        cached_features(model, splits)
    trainer = AvgKTrainer(model, args, train, validation)
    trainer.evaluate(validation, calibrate=True)
    with pytest.raises(ValueError, match="another network than the model's"):
        AvgKTrainer(same, args, eval_dataset=prepare(splits["validation"], same)).evaluate(train)


def test_names_and_warnings_of_models_from_python(make_model, splits, tmp_path, caplog):
    model = make_model(k=2, num_labels=6)
    args = AvgKTrainingArguments(str(tmp_path / "run"), report_to="none")
    train = prepare(splits["train"], model.config)
    AvgKTrainer(model, args, train, train)
    assert list(model.config.id2label.values()) == splits["train"].features["label"].names
    assert "thresholds from images that are learnt suit no others" in caplog.text
    AvgKForImageClassification.from_timm("test_resnet", num_labels=6, k=2, freeze_backbone=True)
    assert "a frozen network with random weights learns next to nothing" in caplog.text
    with pytest.raises(ValueError, match="compute_metrics='accuracy' must be a function"):
        AvgKTrainer(model, args, train, train, compute_metrics="accuracy")
    trainer = AvgKTrainer(model, args, train, prepare(splits["validation"], model), compute_metrics=lambda _: 0.5)
    with pytest.raises(ValueError, match=r"compute_metrics returns 0.5, and must name it"):
        trainer.evaluate()
    with pytest.raises((TypeError, ValueError), match="validation_per_class='5' must be a whole number"):
        take_from_train(DatasetDict({"train": splits["train"]}), "5")


def test_a_classifier_of_transformers_is_named_when_it_is_loaded_as_ours(tmp_path):
    save_vit(tmp_path / "vit")
    with pytest.raises(ValueError, match=r"it is a classifier of transformers \(vit\): `avgk_hf.load_classifier`"):
        AvgKForImageClassification.from_pretrained(tmp_path / "vit")
    (tmp_path / "vit" / "preprocessor_config.json").unlink()
    with pytest.raises(FileNotFoundError, match=r"holds no preprocessor_config.json.*save_pretrained"):
        image_processor(load_classifier(str(tmp_path / "vit")))


def test_a_training_says_what_chose_its_weights_and_that_it_stopped(make_model, splits, tmp_path, capsys):
    model = make_model(k=2, id2label=dict(enumerate(splits["train"].features["label"].names)))
    train, validation = (prepare(splits[name], model.config) for name in ("train", "validation"))
    how = dict.fromkeys(("eval_strategy", "save_strategy"), "epoch") | {"early_stopping_patience": 1}
    how |= {"num_train_epochs": 9, "metric_for_best_model": "mine", "load_best_model_at_end": True}
    args = AvgKTrainingArguments(str(tmp_path), report_to="none", **how)
    AvgKTrainer(model, args, train, validation, compute_metrics=lambda _: {"mine": 0.25}).train()
    said = capsys.readouterr().out
    assert "mine 0.25" in said and "stopped early, after epoch 2 of 9" in said and "(best" not in said


def test_examples_are_of_all_sizes(trained_run, image_folder, monkeypatch):
    """Of a hundred clear photographs and a few hard ones the page shows the hard ones, too."""
    answers = Answers(AvgKForImageClassification.from_pretrained(trained_run))
    sizes = iter([1] * 26 + [2, 2, 3, 3])
    monkeypatch.setattr(answers, "image_set", lambda scores: ([0] * next(sizes), scores["ml"][0], 0.0))
    monkeypatch.setattr(answers, "scores", lambda pixels: {"ml": torch.rand(1, 6)})
    shown = [size for _, size in example_images(answers, image_folder / "test")]
    assert shown == [1, 1, 1, 2, 2, 3, 3]


def test_a_name_is_broken_between_its_words_and_a_title_in_the_middle():
    assert whole("Loxia curvirostra (Fichtenkreuzschnabel)", 23) == "Loxia curvirostra\n(Fichtenkreuzschnabel)"
    first, second = whole("22 classes, 502 images, 2 to 48 each, 8 classes with fewer than 20", 62).split("\n")
    assert abs(len(first) - len(second)) < 10
