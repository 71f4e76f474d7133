"""Options that several commands have."""

import argparse
from pathlib import Path
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
METHOD = {"default": "lac", "help": "how coverage is reached: lac, aps or raps (%(default)s)"}


def data_arguments(parser: argparse.ArgumentParser) -> None:
    """The dataset and how it is read, for commands that take no model."""
    parser.add_argument("dataset", help="glyphs, a folder of images or parquet, a saved dataset, or a Hub id")
    parser.add_argument("--image-column", default="image", help="column that holds the images (%(default)s)")
    parser.add_argument("--label-column", default="label", help="column that holds the classes (%(default)s)")
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)


def read_splits(args: argparse.Namespace) -> Any:
    """All splits of that dataset; a folder that is not there is refused before anything heavy is imported."""
    if args.dataset.startswith((".", "/", "~")) and not Path(args.dataset).exists():
        raise FileNotFoundError(f"dataset={args.dataset!r}: there is no such folder.")
    from ..data import load_splits

    columns = {"image_column": args.image_column, "label_column": args.label_column}
    return load_splits(args.dataset, **columns, allow_outside=args.allow_outside, allow_new_classes=True)


def label_arguments(parser: argparse.ArgumentParser) -> None:
    """How the classes of a dataset are matched to the model's."""
    labels = parser.add_mutually_exclusive_group()
    by_name = "the model's name of each of the dataset's classes: CSV with two columns, or a JSON mapping"
    labels.add_argument("--label-map", metavar="FILE", help=by_name)
    by_position = "class i of the dataset is class i of the model, whatever their names"
    labels.add_argument("--labels-by-position", action="store_true", help=by_position)


def labels_of(args: argparse.Namespace) -> Any:
    """What `align_labels` takes of them."""
    from ..data.classes import read_label_map

    if args.label_map:
        return read_label_map(args.label_map)
    return "position" if args.labels_by_position else "name"
