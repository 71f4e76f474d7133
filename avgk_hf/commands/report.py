"""`avgk report`."""

import argparse

from ..shell import printable

HELP = "mean and 95% confidence interval of runs over their seeds"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs, or of several seeds")
    parser.add_argument("--out", default="runs/report", help="folder for report.md and report.json (%(default)s)")


def run(args: argparse.Namespace) -> None:
    from ..study.seeds import write_report

    print(write_report(args.runs, args.out))
    print(printable(f"written to {args.out}: report.md and report.json"))
