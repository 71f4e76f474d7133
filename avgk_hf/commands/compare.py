"""`avgk compare`."""

import argparse

from ..shell import printable

HELP = "compare losses: tuned alike, several seeds, one report"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("config", metavar="CONFIG", help="a comparison file, e.g. recipes/glyphs/compare.yaml")
    parser.add_argument("--workers", type=int, default=1, help="processes, with one thread each (%(default)s)")
    parser.add_argument("--out", help="folder for results, report and pictures (the file's output_dir)")
    parser.add_argument("--dry-run", action="store_true", help="print the plan and how long it would take")
    parser.add_argument("--so-far", action="store_true", help="train nothing, and report what is finished")
    parser.set_defaults(overrides=[])  # what is not known here is a field of the recipe
    parser.epilog = "Further `--field value` arguments override the recipe, e.g. `--dataset my_plants`. " + (
        "The same command goes on after a crash, and in a second shell helps the first."
    )


def run(args: argparse.Namespace) -> None:
    from ..study.runner import run_comparison
    from ..study.spec import read_comparison

    comparison = read_comparison(args.config, output_dir=args.out or None, overrides=args.overrides)
    text = run_comparison(comparison, args.workers, args.dry_run, args.so_far)
    print("\n".join(map(printable, text.split("\n"))))
    if not args.dry_run:
        print(f"written to {comparison.output_dir}")
