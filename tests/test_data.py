"""Every door data may come through, and what is refused at it."""

import pickle

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage

from avgk_hf import load_splits, prepare
from avgk_hf.classifiers import load_classifier, transform_for
from avgk_hf.data import class_counts, open_image
from avgk_hf.data import glyphs as module
from avgk_hf.data.glyphs import CHARACTERS, FACES, class_name, load_glyphs, train_counts, write_image_folder
from avgk_hf.data.transforms import ImageTransform
from conftest import CLASSES, save_vit


@pytest.fixture(scope="module")
def glyphs():
    return load_glyphs(seed=0, progress=False)


def test_glyphs_meet_the_contract(glyphs):
    assert list(glyphs) == ["train", "validation", "test"]
    for split in glyphs.values():
        assert split.column_names == ["image", "label", "index"]
        assert list(split["index"]) == list(range(len(split)))
        assert isinstance(split.features["label"], ClassLabel)
    image = glyphs["train"][0]["image"]
    assert (image.size, image.mode) == ((32, 32), "L")


def test_glyphs_have_a_long_tail(glyphs):
    counts = class_counts(glyphs["train"], len(CHARACTERS))
    assert len(counts) >= 100 and counts.tolist() == train_counts().tolist()
    assert np.mean(counts < 20) == pytest.approx(0.5, abs=0.05)
    assert np.mean(counts > 100) == pytest.approx(0.25, abs=0.05)
    for split in ("validation", "test"):  # the same distribution, up to chance
        share = class_counts(glyphs[split], len(counts)) / len(glyphs[split])
        assert np.abs(share - counts / counts.sum()).max() < 0.012


def test_glyphs_are_the_same_for_the_same_seed(monkeypatch):
    def pixels(dataset):
        return np.stack([np.asarray(image) for image in dataset["image"]])

    monkeypatch.setattr(module, "VALIDATION_IMAGES", 40)
    monkeypatch.setattr(module, "TEST_IMAGES", 40)
    monkeypatch.setattr(module, "train_counts", lambda: np.repeat([1, 3], len(CHARACTERS) // 2))
    glyphs, again, other = (load_glyphs(seed=seed, progress=False) for seed in (0, 0, 1))
    for split in glyphs:
        assert again[split]["label"] == glyphs[split]["label"]
        assert np.array_equal(pixels(again[split]), pixels(glyphs[split]))
    assert other["train"]["label"] != glyphs["train"]["label"]
    assert class_counts(other["train"], 120).tolist() == class_counts(glyphs["train"], 120).tolist()


def test_every_face_has_every_character():
    from fontTools.ttLib import TTFont
    from matplotlib import get_data_path

    for face in FACES:
        known = TTFont(f"{get_data_path()}/fonts/ttf/{face}").getBestCmap()
        assert [c for c in CHARACTERS if ord(c) not in known] == []
    names = [class_name(c) for c in CHARACTERS]
    assert len({name.casefold() for name in names}) == len(CHARACTERS)
    assert not any(c in name for name in names for c in '/\\:*?"<>|')


def test_glyphs_as_an_image_folder_read_back_the_same(glyphs, tmp_path):
    small = DatasetDict({name: split.select(range(60)) for name, split in glyphs.items()})
    write_image_folder(small, tmp_path / "glyphs")
    read = load_splits(str(tmp_path / "glyphs"), allow_new_classes=True)  # of the first 60 images
    for name, split in small.items():
        names = split.features["label"].names
        expected = sorted((names[row["label"]], np.asarray(row["image"]).tobytes()) for row in split)
        names = read[name].features["label"].names
        assert expected == sorted((names[row["label"]], np.asarray(row["image"]).tobytes()) for row in read[name])


def test_image_folder(splits):
    assert {name: len(split) for name, split in splits.items()} == {"train": 72, "validation": 30, "test": 30}
    assert splits["train"].features["label"].names == CLASSES
    assert class_counts(splits["train"], 6).tolist() == [30, 14, 10, 8, 6, 4]


def test_saved_dataset_and_parquet(splits, tmp_path):
    splits.save_to_disk(tmp_path / "saved")
    (tmp_path / "parquet").mkdir()
    for name, split in splits.items():
        split.to_parquet(tmp_path / "parquet" / f"{name}.parquet")
    for folder in ("saved", "parquet"):
        # to_parquet writes the paths of the images, which lie elsewhere
        read = load_splits(str(tmp_path / folder), allow_outside=folder == "parquet")
        assert read["train"].features["label"].names == CLASSES
        assert list(read["test"]["label"]) == list(splits["test"]["label"])
        assert list(read["test"]["index"]) == list(range(30))
    splits["train"].save_to_disk(tmp_path / "one")
    assert list(load_splits(str(tmp_path / "one"))) == ["train"]


def test_splits_that_number_their_classes_differently(tmp_path):
    """Classes are matched by name, not by number: every image keeps the class that its split calls it."""
    orders = {"train": ["ash", "elm", "oak"], "validation": ["oak", "ash", "elm"], "test": ["oak", "elm"]}
    written = {}
    for name, order in orders.items():
        labels = [order.index(label) for label in sorted(order)]
        images = [PILImage.new("L", (4, 4), ord(label[0])) for label in sorted(order)]  # which show their class
        features = Features(image=Image(), label=ClassLabel(names=order))
        written[name] = Dataset.from_dict({"image": images, "label": labels}, features=features)
    DatasetDict(written).save_to_disk(tmp_path / "splits")
    read = load_splits(str(tmp_path / "splits"))
    for split in read.values():
        assert split.features["label"].names == ["ash", "elm", "oak"]
        names = [split.features["label"].int2str(label) for label in split["label"]]
        assert [ord(name[0]) for name in names] == [image.getpixel((0, 0)) for image in split["image"]]


def test_text_and_number_labels_become_classes(splits, tmp_path):
    test = splits["test"]
    names = test.features["label"].names
    images = [test[i]["image"] for i in (0, 10, 29)]
    for labels, expected in (([names[0], names[2], names[5]], ["ash", "cedar", "oak"]), ([0, 2, 2], ["0", "1", "2"])):
        dataset = Dataset.from_dict({"picture": images, "species": labels}).cast_column("picture", Image())
        dataset.save_to_disk(tmp_path / expected[0])
        read = load_splits(str(tmp_path / expected[0]), image_column="picture", label_column="species")["train"]
        assert read.features["label"].names == expected
        assert list(read["label"]) == ([0, 1, 2] if labels[0] == names[0] else labels)


@pytest.mark.parametrize("bad", [[-1, 0], [0.5, 1.0], [None, "a"]])
def test_other_labels_are_refused(bad, tmp_path):
    dataset = Dataset.from_dict({"image": [PILImage.new("L", (4, 4))] * 2, "label": bad})
    dataset.save_to_disk(tmp_path / "bad")
    with pytest.raises(ValueError, match="the column 'label'"):
        load_splits(str(tmp_path / "bad"))


def test_missing_columns_and_empty_data_are_refused(splits, tmp_path):
    splits.rename_column("label", "species").save_to_disk(tmp_path / "renamed")
    with pytest.raises(ValueError, match=r"no column 'label'; it has .*'species'.*`label_column:`"):
        load_splits(str(tmp_path / "renamed"))
    with pytest.raises(ValueError, match=r"no column 'photo'.*`image_column:`"):
        load_splits(str(tmp_path / "renamed"), image_column="photo", label_column="species")
    features = Features(image=Image(), label=Value("string"))
    Dataset.from_dict({"image": [], "label": []}, features=features).save_to_disk(tmp_path / "none")
    with pytest.raises(ValueError, match="none' is empty"):
        load_splits(str(tmp_path / "none"))
    (tmp_path / "norows").mkdir()
    pq.write_table(features.arrow_schema.empty_table(), tmp_path / "norows" / "train.parquet")
    with pytest.raises(ValueError, match="empty"):
        load_splits(str(tmp_path / "norows"))
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="is an empty folder"):
        load_splits(str(tmp_path / "empty"))
    with pytest.raises(FileNotFoundError, match="there is no such folder"):
        load_splits(str(tmp_path / "nowhere"))
    with pytest.raises(ValueError, match="has no column 'label'"):
        prepare(splits["test"].remove_columns("label"), config=None)


@pytest.mark.parametrize("in_chans", [1, 3])
def test_prepared_examples(in_chans, splits, make_model):
    model = make_model(model_args={"in_chans": in_chans})
    example = prepare(splits["test"], model.config)[3]
    assert example["pixel_values"].shape == (in_chans, 32, 32)
    assert (example["labels"], example["index"]) == (splits["test"][3]["label"], 3)
    prepared = prepare(splits["train"], model.config, augmentation="timm")
    torch.manual_seed(0)
    first, second = prepared[0]["pixel_values"], prepared[0]["pixel_values"]
    assert not torch.equal(first, second)
    with pytest.raises(ValueError, match="augmentation='mixup' is unknown"):
        prepare(splits["train"], model.config, augmentation="mixup")


def test_unreadable_images_are_refused_by_name(tmp_path, make_model):
    (tmp_path / "notes.jpg").write_text("this is not a picture")
    with pytest.raises(ValueError, match=r"notes.jpg cannot be read as an image"):
        open_image(tmp_path / "notes.jpg")
    with pytest.raises(FileNotFoundError, match=r"missing.png: there is no such file"):
        open_image(tmp_path / "missing.png")
    transform = ImageTransform(make_model().config)
    with pytest.raises(ValueError, match="image 7 cannot be read"):
        transform({"image": [{"bytes": b"junk", "path": None}], "index": [7]})
    assert transform.image(PILImage.new("P", (9, 5))).shape == (3, 32, 32)


@pytest.mark.parametrize("kind", ["ours", "foreign"])
def test_prepared_images_can_be_sent_to_workers(kind, splits, make_model, tmp_path):
    """Where processes are spawned and not forked, as on macOS and Windows, they get the dataset pickled."""
    if kind == "foreign":
        save_vit(tmp_path / "vit")
    model = make_model() if kind == "ours" else load_classifier(str(tmp_path / "vit"))
    images = prepare(splits["test"], transform_for(model))
    sent = pickle.loads(pickle.dumps(images))
    assert torch.equal(sent[3]["pixel_values"], images[3]["pixel_values"]) and sent[3]["labels"] == images[3]["labels"]
