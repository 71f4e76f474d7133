"""One door for all data: `glyphs`, a Hub id, an image folder, parquet files, a saved dataset, or an archive."""

import difflib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, load_dataset_builder, load_from_disk
from datasets.exceptions import DatasetGenerationError
from transformers.utils import logging

from ..images import open_image
from ..shell import printable
from .boundary import check_builder, check_folder, check_images, hub_roots, own_roots
from .cifar import is_cifar_archive, load_cifar
from .glyphs import load_glyphs
from .plantnet import is_plantnet, load_plantnet

logger = logging.get_logger(__name__)
MOST_CLASSES = 1_000_000
ON_BAD_IMAGE = ("error", "skip")


def load_splits(
    dataset: str,
    config_name: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
    seed: int = 0,
    validation_per_class: int | None = None,
    split_seed: int = 0,
    unlabelled: bool = False,
    allow_outside: bool = False,
) -> DatasetDict:
    """Load a dataset and bring it to the contract: columns `image`, `label` (ClassLabel) and `index`.

    Args:
        dataset: `glyphs` (generated), a folder (images in `split/class/`, parquet files, written by `save_to_disk`,
            or the unpacked archive of CIFAR-100 or Pl@ntNet-300K), or the id of a dataset on the Hub.
        config_name: Configuration of a Hub dataset.
        image_column: Its column of images.
        label_column: Its column of classes: ClassLabel, text, or whole numbers from 0.
        seed: Seed of generated data.
        validation_per_class: For data without validation images: take this many of each class from train.
        split_seed: Which ones; same seed, same images.
        unlabelled: Whether a dataset without the column of classes, e.g. a folder of image files, is taken too; its
            splits have no column `label`.
        allow_outside: Whether the dataset may point out of itself: links, paths of images, and addresses on the
            network in its README. Only for a dataset whose author you trust.

    Returns:
        The splits under their own names, usually train, validation and test. All have the same classes, matched by
        name; a class that only some splits have is a class without images in the others.
    """
    if image_column == label_column:
        raise ValueError(f"image_column and label_column are both {image_column!r}: name the two columns.")
    splits = _load_splits(dataset, config_name, image_column, label_column, seed, unlabelled, allow_outside)
    return splits if validation_per_class is None else split_validation(splits, validation_per_class, split_seed)


def _load_splits(
    dataset: str,
    config_name: str | None,
    image_column: str,
    label_column: str,
    seed: int,
    unlabelled: bool,
    allow_outside: bool,
) -> DatasetDict:
    if dataset == "glyphs":
        return load_glyphs(seed)
    folder = Path(dataset)
    if folder.is_dir() and not allow_outside:
        check_folder(folder)
    if is_cifar_archive(folder):
        return load_cifar(folder, coarse=label_column == "coarse_label")
    if is_plantnet(folder):
        return load_plantnet(folder)
    if not folder.exists() and dataset.startswith((".", "/", "~")):
        raise FileNotFoundError(f"dataset={dataset!r}: there is no such folder.")
    if folder.is_file():
        raise ValueError(f"dataset={dataset!r} is a file; name the folder that holds it.")
    if folder.is_dir() and not any(folder.iterdir()):
        raise ValueError(f"dataset={dataset!r} is an empty folder; images belong in {dataset}/train/<class>/.")
    saved = (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()
    if folder.is_dir() and not saved:
        _check_parquet(sorted(folder.rglob("*.parquet")), label_column)
    try:
        splits = load_from_disk(dataset) if saved else _load_dataset(dataset, config_name, allow_outside)
    except Exception as error:  # of arrow, json, the file system or the network
        # datasets has no error of its own for a split without rows
        if isinstance(error, IndexError) or (isinstance(error, ValueError) and "no data" in str(error)):
            raise ValueError(f"dataset {dataset!r} is empty.") from None
        if not folder.is_dir() and not isinstance(error, DatasetGenerationError):
            reason = " ".join(str(error).split())
            raise OSError(
                f"there is no folder {dataset!r} here, and as a Hub id it cannot be loaded ({reason}): check the name."
            ) from error
        reason = " ".join(str(error.__cause__ or error).split()) or type(error).__name__
        raise ValueError(f"dataset {dataset!r} cannot be read ({reason}): is a file empty or broken?") from error
    if isinstance(splits, Dataset):
        splits = DatasetDict({str(splits.split or "train"): splits})
    without = unlabelled and all(label_column not in split.column_names for split in splits.values())
    _check_columns(
        splits,
        dataset,
        {"image_column": image_column} if without else {"image_column": image_column, "label_column": label_column},
    )
    names = None if without else _class_names(splits, dataset, label_column)
    contract = {}
    for name, split in splits.items():
        try:
            contract[name] = _to_contract(split, names, image_column, label_column)
        except Exception as error:  # of arrow, for a column of another type
            reason = " ".join(str(error).split())
            raise ValueError(
                f"dataset {dataset!r}, split {name!r}: {image_column!r} or {label_column!r} cannot be read as images"
                f" and classes ({reason}); name the right columns with `image_column:` and `label_column:`."
            ) from error
        if not allow_outside:
            check_images(contract[name], own_roots(folder) if folder.is_dir() else hub_roots(dataset), dataset)
    return DatasetDict(contract)


def _load_dataset(dataset: str, config_name: str | None, allow_outside: bool) -> DatasetDict:
    """`datasets.load_dataset`, with a look at what it would read before it does."""
    builder = load_dataset_builder(dataset, config_name)
    if not allow_outside:
        check_builder(builder, dataset, own_roots(Path(dataset)) if Path(dataset).is_dir() else None)
    builder.download_and_prepare()
    return builder.as_dataset()


def _check_parquet(files: Iterable[Path], label_column: str) -> None:
    """Refuse files that are no parquet, and class names that differ: `datasets` would take the ids of the first."""
    first: tuple[Path, list[str]] | None = None
    for file in files:
        try:
            feature = Features.from_arrow_schema(pq.read_schema(file)).get(label_column)
        except Exception as error:  # of arrow, for a broken file, and of json, for a broken header
            reason = " ".join(str(error).split())
            raise ValueError(f"{file} cannot be read as parquet ({reason}); replace or remove it.") from error
        if isinstance(feature, ClassLabel):
            first = first or (file, feature.names)
            if feature.names != first[1]:
                raise ValueError(
                    f"{file} and {first[0]} have different classes in the column {label_column!r}; write all splits"
                    " with the same ClassLabel, or the class names as text."
                )


def _check_columns(splits: DatasetDict, dataset: str, columns: dict[str, str]) -> None:
    """Refuse splits without rows, or without a column that an option names."""
    for name, split in splits.items():
        for option, column in columns.items():
            if column not in split.column_names:
                hint = " Images in one folder per class, `train/<class>/x.jpg`, give it." if option[0] == "l" else ""
                raise ValueError(
                    f"dataset {dataset!r}, split {name!r} has no column {column!r}; it has {split.column_names}. Name"
                    f" the right one with `{option}:` in a recipe, `--{option.replace('_', '-')}` for a command.{hint}"
                )
        if len(split) == 0:
            raise ValueError(f"dataset {dataset!r}, split {name!r} is empty.")


def _class_names(splits: DatasetDict, dataset: str, label_column: str) -> list[str]:
    """The names of the classes over all splits."""
    features = [split.features[label_column] for split in splits.values()]
    if all(isinstance(feature, ClassLabel) for feature in features):
        return list(dict.fromkeys(name for feature in features for name in feature.names))
    if not all(isinstance(feature, Value) for feature in features):
        raise ValueError(
            f"dataset {dataset!r}: the column {label_column!r} holds {features[0]} in one split, neither text nor"
            " whole numbers from 0 in all of them; one class for each image is needed."
        )
    labels = [label for split in splits.values() for label in split.unique(label_column)]
    if any(label is None for label in labels):
        raise ValueError(f"dataset {dataset!r}: the column {label_column!r} has missing values.")
    if all(isinstance(label, str) for label in labels):
        return sorted(set(labels))
    if not all(isinstance(label, int) and not isinstance(label, bool) for label in labels) or min(labels) < 0:
        raise ValueError(
            f"dataset {dataset!r}: the column {label_column!r} holds neither text nor whole numbers from 0, e.g."
            f" {labels[0]!r}. Leave out images without a label."
        )
    if max(labels) >= MOST_CLASSES:
        raise ValueError(
            f"dataset {dataset!r}: the column {label_column!r} holds {max(labels)}, and whole numbers count the"
            " classes from 0; write class names as text."
        )
    return [str(label) for label in range(max(labels) + 1)]


def _to_contract(split: Dataset, names: list[str] | None, image_column: str, label_column: str) -> Dataset:
    columns = {"image": image_column} if names is None else {"image": image_column, "label": label_column}
    split = split.select_columns([c for c in dict.fromkeys((*columns.values(), "index")) if c in split.column_names])
    split = split.rename_columns({old: new for new, old in columns.items() if old != new})
    # the position in the split, which a loss with state per image relies on, whatever an index column held before
    index = list(range(len(split)))
    if "index" in split.column_names and list(split["index"]) != index:
        split = split.remove_columns("index")
    if "index" not in split.column_names:
        split = split.add_column("index", index)
    if names is None:
        return split.cast(Features(image=Image(), index=Value("int64")))
    label = ClassLabel(names=names)
    features = Features(image=Image(), label=label, index=Value("int64"))
    own = split.features["label"]
    if own != label and own.dtype == "string":
        split = split.map(lambda row: {"label": label.str2int(row["label"])}, features=features)
    elif isinstance(own, ClassLabel) and own.names != names:
        class_counts(split, len(own.names))
        ids = np.asarray([label.str2int(name) for name in own.names])[np.asarray(split["label"])]
        split = split.remove_columns("label").add_column("label", ids.tolist()).select_columns(list(features))
    return split.cast(features)


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
    labels = np.asarray(train.with_format("arrow")["label"].to_pylist())
    order = np.random.default_rng(seed).permutation(len(labels))
    by_class = order[np.argsort(labels[order], kind="stable")]  # (n,), random within each class
    starts = np.cumsum(counts) - counts
    taken = np.zeros(len(labels), dtype=bool)
    taken[by_class[(starts[:, None] + np.arange(per_class)).ravel()]] = True
    # the new positions are written before rows are selected: to add a column later would copy all images
    index = np.where(taken, np.cumsum(taken), np.cumsum(~taken)) - 1
    train = train.remove_columns("index").add_column("index", index.tolist())
    parts = {}
    for name, rows in (("train", np.flatnonzero(~taken)), ("validation", np.flatnonzero(taken))):
        part = train.select(rows)
        parts[name] = Dataset(part.data, info=part.info, split=name, indices_table=part._indices)
    return DatasetDict({**parts, **{name: split for name, split in splits.items() if name != "train"}})


def class_counts(dataset: Dataset, num_labels: int) -> np.ndarray:
    """The number of images of each class, (L,); refuses labels outside [0, L)."""
    labels = dataset.with_format("arrow")["label"].to_pylist()
    _check_labels(labels, range(num_labels), f"split {dataset.split}" if dataset.split else "the dataset")
    return np.bincount(labels, minlength=num_labels)


def _check_labels(labels: list[int | None], classes: Any, place: str) -> None:
    """Refuse labels that are missing, or outside [0, L)."""
    for row, label in enumerate(labels):
        if label is None or not 0 <= label < len(classes):
            most = max(other for other in labels if other is not None) if any(labels) else 0
            raise ValueError(
                f"{place}, row {row}: the label {label} lies outside [0, {len(classes)}), the classes of the model:"
                f" build the model with `num_labels={most + 1}`, or leave out images without a label."
            )


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
    faults = dataset.cast_column("image", Image(decode=False)).map(
        _fault,
        remove_columns=dataset.column_names,
        features=Features(fault=Value("string")),
        num_proc=num_workers if num_workers > 1 else None,
        desc=f"check the images of {name}",
    )
    faults = list(faults["fault"])
    bad = [fault for fault in faults if fault is not None]
    if not bad:
        return dataset, 0
    if len(bad) == len(faults):
        raise ValueError(f"{name}: none of the {len(bad)} images can be read, e.g. {bad[0]}")
    if report:
        shown = " ".join(bad[:3]) + f" (and {len(bad) - 3} more)" * (len(bad) > 3)
        text = f"{name}: {len(bad)} of {len(faults)} images cannot be read and are left out: {shown}"
        logger.warning(printable(text))
    kept = dataset.select([row for row, fault in enumerate(faults) if fault is None])
    return kept.remove_columns("index").add_column("index", list(range(len(kept)))), len(bad)


def _fault(row: dict[str, Any]) -> dict[str, str | None]:
    """Why an image cannot be read, None where it can."""
    stored = row["image"] or {}
    try:
        open_image(stored, name=None if stored.get("path") else f"image {row['index']}")
    except (ValueError, OSError) as error:
        return {"fault": str(error)}
    return {"fault": None}


def align_labels(dataset: Dataset, config: Any) -> Dataset:
    """The dataset with the model's class ids: classes are matched by name, and unknown ones refused.

    A folder without images of some class has other ids than the training set had. Where no name is known at all but
    the numbers of classes agree, the ids are taken as they are.

    Args:
        dataset: One split of `load_splits`.
        config: A model's config with `id2label`.
    """
    names = dataset.features["label"].names
    class_counts(dataset, len(names))
    known = {name: int(i) for i, name in config.id2label.items()}
    if [known.get(name) for name in names] == list(range(len(names))):
        return dataset
    unknown = [name for name in names if name not in known]
    if len(unknown) == len(names) == len(known):
        return dataset
    if unknown:
        near = difflib.get_close_matches(unknown[0], known, n=1)
        raise ValueError(
            f"the dataset has {len(unknown)} classes that the model does not know, e.g. {unknown[0]!r}"
            + (f" (the model knows {near[0]!r})" if near else "")
            + ". Name the classes as in the model's config, or leave these images out."
        )
    ids = np.asarray([known[name] for name in names])[np.asarray(dataset["label"])]
    label = ClassLabel(names=[config.id2label[i] for i in range(len(known))])
    return dataset.remove_columns("label").add_column("label", ids.tolist()).cast_column("label", label)
