"""`avgk evaluate`, and what `avgk calibrate` shares with it."""

import argparse
import json
import os
import sys
from pathlib import Path
from typing import Any

from ..files import refuse_link, write_text
from ..rows import check_ending, written_to
from ..shell import printable
from .options import (
    ALLOW_OUTSIDE,
    BAD_IMAGES,
    BALANCE,
    BATCH_SIZE,
    METHOD,
    PER_CLASS_WEIGHT,
    check_model,
    label_arguments,
    labels_of,
    per_class_of,
)

HELP = "evaluate a calibrated model; on images without labels only the sizes of its sets"
SHOWN_CLASSES, SHOWN_IMAGES = 24, 60  # in one picture


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments(parser, "test")
    parser.add_argument("--k", type=float, nargs="+", default=[], help="set sizes besides the model's own")
    levels = "coverage levels to report (all recorded)"
    parser.add_argument("--coverage", type=float, nargs="+", metavar="C", help=levels)
    parser.add_argument("--method", **METHOD)
    parser.add_argument("--per-class-weight", **PER_CLASS_WEIGHT)
    parser.add_argument("--balance", **BALANCE)
    parser.add_argument("--plot", metavar="FILE", help="picture of the mean set size and its interval, PNG or SVG")
    table = "table of the classes, .csv, .jsonl or .parquet, and beside it a picture of those listed together"
    parser.add_argument("--per-species", metavar="FILE", help=table)
    longest = "the N images with the longest sets, to look at or label first: a list and a contact sheet"
    parser.add_argument("--unsure", type=int, metavar="N", help=longest)
    parser.add_argument("--unsure-out", metavar="DIR", default="runs/unsure", help="folder for them (%(default)s)")
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
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON, all of them")
    parser.add_argument("--all", action="store_true", help="print all metrics, a line for each")


def run(args: argparse.Namespace) -> None:
    for path in filter(None, (args.out, args.per_species)):  # now, and not when all is computed
        refuse_link(Path(path).parent)
    check_model(args.model, args.k, dataset=args.dataset)
    if args.per_species:
        check_ending(args.per_species)
    if args.unsure is not None and args.unsure < 1:
        raise ValueError(f"--unsure {args.unsure} must be a number of images, e.g. 24.")
    from ..checks import title_of
    from ..classifiers import best_device, load_classifier
    from ..confusions import Listed
    from ..monitor import SetSizeMonitor

    model = load_classifier(args.model).to(best_device())
    split = read_split(args, unlabelled=args.label_column == "label")  # one that is named has to be there
    if args.per_species and "label" not in split.column_names:
        raise ValueError("--per-species needs labels, and these images have none: leave it out, or use --unsure.")
    monitor = SetSizeMonitor.from_config(model.config, *args.k[:1], balance=args.balance)
    listed = Listed(model.config, *args.k[:1], balance=args.balance) if args.per_species or args.unsure else None
    how = {"method": args.method, "per_class": per_class_of(args), "monitor": monitor}
    metrics = measure(model, split, args, listed=[listed] if listed else (), **how)
    if not is_first_process():
        return
    if args.out:
        write_text(args.out, json.dumps(metrics, indent=2) + "\n")
    print_metrics(metrics, args, monitor.k if "num_images" in metrics else getattr(model.config, "k", None))
    if not monitor.drifted and not args.json:  # a drift was said already
        print(monitor.message())
    if args.plot:
        from ..study.plots import set_size_course

        set_size_course(monitor, args.plot, title_of(args.model))
    for path in _show_sets(listed, args, title_of(args.model)) if listed else ():
        print(printable(path), file=sys.stderr if args.json else sys.stdout)


def _show_sets(listed: Any, args: argparse.Namespace, name: str) -> list[Path]:
    """Write what was asked for about the sets, and return the files."""
    from ..study.class_plots import confusion_groups
    from ..study.plots import contact_sheet

    asked, files = f"{name}, K = {listed.k:g}", []
    if listed.labels is not None:
        asked += f", accuracy {100 * listed.accuracy:.1f}%"
    if args.per_species:
        files.append(Path(args.per_species))
        with written_to(files[0]) as write:
            write(listed.by_class())
        groups, shares = listed.groups(SHOWN_CLASSES)
        if groups:
            files.append(files[0].with_suffix(".png"))
            names = [[listed.names[j] for j in group] for group in groups]
            confusion_groups(names, shares, files[-1], f"{asked}: classes that are listed together")
        else:
            print("no two classes are listed together often, so there is no picture of them.", file=sys.stderr)
    if args.unsure:
        images = listed.longest(args.unsure)
        files += [Path(args.unsure_out) / "unsure.csv", Path(args.unsure_out) / "contact_sheet.png"]
        with written_to(files[-2]) as write:
            write(listed.rows(images))
        shown, (sets, scores) = images[:SHOWN_IMAGES], zip(*map(listed.set_of, images[:SHOWN_IMAGES]), strict=True)
        labels = None if listed.labels is None else listed.labels[shown].tolist()
        pictures = [listed.stored(image) for image in shown]
        title = f"{asked}: the photographs with the longest sets"
        contact_sheet(pictures, sets, labels, listed.names, files[-1], scores, title, ordered=False)
    return files


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
        balance=args.balance,
        labels=labels_of(args),
        **how,
    )


def is_first_process() -> bool:
    """Of several, started by accelerate or torchrun, the first writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def print_metrics(metrics: dict[str, float], args: argparse.Namespace, own_k: float | None) -> None:
    """A table with a row for each K; all metrics as JSON, or a line for each, where that is asked for."""
    from ..study.columns import by_k

    if args.json:
        print(json.dumps(metrics, indent=2))
    elif args.all:
        width = max(32, *(len(name) + 2 for name in metrics))
        print("\n".join(f"{name:{width}}{value:.6g}" for name, value in metrics.items()))
    else:
        print(by_k(metrics, own_k))
