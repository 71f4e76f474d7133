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

from avgk_hf.study.columns import as_table, columns_of

from .processors import SETTINGS, environment

DEMO = "import sys; from avgk_hf.commands.demo import demo; demo(sys.argv[1], ('--seed', sys.argv[2]))"


def run(setting: dict[str, str], seed: int) -> dict[str, dict[str, float]]:
    """The columns of the demo's table for one seed under one setting, by row."""
    with tempfile.TemporaryDirectory() as folder:
        subprocess.run([sys.executable, "-c", DEMO, folder, str(seed)], env=environment(setting), check=True)
        results = json.loads(Path(folder, "results.json").read_text())
    return {name: {c.metric: result["test"][c.metric] for c in columns_of("demo")} for name, result in results.items()}


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
    done = {(entry["processor"], entry["seed"]) for entry in runs}
    for seed in range(args.seeds):
        for name, setting in {"this machine": {}, **SETTINGS}.items():
            if (name, seed) in done:
                continue
            print(f"\n== seed {seed}, {name}", flush=True)
            runs.append({"processor": name, "seed": seed, "rows": run(setting, seed)})
            path.write_text(json.dumps(runs, indent=1) + "\n")
    text = table(runs, k=3)
    (args.out / "table.md").write_text(text + "\n")
    print(f"\n{text}\n\nmean (lowest to highest) of {len(runs)} runs")


if __name__ == "__main__":
    main()
