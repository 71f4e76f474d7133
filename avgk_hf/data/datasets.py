"""The dataset contract: splits with `image`, `label` (ClassLabel) and `index`, the position in the split."""

import json
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import datasets
import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from torch.utils.data import default_collate
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..checks import LIKE, check_whole
from ..images import open_image
from ..shell import printable

logger = logging.get_logger(__name__)
ON_BAD_IMAGE = ("error", "skip")
MOST_BYTES = 2**26  # of a list in an archive; CUB's largest has 700,000
TAKE, TAKE_TEST = "validation_per_class", "test_per_class"  # the fields that take these images from train


@contextmanager
def without_bars(always: bool = True) -> Iterator[None]:
    """Without the progress bars of `datasets`: for what takes no time, or else where nobody sees them move."""
    shown = not datasets.are_progress_bars_disabled()
    if always or not sys.stderr.isatty():
        datasets.disable_progress_bars()
    try:
        yield
    finally:
        if shown:
            datasets.enable_progress_bars()


def contract(names: list[str] | None) -> Features:
    """The columns of a split with these classes; None for one without labels."""
    label = {} if names is None else {"label": ClassLabel(names=names)}
    return Features(image=Image(), **label, index=Value("int64"))


def make_split(split: str, images: list[Any], labels: list[int], names: list[str]) -> Dataset:
    """A split of images, each a path or a stored `{"bytes", "path"}`."""
    columns = {"image": images, "label": labels, "index": list(range(len(labels)))}
    return Dataset.from_dict(columns, features=contract(names), split=split)


def read_rows(path: Path, number: int, separator: str | None = None) -> list[list[str]]:
    """The rows of a list that an archive brings: so many words each, no two with the same first one.

    Args:
        path: A text file with one row a line.
        number: Words in a row.
        separator: Between them; None for a space, and then the last of them is the rest of the line.
    """
    if path.stat().st_size > MOST_BYTES:
        raise ValueError(f"{path} is larger than {MOST_BYTES} bytes, no list of images or classes.")
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except UnicodeDecodeError as error:
        raise ValueError(f"{path} is no text ({error}): unpack the archive again.") from None
    rows = [line.strip().split(separator, number - 1) for line in lines if line.strip()]
    seen: set[str] = set()
    for row in rows:
        if len(row) != number or row[0] in seen:
            raise ValueError(
                f"{path}: {' '.join(row)[:100]!r} is no row of {number} words, or the second for {row[0][:100]!r}."
            )
        seen.add(row[0])
    return rows


def distinct_names(ids: list[str], names: list[str]) -> list[str]:
    """The names of classes; where several have the same, the id is put behind it.

    >>> distinct_names(["1", "2", "3"], ["oak", "elm", "oak"])
    ['oak (1)', 'elm', 'oak (3)']
    """
    times = Counter(names)
    return [name if times[name] == 1 else f"{name} ({i})" for i, name in zip(ids, names, strict=True)]


def chosen(dataset: Dataset, rows: np.ndarray) -> Dataset:
    """The rows where the mask (n,) is true, numbered anew."""
    # the new positions are written before rows are selected: to add a column later would copy all images
    index = (np.cumsum(rows) - 1).tolist()
    with without_bars():
        return dataset.remove_columns("index").add_column("index", index).select(np.flatnonzero(rows))


def each_row(
    dataset: Dataset, look: Callable[[dict], dict], columns: Features, num_workers: int, desc: str
) -> Dataset:
    """What a function finds in every row, its image as it is stored; `datasets` keeps it for the same files."""
    with without_bars(always=False):
        return dataset.cast_column("image", Image(decode=False)).map(
            look,
            remove_columns=dataset.column_names,
            features=columns,
            num_proc=num_workers if num_workers > 1 else None,
            desc=desc,
        )


def class_ids(dataset: Dataset) -> list[int]:
    """The label of each row as it is stored."""
    return dataset.with_format("arrow")["label"].to_pylist()


def class_counts(dataset: Dataset, num_labels: int) -> np.ndarray:
    """The number of images of each class, (L,); refuses labels that are missing or outside [0, L)."""
    labels = class_ids(dataset)
    for row, label in enumerate(labels):
        if label is None or not 0 <= label < num_labels:
            place = f"split {dataset.split}" if dataset.split else "the dataset"
            remedy = "-1 stands for no label: leave such images out, or the column where sizes are enough."
            if label is not None and label >= 0:
                most = max(other for other in labels if other is not None)
                remedy = f"build the model with `num_labels={most + 1}`, or leave these images out."
            raise ValueError(
                f"{place}, row {row}: the label {label} lies outside [0, {num_labels}), the classes of the model:"
                f" {remedy}"
            )
    return np.bincount(labels, minlength=num_labels)


def check_split(
    splits: Mapping[str, Dataset], dataset: str, name: str, option: str, take: str = "", number: int = 20
) -> None:
    """Refuse a split that is not there, with what to do; for validation the test images are never offered.

    Args:
        splits: What `load_splits` gives.
        dataset: Its name.
        name: Of the split.
        option: What names another one.
        take: What takes validation images from train, for a part that may be taken from there.
        number: How many of each class it takes.
    """
    if name in splits:
        return
    if name == "validation" and "train" in splits and take:
        near = [other for other in splits if other.lower() in ("val", "valid", "dev")]
        named = f", or name one with {option}" + (f" ({near[0]!r}?)" if near else "")
        raise ValueError(
            f"the dataset {dataset!r} has no split 'validation': {take} takes {number} images of each class from"
            f" 'train'{named}. Test images are for the report only."
        )
    near = "".join(f" ({other!r}?)" for other in get_close_matches(name, list(splits), 1, LIKE))
    if name == "test" and list(splits) == ["train"] and option == "--split":
        raise ValueError(
            f"the dataset {dataset!r} has no splits: `--split train` takes all of it, if the model has not learnt from"
            " these images."
        )
    raise ValueError(
        f"the dataset {dataset!r} has no split {name!r}, only {list(splits)}; name the right one with {option}{near}."
    )


def taken_of(counts: np.ndarray, per_class: int, parts: int = 1) -> np.ndarray:
    """How many images of each class are taken from train (L,), so that as many are left after so many such parts."""
    return np.minimum(per_class, counts // (parts + 1))


def take_from_train(
    splits: DatasetDict, validation: int | None = None, test: int | None = None, seed: int = 0
) -> DatasetDict:
    """Take balanced sets of images from train: of each class so many, at random, first for test.

    No part takes more of a class than is left to train on: of a class with few images it is half, or a third where
    both parts are taken. A class with a single image gives none.

    Args:
        splits: What `load_splits` gives, without these splits.
        validation: Validation images of each class.
        test: Test images of each class.
        seed: Same seed, same images; it is not the seed of the training.
    """
    asked = {"test": test, "validation": validation}
    asked = {name: number for name, number in asked.items() if number is not None}
    for i, (name, number) in enumerate(asked.items()):
        splits = _take(splits, name, number, len(asked) - i, seed)
    for name in ("train", *asked) if asked else ():
        splits[name].info.description = json.dumps({TAKE: validation, TAKE_TEST: test, "split_seed": seed})
    return splits


def _take(splits: DatasetDict, name: str, per_class: int, parts: int, seed: int) -> DatasetDict:
    field = TAKE_TEST if name == "test" else TAKE
    if "train" not in splits or name in splits:
        raise ValueError(
            f"{field}={per_class} takes images from the split 'train' where there is no {name!r}, but the dataset has"
            f" {list(splits)}: leave the field out."
        )
    check_whole(field, per_class)
    train = splits["train"]
    names = train.features["label"].names
    counts = class_counts(train, len(names))
    given = taken_of(counts, per_class, parts)
    share = "half" if parts == 1 else "a third"
    if per_class < 1 or not given.any():
        raise ValueError(
            f"{field}={per_class} must be 1 at least, and of a class at most {share} of the images are taken:"
            f" the largest has {counts.max()}."
        )
    labels = np.asarray(class_ids(train))
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]  # (n,), random within each class
    place = np.arange(len(labels)) - np.repeat(np.cumsum(counts) - counts, counts)  # (n,), of each within its class
    taken = np.zeros(len(labels), dtype=bool)
    taken[by_class[place < np.repeat(given, counts)]] = True
    parts = {"train": as_split(train, ~taken, "train"), name: as_split(train, taken, name)}
    return DatasetDict({**parts, **{other: split for other, split in splits.items() if other != "train"}})


def taken_as(dataset: Any) -> dict[str, int]:
    """The fields by which `take_from_train` took these images, or took others from them; none for others."""
    try:
        found = json.loads(getattr(getattr(dataset, "info", None), "description", None) or "{}")
    except (ValueError, RecursionError):  # a stranger's description is any text
        return {}
    if not isinstance(found, dict) or set(found) != {TAKE, TAKE_TEST, "split_seed"}:
        return {}
    numbers = (value for name, value in found.items() if name == "split_seed" or value is not None)
    known = all(type(value) is int and 0 <= value < 10**9 for value in numbers)
    return found if known else {}


def as_split(dataset: Dataset, rows: np.ndarray, name: str) -> Dataset:
    """The rows where the mask (n,) is true, numbered anew, as a split of this name."""
    part = chosen(dataset, rows)
    # that of the table is the same for both parts, and `datasets` would take what it keeps of the one for the other
    named = {"split": name, "fingerprint": part._fingerprint}
    return Dataset(part.data, info=part.info, indices_table=part._indices, **named)


def keep_aside(validation: Dataset, seed: int = 0, least: int = 0) -> tuple[Dataset, Dataset] | None:
    """A random half of the validation images to choose by, and the other, on which nothing is chosen, to calibrate on.

    Args:
        validation: What is divided.
        seed: Same seed, same images.
        least: What each half has to hold; None is returned where it would not.
    """
    number = len(validation) // 2
    if number < max(least, 1):
        return None
    rows = np.zeros(len(validation), dtype=bool)
    rows[np.random.default_rng(seed).permutation(len(validation))[:number]] = True
    return as_split(validation, ~rows, str(validation.split or "validation")), as_split(
        validation, rows, "calibration"
    )


def skip_bad_images(
    dataset: Dataset, name: str, num_workers: int = 0, report: bool = True
) -> tuple[Dataset, list[str]]:
    """The dataset without the images that cannot be read, and a sentence about each of these.

    All images are opened once, before anything is counted; `datasets` keeps the result, so that the next run with the
    same files does not open them again. The images that are left are numbered anew in `index`.

    Args:
        dataset: One split of `load_splits`.
        name: What to call it in messages.
        num_workers: Processes that read images.
        report: Whether to warn when images are left out.
    """
    columns = Features(fault=Value("string"))
    found = each_row(dataset, _fault, columns, num_workers, f"check the images of {name}")
    faults = list(found["fault"])
    bad = [fault for fault in faults if fault is not None]
    if not bad:
        return dataset, []
    if len(bad) == len(faults):
        raise ValueError(f"{name}: none of the {len(bad)} images can be read, e.g. {bad[0]}")
    if report:
        shown = " ".join(bad[:3]) + f" (and {len(bad) - 3} more)" * (len(bad) > 3)
        text = f"{name}: {len(bad)} of {len(faults)} images left out, which cannot be read: {shown}"
        logger.warning(printable(text))
    return chosen(dataset, np.asarray([fault is None for fault in faults])), bad


def _fault(row: dict[str, Any]) -> dict[str, str | None]:
    return {"fault": image_fault(row)}


def image_fault(row: dict[str, Any]) -> str | None:
    """Why the image of a stored row cannot be read, None where it can."""
    stored = row["image"] or {}
    try:
        open_image(stored, name=None if stored.get("path") else f"image {row['index']}")
    except (ValueError, OSError) as error:
        return str(error)
    return None


def collate(examples: list[dict[str, Any]] | dict[str, Any]) -> dict[str, Any]:
    """A batch of examples, or one that is a batch already.

    Labels may be called `label` or `label_ids`, as for transformers' own collator.
    """
    batch = examples if isinstance(examples, dict) else default_collate(examples)
    if not isinstance(batch, dict):
        raise ValueError(
            f"an example of the dataset is a {type(examples[0]).__name__}, and not a mapping with `pixel_values` and"
            " `labels`: take `prepare(load_splits(FOLDER)['train'], model)`."
        )
    for name in ("label", "label_ids"):
        if name in batch:
            batch.setdefault("labels", batch.pop(name))
    return batch


def check_prepared(name: str, dataset: Any) -> None:
    """Refuse all splits at once, and images as they are stored."""
    if isinstance(dataset, dict):
        raise ValueError(
            f"{name} are the splits {list(dataset)}: pass one of them, `prepare({name}['train'], model)`."
        )
    stored = isinstance(dataset, Dataset) and dataset.format["type"] != "custom"
    if stored and "image" in dataset.column_names and "pixel_values" not in dataset.column_names:
        raise ValueError(f"{name} holds images as they are stored, not as the model takes them: `prepare(it, model)`.")


def check_prepared_for(name: str, dataset: Any, model: Any) -> None:
    """Refuse images prepared for a model of another size or colour, and features of another network."""
    if isinstance(dataset, Dataset):
        transform = dataset.format["format_kwargs"].get("transform")
    else:
        transform = getattr(dataset, "transform", None)
    made, own = getattr(transform, "input_size", None), tuple(model.config.pretrained_cfg["input_size"])
    if made is not None and made != own:
        raise ValueError(
            f"{name} was prepared for another model: its images have the shape {made}, and this one takes {own}:"
            " prepare them with this model."
        )
    if hasattr(dataset, "check_for"):
        dataset.check_for(name, model)


def is_labelled(dataset: Any) -> bool:
    """Whether a split has labels; what is not one split is refused: a name, all at once, one of another package."""
    if not hasattr(dataset, "column_names") or isinstance(dataset, dict):
        given = f"the splits {list(dataset)}" if isinstance(dataset, dict) else f"a {type(dataset).__name__}"
        raise ValueError(f"the dataset is {given}: give one split, e.g. `load_splits(FOLDER)['validation']`.")
    columns = dataset.features if isinstance(dataset, Dataset) and "label" not in dataset.column_names else {}
    if classes := [name for name, feature in columns.items() if isinstance(feature, ClassLabel)]:
        logger.warning(
            f"there is no column 'label', so only the sizes of sets are measured; {classes[0]!r} may be it."
        )
    return "label" in (dataset.column_names or ())


def check_length(name: str, dataset: Any) -> None:
    """Refuse a stream where the number of images has to be known before the first."""
    if not has_length(dataset):
        raise ValueError(
            f"{name} of type {type(dataset).__name__} has no length, and thresholds depend on the number of images:"
            " give a dataset that can be counted, e.g. `datasets.Dataset.from_generator(...)`."
        )
