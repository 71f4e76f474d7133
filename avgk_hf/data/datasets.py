"""One door for all data: `glyphs`, a Hub id, an image folder, parquet files, a saved dataset, or an archive."""

import difflib
from pathlib import Path
from typing import Any

import numpy as np
from datasets import ClassLabel, Dataset, DatasetDict, Features, Image, Value, load_dataset, load_from_disk
from datasets.exceptions import DatasetGenerationError

from .cifar import is_cifar_archive, load_cifar
from .glyphs import load_glyphs
from .plantnet import is_plantnet, load_plantnet


def load_splits(
    dataset: str,
    config_name: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
    seed: int = 0,
    validation_per_class: int | None = None,
    split_seed: int = 0,
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

    Returns:
        The splits under their own names, usually train, validation and test.
    """
    splits = _load_splits(dataset, config_name, image_column, label_column, seed)
    return splits if validation_per_class is None else split_validation(splits, validation_per_class, split_seed)


def _load_splits(
    dataset: str, config_name: str | None, image_column: str, label_column: str, seed: int
) -> DatasetDict:
    if dataset == "glyphs":
        return load_glyphs(seed)
    folder = Path(dataset)
    if is_cifar_archive(folder):
        return load_cifar(folder, coarse=label_column == "coarse_label")
    if is_plantnet(folder):
        return load_plantnet(folder)
    if not folder.exists() and dataset.startswith((".", "/", "~")):
        raise FileNotFoundError(f"dataset={dataset!r}: there is no such folder.")
    if folder.is_dir() and not any(folder.iterdir()):
        raise ValueError(f"dataset={dataset!r} is an empty folder; images belong in {dataset}/train/<class>/.")
    saved = (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()
    try:
        splits = load_from_disk(dataset) if saved else load_dataset(dataset, config_name)
    except (IndexError, ValueError) as error:  # datasets has no error of its own for a split without rows
        if isinstance(error, ValueError) and "no data" not in str(error):
            raise
        raise ValueError(f"dataset {dataset!r} is empty.") from None
    except DatasetGenerationError as error:
        reason = error.__cause__ or error
        raise ValueError(f"dataset {dataset!r} cannot be read ({reason}): is a file empty or broken?") from error
    if isinstance(splits, Dataset):
        splits = DatasetDict({str(splits.split or "train"): splits})
    names = _class_names(splits, dataset, image_column, label_column)
    return DatasetDict(
        {name: _to_contract(split, names, image_column, label_column) for name, split in splits.items()}
    )


def _class_names(splits: DatasetDict, dataset: str, image_column: str, label_column: str) -> list[str]:
    """The names of the classes over all splits, after checking that there is something to classify."""
    for name, split in splits.items():
        for column, option in ((image_column, "image_column"), (label_column, "label_column")):
            if column not in split.column_names:
                hint = " Images in one folder per class, `train/<class>/x.jpg`, give it." if option[0] == "l" else ""
                raise ValueError(
                    f"dataset {dataset!r}, split {name!r} has no column {column!r}; it has {split.column_names}. Name"
                    f" the right one with `{option}:`.{hint}"
                )
        if len(split) == 0:
            raise ValueError(f"dataset {dataset!r}, split {name!r} is empty.")
    feature = next(iter(splits.values())).features[label_column]
    if isinstance(feature, ClassLabel):
        return feature.names
    labels = [label for split in splits.values() for label in split.unique(label_column)]
    if any(label is None for label in labels):
        raise ValueError(f"dataset {dataset!r}: the column {label_column!r} has missing values.")
    if all(isinstance(label, str) for label in labels):
        return sorted(set(labels))
    if not all(isinstance(label, int) for label in labels) or min(labels) < 0:
        raise ValueError(
            f"dataset {dataset!r}: the column {label_column!r} holds neither text nor whole numbers from 0, e.g."
            f" {labels[0]!r}."
        )
    return [str(label) for label in range(max(labels) + 1)]


def _to_contract(split: Dataset, names: list[str], image_column: str, label_column: str) -> Dataset:
    columns = {"image": image_column, "label": label_column}
    split = split.select_columns([c for c in (*columns.values(), "index") if c in split.column_names])
    split = split.rename_columns({old: new for new, old in columns.items() if old != new})
    # the position in the split, which a loss with state per image relies on, whatever an index column held before
    index = list(range(len(split)))
    if "index" in split.column_names and list(split["index"]) != index:
        split = split.remove_columns("index")
    if "index" not in split.column_names:
        split = split.add_column("index", index)
    label = ClassLabel(names=names)
    features = Features(image=Image(), label=label, index=Value("int64"))
    if split.features["label"] != label and split.features["label"].dtype == "string":
        split = split.map(lambda row: {"label": label.str2int(row["label"])}, features=features)
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
    labels = np.asarray(dataset.with_format("arrow")["label"].to_pylist())
    if labels.min() < 0 or labels.max() >= num_labels:
        wrong = labels[(labels < 0) | (labels >= num_labels)][0]
        raise ValueError(
            f"label {wrong} lies outside [0, {num_labels}), the classes of the model: build the model with"
            f" `num_labels={labels.max() + 1}`, or check the label column."
        )
    return np.bincount(labels, minlength=num_labels)


def align_labels(dataset: Dataset, config: Any) -> Dataset:
    """The dataset with the model's class ids: classes are matched by name, and unknown ones refused.

    A folder without images of some class has other ids than the training set had. Where no name is known at all but
    the numbers of classes agree, the ids are taken as they are.

    Args:
        dataset: One split of `load_splits`.
        config: A model's config with `id2label`.
    """
    names = dataset.features["label"].names
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
