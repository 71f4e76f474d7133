"""`avgk plot`."""

import argparse

from ..shell import printable
from .options import ALLOW_OUTSIDE

HELP = "draw set sizes, accuracy against K and contact sheets of runs"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished `avgk train` runs")
    parser.add_argument("--out", default="runs/plots", help="folder for the pictures, PNG and SVG (%(default)s)")
    parser.add_argument("--allow-outside", **ALLOW_OUTSIDE)


def run(args: argparse.Namespace) -> None:
    from ..plots import plot_runs

    for path in plot_runs(args.runs, args.out, allow_outside=args.allow_outside):
        print(printable(path))
