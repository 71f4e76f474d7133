"""`python -m benchmarks.demo`: how far the demo's table moves, over seeds and over processors that round differently.

Runs `avgk demo` for every seed under every setting of `benchmarks.processors`, adds each result to
results/demo/runs.json (one that is there already is not computed again), and writes mean, lowest and highest value of
every cell to results/demo/table.md.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from avgk_hf.commands.demo import BALANCE, OBJECTIVES
from avgk_hf.study.columns import as_table, columns_of

from .processors import SETTINGS, environment

ROW_NAMES = ["CE", f"CE, balance {BALANCE:g}", "AVG-K"]
# the rows of some objectives, as `avgk demo` makes them
ROWS = """
import json, pathlib, sys
from avgk_hf.commands.demo import rows_of
folder, seed, *objectives = sys.argv[1:]
rows, splits = {}, None
for objective in objectives:
    found, splits = rows_of(objective, pathlib.Path(folder), ("--seed", seed), splits)
    rows |= {name: result["test"] for name, result in found.items()}
pathlib.Path(folder, "rows.json").write_text(json.dumps(rows))
"""


def run(setting: dict[str, str], seed: int, known: dict[str, Any]) -> dict[str, dict[str, float]]:
    """The columns of the demo's table for one seed under one setting, by row.

    Args:
        setting: Of `benchmarks.processors`.
        seed: Of the training.
        known: Rows that there are already. Where AVG-K's is among them it is kept, if CE, trained again, gives the
            same digits: then this is the machine that computed it.
    """
    for objectives in (["ce"], list(OBJECTIVES)) if OBJECTIVES["avgk"] in known else (list(OBJECTIVES),):
        with tempfile.TemporaryDirectory() as folder:
            command = [sys.executable, "-c", ROWS, folder, str(seed), *objectives]
            subprocess.run(command, env=environment(setting), check=True)
            results = json.loads(Path(folder, "rows.json").read_text())
        rows = {name: {c.metric: found[c.metric] for c in columns_of("demo")} for name, found in results.items()}
        if all(rows[name] == known[name] for name in rows if name in known):
            break
    return {name: {**known, **rows}[name] for name in ROW_NAMES}


def table(runs: list[dict[str, Any]], k: float) -> str:
    """Mean (lowest to highest) of every cell as a Markdown table."""
    columns, rows = columns_of("demo"), []
    for name in runs[0]["rows"]:
        of_column = {column: [entry["rows"][name][column.metric] for entry in runs] for column in columns}
        cells = [
            f"{column.cell(sum(values) / len(values))} ({column.cell(min(values))} to {column.cell(max(values))})"
            for column, values in of_column.items()
        ]
        rows.append([name, *cells])
    return as_table(["", *(column.heading(k) for column in columns)], rows)


def main() -> None:
    """Run what is missing, and write the table."""
    parser = argparse.ArgumentParser("python -m benchmarks.demo", description=__doc__)
    parser.add_argument("--seeds", type=int, default=3, help="seeds 0, 1, ... (%(default)s)")
    parser.add_argument("--out", type=Path, default=Path("results/demo"), help="folder of results (%(default)s)")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    path = args.out / "runs.json"
    runs = json.loads(path.read_text()) if path.exists() else []
    done = {(entry["processor"], entry["seed"]): entry for entry in runs}
    for seed in range(args.seeds):
        for name, setting in {"this machine": {}, **SETTINGS}.items():
            entry = done.get((name, seed), {"processor": name, "seed": seed, "rows": {}})
            if set(ROW_NAMES) <= set(entry["rows"]):
                continue
            print(f"\n== seed {seed}, {name}", flush=True)
            entry["rows"] = run(setting, seed, entry["rows"])
            runs += [] if (name, seed) in done else [entry]
            path.write_text(json.dumps(runs, indent=1) + "\n")
    text = table(runs, k=3)
    (args.out / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\nmean (lowest to highest) of {len(runs)} runs")


if __name__ == "__main__":
    main()
