"""Options that several commands have."""

import argparse
import os
import sys
from collections.abc import Iterable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from ..shell import printable

LEFT_OUT = 1  # the exit code where some images could not be read

BAD_IMAGES = {
    "choices": ("error", "skip"),
    "default": "error",
    "help": "refuse an image that cannot be read, or leave it out and say so (%(default)s)",
}
ALLOW_OUTSIDE = {
    "action": "store_true",
    "help": "let the dataset point out of itself: links, paths of images, addresses in its README",
}
BATCH_SIZE = {"type": int, "default": 64, "help": "images per forward pass (%(default)s)"}
BALANCE = {
    "type": float,
    "metavar": "B",
    "help": "0: every image counts alike, 1: every class does; one that is recorded (the model's own)",
}
PER_CLASS_WEIGHT = {
    "type": float,
    "metavar": "W",
    "help": "thresholds between that of all images (0) and those of each class (1)",
}
METHOD = {"default": "lac", "help": "how coverage is reached: lac, aps or raps (%(default)s)"}


def check_model(
    name: str,
    ks: list[float] = (),
    calibrated: bool = True,
    dataset: str | None = None,
    levels: list[float] = (),
    images: str | None = None,
) -> None:
    """Refuse a model and set sizes that cannot be meant, before torch is imported.

    Args:
        name: Folder or Hub id; of the latter nothing is known yet.
        ks: Average set sizes.
        calibrated: Whether they have to be in the calibrated range.
        dataset: A dataset, whose path has to be there.
        levels: Of coverage.
        images: Where images are, which may have been named in the model's place.
    """
    from ..checks import check_calibrated, check_dataset, check_k, model_folder, read_config
    from ..conformal import check_level

    other = dataset or images
    if (
        other
        and Path(name).is_dir()
        and (Path(other) / "config.json").is_file() > (Path(name) / "config.json").is_file()
    ):
        raise ValueError(f"{name} is no model, and {other} is one: name the model first.")
    folder = model_folder(name)
    stored = {} if folder is None else read_config(folder)
    labels, thresholds = stored.get("id2label") or stored.get("label_names"), stored.get("thresholds")  # or timm's
    number = len(labels) if isinstance(labels, dict | list) and labels else None
    try:
        known = [check_k(float(key), number) for key in dict(thresholds or {})] if calibrated else []
    except (TypeError, ValueError):  # refused with the field's name when the model is loaded
        known = []
    for k in ks:
        check_k(k, None if known else number)
        if known:
            check_calibrated(k, known, number, ks)
    for level in levels:
        check_level(level)
    if dataset is not None:
        check_dataset(dataset)


def check_pictures(*asked: object) -> None:
    """Refuse pictures that cannot be drawn before anything is computed, where any are asked for."""
    if any(asked) and find_spec("matplotlib") is None:
        raise ImportError("pictures need matplotlib: `pip install matplotlib`.")


def data_arguments(parser: argparse.ArgumentParser) -> None:
    """The dataset and how it is read, for commands that take no model."""
    parser.add_argument("dataset", help="glyphs, a folder of images or parquet, a saved dataset, or a Hub id")
    parser.add_argument("--image-column", default="image", help="column that holds the images (%(default)s)")
    parser.add_argument("--label-column", default="label", help="column that holds the classes (%(default)s)")
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)


def read_splits(args: argparse.Namespace, unlabelled: bool = False) -> Any:
    """All splits of that dataset; a folder that is not there is refused before anything heavy is imported."""
    from ..checks import check_dataset

    check_dataset(args.dataset)
    if near := above(args.dataset):
        folder, beside = near
        text = f"{args.dataset} is one split, and there is `{beside}` beside it: did you mean {folder}?"
        print(printable(text), file=sys.stderr)
    from ..data import load_splits

    how = {"image_column": args.image_column, "label_column": args.label_column, "unlabelled": unlabelled}
    return load_splits(args.dataset, **how, allow_outside=args.allow_outside, allow_new_classes=True)


def above(dataset: str) -> tuple[str, str] | None:
    """Where a folder is only a split of a dataset: that dataset, and another of its splits."""
    folder, known = os.path.normpath(os.path.join(dataset, os.pardir)), {"train", "validation", "val", "test"}
    others = known - {os.path.basename(os.path.abspath(dataset))}
    beside = sorted(name for name in others if len(others) < 4 and os.path.isdir(os.path.join(folder, name)))
    return (folder, beside[0]) if beside and os.path.isdir(dataset) else None


def label_arguments(parser: argparse.ArgumentParser) -> None:
    """How the classes of a dataset are matched to the model's."""
    labels = parser.add_mutually_exclusive_group()
    by_name = "the model's name of each of the dataset's classes: CSV with two columns, or a JSON mapping"
    labels.add_argument("--label-map", metavar="FILE", help=by_name)
    by_position = "class i of the dataset is class i of the model, whatever their names"
    labels.add_argument("--labels-by-position", action="store_true", help=by_position)


def balance(text: str) -> float | str:
    """The value of --balance: a number, or `auto` where there is something to choose."""
    return text if text == "auto" else float(text)


def per_class_of(args: argparse.Namespace) -> bool | float:
    """What `Question` takes of --per-class and --per-class-weight."""
    if args.per_class_weight is None:
        return args.per_class
    if args.per_class:
        raise ValueError("--per-class is --per-class-weight 1: give one of them.")
    return {0.0: False, 1.0: True}.get(args.per_class_weight, args.per_class_weight)


def say_shared(calibration: Any, levels: Iterable[float], per_class: bool | float) -> None:
    """Say where thresholds per class are asked for and no class has one of its own."""
    recorded = calibration.coverage.get("per_class") or {} if per_class else {}
    shared = [f"{level:g}" for level in levels if not recorded.get(f"{level:g}", {"own": True})["own"]]
    if shared:
        text = f"coverage {', '.join(shared)} per class: no class had images enough for a threshold of its own"
        print(f"{text}, so all of them share one.", file=sys.stderr)


def writes_card(folder: Path) -> str:
    """The command that writes the card of a folder anew; a classifier that was not trained here has no results."""
    return "`avgk card`" if (folder / "results.json").is_file() else "`avgk calibrate` with --out another folder"


def say_written(path: object, what: str, args: argparse.Namespace) -> None:
    """Name a file that was written, and what it shows; beside the answer where that is for a program."""
    print(printable(f"written to {path}: {what}"), file=sys.stderr if args.json else sys.stdout)


def replacing_said(path: str | Path, what: str) -> str:
    """What a file shows that is going to be written, and that there is one already."""
    return f"{what}, in place of the file that was there" if Path(path).is_file() else what


def say_left_out(faults: list[str], number: int, left_out: int | None = None) -> int:
    """List the images that could not be read, where there are such, and return the exit code.

    Args:
        faults: Why, of all or the first of them.
        number: Of all images.
        left_out: How many could not be read, where not all are listed.
    """
    if faults:
        left_out = len(faults) if left_out is None else left_out
        print(f"left out {left_out:,} of {number:,} images that cannot be read:", file=sys.stderr)
        more = [f"and {left_out - len(faults):,} more"] if left_out > len(faults) else []
        for text in [*faults, *more]:
            print(f"  {printable(text)}", file=sys.stderr)
    return LEFT_OUT if faults else 0


def labels_of(args: argparse.Namespace) -> Any:
    """What `align_labels` takes of them."""
    from ..data.classes import read_label_map

    if args.label_map:
        return read_label_map(args.label_map)
    return "position" if args.labels_by_position else "name"
