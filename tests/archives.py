"""Small copies of datasets in the layouts of their authors."""

import json
import pickle
import struct
from pathlib import Path

import numpy as np
from PIL import Image

SPECIES = {"9": "Quercus robur L.", "1355868": "Lactuca virosa L.", "1355920": "Lactuca muralis (L.) Gaertn."} | {
    str(1356000 + 111 * i): f"Genus species{i:02d} L." for i in range(9)
}


class Python2Pickler(pickle._Pickler):
    """Writes text and bytes as the `str` of Python 2, as in the archive of CIFAR-100."""

    def save_str(self, value):
        data = value if isinstance(value, bytes) else value.encode()
        self.write(pickle.BINSTRING + struct.pack("<i", len(data)) + data)

    dispatch = {**pickle._Pickler.dispatch, str: save_str, bytes: save_str}  # noqa: RUF012


def write_pickle(path: Path, content: dict) -> None:
    with path.open("wb") as file:
        Python2Pickler(file, protocol=2).dump(content)
    path.write_bytes(path.read_bytes().replace(b"cnumpy._core.multiarray\n", b"cnumpy.core.multiarray\n"))


def write_cifar(folder: Path, classes: int = 12, train: int = 4, test: int = 1) -> dict[str, np.ndarray]:
    """`cifar-100-python` with fewer classes and images; returns the pixels of each split, (n, 3, 32, 32)."""
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    fine = [f"class{i:02d}" for i in range(classes)]
    write_pickle(folder / "meta", {"fine_label_names": fine, "coarse_label_names": ["even", "odd"]})
    pixels = {}
    for split, per_class in (("train", train), ("test", test)):
        labels = rng.permutation(np.repeat(np.arange(classes), per_class))
        pixels[split] = rng.integers(0, 256, (len(labels), 3, 32, 32), dtype=np.uint8)
        content = {
            "filenames": [f"{i}.png" for i in range(len(labels))],
            "batch_label": f"{split}ing batch 1 of 1",
            "fine_labels": labels.tolist(),
            "coarse_labels": (labels % 2).tolist(),
            "data": pixels[split].reshape(len(labels), -1),
        }
        write_pickle(folder / split, content)
    return pixels


def write_plantnet(folder: Path, split_folder: str = "images/{}", size: tuple[int, int] = (90, 70)) -> None:
    """`plantnet_300K` with 12 species: 3 or more training images of each, one for validation and one for test."""
    rng = np.random.default_rng(0)
    metadata = {}
    for split in ("train", "val", "test"):
        for i, species in enumerate(SPECIES):
            place = folder / split_folder.format(split) / species
            place.mkdir(parents=True)
            for j in range(3 + (i == 0) if split == "train" else 1):
                name = f"{split}{i:02d}{j}"
                Image.fromarray(rng.integers(0, 256, (*size[::-1], 3), dtype=np.uint8)).save(place / f"{name}.jpg")
                metadata[name] = {"species_id": species, "split": split, "organ": "flower", "license": "cc-by-sa"}
    (folder / "plantnet300K_species_id_2_name.json").write_text(json.dumps(SPECIES))
    (folder / "plantnet300K_metadata.json").write_text(json.dumps(metadata))


def write_cub(folder: Path, classes: int = 8, train: int = 4, test: int = 1, size: int = 40) -> None:
    """`CUB_200_2011` with fewer species and images; the last two differ in their number only."""
    rng, rows = np.random.default_rng(0), []
    names = [f"{i + 1:03d}.Red_footed_Bird{min(i, classes - 2)}" for i in range(classes)]
    for label, name in enumerate(names, 1):
        (folder / "images" / name).mkdir(parents=True)
        for j in range(train + test):
            pixels = rng.integers(0, 256, (size, size + 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(folder / "images" / name / f"Bird_{j}.jpg")
            rows.append((f"{name}/Bird_{j}.jpg", label, int(j < train)))
    columns = {"images": 0, "image_class_labels": 1, "train_test_split": 2}
    for list_name, column in columns.items():
        lines = [f"{i} {row[column]}\n" for i, row in enumerate(rows, 1)]
        (folder / f"{list_name}.txt").write_text("".join(lines))
    (folder / "classes.txt").write_text("".join(f"{i} {name}\n" for i, name in enumerate(names, 1)))


def write_tiny_imagenet(folder: Path, classes: int = 4, train: int = 3) -> None:
    """`tiny-imagenet-200` with fewer classes and images, two of them cranes, and 64 x 64 pixels."""
    rng, ids = np.random.default_rng(0), [f"n0{i + 1}" for i in range(classes)]

    def write(path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)).save(path, "JPEG")

    for wnid in ids:
        for j in range(train):
            write(folder / "train" / wnid / "images" / f"{wnid}_{j}.JPEG")
        (folder / "train" / wnid / f"{wnid}_boxes.txt").write_text(f"{wnid}_0.JPEG\t0\t0\t9\t9\n")
    lines = []
    for i, wnid in enumerate(ids):
        write(folder / "val" / "images" / f"val_{i}.JPEG")
        lines.append(f"val_{i}.JPEG\t{wnid}\t0\t32\t44\t62\n")
    (folder / "val" / "val_annotations.txt").write_text("".join(lines))
    words = {"n01": "goldfish, Carassius auratus", "n02": "crane, derrick", "n03": "crane", "n99": "elsewhere"}
    (folder / "words.txt").write_text("".join(f"{wnid}\t{text}\n" for wnid, text in words.items()))
    (folder / "wnids.txt").write_text("\n".join(ids))
