"""What is in a dataset before anything is trained on it: classes, counts, broken or repeated images, names."""

import hashlib
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from statistics import mode
from typing import Any

import numpy as np
from datasets import Dataset, Features, Image, Value

from ..checks import LIKE
from ..images import open_image
from ..statistics import SHOTS
from .classes import letters, nearest
from .datasets import class_counts, class_ids, each_row, image_fault
from .sources import image_files, left_out

Counts = dict[str, np.ndarray]  # {split: images of each class, (L,)}


@dataclass
class Inspection:
    """What `inspect` found.

    Args:
        names: Of the classes.
        counts: {split: images of each class}.
        problems: {kind: sentences}, only kinds of which something was found.
    """

    names: list[str]
    counts: Counts
    problems: dict[str, list[str]]

    def summary(self, train: str = "train") -> str:
        """`short_form`, or how many images there are where no class is known."""
        total = sum(int(counts.sum()) for counts in self.counts.values())
        return short_form(self.counts, train) if self.names else f"{total:,} images without classes"

    def as_json(self) -> dict[str, Any]:
        """The same as plain values, with the shot table and the short form."""
        by_class = {name: {split: int(n[i]) for split, n in self.counts.items()} for i, name in enumerate(self.names)}
        return {
            "summary": self.summary(),
            "classes": by_class,
            "images": {split: int(counts.sum()) for split, counts in self.counts.items()},
            "shots": shot_table(self.counts) if self.names else {},
            "problems": self.problems,
        }


def short_form(counts: Counts, train: str = "train") -> str:
    """One line about the images of each class in the split to train on, and how many the other splits have.

    >>> short_form({"train": np.array([200, 8, 40]), "test": np.array([5, 5, 0])})
    '3 classes, 248 images, 8 to 200 each, 1 class with fewer than 20; test 10'
    """
    own = counts.get(train, next(iter(counts.values())))
    few = int((own < SHOTS["few"][1]).sum())
    text = f"{len(own):,} classes, {own.sum():,} images, {own.min():,} to {own.max():,} each"
    if few:
        text += f", {few:,} class{'es' * (few != 1)} with fewer than {SHOTS['few'][1]}"
    others = [f"{name} {each.sum():,}" for name, each in counts.items() if each is not own]
    return text + (f"; {', '.join(others)}" if others else "")


def count_images(splits: Mapping[str, Dataset]) -> Counts:
    """The images of each class in each split of `load_splits`; where classes are not known, as if of one."""
    if not _labelled(splits):
        return {name: np.array([len(split)]) for name, split in splits.items()}
    return {name: class_counts(split, len(split.features["label"].names)) for name, split in splits.items()}


def shot_table(counts: Counts, train: str = "train") -> dict[str, dict[str, int]]:
    """{few, medium, many: {"classes": number, split: images}}, by the training images of the classes.

    >>> shot_table({"train": np.array([200, 8, 40]), "test": np.array([5, 5, 0])})["few"]
    {'classes': 1, 'train': 8, 'test': 5}
    """
    own, table = counts.get(train, next(iter(counts.values()))), {}
    for shot, (low, high) in SHOTS.items():
        group = (own >= low) & (own < high)
        table[shot] = {"classes": int(group.sum()), **{name: int(n[group].sum()) for name, n in counts.items()}}
    return table


def inspect(splits: Mapping[str, Dataset], train: str = "train", num_workers: int = 0) -> Inspection:
    """Look at every image once: what would spoil a training or its numbers is found before it.

    Args:
        splits: What `load_splits(..., allow_new_classes=True)` gives, or images without classes.
        train: The split to train on.
        num_workers: Processes that read images.
    """
    counts, labelled = count_images(splits), _labelled(splits)
    names = next(iter(splits.values())).features["label"].names if labelled else []
    seen = {name: _looked_at(split, name, num_workers) for name, split in splits.items()}
    problems = {"broken images": [fault for rows in seen.values() for fault in rows["fault"] if fault]}
    if labelled:
        problems |= {
            "classes in one split only, or without training images": _in_one_split(names, counts, train),
            "names that differ by accents, case or spaces": [" / ".join(alike) for alike in names_alike(names)],
            **_repeated(splits, names, seen),
        }
    return Inspection(names, counts, {kind: found for kind, found in problems.items() if found})


def _labelled(splits: Mapping[str, Dataset]) -> bool:
    return all("label" in split.column_names for split in splits.values())


def beside_images(folder: str | Path) -> dict[str, list[str]]:
    """Further problems of a folder of images: photographs that are not opened, and classes without any."""
    paths = image_files(folder)
    held, own = {parent for path in paths for parent in path.parents}, len(Path(folder).parts)
    depth = mode([len(path.parts) - 1 - own for path in paths] or [0])
    places = Path(folder).glob("/".join("*" * depth)) if depth else ()
    places = (place for place in sorted(places) if place.is_dir() and not place.is_symlink() and place not in held)
    names = [place.relative_to(folder).as_posix() for place in places]
    empty = [f"{name} has no image" for name in names if "/." not in f"/{name}"]  # hidden ones are left alone
    other = left_out(folder)
    return ({"other formats": [other]} if other else {}) | ({"empty folders": empty} if empty else {})


def names_alike(names: list[str]) -> list[list[str]]:
    """The names that are the same but for accents, case, underscores and spaces, together.

    >>> names_alike(["Épicéa", "epicea", "Acer_rubrum", "Acer rubrum", "Acer"])
    [['Épicéa', 'epicea'], ['Acer_rubrum', 'Acer rubrum']]
    """
    groups = defaultdict(list)
    for name in names:
        groups[letters(name)].append(name)
    return [alike for alike in groups.values() if len(alike) > 1]


def _in_one_split(names: list[str], counts: Counts, train: str) -> list[str]:
    """The classes with images in one of several splits only, or in none to train on."""
    found, new = [], without_training(names, counts, train)
    for i, name in enumerate(names):
        where = [split for split, n in counts.items() if n[i]]
        if name in new or (len(counts) > 1 and len(where) == 1):
            found.append(f"{name} (only in {', '.join(where)}{f'; {new[name]}?' if new.get(name) else ''})")
    return found


def without_training(names: list[str], counts: Counts, train: str = "train") -> dict[str, str | None]:
    """The classes without an image to train on, and of each the one there that has nearly its name."""
    trained = [name for name, number in zip(names, counts[train], strict=True) if number]
    held = sum(counts.values())
    return {
        name: nearest(name, trained, LIKE)
        for name, number, own in zip(names, held, counts[train], strict=True)
        if number and not own
    }


def _looked_at(split: Dataset, name: str, num_workers: int) -> dict[str, list]:
    """Why each image cannot be read, None where it can, a digest of its file, and what to call it."""
    columns = Features(fault=Value("string"), digest=Value("string"), place=Value("string"))
    found = each_row(split, _look, columns, num_workers, f"look at the images of {name}")
    return {column: list(found[column]) for column in found.column_names}


def _look(row: dict[str, Any]) -> dict[str, str | None]:
    stored, fault, digest = row["image"] or {}, image_fault(row), None
    if fault is None:
        content = stored["bytes"] if stored.get("bytes") is not None else Path(stored["path"]).read_bytes()
        digest = hashlib.sha256(content).hexdigest()
    return {"fault": fault, "digest": digest, "place": stored.get("path") or f"image {row['index']}"}


def _repeated(splits: Mapping[str, Dataset], names: list[str], seen: dict[str, dict[str, list]]) -> dict[str, list]:
    """Images whose files are equal to the last byte, in several splits, under several classes, or twice in one.

    The last harm where test images are drawn from all: one is learnt and its copy is tested.
    """
    places = defaultdict(list)
    for split, rows in seen.items():
        for digest, place, label in zip(rows["digest"], rows["place"], class_ids(splits[split]), strict=True):
            if digest:
                places[digest].append((split, names[label], place))
    across, classes, twice = [], [], []
    for found in places.values():
        text = " = ".join(f"{place} ({split}, {name})" for split, name, place in found[:4])
        if len({split for split, *_ in found}) > 1:
            across.append(text)
        if len({name for _, name, _ in found}) > 1:
            classes.append(text)
        elif len(found) > 1 and len(seen) == 1:
            twice.append(text)
    kinds = {"images in more than one split": across, "images under more than one class": classes}
    return kinds | {"images that are there twice: keep one, or its copy is tested after it was learnt": twice}


def sample_images(split: Dataset, number: int = 100) -> tuple[list[int], bool]:
    """The shorter sides of some images, evenly drawn from a split, and whether all of them are grey."""
    rows = np.unique(np.linspace(0, len(split) - 1, number).astype(int))
    sides, grey = [], True
    for row in split.cast_column("image", Image(decode=False)).select(rows):
        try:
            image = open_image(row["image"])
        except (ValueError, OSError):  # `avgk check` names it
            continue
        sides.append(min(image.size))
        pixels = np.asarray(image).astype(np.int16)
        grey = grey and not np.abs(pixels - pixels[..., :1]).max() > 8  # JPEG is not exact
    if not sides:
        raise ValueError(f"none of {len(rows)} images can be read: `avgk check` names them.")
    return sides, grey
