"""Sets as rows and tables: what `predict`, `evaluate` and `calibrate` print and write, and what stays silent."""

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from datasets import Dataset
from datasets import Image as StoredImage
from PIL import Image
from transformers import PreTrainedConfig

from avgk_hf.calibration import Calibration
from avgk_hf.cli import main
from avgk_hf.confusions import Listed
from avgk_hf.data.datasets import make_split
from avgk_hf.progress import EpochLines, leaves_parameters_out
from avgk_hf.questions import Question
from avgk_hf.recipes import describe_fields
from avgk_hf.rows import cells, row, written_to
from avgk_hf.shell import shortened
from avgk_hf.study import class_plots, drawing, plots
from avgk_hf.study.columns import by_k
from avgk_hf.training_args import HONOURED
from conftest import CLASSES


@pytest.fixture(scope="module")
def model_folder(trained_run, tmp_path_factory):
    """A trained model, calibrated for K = 1, 2 and 3."""
    place = tmp_path_factory.mktemp("tables") / "run"
    return shutil.copytree(trained_run, place, ignore=shutil.ignore_patterns("checkpoint-*"))


@pytest.mark.parametrize("ending", ["csv", "jsonl", "parquet"])
def test_predict_writes_a_row_for_each_image_and_k(ending, model_folder, image_folder, tmp_path, capsys):
    """The same in all formats, with several K from one pass; a broken image is a row with its error."""
    images = [str(image_folder / "test" / "oak" / "0.png"), str(tmp_path / "broken.png")]
    images.append(str(image_folder / "test" / "ash" / "1.png"))
    (tmp_path / "broken.png").write_text("no image")
    out = tmp_path / "new" / f"sets.{ending}"
    assert main(["predict", str(model_folder), *images, "--k", "1", "2.5", "3", "--out", str(out)]) == 1
    printed = capsys.readouterr()
    said = f"{model_folder}, K = 2.5: "
    assert printed.out == "" and said in printed.err and f"written to {out}" in printed.err
    assert "left out 1 of 3 images" in printed.err and "broken.png cannot be read" in printed.err
    if ending == "csv":
        assert out.read_bytes().startswith(
            b"\xef\xbb\xbfimage,k,size,below_threshold,best,best_score,classes,scores,error\n"
        )
        found = list(csv.DictReader(io.StringIO(out.read_text("utf-8-sig"))))
        sets = [each["classes"].split(" | ") if each["classes"] else [] for each in found]
    else:
        rows = out.read_text().splitlines() if ending == "jsonl" else None
        found = list(map(json.loads, rows)) if rows else Dataset.from_parquet(str(out), cache_dir=tmp_path).to_list()
        sets = [[item["label"] for item in each["set"]] for each in found]
    assert [(each["image"], float(each["k"])) for each in found] == [(i, k) for i in images for k in (1, 2.5, 3)]
    assert [int(each["size"] or 0) for each in found] == list(map(len, sets))
    if ending == "csv":
        assert [each["best"] for each in found] == [one[0] if one else "" for one in sets]
        assert [each["size"] == "" for each in found] == [bool(each["error"]) for each in found]
    assert [bool(each["error"]) for each in found] == [False] * 3 + [True] * 3 + [False] * 3
    for place, k in ((0, "1"), (1, "2.5"), (8, "3")):
        assert main(["predict", str(model_folder), found[place]["image"], "--k", k, "--json"]) == 0
        (alone,) = json.loads(capsys.readouterr().out)
        assert [item["label"] for item in alone["set"]] == sets[place]


def test_what_is_replaced_and_what_is_longer_than_asked_for_is_said(model_folder, image_folder, tmp_path, capsys):
    command = ["predict", str(model_folder), str(image_folder / "test"), "--k", "1", "--out", str(tmp_path / "a.csv")]
    assert main(command) == 0
    assert f"written to {tmp_path / 'a.csv'}\n" in (before := capsys.readouterr().err)
    assert "longer sets than asked for" not in before
    assert main([*command, "--min-size", "2"]) == 0
    said = capsys.readouterr().err
    assert f"written to {tmp_path / 'a.csv'}, in place of the file that was there\n" in said
    assert "longer sets than asked for" in said and "It cannot recognise such a class" in said


def test_csv_can_be_printed_and_holds_no_formula(make_model, tmp_path, capsys):
    names = ['=HYPERLINK("http://a.b")', "+1", "-oak", "@sum", "橡树, 'Quercus'"]
    model = make_model(num_labels=5, k=1, id2label=dict(enumerate(names)))
    Calibration.store(model.config, {1: 0.0, 2: 0.0}, {})
    model.save_pretrained(tmp_path / "model")
    Image.new("RGB", (8, 8)).save(tmp_path / "a.png")
    assert main(["predict", str(tmp_path / "model"), str(tmp_path / "a.png"), "--csv"]) == 0
    printed = capsys.readouterr()
    (found,) = csv.DictReader(io.StringIO(printed.out))
    written = found["classes"].split(" | ")
    assert {name.removeprefix("'") for name in written} == set(names) and found["k"] == "1"
    assert not any(name.startswith(("=", "-", "@")) for name in written) and "+1" in written  # a number is one
    assert "K = 1: 5.00 classes on average over 1 image" in printed.err and "\ufeff" not in printed.out
    by_coverage = cells(row("a", ("coverage", 0.9), [{"label": "x", "score": -1.5}, {"label": "y", "score": -2}]))
    assert by_coverage["coverage"] == "0.9" and by_coverage["scores"].startswith("'-1.5")


def test_what_cannot_be_written_or_read_is_refused(model_folder, image_folder, tmp_path, capsys):
    image = str(image_folder / "test" / "oak" / "0.png")
    for name in ("a.png", "b.png"):
        (tmp_path / name).write_text("no image")
    for arguments, message in (
        ([image, "--out", str(tmp_path / "sets.xlsx")], "ends with none of .csv, .jsonl, .parquet"),
        ([str(tmp_path / "a.png"), str(tmp_path / "b.png")], "none of the images can be read, e.g. "),
    ):
        assert main(["predict", str(model_folder), *arguments]) == 2
        assert message in capsys.readouterr().err
    with pytest.raises(RuntimeError), written_to(tmp_path / "sets.parquet") as write:  # whole or not at all
        write([row("a", ("k", 1), [])])
        raise RuntimeError
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.png", "b.png"]


MEANING = "(K: classes in a set on average; accuracy: share of all images whose set holds the true class)"


def test_metrics_are_a_table_by_k():
    metrics = {"loss": 1.0, "top1_accuracy": 0.5, "average_k_accuracy": 0.75, "mean_set_size": 2.0, "empty_sets": 0.01}
    metrics |= {"average_k_accuracy@10": 1.0, "mean_set_size@10": 9.5, "average_k_accuracy@1.5": 0.6}
    metrics |= {"coverage_0.95": 0.96, "coverage_0.95_size": 4.0, "coverage_0.9": 0.91, "coverage_0.9_size": 3.0}
    table, coverage, rest = (part.splitlines() for part in by_k({**metrics, "skipped": 3}, 2).split("\n\n"))
    assert [line.split() for line in table] == [
        "K accuracy mean set size empty sets".split(),
        ["1.5", "60.00%", "–", "–"],
        ["2", "75.00%", "2.00", "1.00%"],
        ["10", "100.00%", "9.50", "–"],
    ]
    assert [line.split()[0] for line in coverage] == ["coverage", "0.9", "0.95"]
    assert rest[:2] == ["top-1 accuracy 50.00%, 3 images left out", MEANING]
    assert "sets may be empty" in rest[2] and len({len(line) for line in table}) == 1
    shots = by_k({**metrics, "few_shot_accuracy": 0.5, "many_shot_accuracy": 0.5, "skipped": 1}, 2).splitlines()[-4:]
    assert shots[0].endswith(", 1 image left out") and shots[1] == MEANING
    assert (
        shots[3] == "(shots: mean over classes, by the images that were left to train on: few under 20, many over 100)"
    )
    assert "(" not in by_k({"mean_set_size": 2.0, "num_images": 12}, 2)  # nothing that would need it
    foreign = by_k({"average_k_accuracy@2": 0.5, "mean_set_size@2": 2.0}, None)
    assert [line.split()[:1] for line in foreign.splitlines()] == [["K"], ["2"], [], ["(K:"]]


def test_all_metrics_can_be_printed(model_folder, image_folder, capsys):
    printed = {}
    for how in ((), ("--all",), ("--json",)):
        assert main(["evaluate", str(model_folder), str(image_folder), *how]) == 0
        printed[how] = capsys.readouterr().out
    metrics = json.loads(printed["--json",])
    assert all(f"\n{name} " in f"\n{printed['--all',]}" for name in metrics)
    first = [line.split()[0] for line in printed[()].splitlines()[2:6]]
    assert first == ["K", "1", "2", "3"] and "lambda_val" not in printed[()]
    shown = f"{100 * metrics['average_k_accuracy@3']:.2f}%"
    assert shown in printed[()].splitlines()[5] and len(printed[()].splitlines()) < 20


def listed_of(sets, labels, num_labels):
    """Sets that an evaluation would have collected, two batches of it, in the wrong order."""
    config = PreTrainedConfig(num_labels=num_labels)
    Calibration.store(config, {1: 0.5})
    listed = Listed(config)
    logits = torch.full((len(sets), num_labels), -20.0)
    for image, classes in enumerate(sets):
        logits[image, list(classes)] = 20.0 - torch.arange(len(classes)) / 10
    listed.answer = Calibration.of(config).answer(Question(lambda_val=1e-6))
    for first in (2, 0):
        part = slice(first, None if first else 2)
        output = PreTrainedConfig()
        output.logits, output.sccp_logits = logits[part], None
        listed.update(output, torch.tensor(labels[part]), first)
    listed.merge("cpu")
    return listed


def test_species_and_those_they_are_listed_with():
    sets = [[0], [0, 1], [1, 0], [2, 3], [3, 2], [4]]
    listed = listed_of(sets, [0, 0, 1, 2, 2, 1], 6)
    assert [listed.set_of(i)[0].tolist() for i in range(6)] == sets and listed.accuracy == 5 / 6
    rows = listed.by_class()
    assert rows[0] == {
        "species": "LABEL_0",
        "images": 2,
        "k": 1,
        "found": 2,
        "accuracy": 1.0,
        "named_first": 1.0,
        "right_when_first": 1.0,
        "mean_size": 1.5,
        "most_often_listed_with": "LABEL_1 50%",
    }
    assert [each["accuracy"] for each in rows] == [1.0, 0.5, 1.0, None, None, None]
    assert rows[2]["most_often_listed_with"] == "LABEL_3 100%" and rows[3]["images"] == 0
    # of class 1 one image begins with it and one with 4; of class 2 one with it and one with 3
    assert [each["named_first"] for each in rows] == [1.0, 0.5, 0.5, None, None, None]
    assert [each["right_when_first"] for each in rows] == [1.0, 1.0, 1.0, 0.0, 0.0, None]
    listed.train_counts = [7, 6, 5, 4, 3, 2]
    assert [each["training_images"] for each in listed.by_class()] == listed.train_counts
    many = listed_of([[0, 1, 2, 3, 4], [0, 4], [1]], [0, 0, 1], 6).by_class()[0]
    assert many["most_often_listed_with"] == "LABEL_4 100% | LABEL_1 50% | LABEL_2 50%"
    groups, shares, crowded = listed.groups(most=5)
    assert groups == [[2, 3], [0, 1, 4]] and shares[0].tolist() == [1, 1, 0, 0, 0]
    assert shares[2].tolist() == [0, 0, 1, 0.5, 0] and shares[4].tolist() == [0] * 5
    groups, shares, crowded_out = listed.groups(most=6)  # there is room for all
    assert groups == [[2, 3], [0, 1, 4], [5]] and shares.shape == (6, 6) and crowded_out == 0
    assert listed.groups(most=4)[0] == [[2, 3]] and listed.groups(most=4)[2] == crowded + 3
    assert listed.longest(4).tolist()[:4] == sorted([1, 2, 3, 4], key=lambda i: listed.set_of(i)[1][0])


def test_evaluate_writes_species_and_unsure_images(model_folder, image_folder, tmp_path, capsys):
    table, out = tmp_path / "species.csv", tmp_path / "unsure"
    asked = ["--per-species", str(table), "--unsure", "7", "--unsure-out", str(out), "--k", "3"]
    assert main(["evaluate", str(model_folder), str(image_folder), *asked, "--out", str(tmp_path / "m.json")]) == 0
    printed = capsys.readouterr().out
    metrics = json.loads((tmp_path / "m.json").read_text())
    rows = list(csv.DictReader(io.StringIO(table.read_text("utf-8-sig"))))
    assert [each["species"] for each in rows] == CLASSES and {each["images"] for each in rows} == {"5"}
    assert np.mean([float(each["accuracy"]) for each in rows]) == pytest.approx(metrics["average_k_accuracy@3"])
    assert np.mean([float(each["mean_size"]) for each in rows]) == pytest.approx(metrics["mean_set_size@3"], abs=0.01)
    unsure = list(csv.DictReader(io.StringIO((out / "unsure.csv").read_text("utf-8-sig"))))
    sizes = [int(each["size"]) for each in unsure]
    assert len(sizes) == 7 and sizes == sorted(sizes, reverse=True) and {each["k"] for each in unsure} == {"3"}
    for each in unsure:
        assert Path(each["image"]).parent.name == each["true_species"] and Path(each["image"]).is_file()
        assert (each["true_in_set"] == "yes") == (each["true_species"] in each["classes"].split(" | "))
    assert f"{Path(image_folder).name}, split test: 30 images\n\n" in printed
    assert f"written to {table}: a row for each class, K = 3\n" in printed
    for picture in (table.with_suffix(".png"), out / "contact_sheet.png"):
        assert picture.read_bytes()[:4] == b"\x89PNG" and str(picture) in printed
    flat = tmp_path / "flat"
    flat.mkdir()
    for path in (image_folder / "test" / "oak").iterdir():
        shutil.copy(path, flat)
    assert main(["evaluate", str(model_folder), str(flat), "--unsure", "2", "--unsure-out", str(tmp_path / "u")]) == 0
    assert "species" not in (tmp_path / "u" / "unsure.csv").read_text("utf-8-sig").splitlines()[0]
    for wrong, message in ((["--unsure", "0"], "must be a number of images"), (["--per-species", "a"], "ends with")):
        assert main(["evaluate", str(model_folder), str(flat), *wrong]) == 2
        assert message in capsys.readouterr().err
    assert main(["evaluate", str(model_folder), str(flat), "--per-species", str(table)]) == 2
    assert "--per-species needs labels" in capsys.readouterr().err


EARLY = """
import sys
from avgk_hf.cli import main
for words in sys.argv[1:]:
    assert main(words.split()) == 2
    assert not {"torch", "transformers"} & set(sys.modules), words
"""


def test_wrong_folders_and_k_are_refused_before_torch_is_imported(model_folder, image_folder, recipe):
    model, image = str(model_folder), str(image_folder / "test" / "oak" / "0.png")
    recipe.write_text(recipe.read_text().replace("k: 2\n", "k: 0.5\n"))
    commands = {
        f"predict ./nowhere {image}": "there is no model folder './nowhere'",
        f"predict {image_folder} {image}": f"{image_folder} is no model, it holds no config.json",
        f"predict {model} {image} --k 1 9": "no threshold is stored for k=9",
        f"predict {model} {image} --k 4": "no threshold is stored for k=4",
        f"predict {model} nothing.png": "nothing.png: there is no such file",
        f"predict {model} {image} --out sets.xlsx": "ends with none of",
        f"evaluate {model} ./nowhere": "there is no such folder",
        f"calibrate {model} {image_folder} --k 6": "k=6 must be a number in [1, 6)",
        "app ./nowhere": "there is no model folder",
        f"app {model} --noun /": "is no word",
        f"app {model} --port 70000": "must lie in 1 to 65535",
        "train nowhere.yaml": "there is no recipe",
        f"train {recipe}": "k=0.5 must be a number from 1 to below",
        f"train {recipe} --k 2 --dataset=./nowhere": "there is no such folder",
    }
    run = subprocess.run([sys.executable, "-c", EARLY, *commands], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert all(message in line for message, line in zip(commands.values(), run.stderr.splitlines(), strict=True))


def test_help_of_training_shows_every_default():
    lines = {line.split()[0]: line for line in describe_fields().splitlines() if line.startswith("  ")}
    for name, default in (("k", "(5)"), ("dataset", "(required)"), ("learning_rate", "(5e-05)"), ("alpha", "(1.0)")):
        assert lines[name].endswith(default), lines[name]
    assert lines["calibrate_coverage"].endswith("([0.9, 0.95, 0.99])") and "avgk, an, epr" in lines["objective"]
    for title in ("evaluation", "reading data", "optimizer and learning rate"):
        assert set(HONOURED[title]) <= set(lines)


def test_a_training_prints_lines_and_no_noise(make_trainer, capfd, caplog):
    """On what is no terminal; what libraries say of shards, pinned memory and downloads is not there."""
    trainer = make_trainer(disable_tqdm=False, dataloader_pin_memory=True, num_train_epochs=2, logging_steps=5)
    trainer.train()
    trainer.save_model()
    printed = capfd.readouterr()
    lines = printed.out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["epoch 1/2", "epoch 2/2"]
    accuracies = [entry["eval_average_k_accuracy"] for entry in trainer.state.log_history if "eval_loss" in entry]
    for line, accuracy in zip(lines, accuracies, strict=True):
        assert f"average-2 {100 * accuracy:.1f}% (best " in line and "few shot" in line and line.endswith(" left")
    assert f"(best {100 * max(accuracies):.1f}%)" in lines[-1]
    for noise in ("pin_memory", "shards", "Downloading", "it/s"):
        assert noise not in printed.err
    assert "use_cache" not in caplog.text
    assert "eval_topk_accuracy" in (Path(trainer.args.output_dir) / "train.log").read_text()
    assert [type(each) for each in trainer.callback_handler.callbacks].count(EpochLines) == 1


def test_on_a_terminal_there_is_one_progress_bar(make_trainer, monkeypatch, capsys):
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    trainer = make_trainer(disable_tqdm=False, num_train_epochs=1, per_device_eval_batch_size=2)
    trainer.train()
    printed = capsys.readouterr()
    assert "| 5/5 [" in printed.err and "/15 [" not in printed.err  # of 5 steps, not of the 15 batches in between
    assert printed.out.count("epoch 1/1") == 1
    trainer.evaluate()
    assert "| 15/15 [" in capsys.readouterr().err


def test_processes_look_for_unused_parameters_only_if_there_are_any(make_model):
    """Without computing anything: neither weights nor buffers change."""
    model = make_model().train()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    assert leaves_parameters_out(model) is False
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    model.spare = torch.nn.Parameter(torch.zeros(3))
    assert leaves_parameters_out(model) is True
    model.spare.requires_grad_(False)
    assert leaves_parameters_out(model) is False and model.ml_head.weight.grad is None


def test_bars_are_for_terminals(image_folder, model_folder, tmp_path, monkeypatch, capfd):
    """Of `datasets` and our own: what looks at images has a bar that moves on a terminal, and none in a file."""
    folder = shutil.copytree(image_folder, tmp_path / "trees")
    shutil.rmtree(folder / "validation")
    (folder / "test" / "oak" / "0.png").write_bytes(b"no image")
    recipe = ["dataset: trees", "output_dir: run", "model: test_resnet", "image_size: 32", "k: 2", "max_steps: 1"]
    recipe += ["validation_per_class: 3", "on_bad_image: skip", "disable_tqdm: false"]
    (tmp_path / "recipe.yaml").write_text("\n".join(recipe))
    monkeypatch.chdir(tmp_path)
    for code, command in (
        (1, ["check", "trees"]),
        (0, ["train", "recipe.yaml"]),
        (1, ["evaluate", "run", "trees"]),
        (0, ["calibrate", "run", "trees"]),
        (0, ["plot", "run"]),
    ):
        assert main(command) == code
        printed = capfd.readouterr()
        assert "%|" not in printed.err and "/s]" not in printed.err + printed.out, command
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    shutil.copy(
        folder / "test" / "elm" / "0.png", folder / "test" / "elm" / "again.png"
    )  # so that nothing is kept of it
    assert main(["check", "trees"]) == 1
    assert "look at the images of test: 100%|" in capfd.readouterr().err
    assert main(["evaluate", "run", "trees"]) == 1
    printed = capfd.readouterr().err
    assert "check the images of test: 100%|" in printed and "evaluate: 100%|" in printed
    for noise in ("Flattening", "Map:", "Filter:", "Generating", "Downloading", "mtime"):
        assert noise not in printed


def test_loading_a_folder_and_a_model_is_silent(model_folder, image_folder, tmp_path, monkeypatch, capfd):
    from avgk_hf import load_classifier, load_splits

    copied = shutil.copytree(image_folder, tmp_path / "trees")
    load_splits(str(copied))
    load_classifier(str(model_folder)).save_pretrained(tmp_path / "model")
    assert capfd.readouterr() == ("", "")


def test_no_picture_of_a_single_point(tmp_path):
    point = {"mean": 0.5, "half_width": None}
    for picture, data in (
        (plots.accuracy_curve, {"a": {1: point}}),
        (plots.tradeoff_curve, [[1, 0.5, 1.0, 0.5, 0.5]]),
        (plots.learning_curves, {"a": [{"epoch": 1, "accuracy": 0.5, "loss": 1.0}]}),
    ):
        assert plots.in_both_formats(picture, tmp_path / "picture", data) == []
    assert plots.sweep_curve([{"value": 1, **point}], tmp_path / "sweep.png", "alpha") is False
    assert not list(tmp_path.iterdir())
    assert len(plots.in_both_formats(plots.accuracy_curve, tmp_path / "picture", {"a": {1: point, 2: point}})) == 2


def test_names_are_whole_and_other_scripts_are_looked_for(tmp_path, caplog):
    long = "Lactuca virosa Habl. ex Willd. subsp. virosa var. integrifolia"
    picture = Image.new("RGB", (400, 100))
    names = {0: long, 1: "oak"}
    plots.contact_sheet([picture], [[0]], [1], names, tmp_path / "sheet.svg", [[0.75]], "trees, K = 1")
    drawn = (tmp_path / "sheet.svg").read_text()
    comments = " ".join(part.split("-->")[0].strip() for part in drawn.split("<!--")[1:])
    assert "".join(long.split()) in "".join(comments.split()) and "0.75" in comments and "✗" in comments
    from matplotlib import font_manager

    own = drawing._drawn(font_manager.findfont("DejaVu Sans"))
    other = drawing._drawn(font_manager.findfont("STIXGeneral")) - own
    families, missing = drawing._fonts(frozenset(sorted(other)[:3]))
    assert families[0] == "DejaVu Sans" and len(families) > 1 and not missing
    assert not caplog.records


def test_names_that_no_font_draws_are_spelt(tmp_path, monkeypatch, caplog):
    """Two of them stay two, and a name that is partly drawn keeps that part; it is said once for all pictures."""
    monkeypatch.setattr(drawing, "_fonts", drawing._fonts.__wrapped__)
    monkeypatch.setattr(drawing, "_said", set())
    own = drawing._drawn
    monkeypatch.setattr(drawing, "_drawn", lambda path: own(path) - set("红嘴巨鸥普通燕"))
    names, picture = ["红嘴巨鸥", "普通燕鸥 (Sterna)"], Image.new("RGB", (40, 30))
    plots.contact_sheet([picture], [[0, 1]], None, names, tmp_path / "sheet.svg")
    drawn = texts(tmp_path / "sheet.svg")
    assert {"Hong Zui Ju Ou", "Pu Tong Yan Ou (Sterna)"} <= set(drawn)
    class_plots.confusion_groups([names], np.eye(2), [1, 2], tmp_path / "species.svg")
    assert "Hong Zui Ju Ou (1)" in texts(tmp_path / "species.svg")
    (said,) = [record.getMessage() for record in caplog.records if "no font here draws" in record.getMessage()]
    assert "U+7EA2" in said and "Latin letters" in said and "fonts-noto-cjk" in said


def texts(path):
    """What is written in an SVG, line by line."""
    return [part.split("-->")[0].strip() for part in path.read_text(encoding="utf-8").split("<!--")[1:]]


def test_pictures_explain_themselves(tmp_path):
    """A title, names at both sides, what numbers and boxes are, and how many classes there was no room for."""
    groups, names = [["Épicéa", "O'Brien's [gull]"], ["ash", "oak"]], ["Épicéa", "O'Brien's [gull]", "ash", "oak"]
    shares = np.eye(4) + 0.25 * np.eye(4)[::-1]
    images, title = [3, 40, 1200, 0], "trees, K = 2, accuracy 90.0%"
    class_plots.confusion_groups(groups, shares, images, tmp_path / "species.svg", title, classes=30)
    drawn = texts(tmp_path / "species.svg")
    assert all(drawn.count(name) == 1 for name in names) and drawn.count("25") == 4
    assert {"Épicéa (3)", "O'Brien's [gull] (40)", "ash (1,200)", "oak (0)"} <= set(drawn)
    said = " ".join(drawn)
    for words in (
        "trees, K = 2, accuracy 90.0%",
        "How to read it",
        "A box holds classes",
        "26 of 30 classes are not drawn",
    ):
        assert words in said, words
    boxes = (tmp_path / "species.svg").read_text().lower().count("stroke: #d55e00")
    class_plots.confusion_groups([names[:2], ["ash"], ["oak"]], shares, images, tmp_path / "all.svg", classes=4)
    drawn = texts(tmp_path / "all.svg")
    assert "not drawn" not in " ".join(drawn) and "oak" in drawn and "oak (0)" in drawn
    assert boxes == 2 and (tmp_path / "all.svg").read_text().lower().count("stroke: #d55e00") == 1
    counts = {"train": np.array([30, 8, 120, 3]), "test": np.array([3, 2, 9, 1])}
    class_plots.count_bars(names, counts, tmp_path / "counts.svg", "trees: 4 classes")
    drawn = texts(tmp_path / "counts.svg")
    assert {"30", "8", "120", "3", "2", "9", "1"} <= set(drawn) and drawn.count("3") == 2  # at the ends of the bars
    said = " ".join(drawn)
    for words in ("trees: 4 classes", "20 images, left of it few shot", "100 images, right of it many shot", *names):
        assert words in said, words
    report = {"bytes": {"model.onnx": 2e6, "model.int8.onnx": 1e6}, "thresholds": {}}
    plots.export_bars(report, tmp_path / "export.svg", "trees as ONNX graphs, K = 2: accuracy 90.0%")
    assert "trees as ONNX graphs, K = 2: accuracy 90.0%" in texts(tmp_path / "export.svg")


def test_contact_sheet_names_files(tmp_path):
    """By their names, and by folders that are no classes, so that a photograph can be found again."""
    long = "a_photograph_of_an_oak_beside_the_lake_20240501_0001.png"
    paths = [tmp_path / "oak" / "0.png", tmp_path / "walk $2" / "1.png", tmp_path / "oak" / long]
    for path in paths:
        path.parent.mkdir(exist_ok=True)
        Image.new("RGB", (40, 20)).save(path)
    content = {"bytes": paths[0].read_bytes(), "path": None}
    images = [str(paths[0]), {"path": str(paths[1]), "bytes": None}, paths[2], Image.open(paths[0]), content]
    sets = [[0], [0, 1], [1], [0], [1]]
    plots.contact_sheet(images, sets, None, {0: "oak", 1: "ash"}, tmp_path / "s.svg", ordered=False)
    drawn = texts(tmp_path / "s.svg")
    assert drawn.count("0.png") == 2 and "walk $2/1.png" in drawn and "2 classes" in drawn
    assert "a_photograph_of_a…_20240501_0001.png" in drawn and shortened(long, len(long)) == long
    assert shortened("信天翁" * 10, 20) == "信天翁信…天翁信天翁"
    plots.contact_sheet(images[1:2], sets[1:2], None, ["oak", "ash"], tmp_path / "one.svg")
    assert "1.png" in texts(tmp_path / "one.svg")  # one folder goes without saying


def test_axes_have_whole_numbers_and_percent(tmp_path):
    """K has ticks at whole numbers, sizes of sets are in percent of images, and a single run needs no name."""
    curve = {k: {"mean": 0.5 + k / 100, "half_width": None} for k in range(1, 11)}
    plots.accuracy_curve({"birds": curve}, tmp_path / "curve.svg")
    drawn = texts(tmp_path / "curve.svg")
    assert {"2", "4", "6", "8", "10"} <= set(drawn) and not {"2.5", "7.5", "5.0"} & set(drawn)
    plots.set_size_histogram({"": [0, 50, 50]}, tmp_path / "sizes.svg")
    assert {"mean 1.50 classes, 100 images", "% of images", "50"} <= set(texts(tmp_path / "sizes.svg"))
    plots.set_size_histogram({"ce": [0, 50, 50], "avgk": [0, 100]}, tmp_path / "both.svg")
    assert {"ce (mean 1.50, 100 images)", "avgk (mean 1.00, 100 images)", "100"} <= set(texts(tmp_path / "both.svg"))


def test_contact_sheet_wastes_no_third(tmp_path):
    """Of its pixels, less than a third are white: rows are as high as their longest set."""
    rng = np.random.default_rng(0)
    images = [Image.fromarray(rng.integers(0, 200, (40, 40, 3), dtype=np.uint8)) for _ in range(24)]
    sets = [list(range(1 + i // 4)) for i in range(24)]
    plots.contact_sheet(images, sets, [0] * 24, [f"species {j}" for j in range(9)], tmp_path / "sheet.png")
    pixels = np.asarray(Image.open(tmp_path / "sheet.png").convert("L"))
    assert (pixels == 255).mean() < 1 / 2  # text is mostly white, too
    white_rows = (pixels == 255).all(1).mean()
    assert white_rows < 1 / 3


def test_splits_for_a_sheet_are_opened_one_by_one(tmp_path):
    """Only what is shown is read."""
    Image.new("RGB", (30, 20)).save(tmp_path / "0.png")
    paths = [str(tmp_path / "0.png"), *(str(tmp_path / f"{i}.png") for i in range(1, 100))]
    split = make_split("test", [{"path": path, "bytes": None} for path in paths], [0] * 100, ["oak"])
    images = split.cast_column("image", StoredImage(decode=False))["image"]
    sets = [[0]] + [[0, 0]] * 99
    plots.contact_sheet(images, sets, None, ["oak"], tmp_path / "sheet.png", columns=1, rows=1)
    assert (tmp_path / "sheet.png").is_file()
