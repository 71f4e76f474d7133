"""`avgk evaluate`, and what `avgk calibrate` shares with it."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..files import refuse_link, write_text
from .options import ALLOW_OUTSIDE, BAD_IMAGES, BATCH_SIZE, METHOD, label_arguments, labels_of

HELP = "evaluate a calibrated model; on images without labels only the sizes of its sets"


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments(parser, "test")
    parser.add_argument("--k", type=float, nargs="+", default=[], help="set sizes besides the model's own")
    levels = "coverage levels to report (all recorded)"
    parser.add_argument("--coverage", type=float, nargs="+", metavar="C", help=levels)
    parser.add_argument("--method", **METHOD)
    parser.add_argument("--plot", metavar="FILE", help="picture of the mean set size and its interval, PNG or SVG")
    parser.add_argument("--out", help="JSON file to write the metrics to")


def shared_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """The model, the dataset and how it is read."""
    parser.add_argument("model", help="folder or Hub id of a model")
    parser.add_argument("dataset", help="glyphs, a folder of images or parquet, a saved dataset, or a Hub id")
    parser.add_argument("--split", default=split, help="split of the dataset (%(default)s)")
    parser.add_argument("--per-class", action="store_true", help="coverage thresholds for each class")
    parser.add_argument("--batch-size", **BATCH_SIZE)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (%(default)s)")
    parser.add_argument("--seed", type=int, default=0, help="seed of generated glyphs (%(default)s)")
    parser.add_argument("--image-column", default="image", help="column that holds the images (%(default)s)")
    parser.add_argument("--label-column", default="label", help="column that holds the classes (%(default)s)")
    parser.add_argument("--validation-per-class", type=int, help="take so many images of each class from train")
    parser.add_argument("--split-seed", type=int, default=0, help="which of them, as in training (%(default)s)")
    label_arguments(parser)
    parser.add_argument("--on-bad-image", **BAD_IMAGES)
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON")


def run(args: argparse.Namespace) -> None:
    from ..classifiers import best_device, load_classifier
    from ..monitor import SetSizeMonitor

    if args.out:  # now, and not when all is computed
        refuse_link(Path(args.out).parent)
    model = load_classifier(args.model).to(best_device())
    split = read_split(args, unlabelled=args.label_column == "label")  # one that is named has to be there
    monitor = SetSizeMonitor.from_config(model.config, *args.k[:1])
    metrics = measure(model, split, args, method=args.method, monitor=monitor)
    if not is_first_process():
        return
    if args.out:
        write_text(args.out, json.dumps(metrics, indent=2) + "\n")
    print_metrics(metrics, args.json)
    if not monitor.drifted and not args.json:  # a drift was said already
        print(monitor.message())
    if args.plot:
        from ..study.plots import set_size_course

        set_size_course(monitor, args.plot)


def read_split(args: argparse.Namespace, unlabelled: bool = False) -> Any:
    """The split that is asked for, with or without labels; a folder of image files has no splits."""
    from ..data import load_splits
    from ..data.datasets import check_split

    splits = load_splits(
        args.dataset,
        image_column=args.image_column,
        label_column=args.label_column,
        seed=args.seed,
        validation_per_class=args.validation_per_class,
        split_seed=args.split_seed,
        unlabelled=unlabelled,
        allow_outside=args.allow_outside,
        allow_new_classes=True,  # the model's classes count
    )
    name = args.split
    if len(splits) == 1 and name == "test" and "label" not in next(iter(splits.values())).column_names:
        name = next(iter(splits))
    check_split(splits, args.dataset, name, "--split", "--validation-per-class 20")
    if "label" not in splits[name].column_names:
        text = f"{args.dataset} has no column 'label' (another one is named with --label-column)"
        print(f"{text}, so only the sizes of the sets are evaluated.", file=sys.stderr)
    return splits[name]


def measure(model: Any, split: Any, args: argparse.Namespace, **how: Any) -> dict[str, float]:
    """Evaluate or calibrate with the options that both have."""
    from ..evaluation import evaluate

    return evaluate(
        model,
        split,
        args.k,
        batch_size=args.batch_size,
        num_workers=args.workers,
        dataset_name=Path(args.dataset).name if Path(args.dataset).exists() else args.dataset,
        on_bad_image=args.on_bad_image,
        coverage=args.coverage,
        per_class=args.per_class,
        labels=labels_of(args),
        **how,
    )


def is_first_process() -> bool:
    """Of several, started by accelerate or torchrun, the first writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def print_metrics(metrics: dict[str, float], as_json: bool) -> None:
    """As JSON, or a line for each."""
    width = max(32, *(len(name) + 2 for name in metrics))
    lines = "\n".join(f"{name:{width}}{value:.6g}" for name, value in metrics.items())
    print(json.dumps(metrics, indent=2) if as_json else lines)
