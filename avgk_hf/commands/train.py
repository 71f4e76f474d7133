"""`avgk train`."""

import argparse
from itertools import pairwise
from pathlib import Path

HELP = "train a model from a recipe"


def arguments(parser: argparse.ArgumentParser) -> None:
    """Whatever comes: the options are the recipe's fields, which only the training code knows."""
    parser.prefix_chars = ""  # so that none is an option here
    parser.add_argument("arguments", nargs="*")


def run(args: argparse.Namespace) -> None:
    _check(args.arguments)
    from ..train import main

    main(args.arguments)


def _check(arguments: list[str]) -> None:
    """Refuse a recipe that cannot be read, its K or its folder of images, before torch is imported."""
    from ..checks import check_dataset, check_k
    from ..files import check_output_dir
    from ..plain_yaml import read_recipe

    if {"-h", "--help"} & set(arguments) or not arguments or arguments[0].startswith("-"):
        return
    given = read_recipe(Path(arguments[0]))
    for flag, value in pairwise([*arguments[1:], ""]):  # a later one counts
        name, equals, own = flag.partition("=")
        given |= {name[2:]: own if equals else value} if flag.startswith("--") else {}
    if isinstance(given.get("output_dir"), str):
        check_output_dir(given["output_dir"])
    if isinstance(given.get("dataset"), str):
        check_dataset(given["dataset"])
    try:
        k = float(given.get("k", 1))
    except (TypeError, ValueError):
        raise ValueError(f"k={given['k']!r} is no number, e.g. 2.") from None
    check_k(k)
