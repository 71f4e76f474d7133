"""`avgk check`."""

import argparse
import json
from typing import Any

from ..shell import printable
from .options import check_pictures, data_arguments, read_splits, say_written

HELP = "look at a dataset before training: counts, broken and repeated images, names (exit code 1 where something is)"
MOST = 40  # classes that are printed, and 5 problems of a kind; --json has all
MOVE = "images out of place, because of which no class is known; check again when they are moved"
USE = "`avgk predict` and `avgk evaluate --unsure 24` take them as they are"
ENDS = {"few": "fewer than 20", "medium": "20 to 100", "many": "more than 100"}


def arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser)
    parser.add_argument("--train-split", default="train", help="split to train on (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (%(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="picture of the counts, PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    check_pictures(args.plot)
    splits = read_splits(args, unlabelled=args.label_column == "label")  # one that is named must be there
    from ..checks import check_whole, title_of
    from ..data.datasets import check_split
    from ..data.inspection import beside_images, inspect
    from ..data.loading import misplaced, no_classes

    check_whole("--workers", args.workers)
    labelled = "label" in next(iter(splits.values())).column_names
    if args.plot and not labelled:
        raise ValueError(f"--plot {args.plot} draws the images of each class, and no class is known: leave it out.")
    if labelled:
        check_split(splits, args.dataset, args.train_split, "--train-split")
    found = inspect(splits, args.train_split, args.workers)
    if not labelled:
        places = misplaced(args.dataset)
        kind = MOVE if places else "no classes"
        found.problems[kind] = places or [f"{no_classes(args.dataset)}; {USE}"]
    found.problems |= beside_images(args.dataset)
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found, args.train_split)
    if args.plot:
        from ..study.class_plots import count_bars

        title = f"{title_of(args.dataset)}: {found.summary(args.train_split)}"
        count_bars(found.names, found.counts, args.plot, title)
        say_written(args.plot, "the images of each class", args)
    return int(bool(found.problems))


def _print(found: Any, train: str) -> None:
    print(found.summary(train))
    if found.names:
        _print_classes(found, train)
    for kind, sentences in found.problems.items():
        print(f"{kind}: {len(sentences):,}")
        shown = sentences[: 6 if len(sentences) == 6 else 5]
        for sentence in shown:
            print(f"  {printable(sentence)}")
        if len(sentences) > len(shown):
            print(f"  and {len(sentences) - len(shown):,} more (--json)")
    if not found.problems:
        print("nothing to complain about")


def _print_classes(found: Any, train: str) -> None:
    from ..data.inspection import shot_table

    order = sorted(range(len(found.names)), key=lambda i: -found.counts[train][i])
    heading = "".join(f"{printable(split)[:12]:>12}" for split in found.counts)
    print(f"\n{heading}  class")
    for i in order[:MOST]:
        print("".join(f"{n[i]:>12,}" for n in found.counts.values()) + f"  {printable(found.names[i])}")
    if len(order) > MOST:
        print(f"  and {len(order) - MOST:,} more (--json)")
    print(f"\n{heading}     classes")
    for shot, row in shot_table(found.counts, train).items():
        numbers = "".join(f"{row[split]:>12,}" for split in found.counts)
        print(f"{numbers}{row['classes']:>12,}  {shot} shot: {ENDS[shot]} training images")
    print("(before a training takes validation images from them)\n" if "validation" not in found.counts else "")
