"""`avgk report`."""

import argparse

from ..shell import printable

HELP = "mean and 95% confidence interval of runs over their seeds"


def arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("runs", nargs="+", metavar="RUN", help="folders of finished runs, or of several seeds")
    parser.add_argument("--out", default="runs/report", help="folder for report.md and report.json (%(default)s)")


def run(args: argparse.Namespace) -> None:
    from ..classifiers import load_model_config
    from ..results import of_other_thresholds, read_results
    from ..study.seeds import find_runs, write_report

    note = ""
    for run in (run for run in find_runs(args.runs) if (run / "config.json").is_file()):
        results = read_results(run)
        measured = {split: results[split] for split in ("validation", "test") if split in results}
        if of_other_thresholds(load_model_config(str(run)), measured):
            which = f"{printable(run)} was calibrated again: some of its numbers are of the thresholds before"
            note += f"\n**{which}** (`avgk info` says more).\n"
    print(write_report(args.runs, args.out, note))
    print(printable(f"written to {args.out}: report.md and report.json"))
