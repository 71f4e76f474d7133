"""Which classes are meant: names decide, and what cannot be told is refused."""

import json
import unicodedata

import pytest
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from avgk_hf import load_splits
from avgk_hf.classifiers import load_classifier
from avgk_hf.cli import main
from avgk_hf.data import align_labels
from avgk_hf.data.classes import check_names, match_classes, read_label_map
from avgk_hf.evaluation import evaluate
from conftest import CLASSES, save_vit, write_images

WNIDS = dict(zip(CLASSES, ("n06", "n05", "n04", "n03", "n02", "n01"), strict=True))  # in another order


def config_of(*names: str) -> ViTConfig:
    return ViTConfig(id2label=dict(enumerate(names)))


def rename(folder, names: dict[str, str]) -> None:
    for split in folder.iterdir():
        for old, new in names.items():
            (split / old).rename(split / new)


@pytest.fixture
def vit(tmp_path):
    save_vit(tmp_path / "vit")
    return tmp_path / "vit"


@pytest.fixture
def others(tmp_path):
    """The validation images, in folders named by WordNet ids."""
    write_images(tmp_path / "others" / "validation", dict.fromkeys(CLASSES, 5), seed=1)
    rename(tmp_path / "others", WNIDS)
    return tmp_path / "others"


def measured(capsys, *arguments: str) -> dict[str, float]:
    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    return json.loads(capsys.readouterr().out)


def test_commands_do_not_match_other_classes_by_their_order(vit, others, capsys):
    assert main(["calibrate", str(vit), str(others), "--k", "2"]) == 2
    error = capsys.readouterr().err
    assert "6 classes that the model does not know, 'n01', 'n02'" in error and "--labels-by-position" in error
    assert "thresholds" not in json.loads((vit / "config.json").read_text())


@pytest.mark.parametrize("kind", ["csv", "json"])
def test_label_map_translates_names(vit, others, image_folder, tmp_path, capsys, kind):
    path = tmp_path / f"names.{kind}"
    pairs = {wnid: name for name, wnid in WNIDS.items()} | {"n99": "a class of another dataset"}
    path.write_text(json.dumps(pairs) if kind == "json" else "".join(f"{a},{b}\n" for a, b in pairs.items()))
    wanted = measured(capsys, "calibrate", vit, image_folder, "--k", "2", "--out", tmp_path / "wanted")
    found = measured(capsys, "calibrate", vit, others, "--k", "2", "--label-map", path, "--out", tmp_path / "found")
    assert found == pytest.approx(wanted)
    options = ["--split", "validation", "--label-map", path]
    assert (
        measured(capsys, "evaluate", tmp_path / "found", others, *options)["top1_accuracy"] == wanted["top1_accuracy"]
    )


def test_positions_where_the_user_says_so(vit, others, image_folder, tmp_path, capsys):
    rename(others, {wnid: f"{i} {name}" for i, (name, wnid) in enumerate(WNIDS.items())})  # now in the model's order
    wanted = measured(capsys, "calibrate", vit, image_folder, "--k", "2", "--out", tmp_path / "wanted")
    found = measured(capsys, "calibrate", vit, others, "--k", "2", "--labels-by-position", "--out", tmp_path / "found")
    assert found == pytest.approx(wanted)
    split, model = load_splits(str(others))["validation"], load_classifier(str(tmp_path / "found"))
    assert evaluate(model, split, labels="position")["top1_accuracy"] == wanted["top1_accuracy"]
    with pytest.raises(ValueError, match=r"6 classes and the model 2: class '2 cedar' has no counterpart"):
        align_labels(split, config_of("ash", "elm"), "position")
    with pytest.raises(SystemExit):
        main(["evaluate", str(vit), str(others), "--labels-by-position", "--label-map", "names.csv"])
    assert "not allowed with argument" in capsys.readouterr().err


def test_names_of_a_label_map_that_nobody_knows(tmp_path):
    config, names = config_of("ash", "oak"), ["n01", "n02"]
    assert match_classes(names, config, {"n01": "oak", "n02": "ash"}) == [1, 0]
    with pytest.raises(ValueError, match=r"'Oaks' for 'n01', which is no class of the model \(it has 'oak'\)"):
        match_classes(names, config, {"n01": "Oaks", "n02": "ash"})
    with pytest.raises(ValueError, match=r"'n03', which is no class of the dataset \(it has 'n0"):
        match_classes(names, config, {"n01": "oak", "n03": "ash"})
    with pytest.raises(ValueError, match=r"labels='order' is unknown"):
        match_classes(names, config, "order")
    for name, text, reason in (
        ("a.csv", "n01,oak,big\n", "line 1: .* no two columns"),
        ("b.csv", "n01,oak\n\nn01,ash\n", "line 3: 'n01' is mapped twice"),
        ("c.json", '{"n01": ["oak"]}', "'n01' is mapped to"),
        ("d.json", "[]", "must hold a mapping"),
    ):
        (tmp_path / name).write_text(text)
        with pytest.raises(ValueError, match=f"{name}.*{reason}"):
            read_label_map(tmp_path / name)
    with pytest.raises(FileNotFoundError, match=r"nowhere\.csv"):
        read_label_map(tmp_path / "nowhere.csv")


def test_classes_are_matched_by_name(tmp_path, splits):
    """A folder without images of some class numbers its classes differently."""
    write_images(tmp_path / "test", {"beech": 2, "oak": 3})
    for empty in ("ash", "cedar", "elm", "fir"):
        (tmp_path / "test" / empty).rmdir()
    test = load_splits(str(tmp_path))["test"]
    config = config_of(*CLASSES)
    assert list(test["label"]) == [0, 0, 1, 1, 1]
    aligned = align_labels(test, config)
    assert list(aligned["label"]) == [1, 1, 5, 5, 5] and aligned.features["label"].names == CLASSES
    aligned = align_labels(splits["test"], config_of(*CLASSES[::-1]))  # as many classes, in another order
    assert list(aligned["label"]) == [5 - label for label in splits["test"]["label"]]
    assert aligned.features["label"].names == CLASSES[::-1]
    assert align_labels(splits["test"], config) is splits["test"]
    with pytest.raises(ValueError, match=r"2 classes that the model does not know, 'beech', 'oak'\. Name"):
        align_labels(test, config_of("pine", "palm", "yew"))
    with pytest.raises(
        ValueError, match=r"'beech' \(the model knows 'Beach'\), 'oak' \(the model knows 'oaks'\)\. Name"
    ):
        align_labels(test, config_of("pine", "Beach", "oaks"))
    with pytest.raises(ValueError, match=r"know, 'beech', .*--labels-by-position"):
        align_labels(test, ViTConfig(num_labels=2))  # LABEL_0 and LABEL_1 say nothing about trees


def test_numbers_are_matched_by_number():
    """Also where the model has no names; folders in alphabetical order are not in that of their numbers."""
    numbered = ViTConfig(num_labels=12)
    assert match_classes(["0", "1", "2"], numbered) == [0, 1, 2]
    assert match_classes(["10", "7"], config_of("7", "8", "9", "10")) == [3, 0]
    for names in (sorted(map(str, range(12))), ["1", "2"], list(map(str, range(13)))):
        with pytest.raises(ValueError, match="that the model does not know"):
            match_classes(names, numbered)


def test_names_are_compared_as_they_look(vit, image_folder, tmp_path, capsys):
    """An accent is one character or two: Linux and macOS write folders differently."""
    composed, decomposed = (unicodedata.normalize(form, "épicéa") for form in ("NFC", "NFD"))
    assert composed != decomposed
    write_images(tmp_path / "trees" / "train", dict.fromkeys(CLASSES, 2))
    write_images(tmp_path / "trees" / "test", dict.fromkeys(CLASSES, 2))
    (tmp_path / "trees" / "train" / "fir").rename(tmp_path / "trees" / "train" / decomposed)
    (tmp_path / "trees" / "test" / "fir").rename(tmp_path / "trees" / "test" / composed)
    splits = load_splits(str(tmp_path / "trees"))
    assert splits["train"].features == splits["test"].features and composed in splits["train"].features["label"].names
    assert match_classes([decomposed], config_of("ash", composed)) == [1]
    assert match_classes([composed], config_of("ash", decomposed)) == [1]


def test_a_class_without_training_images_is_refused(recipe, tmp_path, capsys):
    write_images(tmp_path / "trees" / "train", dict.fromkeys(CLASSES, 3))
    write_images(tmp_path / "trees" / "validation", dict.fromkeys(CLASSES, 3), seed=1)
    (tmp_path / "trees" / "validation" / "oak").rename(tmp_path / "trees" / "validation" / "Oaks")
    command = ["train", str(recipe), "--dataset", str(tmp_path / "trees"), "--num_train_epochs", "1"]
    assert main(command) == 2
    message = "split 'validation' has 1 class without an image in 'train', e.g. 'Oaks' ('train' has 'oak')"
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        load_splits(str(tmp_path / "trees"))
    assert "Oaks" in load_splits(str(tmp_path / "trees"), allow_new_classes=True)["train"].features["label"].names
    assert main([*command, "--allow_new_classes"]) == 0
    config = json.loads((tmp_path / "run" / "config.json").read_text())
    assert "Oaks" in config["id2label"].values()


@pytest.fixture
def cranes(tmp_path):
    """A classifier with two classes of one name, as ImageNet's 134 and 517, and a dataset with its ids."""
    names = ["ash", "crane", "elm", "crane"]
    shape = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
    config = ViTConfig(image_size=32, patch_size=8, id2label=dict(enumerate(names)), **shape)
    ViTForImageClassification(config).save_pretrained(tmp_path / "model")
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(tmp_path / "model")
    write_images(tmp_path / "data" / "validation", dict.fromkeys(CLASSES[:4], 5))
    rename(tmp_path / "data", {"beech": "crane", "cedar": "elm0", "elm": "hoist"})
    rename(tmp_path / "data", {"elm0": "elm"})
    for empty in CLASSES[4:]:
        (tmp_path / "data" / "validation" / empty).rmdir()
    return tmp_path / "model", tmp_path / "data"


def test_two_classes_of_one_name_are_matched_by_id(cranes, monkeypatch):
    (model, data), said = cranes, []
    monkeypatch.setattr("avgk_hf.data.classes.logger.warning", said.append)
    assert main(["calibrate", str(model), str(data), "--k", "2"]) == 0
    (line,) = said
    assert "2 classes are matched by their ids" in line and "'crane' (1), 'hoist' (3)" in line
    assert json.loads((model / "config.json").read_text())["thresholds"].keys() == {"2"}
    aligned = align_labels(load_splits(str(data))["validation"], load_classifier(str(model)).config)
    assert sorted(set(aligned["label"])) == [0, 1, 2, 3]
    assert align_labels(aligned, load_classifier(str(model)).config) is aligned


def test_two_classes_of_one_name_with_other_ids():
    """By luck an id may fit: it counts only where those of all other classes do."""
    config = config_of("ash", "crane", "elm", "crane")
    for names in (["elm", "crane"], ["crane", "ash", "elm"]):
        with pytest.raises(ValueError, match=r"the model has 2 classes named 'crane'.*--label-map.*`crane,1`"):
            match_classes(names, config)
    assert match_classes(["elm", "crane"], config, {"crane": 3}) == [2, 3]
    assert match_classes(["elm", "crane"], config, {"crane": "3"}) == [2, 3]
    with pytest.raises(ValueError, match="2 for 'crane', which is no class of the model"):
        match_classes(["elm", "crane"], config, {"crane": 2})


def test_a_model_is_not_trained_on_classes_of_another_order(make_trainer, make_model, splits):
    """Nor evaluated; a model that names none takes any, and of a longer list the names that both have count."""
    names = splits["train"].features["label"].names
    other = make_model(id2label=dict(enumerate(reversed(names))))
    with pytest.raises(ValueError, match="train_dataset: class 0 is"):
        make_trainer(other)
    trainer = make_trainer(make_model())
    trainer.model.config.id2label = dict(enumerate(reversed(names)))
    with pytest.raises(ValueError, match="the dataset to evaluate: class 0 is"):
        trainer.evaluate(trainer.eval_dataset.select(range(4)))
    for given in ({"num_labels": len(names)}, {"id2label": dict(enumerate([*names, "yew"]))}):
        check_names("train_dataset", splits["train"], make_model(**given).config)
    with pytest.raises(ValueError, match="num_labels=3, but id2label has 6 names"):
        make_model(id2label=dict(enumerate(names)), num_labels=3)
