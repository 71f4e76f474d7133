"""Datasets in the layouts of their authors, the balanced split, and the crops of both protocols."""

import json
import os
import pickle

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from PIL import Image as PILImage

from archives import SPECIES, write_cifar, write_cub, write_plantnet, write_tiny_imagenet
from avgk_hf import AvgKForImageClassification, load_splits
from avgk_hf.data import class_counts
from avgk_hf.data.cifar import load_cifar, read_pickle
from avgk_hf.data.datasets import take_from_train
from avgk_hf.data.transforms import ImageTransform


def test_cifar_archive_meets_the_contract(tmp_path):
    pixels = write_cifar(tmp_path / "cifar-100-python")
    splits = load_splits(str(tmp_path / "cifar-100-python"), image_column="img", label_column="fine_label")
    assert {name: len(split) for name, split in splits.items()} == {"train": 48, "test": 12}
    for name, split in splits.items():
        assert split.column_names == ["image", "label", "index"] and str(split.split) == name
        assert list(split["index"]) == list(range(len(split)))
        assert split.features["label"].names == [f"class{i:02d}" for i in range(12)]
        read = np.stack([np.asarray(row["image"]) for row in split])  # (n, 32, 32, 3)
        assert np.array_equal(read, pixels[name].transpose(0, 2, 3, 1))
    assert class_counts(splits["train"], 12).tolist() == [4] * 12
    coarse = load_splits(str(tmp_path / "cifar-100-python"), label_column="coarse_label")["test"]
    assert coarse.features["label"].names == ["even", "odd"]
    assert list(coarse["label"]) == [label % 2 for label in splits["test"]["label"]]


def test_cifar_pickles_of_python_3(tmp_path):
    array = np.arange(6, dtype=np.uint8).reshape(2, 3)
    for protocol in range(pickle.HIGHEST_PROTOCOL + 1):
        (tmp_path / "file").write_bytes(pickle.dumps({b"data": array, "names": [b"a"]}, protocol=protocol))
        if protocol < 5:
            content = read_pickle(tmp_path / "file")
            assert np.array_equal(content["data"], array) and content["names"] == [b"a"]
        else:  # a newer form of arrays, which the archive does not use
            with pytest.raises(ValueError, match="_frombuffer"):
                read_pickle(tmp_path / "file")


class Call:
    """Pickled, this is a call of any function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.mark.parametrize("name", ["train", "test", "meta"])
@pytest.mark.parametrize("function", [os.system, eval, np.save])
def test_malicious_pickles_run_nothing_and_are_named(name, function, tmp_path):
    folder, mark = tmp_path / "cifar-100-python", tmp_path / "mark"
    write_cifar(folder)
    arguments = {
        os.system: [f"touch {mark}"],
        eval: [f"open({str(mark)!r}, 'w')"],
        np.save: [str(mark) + ".npy", np.zeros(1)],
    }
    bad = pickle.dumps({"data": Call(function, *arguments[function])}, protocol=2)
    (folder / name).write_bytes(bad)
    with pytest.raises(
        ValueError, match=rf"{name} cannot be read as CIFAR-100 \(it asks for \w+\.{function.__name__}"
    ):
        load_splits(str(folder))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["cifar-100-python"]
    pickle.loads(bad)  # the file does do harm where it is trusted
    assert len(list(tmp_path.iterdir())) == 2


def test_broken_cifar_files_are_refused(tmp_path):
    folder = tmp_path / "cifar-100-python"
    write_cifar(folder)
    whole = (folder / "train").read_bytes()
    for content, message in (
        (whole[:-100], "train cannot be read as CIFAR-100"),
        (pickle.dumps([1]), "train holds a list"),
        (pickle.dumps({"data": []}), r"train has no 'fine_labels', only \['data'\]"),
        (pickle.dumps({"data": np.zeros((2, 7)).tolist(), "fine_labels": [0, 1]}), "holds a list as 'data'"),
        (pickle.dumps({"data": np.zeros((2, 7)), "fine_labels": [0, 1]}, 4), "array of 'f8', not of u1, i4, i8"),
        (pickle.dumps({"data": np.zeros((2, 7), "u1"), "fine_labels": [0, 1]}, 4), r"uint8 \(2, 7\) for 2 labels"),
        (pickle.dumps({"data": np.zeros((1, 3072), "u1"), "fine_labels": [12]}, 4), r"labels outside \[0, 12\)"),
    ):
        (folder / "train").write_bytes(content)
        with pytest.raises(ValueError, match=message):
            load_cifar(folder)


def test_the_split_is_balanced_and_fixed():
    """4,500 and 500 of 5,000 images of 100 classes, a tenth of CIFAR-100."""
    labels = np.random.default_rng(1).permutation(np.repeat(np.arange(100), 50))
    features = Features(image=Image(), label=ClassLabel(num_classes=100), index=Value("int64"))
    images = [{"bytes": str(i).encode(), "path": None} for i in range(5_000)]
    columns = {"image": images, "label": labels.tolist(), "index": list(range(5_000))}
    whole = DatasetDict(
        {name: Dataset.from_dict(columns, features=features, split=name) for name in ("train", "test")}
    )

    def numbers(split):
        return [int(row["bytes"]) for row in split.cast_column("image", Image(decode=False))["image"]]

    splits = take_from_train(whole, 5, seed=0)
    assert {name: len(split) for name, split in splits.items()} == {
        "train": 4_500,
        "validation": 500,
        "test": 5_000,
    }
    for name, count in (("train", 45), ("validation", 5)):
        assert class_counts(splits[name], 100).tolist() == [count] * 100
        assert list(splits[name]["index"]) == list(range(100 * count))  # what ROLE counts on
        assert str(splits[name].split) == name
        assert np.array_equal(labels[numbers(splits[name])], splits[name]["label"])
    validation = numbers(splits["validation"])
    assert sorted(numbers(splits["train"]) + validation) == list(range(5_000))
    assert numbers(take_from_train(whole, 5, seed=0)["validation"]) == validation
    assert len(set(numbers(take_from_train(whole, 5, seed=1)["validation"])) & set(validation)) < 100
    half = take_from_train(whole, 50)  # never more than half of a class
    assert class_counts(half["validation"], 100).tolist() == class_counts(half["train"], 100).tolist() == [25] * 100
    with pytest.raises(ValueError, match="validation_per_class=0 must be 1 at least"):
        take_from_train(whole, 0)
    with pytest.raises(ValueError, match=r"has \['train', 'validation', 'test'\]: leave the field out"):
        take_from_train(splits, 5)


@pytest.mark.parametrize("layout", ["images/{}", "images_{}"])
def test_plantnet_meets_the_contract(layout, tmp_path):
    folder = tmp_path / "plantnet_300K"
    write_plantnet(folder, layout)
    (folder / layout.format("train") / "9" / "notes.txt").write_text("not an image")
    if layout == "images_{}":
        (folder / "plantnet300K_species_id_2_name.json").rename(folder / "plantnet300K_species_names.json")
    splits = load_splits(str(folder))
    ids = sorted(SPECIES)  # as text, as torchvision's ImageFolder orders folders: "9" is the last
    assert ids[-1] == "9"
    assert {name: len(split) for name, split in splits.items()} == {"train": 37, "validation": 12, "test": 12}
    for name, split in splits.items():
        assert split.features["label"].names == [SPECIES[i] for i in ids] and str(split.split) == name
        assert list(split["index"]) == list(range(len(split)))
        for row in split.cast_column("image", Image(decode=False)):
            assert row["image"]["bytes"] is None  # paths only
            assert row["image"]["path"].split("/")[-2] == ids[row["label"]]
    assert class_counts(splits["train"], 12).tolist() == [3] * 11 + [4]
    assert splits["validation"][0]["image"].size == (90, 70)


def test_plantnet_opens_no_image_to_list_them(tmp_path):
    folder = tmp_path / "plantnet_300K"
    write_plantnet(folder)
    for path in folder.glob("images/*/*/*.jpg"):
        path.write_bytes(b"not read")
    assert len(load_splits(str(folder))["train"]) == 37


def test_species_of_one_name_are_told_apart(tmp_path):
    folder = tmp_path / "plantnet_300K"
    write_plantnet(folder)
    names = {**SPECIES, "9": "Lactuca virosa L."}
    (folder / "plantnet300K_species_id_2_name.json").write_text(json.dumps(names))
    read = load_splits(str(folder))["train"].features["label"].names
    assert (read[0], read[-1]) == ("Lactuca virosa L. (1355868)", "Lactuca virosa L. (9)")


def test_incomplete_plantnet_is_refused(tmp_path):
    folder = tmp_path / "plantnet_300K"
    write_plantnet(folder)
    next(folder.glob("images/val/9/*.jpg")).unlink()
    message = r"images/val holds 11 images, but plantnet300K_metadata.json lists 12: unpack.*or remove"
    with pytest.raises(ValueError, match=message):
        load_splits(str(folder))
    (folder / "plantnet300K_metadata.json").unlink()
    assert len(load_splits(str(folder))["validation"]) == 11
    names = folder / "plantnet300K_species_id_2_name.json"
    names.write_text(json.dumps({"9": "Quercus robur L."}))
    with pytest.raises(ValueError, match=r"no name for 11 species, e.g. the folder '1355868'"):
        load_splits(str(folder))
    names.write_text("{")
    with pytest.raises(ValueError, match=r"plantnet300K_species_id_2_name.json is not valid JSON"):
        load_splits(str(folder))
    names.write_text("{}")
    (folder / "images" / "test").rename(folder / "elsewhere")
    with pytest.raises(FileNotFoundError, match="neither images/test nor images_test"):
        load_splits(str(folder))


def test_the_crop_of_cifar():
    """A window of the image with 4 black pixels around it, flipped or not, and nothing else."""
    config = AvgKForImageClassification.from_timm("densenet40_40_cifar", num_labels=12, k=2).config
    pixels = np.random.default_rng(0).integers(1, 256, (32, 32, 3), dtype=np.uint8)
    image = PILImage.fromarray(pixels)
    plain = ImageTransform(config).image(image)
    mean, std = (torch.tensor(config.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    expected = (torch.from_numpy(pixels).permute(2, 0, 1) / 255 - mean) / std
    assert torch.allclose(plain, expected, atol=1e-6)
    black = (-mean / std).expand(3, 40, 40).clone()
    black[:, 4:36, 4:36] = expected
    windows = [black[:, y : y + 32, x : x + 32] for y in range(9) for x in range(9)]
    both = torch.stack([*windows, *(window.flip(2) for window in windows)])  # (162, 3, 32, 32)
    torch.manual_seed(0)
    transform, seen = ImageTransform(config, "pad_crop_flip"), set()
    for _ in range(60):
        distance = (both - transform.image(image)).abs().amax((1, 2, 3))
        assert distance.min() < 1e-5
        seen.add(distance.argmin().item())
    assert len(seen) > 40 and min(seen) < 81 <= max(seen)


def test_the_crop_of_plantnet():
    """A window of 224 of the image resized to 256, never flipped; evaluation takes the one in the middle."""
    config = AvgKForImageClassification.from_timm("resnet18.tv_in1k", num_labels=12, k=2, pretrained=False).config
    rng = np.random.default_rng(0)
    image = PILImage.fromarray(rng.integers(0, 256, (100, 125, 3), dtype=np.uint8))
    resized = image.resize((320, 256), PILImage.Resampling.BILINEAR)
    mean, std = (torch.tensor(config.pretrained_cfg[name])[:, None, None] for name in ("mean", "std"))
    whole = (torch.from_numpy(np.array(resized)).permute(2, 0, 1) / 255 - mean) / std  # (3, 256, 320)
    assert torch.allclose(ImageTransform(config).image(image), whole[:, 16:240, 48:272], atol=1e-6)
    torch.manual_seed(0)
    transform, seen = ImageTransform(config, "resize_crop"), set()
    for _ in range(12):
        crop = transform.image(image)
        corner = (whole[:, :33, :97] - crop[:, :1, :1]).abs().amax(0)  # where the first pixel may come from
        places = [(y, x) for y, x in (corner < 1e-5).nonzero().tolist()]
        matches = [(y, x) for y, x in places if torch.allclose(whole[:, y : y + 224, x : x + 224], crop, atol=1e-5)]
        assert len(matches) == 1
        seen.update(matches)
    assert len(seen) > 8
    assert transform.image(PILImage.new("RGB", (300, 40))).shape == (3, 224, 224)


def test_cub_meets_the_contract(tmp_path):
    write_cub(tmp_path / "CUB_200_2011")
    splits = load_splits(str(tmp_path / "CUB_200_2011"), validation_per_class=1)
    assert {name: len(split) for name, split in splits.items()} == {"train": 24, "validation": 8, "test": 8}
    names = splits["test"].features["label"].names  # without numbers, but where the name alone is not enough
    assert names[0] == "Red footed Bird0" and names[-2:] == ["Red footed Bird6 (7)", "Red footed Bird6 (8)"]
    for split in splits.values():
        rows = split.cast_column("image", Image(decode=False))
        assert list(split["index"]) == list(range(len(split)))
        for row in rows:
            assert f"/{row['label'] + 1:03d}.Red" in row["image"]["path"]
    (path,) = {
        row["image"]["path"] for row in splits["test"].cast_column("image", Image(decode=False)) if not row["label"]
    }
    assert path.endswith("Bird_4.jpg")  # as the official split says


def test_tiny_imagenet_meets_the_contract(tmp_path):
    write_tiny_imagenet(tmp_path / "tiny-imagenet-200")
    splits = load_splits(str(tmp_path / "tiny-imagenet-200"), validation_per_class=1)
    assert {name: len(split) for name, split in splits.items()} == {"train": 8, "validation": 4, "test": 4}
    assert splits["train"].features["label"].names == ["goldfish", "crane (n02)", "crane (n03)", "n04"]
    assert list(splits["test"]["label"]) == [0, 1, 2, 3] and splits["test"][0]["image"].size == (64, 64)


@pytest.mark.parametrize(
    "name",
    [
        "/etc/passwd",
        "../out.jpg",
        "001.Red_footed_Bird0/../../../out.jpg",
        "a\\b.jpg",
        "http://host/a.jpg",
        "//out.jpg",
    ],
)
def test_lists_of_strangers_name_images_of_their_own(name, tmp_path):
    folder = tmp_path / "CUB_200_2011"
    write_cub(folder, classes=2)
    PILImage.new("RGB", (8, 8)).save(tmp_path / "out.jpg")
    path = folder / "images.txt"
    path.write_text(path.read_text().replace("001.Red_footed_Bird0/Bird_0.jpg", name))
    with pytest.raises(ValueError, match="no plain path below"):
        load_splits(str(folder))
    tiny = tmp_path / "tiny"
    write_tiny_imagenet(tiny)
    path = tiny / "val" / "val_annotations.txt"
    path.write_text(path.read_text().replace("val_0.JPEG", name))
    with pytest.raises(ValueError, match="no plain path below"):
        load_splits(str(tiny))


def test_incomplete_lists_are_refused(tmp_path):
    folder = tmp_path / "CUB_200_2011"
    write_cub(folder, classes=2)
    texts = {path.name: path.read_text() for path in folder.glob("*.txt")}
    for name, change, message in (
        ("images.txt", lambda text: text.replace("Bird_0", "Bird_9"), "no such file"),
        ("images.txt", lambda text: text + text, "second for '1'"),
        ("image_class_labels.txt", lambda text: text.replace("1 1\n", "1 77\n"), "no class '77'"),
        ("image_class_labels.txt", lambda text: text.replace("1 1\n", ""), "do not list the same images"),
        ("train_test_split.txt", lambda text: text.replace(" 0\n", " 1\n"), "marks no image with 0"),
        ("classes.txt", lambda text: text + "3\n", "no row of 2 words"),
    ):
        (folder / name).write_text(change(texts[name]))
        with pytest.raises((ValueError, FileNotFoundError), match=message):
            load_splits(str(folder))
        (folder / name).write_text(texts[name])
    (folder / "classes.txt").write_bytes(b"\xff\xfe 1")
    with pytest.raises(ValueError, match="is no text"):
        load_splits(str(folder))


def test_a_class_may_be_called_train(tmp_path):
    """CIFAR-100 has one; its test images are none to train on."""
    for place in ("train/train", "train/oak", "test/train", "test/oak"):
        (tmp_path / "data" / place).mkdir(parents=True)
        for i in range(2):
            PILImage.new("RGB", (8, 8), (40 * i, 90, len(place))).save(tmp_path / "data" / place / f"{i}.png")
    splits = load_splits(str(tmp_path / "data"))
    assert {name: len(split) for name, split in splits.items()} == {"train": 4, "test": 4}
    assert splits["test"].features["label"].names == ["oak", "train"]
    assert sorted(splits["test"]["label"]) == sorted(splits["train"]["label"]) == [0, 0, 1, 1]
