"""`avgk check`."""

import argparse
import json
from typing import Any

from ..shell import printable
from .options import check_pictures, data_arguments, read_splits, say_written

HELP = "look at a dataset before training: counts, broken and repeated images, names (exit code 1 where something is)"
MOST = 40  # classes that are printed, and 5 problems of a kind; --json has all
ENDS = {"few": "fewer than 20", "medium": "20 to 100", "many": "more than 100"}


def arguments(parser: argparse.ArgumentParser) -> None:
    data_arguments(parser)
    parser.add_argument("--train-split", default="train", help="split to train on (%(default)s)")
    parser.add_argument("--workers", type=int, default=0, help="processes that read images (%(default)s)")
    parser.add_argument("--plot", metavar="FILE", help="picture of the counts, PNG or SVG")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")


def run(args: argparse.Namespace) -> int:
    check_pictures(args.plot)
    splits = read_splits(args)
    from ..checks import check_whole, title_of
    from ..data.datasets import check_split
    from ..data.inspection import beside_images, inspect, short_form

    check_whole("--workers", args.workers)
    check_split(splits, args.dataset, args.train_split, "--train-split")
    found = inspect(splits, args.train_split, args.workers)
    found.problems |= beside_images(args.dataset)
    if args.json:
        print(json.dumps(found.as_json(), indent=2))
    else:
        _print(found, args.train_split)
    if args.plot:
        from ..study.class_plots import count_bars

        title = f"{title_of(args.dataset)}: {short_form(found.counts, args.train_split)}"
        count_bars(found.names, found.counts, args.plot, title)
        say_written(args.plot, "the images of each class", args)
    return int(bool(found.problems))


def _print(found: Any, train: str) -> None:
    from ..data.inspection import short_form, shot_table

    print(short_form(found.counts, train))
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
    for kind, sentences in found.problems.items():
        print(f"{kind}: {len(sentences):,}")
        shown = sentences[: 6 if len(sentences) == 6 else 5]
        for sentence in shown:
            print(f"  {printable(sentence)}")
        if len(sentences) > len(shown):
            print(f"  and {len(sentences) - len(shown):,} more (--json)")
    if not found.problems:
        print("nothing to complain about")
