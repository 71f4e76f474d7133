"""`avgk sweep`."""

import argparse
from pathlib import Path

HELP = "search hyperparameters on validation, report the winner on test"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.allow_abbrev = False
    parser.add_argument("recipe", metavar="RECIPE", help="a recipe, or a sweep file that names one")
    parser.add_argument(
        "--search", nargs="+", default=[], metavar="FIELD=V1,V2", help="values to try, e.g. alpha=1,3,10"
    )
    parser.add_argument("--seeds", type=int, help="trainings of every combination (1)")
    parser.add_argument("--scale-learning-rate", action="store_true", help="learning rate in proportion to batch size")
    parser.add_argument("--backend", choices=["optuna", "ray"], help="optuna, or ray for a cluster (optuna)")
    parser.add_argument("--out", help="folder for study, table, plot and the winner's runs (runs/sweep-...)")
    parser.set_defaults(overrides=[])  # what is not known here is a field of the recipe
    parser.epilog = "Further `--field value` arguments override the recipe. The same command goes on after a crash."


def run(args: argparse.Namespace) -> None:
    from ..study.sweep import parse_search, read_sweep, run_sweep

    given = {"seeds": args.seeds, "backend": args.backend, "output_dir": args.out, "overrides": args.overrides}
    search, scale = parse_search(args.search) or None, args.scale_learning_rate or None
    sweep = read_sweep(args.recipe, search=search, scale_learning_rate=scale, **given)
    found = run_sweep(sweep)
    if "winner" in found:
        print((Path(sweep.output_dir) / "sweep.md").read_text())
        print(f"written to {sweep.output_dir}")
