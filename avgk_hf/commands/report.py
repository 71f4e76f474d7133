"""`avgk report`."""

import argparse

HELP = "mean and 95% confidence interval of runs over their seeds"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs, or of several seeds")
    parser.add_argument("--out", default="runs/report", help="folder for report.md and report.json (%(default)s)")


def run(args: argparse.Namespace) -> None:
    from ..study.seeds import write_report

    print(write_report(args.runs, args.out))
