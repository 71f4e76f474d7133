"""`avgk evaluate`, and what `avgk calibrate` shares with it."""

import argparse
import json
import logging
import os
import sys
from itertools import count
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
    above,
    check_model,
    check_pictures,
    label_arguments,
    labels_of,
    per_class_of,
    replacing_said,
    say_left_out,
    say_shared,
    say_written,
)

HELP = "evaluate a calibrated model; on images without labels only the sizes of its sets"
SHOWN_CLASSES, SHOWN_IMAGES = 24, 60  # in one picture
ONLY_NEW = "only if the classifier was not trained on the images in 'train'"


def arguments(parser: argparse.ArgumentParser) -> None:
    shared_arguments(parser, "test")
    sizes = "set sizes besides the model's own; the files are about the first, unless the own is among them"
    parser.add_argument("--k", type=float, nargs="+", default=[], help=sizes)
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
    parser.add_argument("--unsure-out", metavar="DIR", help="folder for them (a new one, runs/unsure-MODEL-DATASET)")
    parser.add_argument("--out", help="JSON file to write the metrics to; MODEL/results.json is renewed by them")


def shared_arguments(parser: argparse.ArgumentParser, split: str) -> None:
    """The model, the dataset and how it is read."""
    parser.add_argument("model", help="folder or Hub id of a model")
    parser.add_argument("dataset", help="glyphs, a folder of images or parquet, a saved dataset, or a Hub id")
    parser.add_argument("--split", default=split, help="split of the dataset (%(default)s)")
    parser.add_argument("--per-class", action="store_true", help="coverage thresholds for each class")
    parser.add_argument("--batch-size", **BATCH_SIZE)
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (%(default)s)")
    parser.add_argument("--seed", type=int, help="seed of generated glyphs (0)")
    parser.add_argument("--image-column", default="image", help="column that holds the images (%(default)s)")
    parser.add_argument("--label-column", default="label", help="column that holds the classes (%(default)s)")
    stream = "read a Hub dataset, or a folder of parquet or tars, as it comes: nothing is downloaded first or copied"
    parser.add_argument("--streaming", action="store_true", help=stream)
    number = "with --streaming: how many images there are (they are counted, in a pass before)"
    parser.add_argument("--num-examples", type=int, metavar="N", help=number)
    taken = "take so many images of each class from train (as many as the model's training took from this dataset)"
    parser.add_argument("--validation-per-class", type=int, help=taken)
    parser.add_argument("--split-seed", type=int, help="which of them, as in training (0)")
    label_arguments(parser)
    bad = "refuse an image that cannot be read, or leave it out and say so (skip; error with --num-examples)"
    parser.add_argument("--on-bad-image", **{**BAD_IMAGES, "default": None, "help": bad})
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)
    parser.add_argument("--json", action="store_true", help="print the metrics as JSON, all of them")
    parser.add_argument("--all", action="store_true", help="print all metrics, a line for each")


def run(args: argparse.Namespace) -> int:
    for path in filter(None, (args.out, args.per_species)):  # now, and not when all is computed
        refuse_link(Path(path).parent)
    check_model(args.model, args.k, dataset=args.dataset, levels=args.coverage or ())
    check_pictures(args.plot, args.per_species, args.unsure)
    quiet_unless_first()
    if args.out and Path(args.out).suffix.lower() not in ("", ".json"):
        remedy = "a table of the classes is --per-species FILE, the sets of images are written by `avgk predict`"
        raise ValueError(f"--out {args.out} gets metrics as JSON: name a file that ends with .json ({remedy}).")
    if args.per_species:
        check_ending(args.per_species)
    if args.unsure is not None and args.unsure < 1:
        raise ValueError(f"--unsure {args.unsure} must be a number of images, e.g. 24.")
    if args.unsure is not None and args.streaming:
        raise ValueError("--unsure looks at images again, which --streaming does not keep: leave one of them out.")
    from ..calibration import Calibration
    from ..checks import title_of
    from ..classifiers import best_device, load_classifier
    from ..confusions import Listed
    from ..monitor import SetSizeMonitor

    model = load_classifier(args.model).to(best_device())
    split = read_split(args, model.config, unlabelled=args.label_column == "label")  # one that is named must be there
    if args.per_species and "label" not in split.column_names:
        raise ValueError("--per-species needs labels, and these images have none: leave it out, or use --unsure.")
    own = getattr(model.config, "k", None)  # the files are about this one, or the first that is asked for
    k = [own] if own in args.k else args.k[:1]
    monitor = SetSizeMonitor.from_config(model.config, *args.k[:1], balance=args.balance)
    listed = (
        Listed(model.config, *k, balance=args.balance) if args.per_species or args.unsure or _renews(args) else None
    )
    how: dict[str, Any] = {"method": args.method, "per_class": per_class_of(args)}
    known = _known_images(split, model.config, args)  # that they look like those of the calibration is no news
    how["monitor"] = monitor if args.plot or not known else None
    metrics, *left_out = measure(model, split, args, listed=[listed] if listed else (), **how)
    if not is_first_process():
        return 0
    calibration = Calibration.of(model.config).at(args.balance)
    say_split(split, args, calibration.balance)
    own = monitor.k if "num_images" in metrics else getattr(model.config, "k", None)
    print_metrics(metrics, args, own, None if known else left_out[1] - len(left_out[0]))
    if known:
        print(known, file=sys.stderr)
    say_shared(calibration, calibration.levels("lac", how["per_class"]), how["per_class"])
    if args.out:
        _write_metrics(args, metrics, str(split.split or args.split), listed)
    if not (known or monitor.drifted or args.json):  # a drift was said already
        print(monitor.message())
    if args.plot:
        from ..study.plots import set_size_course

        set_size_course(monitor, args.plot, title_of(args.model))
        say_written(args.plot, "the mean set size, image by image", args)
    for path, what in _show_sets(listed, args, title_of(args.model)).items() if listed else ():
        say_written(path, what, args)
    return say_left_out(*left_out)


def _renews(args: argparse.Namespace) -> bool:
    """Whether the metrics go into the record of a training."""
    return (
        bool(args.out) and Path(args.out).name == "results.json" and (Path(args.out).parent / "config.json").is_file()
    )


def _write_metrics(args: argparse.Namespace, metrics: dict[str, float], split: str, listed: Any) -> None:
    """Write the file of --out; a training's results.json keeps what it says of the training and of other images."""
    from ..results import renew_results

    what = replacing_said(args.out, "all metrics")
    sizes = listed.size_counts() if _renews(args) and listed.k == listed.calibration.k else None
    if not _renews(args):
        write_text(args.out, json.dumps(metrics, indent=2) + "\n")
    elif not renew_results(Path(args.out).parent, name_of(args), split, metrics, sizes):
        raise ValueError(f"--out {args.out} is the record of a training, of its own validation and test images.")
    else:
        what = f"what it said of {split} is renewed"
    say_written(args.out, what, args)


def _known_images(split: Any, config: Any, args: argparse.Namespace) -> str | None:
    """What is to be said of images from which a model learnt, or its thresholds come; None of others."""
    from ..calibration import Calibration

    source, name = Calibration.of(config).source, str(split.split or args.split)
    asked = args.split == "train" or getattr(config, "train_counts", None)  # else it may be a folder without splits
    if name == "train" and "label" in split.column_names and asked:
        text = "if the model was trained on them, what is measured here says nothing of its accuracy on others"
        return f"these images are called train: {text}."
    if args.streaming or (source.get("dataset"), source.get("split")) != (name_of(args), name):
        return None
    return "these are images of the calibration, by which thresholds were set: test images tell how good the sets are."


def _show_sets(listed: Any, args: argparse.Namespace, name: str) -> dict[Path, str]:
    """Write what was asked for about the sets, and return the files, and what each of them shows."""
    from ..study.class_plots import confusion_groups
    from ..study.plots import contact_sheet

    balance = f", balance {listed.calibration.balance:g}" if listed.calibration.balance else ""
    asked, files = f"{name}, K = {listed.k:g}{balance}", {}
    if listed.labels is not None:
        asked += f", accuracy {100 * listed.accuracy:.1f}% on {listed.dataset.split or args.split}"
    if args.per_species:
        table = Path(args.per_species)
        files[table] = replacing_said(table, f"a row for each class, K = {listed.k:g}")
        with written_to(table) as write:
            write(listed.by_class())
        groups, shares, crowded = listed.groups(SHOWN_CLASSES)
        if groups:
            picture = table.with_suffix(".png")
            names = [[listed.names[j] for j in group] for group in groups]
            title = f"{asked}: classes that are listed together"
            images = [int((listed.labels == j).sum()) for group in groups for j in group]
            files[picture] = replacing_said(picture, "classes that are listed together")
            confusion_groups(names, shares, images, picture, title, len(listed.names), crowded)
        else:
            print("no two classes are listed together often, so there is no picture of them.", file=sys.stderr)
    if args.unsure:
        images = listed.longest(args.unsure)
        usual = "runs/" + f"unsure-{name}-{name_of(args)}".replace("/", "-")
        free = (place for number in count(2) if not (place := Path(f"{usual}-{number}")).exists())
        place = Path(args.unsure_out or (next(free) if Path(usual).exists() else usual))  # notes may stand in the old
        table, picture = place / "unsure.csv", place / "contact_sheet.png"
        empty = int((listed.sizes[images] == 0).sum())
        longest = f"{empty} without a set, then those with the longest" if empty else "the longest sets"
        longest = "all without a set" if empty == len(images) else longest
        what = f"the {len(images)} least sure images, K = {listed.k:g}: {longest}"
        files[table] = replacing_said(table, what)
        some = f", the first {SHOWN_IMAGES} of them" * (len(images) > SHOWN_IMAGES)
        files[picture] = replacing_said(picture, f"the same as pictures{some}")
        with written_to(table) as write:
            write({**each, "image": _as_typed(each["image"], args.dataset)} for each in listed.rows(images))
        shown, (sets, scores) = images[:SHOWN_IMAGES], zip(*map(listed.named, images[:SHOWN_IMAGES]), strict=True)
        labels = None if listed.labels is None else listed.labels[shown].tolist()
        stored = listed.stored()
        pictures = [{**(one := stored[int(i)]), "path": one.get("path") or f"image {i}"} for i in shown]
        title = f"{asked}. Least sure photographs of {name_of(args)}: {longest}"
        how = {"ordered": False, "lambda_val": listed.answer.lambda_val}
        contact_sheet(pictures, sets, labels, listed.names, picture, scores, title, **how)
    return files


def _as_typed(path: str, dataset: str) -> str:
    """What begins with an image's path: that as the user named the dataset, as in the tables of `avgk predict`."""
    place = os.path.join(os.path.realpath(dataset), "")
    return os.path.join(dataset, path.removeprefix(place)) if path.startswith(place) else path


def read_split(args: argparse.Namespace, config: Any, unlabelled: bool = False) -> Any:
    """The split that is asked for, with or without labels; a folder of image files has no splits.

    Validation images that the model's training took from train are taken again.
    """
    import numpy as np

    from ..calibration import Calibration
    from ..data.datasets import as_split, check_split, take_from_train
    from ..data.loading import load_splits, load_streams, misplaced
    from ..scope import taken_in_training

    how = {"image_column": args.image_column, "label_column": args.label_column, "allow_outside": args.allow_outside}
    how["unlabelled"] = unlabelled
    if args.streaming and args.validation_per_class is not None:
        raise ValueError(
            "--validation-per-class needs all rows, which --streaming does not keep: leave one of them out."
        )
    if args.seed is not None and args.dataset != "glyphs":
        raise ValueError(f"--seed {args.seed} is that of generated glyphs: leave it out.")
    if args.split_seed is not None and args.validation_per_class is None:
        raise ValueError(f"--split-seed {args.split_seed} goes with --validation-per-class: add it or leave both out.")
    if args.num_examples is not None and not args.streaming:
        raise ValueError(f"--num-examples {args.num_examples} is for --streaming: add it, or leave the number out.")
    if args.streaming:
        splits = load_streams(args.dataset, num_examples=args.num_examples, **how)
    else:
        how |= {"seed": args.seed or 0, "split_seed": args.split_seed or 0}
        how["validation_per_class"] = args.validation_per_class
        splits = load_splits(args.dataset, **how, allow_new_classes=True)  # the model's classes count
    name = args.split
    if (
        name not in splits and len(splits) == 1 and not args.streaming and above(args.dataset)
    ):  # my_plants/test, with train beside it
        (only,) = splits.values()
        splits = {name: as_split(only, np.ones(len(only), bool), name)}
    if args.validation_per_class is not None and is_first_process():
        _say_trained_on(splits, config)
    if len(splits) == 1 and name == "test" and "label" not in next(iter(splits.values())).column_names:
        name = next(iter(splits))
    dataset, taken = taken_in_training(Calibration.of(config))
    parts = taken.keys() - {"seed"}
    ours = dataset == name_of(args) and "train" in splits and not parts & splits.keys() and not args.streaming
    if parts and ours and name != "train":
        splits = take_from_train(splits, **taken)
        if name in parts and is_first_process():
            text = f"{name}: {len(splits[name]):,} images that the training of this model took from train"
            print(f"{text} (of each class {taken[name]} at most, seed {taken['seed']})", file=sys.stderr)
    number = taken.get("validation") or (None if args.streaming else _number_taken(splits, config)) or 20
    take = "" if getattr(config, "train_counts", None) else f"{ONLY_NEW}, "
    check_split(splits, args.dataset, name, "--split", f"{take}--validation-per-class {number}", number)
    if "label" not in splits[name].column_names and is_first_process():
        text = f"{args.dataset} does not say which class an image is of, so only the sizes of their sets are measured"
        known = "folders would say it, <class>/x.jpg, or a column of a table that is named with --label-column"
        known = next(iter(misplaced(args.dataset)), known)
        print(printable(f"{text} ({known})."), file=sys.stderr)
    return splits[name]


def name_of(args: argparse.Namespace) -> str:
    """What a calibration calls the dataset: a folder by its name only."""
    return Path(args.dataset).name if Path(args.dataset).exists() else args.dataset


def _counts(splits: Any, config: Any) -> tuple[Any, Any] | None:
    """Of each class the images in train, and those that the model was trained on (L,); None where it knows others."""
    import numpy as np

    from ..data.datasets import class_counts

    train, kept = splits.get("train"), getattr(config, "train_counts", None)
    labelled = train is not None and "label" in train.column_names
    if not kept or not labelled or train.features["label"].names != list(config.id2label.values()):
        return None
    return class_counts(train, len(kept)), np.array(kept)


def _say_trained_on(splits: Any, config: Any) -> None:
    """Say how many images a model must have seen in training, or may have, where that is not recorded."""
    found = _counts(splits, config)
    if not getattr(config, "train_counts", None):
        print(f"{ONLY_NEW}: if it was, what they show is too good, and sets are too small", file=sys.stderr)
    seen = 0 if found is None else int((found[1] - found[0]).clip(0).sum())
    if seen:
        text = f"if the model was trained on this dataset, it has learnt at least {seen:,} of these validation images"
        print(f"{text}, and what they show is too good: take as many as its training took.", file=sys.stderr)


def _number_taken(splits: Any, config: Any) -> int | None:
    """How many images of each class were taken from train before the model was trained on the rest of it."""
    from ..data.datasets import taken_of

    if (found := _counts(splits, config)) is None:
        return None
    counts, kept = found
    number = int((counts - kept).max())
    return number if number > 0 and (counts - taken_of(counts, number) == kept).all() else None


def measure(model: Any, split: Any, args: argparse.Namespace, **how: Any) -> tuple[dict[str, float], list[str], int]:
    """Evaluate or calibrate with the options that both have.

    Returns:
        The metrics, why images were left out, and how many there are with these.
    """
    from accelerate import PartialState

    from ..data import Stream, skip_bad_images
    from ..evaluation import evaluate

    faults: list[str] = []
    skip = (args.on_bad_image or ("skip" if args.num_examples is None else "error")) == "skip"
    if isinstance(split, Stream):
        split = split.counted(skip, args.workers, report=False)
        faults = list(split.bad.values())
    elif skip:
        with PartialState().main_process_first():  # the others find what `datasets` has kept
            split, faults = skip_bad_images(split, str(split.split or args.split), args.workers, report=False)
    how |= {"batch_size": args.batch_size, "num_workers": args.workers, "dataset_name": name_of(args)}
    how |= {"coverage": args.coverage, "balance": args.balance, "labels": labels_of(args)}
    metrics = evaluate(model, split, args.k, **how)
    faults = [_as_typed(fault, args.dataset) for fault in faults]
    return metrics | ({"skipped": len(faults)} if faults else {}), faults, len(split) + len(faults)


def is_first_process() -> bool:
    """Of several, started by accelerate or torchrun, the first writes and prints."""
    return os.environ.get("RANK", "0") == "0"


def quiet_unless_first() -> None:
    """What every process finds out is said by the first; an error by whom it happens to."""
    if not is_first_process():
        import datasets

        logging.getLogger("avgk_hf").setLevel(logging.ERROR)
        datasets.disable_progress_bars()


def say_split(split: Any, args: argparse.Namespace, balance: float = 0) -> None:
    """What was measured on, before the tables; a stream does not know how much it was."""
    if not args.json and not args.streaming:
        part = f", split {split.split or args.split}" if "label" in split.column_names else ""
        asked = f", balance {balance:g}" if balance or args.balance == 0 else ""
        print(printable(f"{name_of(args)}{part}: {len(split):,} images{asked}"), end="\n\n")


def print_metrics(
    metrics: dict[str, float], args: argparse.Namespace, own_k: float | None, number: int | None = None
) -> None:
    """A table with a row for each K; all metrics as JSON, or a line for each, where that is asked for."""
    from ..study.columns import by_k

    if args.json:
        print(json.dumps(metrics, indent=2))
    elif args.all:
        width = max(32, *(len(name) + 2 for name in metrics))
        print("\n".join(f"{name:{width}}{value:.6g}" for name, value in metrics.items()))
    else:
        print(by_k(metrics, own_k, number))
