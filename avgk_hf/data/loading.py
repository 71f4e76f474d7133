"""One door for all data: `glyphs`, a Hub id, an image folder, parquet files, a saved dataset, or an archive."""

import logging
import os
from collections.abc import Mapping
from pathlib import Path
from statistics import mode
from typing import Any

import pyarrow.parquet as pq
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    IterableDatasetDict,
    Value,
    load_dataset_builder,
    load_from_disk,
)
from datasets.data_files import SPLIT_KEYWORDS
from datasets.exceptions import DatasetGenerationError
from datasets.packaged_modules.imagefolder.imagefolder import ImageFolder

from ..checks import check_dataset, reason_of
from .boundary import Inside, Refused, check_builder, check_folder, check_images, check_linked, check_reach
from .cifar import is_cifar_archive, load_cifar
from .classes import check_new_classes, class_names, nfc, with_classes
from .cub import is_cub, load_cub
from .datasets import contract, take_from_train, without_bars
from .glyphs import load_glyphs
from .plantnet import is_plantnet, load_plantnet
from .sources import image_files
from .streams import Stream, anywhere, undecoded
from .tiny_imagenet import is_tiny_imagenet, load_tiny_imagenet

# archives as their authors publish them: how each is known, and what reads it for a column of classes
ARCHIVES = (
    (is_cifar_archive, lambda folder, column: load_cifar(folder, coarse=column == "coarse_label")),
    (is_plantnet, lambda folder, column: load_plantnet(folder)),
    (is_cub, lambda folder, column: load_cub(folder)),
    (is_tiny_imagenet, lambda folder, column: load_tiny_imagenet(folder)),
)


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
    allow_new_classes: bool = False,
    test_per_class: int | None = None,
) -> DatasetDict:
    """Load a dataset and bring it to the contract: columns `image`, `label` (ClassLabel) and `index`.

    Args:
        dataset: `glyphs` (generated), a folder (images in `split/class/`, parquet files, written by `save_to_disk`,
            or the unpacked archive of CIFAR-100, Pl@ntNet-300K, CUB-200-2011 or Tiny ImageNet), or the id of a
            dataset on the Hub.
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
        allow_new_classes: Whether other splits may have classes without an image in `train`.
        test_per_class: For data without test images: take this many of each class from train, before validation.

    Returns:
        The splits under their own names, usually train, validation and test. All have the same classes, matched by
        name, in Unicode's form NFC.
    """
    if image_column == label_column:
        raise ValueError(f"image_column and label_column are both {image_column!r}: name the two columns.")
    folder = Path(dataset)
    if dataset != "glyphs" and folder.is_dir() and not allow_outside:
        check_folder(folder)
    load_archive = next((load for is_known, load in ARCHIVES if is_known(folder)), None)
    if dataset == "glyphs":
        splits = load_glyphs(seed)
    elif load_archive is not None:
        splits = load_archive(folder, label_column)
    else:
        splits = _read(dataset, config_name, label_column, allow_outside)
        splits = _to_contract(splits, dataset, {"image": image_column, "label": label_column}, unlabelled)
        if not allow_outside:
            check_images(splits, dataset)
    if not allow_new_classes:
        check_new_classes(splits)
    return take_from_train(splits, validation_per_class, test_per_class, split_seed)


def load_streams(
    dataset: str,
    config_name: str | None = None,
    image_column: str = "image",
    label_column: str = "label",
    num_examples: int | None = None,
    unlabelled: bool = False,
    allow_outside: bool = False,
) -> dict[str, Stream]:
    """The splits of a Hub id, or of a folder of parquet, tars or images, as streams: nothing is downloaded or copied.

    The arguments are those of `load_splits`, and `num_examples` that of `Stream` for the split that will be read.
    Classes are not compared between splits.
    """
    folder = Path(dataset)
    saved = any((folder / name).exists() for name in ("dataset_dict.json", "dataset_info.json"))
    if dataset == "glyphs" or saved or any(is_known(folder) for is_known, _ in ARCHIVES):
        raise ValueError(f"dataset={dataset!r} takes no room by being loaded as usual: leave out the streaming.")
    if folder.is_dir() and not allow_outside:
        check_folder(folder)
    splits = _read(dataset, config_name, label_column, allow_outside, streaming=True)
    columns = _columns(splits, dataset, {"image": image_column, "label": label_column}, unlabelled)
    names = {old: new for new, old in columns.items() if old != new}
    check = anywhere if allow_outside else Inside(dataset)
    made = {}
    for name, split in splits.items():
        rows = undecoded(split, columns["image"]).select_columns(list(columns.values()))
        made[name] = Stream(rows.rename_columns(names), num_examples, check)
    return made


def _read(
    dataset: str, config_name: str | None, label_column: str, allow_outside: bool, streaming: bool = False
) -> DatasetDict | IterableDatasetDict:
    """What `datasets` makes of a folder or a Hub id, with a look at what it would read before it does."""
    folder = Path(dataset)
    check_dataset(dataset)
    if folder.is_file():
        recipe = folder.suffix.lower() in (".yaml", ".yml")
        remedy = f"a recipe is trained with `avgk train {dataset}`" if recipe else "name the folder that holds it"
        raise ValueError(f"dataset={dataset!r} is a file; {remedy}.")
    if folder.is_dir() and not any(folder.iterdir()):
        raise ValueError(f"dataset={dataset!r} is an empty folder; images belong in {dataset}/train/<class>/.")
    saved = (folder / "dataset_dict.json").exists() or (folder / "dataset_info.json").exists()
    if folder.is_dir() and not saved:
        check_linked(folder)
        _check_parquet(folder, label_column)
    try:
        if saved:
            splits = load_from_disk(dataset)
        else:
            place = os.path.realpath(dataset) if folder.is_dir() else dataset  # the folder itself may be a link
            logging.getLogger("huggingface_hub.repocard").addFilter(_is_no_card)
            if not folder.is_dir():
                check_reach(dataset)
            builder = load_dataset_builder(place, config_name, data_files=_split_files(folder))
            if not allow_outside:
                check_builder(builder, dataset)
            if streaming:
                return builder.as_streaming_dataset()
            # of an image folder nothing is downloaded, and only paths are written
            with without_bars(always=isinstance(builder, ImageFolder)):
                builder.download_and_prepare()
            splits = builder.as_dataset()
    except Refused as error:
        raise ValueError(f"dataset {dataset!r}: {error}.") from None
    except Exception as error:  # of arrow, json, the file system or the network
        # datasets has no error of its own for a split without rows
        if isinstance(error, IndexError) or (isinstance(error, ValueError) and "no data" in str(error)):
            raise ValueError(f"dataset {dataset!r} is empty.") from None
        if not folder.is_dir() and not isinstance(error, DatasetGenerationError):
            text = f"there is no folder {dataset!r} here, and as a Hub id it cannot be loaded ({reason_of(error)})"
            raise OSError(f"{text}: check the name, which is relative to where the command is run.") from error
        reason = reason_of(error.__cause__ or error)
        if (folder / "config.json").is_file() and (folder / "model.safetensors").is_file():
            raise ValueError(f"dataset={dataset!r} is a model: name the folder of images.") from None
        if "same data file format" in reason:
            raise ValueError(
                f"dataset {dataset!r} holds files of several kinds: name the folder of images."
            ) from error
        raise ValueError(f"dataset {dataset!r} cannot be read ({reason}): is a file empty or broken?") from error
    return DatasetDict({str(splits.split or "train"): splits}) if isinstance(splits, Dataset) else splits


def _is_no_card(record: logging.LogRecord) -> bool:
    """Not that the README beside somebody's photographs is no card of a dataset on the Hub."""
    return "metadata block was not found" not in record.getMessage()


def _split_files(folder: Path) -> dict[str, str] | None:
    """By split the files of its folder, where a class is named like a split; None where `datasets` finds them itself.

    It would take all of CIFAR-100's class `train` for training, `test/train/*.png` too.
    """
    places = {split: word for split, words in SPLIT_KEYWORDS.items() for word in words if (folder / word).is_dir()}
    words = [word for words in SPLIT_KEYWORDS.values() for word in words]
    if not any((folder / place / word).is_dir() for place in places.values() for word in words):
        return None
    return {str(split): f"{place}/**" for split, place in places.items()}


def _check_parquet(folder: Path, label_column: str) -> None:
    """Refuse files that are no parquet, and class names that differ: `datasets` would take the ids of the first."""
    first: tuple[Path, list[str]] | None = None
    for file in sorted(folder.rglob("*.parquet")):
        try:
            feature = Features.from_arrow_schema(pq.read_schema(file)).get(label_column)
        except Exception as error:  # of arrow, for a broken file, and of json, for a broken header
            raise ValueError(
                f"{file} cannot be read as parquet ({reason_of(error)}); replace or remove it."
            ) from error
        if isinstance(feature, ClassLabel):
            first = first or (file, feature.names)
            if feature.names != first[1]:
                raise ValueError(
                    f"{file} and {first[0]} have different classes in the column {label_column!r}; write all splits"
                    " with the same ClassLabel, or the class names as text."
                )


def _to_contract(splits: DatasetDict, dataset: str, columns: dict[str, str], unlabelled: bool) -> DatasetDict:
    """The splits with our columns for theirs, and the same classes in all of them."""
    columns = _columns(splits, dataset, columns, unlabelled)
    for name, split in splits.items():
        if len(split) == 0:
            raise ValueError(f"dataset {dataset!r}, split {name!r} is empty.")
    names = _class_names(splits, dataset, columns["label"]) if "label" in columns else None
    made = {}
    for name, split in splits.items():
        try:
            split = split.select_columns(list(columns.values()))
            split = split.rename_columns({old: new for new, old in columns.items() if old != new})
            if names is not None and split.features["label"] != ClassLabel(names=names):
                split = with_classes(split, names)
            with without_bars():
                made[name] = split.add_column("index", list(range(len(split)))).cast(contract(names))
        except Exception as error:  # of arrow, for a column of another type
            raise ValueError(
                f"dataset {dataset!r}, split {name!r}: {' or '.join(map(repr, columns.values()))} cannot be read as"
                f" images and classes ({reason_of(error)}); name the right columns with `image_column:` and"
                " `label_column:`."
            ) from error
    return DatasetDict(made)


def _columns(splits: Mapping[str, Any], dataset: str, columns: dict[str, str], unlabelled: bool) -> dict[str, str]:
    """{our column: theirs} of those that are there; one that has to be and is not is refused."""
    if unlabelled and not any(columns["label"] in (split.column_names or []) for split in splits.values()):
        columns = {"image": columns["image"]}
    for name, split in splits.items():
        for ours, column in columns.items():
            if column not in (split.column_names or []):
                if list(columns.values()) == ["image", "label"] and split.column_names == ["image"]:
                    reason = next(iter(misplaced(dataset)), None) or _empty(dataset) or no_classes(dataset)
                    raise ValueError(f"dataset {dataset!r}: {reason}.")
                hint = " Images in one folder per class, `train/<class>/x.jpg`, give it." if ours == "label" else ""
                raise ValueError(
                    f"dataset {dataset!r}, split {name!r} has no column {column!r}; it has {split.column_names}. Name"
                    f" the right one with `{ours}_column:` in a recipe, `--{ours}-column` for a command.{hint}"
                )
    return columns


def _empty(dataset: str) -> str | None:
    """The first class folder without a file, in a sentence: with one other class there is none to tell it from."""
    folders = (path for path in sorted(Path(dataset).glob("*/*")) if path.is_dir() and not path.name.startswith("."))
    empty = next((path.relative_to(dataset).as_posix() for path in folders if not any(path.iterdir())), None)
    return f"{empty} has no image, and two classes at least must have some" if empty else None


def misplaced(dataset: str) -> list[str]:
    """Which image files lie deeper or higher than most, a sentence each: because of one of them no class is known."""
    paths = [path.relative_to(dataset) for path in image_files(dataset)]
    usual = mode([len(path.parts) for path in paths] or [0])
    remedies = {True: ("deeper", "up"), False: ("higher", "to those of its class")}
    found = [(path, *remedies[len(path.parts) > usual]) for path in paths if usual > 1 and len(path.parts) != usual]
    return [f"{path.as_posix()} lies {where} than the others: move it {remedy}" for path, where, remedy in found]


def no_classes(dataset: str) -> str:
    """What would tell the classes of images, in a sentence."""
    above, own = Path(dataset).resolve().parent, any(path.parent == Path(dataset) for path in image_files(dataset))
    whole = f"; or name {os.path.relpath(above)}, if this is one class of it" if own else ""
    return (
        "it does not say which class its images are of: they belong in one folder for each of two or more classes,"
        f" none deeper than others, {dataset}/<class>/x.jpg; in a table, the column of classes is named with"
        f" `label_column:` or `--label-column`{whole}"
    )


def _class_names(splits: DatasetDict, dataset: str, label_column: str) -> list[str]:
    """The names of the classes over all splits."""
    features = [split.features[label_column] for split in splits.values()]
    if all(isinstance(feature, ClassLabel) for feature in features):
        return list(dict.fromkeys(nfc(name) for feature in features for name in feature.names))
    plain = all(isinstance(feature, Value) for feature in features)
    labels = [label for split in splits.values() for label in split.unique(label_column)] if plain else features
    return class_names(labels, f"dataset {dataset!r}: the column {label_column!r}")
