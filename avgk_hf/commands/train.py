"""`avgk train`."""

import argparse

HELP = "train a model from a recipe"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Whatever comes: the options are the recipe's fields, which only the training code knows."""
    parser.prefix_chars = ""  # so that none is an option here
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> None:
    from ..train import main

    main(args.arguments)
