"""Options that several commands have."""

import argparse
from typing import Any

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


def labels_of(args: argparse.Namespace) -> Any:
    """What `align_labels` takes of them."""
    from ..data.classes import read_label_map

    if args.label_map:
        return read_label_map(args.label_map)
    return "position" if args.labels_by_position else "name"
