"""`python -m benchmarks`: measure what the package promises about time and memory, and print it as Markdown."""

import argparse
import os
from pathlib import Path

os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # torch.profiler is chatty
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch

from . import calibration, evaluation, features, loss, prediction, reading, scale, startup
from .measure import Table

PARTS = {
    "loss": loss,
    "calibration": calibration,
    "prediction": prediction,
    "evaluation": evaluation,
    "reading": reading,
    "features": features,
    "scale": scale,
    "startup": startup,
}
README = Path(__file__).with_name("README.md")
BEGIN, END = "<!-- tables: begin -->\n", "<!-- tables: end -->\n"


def main() -> None:
    """Run the parts asked for."""
    parser = argparse.ArgumentParser("python -m benchmarks", description=__doc__)
    # choices with nargs="*" would refuse the empty list
    parser.add_argument("parts", nargs="*", metavar="part", help=f"any of {', '.join(PARTS)}; default: all")
    parser.add_argument("--write", action="store_true", help="also put the tables into benchmarks/README.md")
    args = parser.parse_args()
    unknown = [part for part in args.parts if part not in PARTS]
    if unknown:
        parser.error(f"there is no part {unknown[0]!r}; choose from {', '.join(PARTS)}.")
    if args.write and args.parts:
        parser.error("--write takes the tables of one full run: leave out the parts.")

    torch.set_num_threads(1)
    tables: list[Table] = []
    for name in args.parts or PARTS:
        for table in PARTS[name].run():
            print(table, flush=True)
            tables.append(table)
    verdicts = [verdict for table in tables for verdict in table.verdicts() if verdict]
    summary = f"{verdicts.count('OK')} of {len(verdicts)} bounds kept."
    print(summary)
    if args.write:
        head, _, rest = README.read_text().partition(BEGIN)
        tail = rest.partition(END)[2]
        text = "\n".join([*map(str, tables), f"{summary}\n"])
        README.write_text(f"{head}{BEGIN}\n{text}\n{END}{tail}")


if __name__ == "__main__":
    main()
