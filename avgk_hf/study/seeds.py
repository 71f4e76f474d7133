"""Runs that differ in the seed only, as one row: mean and 95% confidence interval of every metric (`avgk report`)."""

import json
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from ..checks import near_folder
from ..files import write_text
from ..model_card import as_markdown
from ..results import CALIBRATED_ONLY, RESULTS, read_results
from .columns import Column, as_table, columns_of


def interval(values: Sequence[float]) -> dict[str, float | int | None]:
    """Mean and half width of the 95% confidence interval, by Student's t-distribution.

    Of n values with mean m and standard deviation s it is m +- t s / sqrt(n), t the 0.975 quantile with n - 1 degrees
    of freedom. One value has a mean and no interval.

    Example:
        >>> found = interval([0.8, 0.9, 1.0])
        >>> round(found["mean"], 4), round(found["half_width"], 4), found["n"]
        (0.9, 0.2484, 3)
        >>> interval([0.9])
        {'mean': 0.9, 'half_width': None, 'n': 1}
    """
    from scipy.stats import t

    n = len(values)
    half_width = float(t.ppf(0.975, n - 1) * np.std(values, ddof=1) / math.sqrt(n)) if n > 1 else None
    return {"mean": float(np.mean(values)), "half_width": half_width, "n": n}


def intervals(found: Sequence[dict[str, float]], names: Iterable[str]) -> dict[str, dict[str, float | int | None]]:
    """The interval of every named metric that all of them have."""
    shared = [name for name in names if found and all(name in metrics for metrics in found)]
    return {name: interval([metrics[name] for metrics in found]) for name in shared}


def against(
    own: dict[int, dict[str, float]], other: dict[int, dict[str, float]], columns: Iterable[Column]
) -> dict[str, Any]:
    """By seed the metrics of one and of another: intervals, and of every share the paired difference.

    Returns:
        `metrics` {metric: interval}, and `difference` {metric: interval, and how many seeds were won and lost}.
    """
    columns, difference = list(columns), {}
    pairs = [(own[seed], other[seed]) for seed in sorted(own.keys() & other.keys())]
    for name in (column.metric for column in columns if column.percent):
        values = [a[name] - b[name] for a, b in pairs if name in a and name in b]
        if values:
            won, lost = sum(value > 0 for value in values), sum(value < 0 for value in values)
            difference[name] = {**interval(values), "won": won, "lost": lost}
    return {"metrics": intervals(list(own.values()), [column.metric for column in columns]), "difference": difference}


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """The finished runs in these folders: each one itself, or its subfolders, as `avgk train --seeds` makes them."""
    runs = []
    for folder in map(Path, folders):
        own = [folder] if (folder / RESULTS).is_file() else sorted(path.parent for path in folder.glob(f"*/{RESULTS}"))
        if not own:
            only = f"; {CALIBRATED_ONLY}" if (folder / "config.json").is_file() else ""
            near = near_folder(str(folder))
            only = f"; did you mean {near!r}?" if near else f"{only}."
            raise FileNotFoundError(f"{folder} holds no {RESULTS}, nor does a folder in it: name finished runs{only}")
        runs += own
    return list(dict.fromkeys(runs))


def group_runs(folders: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Runs that differ in nothing but the seed, together: mean and interval of every metric on every split.

    What counts is what results.json records: the data and model blocks of the recipe, and those training arguments
    that the weights depend on.

    Args:
        folders: Folders of finished runs, or folders that hold such folders.

    Returns:
        For each group `name`, `runs`, `seeds`, `data`, `hyperparameters`, `recipe` and `metrics`, {split: {metric:
        mean, half_width, n}}.
    """
    members: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    groups: dict[str, dict[str, Any]] = {}
    for run in find_runs(folders):
        results = read_results(run)
        for name in ("objective", "k", "seed"):
            if name not in results:
                raise ValueError(f"{run / RESULTS} has no field {name!r}; write it anew with `avgk train`.")
        same = {name: value for name, value in results["hyperparameters"].items() if name != "seed"}
        own = {"data": results.get("data") or {}, "hyperparameters": same, "recipe": results.get("recipe")}
        key = json.dumps([own, results["objective"], results["k"]], sort_keys=True)
        groups.setdefault(key, {"name": f"{results['objective']}, K = {results['k']}", **own})
        members.setdefault(key, []).append((run, results))
    for key, group in groups.items():
        runs, found = [str(run) for run, _ in members[key]], [results for _, results in members[key]]
        group["runs"], group["seeds"] = runs, sorted({results["seed"] for results in found})
        if len(group["seeds"]) < len(runs):
            raise ValueError(
                f"two of these runs have the same seed and count twice: {', '.join(runs)}. Name each seed once."
            )
        splits = [split for split in ("validation", "test") if all(split in results for results in found)]
        group["metrics"] = {
            split: intervals([results[split] for results in found], found[0][split]) for split in splits
        }
    _name_apart(list(groups.values()))
    return list(groups.values())


def _name_apart(groups: list[dict[str, Any]]) -> None:
    """Add to the names what distinguishes the groups."""
    blocks = [{**group["data"], **(group["recipe"] or group["hyperparameters"])} for group in groups]
    for key in dict.fromkeys(key for block in blocks for key in block):
        values = [block.get(key) for block in blocks]
        if key not in ("objective", "k") and any(value != values[0] for value in values):
            for group, value in zip(groups, values, strict=True):
                if value is not None:
                    group["name"] += f", {key} {value}"


def groups_text(groups: list[dict[str, Any]]) -> str:
    """The groups as Markdown: one table for each split, accuracies in percent."""
    blocks = ["# Report"]
    for split in ("test", "validation"):
        found = [(group, group["metrics"][split]) for group in groups if split in group["metrics"]]
        columns = [c for c in columns_of("report") if any(c.metric in metrics for _, metrics in found)]
        rows = []
        for group, metrics in found:
            for at in dict.fromkeys(name.partition("@")[2] for name in metrics):  # "" is the K of the training
                name = f"{group['name']}, sets for K = {at}" if at else group["name"]
                cells = [c.cell(metrics.get(f"{c.metric}@{at}" if at else c.metric)) for c in columns]
                rows.append([as_markdown(name), str(len(group["seeds"])), *cells])
        if found:
            blocks += [f"## {split.capitalize()}", as_table(["", "seeds", *(c.heading() for c in columns)], rows)]
    blocks.append("Mean ± half width of the 95% confidence interval over seeds (Student's t); accuracies in percent.")
    return "\n\n".join(blocks) + "\n"


def write_report(folders: Sequence[str | Path], out: str | Path, note: str = "") -> str:
    """Write report.md, which ends with a note, and report.json to a folder and return the Markdown."""
    groups = group_runs(folders)
    text = groups_text(groups) + note
    write_text(Path(out) / "report.md", text)
    write_text(Path(out) / "report.json", json.dumps(groups, indent=2, ensure_ascii=False) + "\n")
    return text
