"""`avgk demo`."""

import argparse

HELP = "train CE and AVG-K on generated glyphs and compare them (3 minutes)"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", default="runs/demo", help="folder for models, pictures and table (%(default)s)")


def run(args: argparse.Namespace) -> None:
    from ..demo import demo

    demo(args.out)
