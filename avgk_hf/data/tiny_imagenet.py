"""Tiny ImageNet as its authors distribute it: 200 classes of 64 x 64 photographs.

The folder `tiny-imagenet-200` holds `train/<wnid>/images/*.JPEG`, `val/images/*.JPEG` with `val/val_annotations.txt`,
and `words.txt`. The labels of its test images were never published: the official validation set is the split test
here, and validation images are taken from train with `validation_per_class`.
"""

import os
from pathlib import Path

from datasets import DatasetDict

from .boundary import listed_image
from .datasets import distinct_names, make_split, read_rows

ANNOTATIONS, WORDS = "val_annotations.txt", "words.txt"


def is_tiny_imagenet(folder: Path) -> bool:
    """Whether the folder holds the annotations and the words."""
    return (folder / "val" / ANNOTATIONS).is_file() and (folder / WORDS).is_file() and (folder / "train").is_dir()


def load_tiny_imagenet(folder: Path) -> DatasetDict:
    """List the images: splits train and test with `image`, `label` and `index`.

    Labels are the first of the words of each class, in the order of the WordNet ids.

    Args:
        folder: The unpacked archive, `tiny-imagenet-200`.
    """
    ids = sorted(entry.name for entry in os.scandir(folder / "train") if entry.is_dir())
    if not ids:
        raise ValueError(f"{folder / 'train'} holds no classes; images belong in train/<wnid>/images/.")
    words = dict(read_rows(folder / WORDS, 2, "\t"))
    names = distinct_names(ids, [words.get(wnid, wnid).partition(",")[0] for wnid in ids])
    place = {wnid: label for label, wnid in enumerate(ids)}
    train = []
    for wnid in ids:
        own = folder / "train" / wnid / "images"
        if not own.is_dir():
            raise ValueError(f"{own} is missing: unpack the archive again.")
        train += [(entry.path, place[wnid]) for entry in sorted(os.scandir(own), key=lambda entry: entry.name)]
    path, rows = folder / "val" / ANNOTATIONS, []
    for name, wnid, *_ in read_rows(folder / "val" / ANNOTATIONS, 6, "\t"):
        if wnid not in place:
            raise ValueError(f"{path}: train/ has no class {wnid[:100]!r}, that of {name[:100]}.")
        rows.append((listed_image(path, folder / "val" / "images", name), place[wnid]))
    splits = {}
    for split, found in (("train", train), ("test", rows)):
        if not found:
            raise ValueError(f"{folder} holds no images for {split}: unpack the archive again.")
        paths, labels = map(list, zip(*found, strict=True))
        splits[split] = make_split(split, paths, labels, names)
    return DatasetDict(splits)
