"""The dataset contract: splits with `image`, `label` (ClassLabel) and `index`, the position in the split."""

from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value
from torch.utils.data import default_collate
from transformers.trainer_utils import has_length
from transformers.utils import logging

from ..images import open_image
from ..shell import printable

logger = logging.get_logger(__name__)
ON_BAD_IMAGE = ("error", "skip")
MOST_BYTES = 2**26  # of a list in an archive; CUB's largest has 700,000


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
    return dataset.remove_columns("index").add_column("index", index).select(np.flatnonzero(rows))


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


def split_validation(splits: DatasetDict, per_class: int, seed: int = 0) -> DatasetDict:
    """Take a balanced validation set from train: exactly `per_class` random images of each class.

    Args:
        splits: What `load_splits` gives, without a validation split.
        per_class: Validation images of each class.
        seed: Same seed, same images; it is not the seed of the training.
    """
    if "train" not in splits or "validation" in splits:
        raise ValueError(
            f"validation_per_class={per_class} takes images from the split 'train' where there is no 'validation', but"
            f" the dataset has {list(splits)}: leave the field out."
        )
    train = splits["train"]
    names = train.features["label"].names
    counts = class_counts(train, len(names))
    if per_class < 1 or per_class >= counts.min():
        raise ValueError(
            f"validation_per_class={per_class} must lie in [1, {counts.min()}): the class {names[counts.argmin()]!r}"
            f" has {counts.min()} training images, and one at least must stay."
        )
    labels = np.asarray(class_ids(train))
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]  # (n,), random within each class
    starts = np.cumsum(counts) - counts
    taken = np.zeros(len(labels), dtype=bool)
    taken[by_class[(starts[:, None] + np.arange(per_class)).ravel()]] = True
    parts = {}
    for name, rows in (("train", ~taken), ("validation", taken)):
        part = chosen(train, rows)
        parts[name] = Dataset(part.data, info=part.info, split=name, indices_table=part._indices)
    return DatasetDict({**parts, **{name: split for name, split in splits.items() if name != "train"}})


def skip_bad_images(dataset: Dataset, name: str, num_workers: int = 0, report: bool = True) -> tuple[Dataset, int]:
    """The dataset without the images that cannot be read, and how many these are.

    All images are opened once, before anything is counted; `datasets` keeps the result, so that the next run with the
    same files does not open them again. The images that are left are numbered anew in `index`.

    Args:
        dataset: One split of `load_splits`.
        name: What to call it in messages.
        num_workers: Processes that read images.
        report: Whether to warn when images are left out.
    """
    found = dataset.cast_column("image", Image(decode=False)).map(
        _fault,
        remove_columns=dataset.column_names,
        features=Features(fault=Value("string")),
        num_proc=num_workers if num_workers > 1 else None,
        desc=f"check the images of {name}",
    )
    faults = list(found["fault"])
    bad = [fault for fault in faults if fault is not None]
    if not bad:
        return dataset, 0
    if len(bad) == len(faults):
        raise ValueError(f"{name}: none of the {len(bad)} images can be read, e.g. {bad[0]}")
    if report:
        shown = " ".join(bad[:3]) + f" (and {len(bad) - 3} more)" * (len(bad) > 3)
        text = f"{name}: {len(bad)} of {len(faults)} images cannot be read and are left out: {shown}"
        logger.warning(printable(text))
    return chosen(dataset, np.asarray([fault is None for fault in faults])), len(bad)


def _fault(row: dict[str, Any]) -> dict[str, str | None]:
    """Why an image cannot be read, None where it can."""
    stored = row["image"] or {}
    try:
        open_image(stored, name=None if stored.get("path") else f"image {row['index']}")
    except (ValueError, OSError) as error:
        return {"fault": str(error)}
    return {"fault": None}


def collate(examples: list[dict[str, Any]] | dict[str, Any]) -> dict[str, Any]:
    """A batch of examples, or one that is a batch already.

    Labels may be called `label` or `label_ids`, as for transformers' own collator.
    """
    batch = examples if isinstance(examples, dict) else default_collate(examples)
    for name in ("label", "label_ids"):
        if name in batch:
            batch.setdefault("labels", batch.pop(name))
    return batch


def check_length(name: str, dataset: Any) -> None:
    """Refuse a stream where the number of images has to be known before the first."""
    if not has_length(dataset):
        raise ValueError(
            f"{name} of type {type(dataset).__name__} has no length, and thresholds depend on the number of images:"
            " give a dataset that can be counted, e.g. `datasets.Dataset.from_generator(...)`."
        )
