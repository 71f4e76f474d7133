"""Several runs, one table: the mean over seeds and its 95% confidence interval, for every metric."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from .files import write_text
from .model_card import as_markdown, read_results

RESULTS = "results.json"
COLUMNS = {
    "average_k_accuracy": "average-K accuracy",
    "mean_set_size": "mean set size",
    "top1_accuracy": "top-1",
    "topk_accuracy": "top-K",
    "few_shot_accuracy": "few shot",
    "medium_shot_accuracy": "medium shot",
    "many_shot_accuracy": "many shot",
}


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


def find_runs(folders: Sequence[str | Path]) -> list[Path]:
    """The finished runs in these folders: each one itself, or its subfolders, as `avgk train --seeds` makes them."""
    runs = []
    for folder in map(Path, folders):
        own = [folder] if (folder / RESULTS).is_file() else sorted(path.parent for path in folder.glob(f"*/{RESULTS}"))
        if not own:
            raise FileNotFoundError(f"{folder} holds no {RESULTS}, nor does a folder in it: name finished runs.")
        runs += own
    return list(dict.fromkeys(runs))


def report(folders: Sequence[str | Path]) -> list[dict[str, Any]]:
    """Runs that differ in nothing but the seed, together: mean and interval of every metric on every split.

    What counts is what results.json records: the data and model blocks of the recipe, and those training arguments
    that the weights depend on.

    Args:
        folders: Folders of finished runs, or folders that hold such folders.

    Returns:
        For each group `name`, `runs`, `seeds`, `data`, `hyperparameters`, `recipe` and `metrics`, {split: {metric:
        mean, half_width, n}}.
    """
    groups: dict[str, list[tuple[Path, dict[str, Any]]]] = {}
    for run in find_runs(folders):
        results = read_results(run)
        for name in ("objective", "k", "seed"):
            if name not in results:
                raise ValueError(f"{run / RESULTS} has no field {name!r}; write it anew with `avgk train`.")
        same = {name: value for name, value in results["hyperparameters"].items() if name != "seed"}
        blocks = [results.get("data"), results.get("recipe"), results["objective"], results["k"], same]
        key = json.dumps(blocks, sort_keys=True)
        groups.setdefault(key, []).append((run, results))
    reported = []
    for members in groups.values():
        by_seed = {results["seed"]: run for run, results in members}
        if len(by_seed) < len(members):
            runs = ", ".join(str(run) for run, _ in members)
            raise ValueError(f"two of these runs have the same seed and count twice: {runs}. Name each seed once.")
        first = members[0][1]
        splits = [split for split in ("validation", "test") if all(split in results for _, results in members)]
        metrics = {
            split: {
                name: interval([results[split][name] for _, results in members])
                for name in first[split]
                if all(name in results[split] for _, results in members)
            }
            for split in splits
        }
        shared = {name: value for name, value in first["hyperparameters"].items() if name != "seed"}
        reported.append(
            {
                "name": f"{first['objective']}, K = {first['k']}",
                "runs": [str(run) for run, _ in members],
                "seeds": sorted(by_seed),
                "data": first.get("data") or {},
                "hyperparameters": shared,
                "recipe": first.get("recipe"),
                "metrics": metrics,
            }
        )
    _name_apart(reported)
    return reported


def _name_apart(groups: list[dict[str, Any]]) -> None:
    """Add to the names what distinguishes the groups."""
    blocks = [{**group["data"], **(group["recipe"] or group["hyperparameters"])} for group in groups]
    for key in dict.fromkeys(key for block in blocks for key in block):
        values = [block.get(key) for block in blocks]
        if key not in ("objective", "k") and any(value != values[0] for value in values):
            for group, value in zip(groups, values, strict=True):
                if value is not None:
                    group["name"] += f", {key} {value}"


def as_text(found: dict[str, float | int | None], percent: bool) -> str:
    """A mean with its interval, e.g. `97.12 ± 0.31`.

    >>> as_text({"mean": 0.9712, "half_width": 0.0031, "n": 5}, percent=True)
    '97.12 ± 0.31'
    """
    factor = 100 if percent else 1
    text = f"{factor * found['mean']:.2f}"
    return text if found["half_width"] is None else f"{text} ± {factor * found['half_width']:.2f}"


def markdown(groups: list[dict[str, Any]]) -> str:
    """The report as Markdown: one table for each split, accuracies in percent."""
    lines = ["# Report", ""]
    for split in ("test", "validation"):
        rows = [(group, group["metrics"][split]) for group in groups if split in group["metrics"]]
        names = [name for name in COLUMNS if any(name in metrics for _, metrics in rows)]
        if not rows:
            continue
        lines += [f"## {split.capitalize()}", "", f"| | seeds | {' | '.join(COLUMNS[name] for name in names)} |"]
        lines.append("|---" * (2 + len(names)) + "|")
        for group, metrics in rows:
            for at in dict.fromkeys(name.partition("@")[2] for name in metrics):  # "" is the K of the training
                found = [(name, metrics.get(f"{name}@{at}" if at else name)) for name in names]
                cells = [as_text(value, name != "mean_set_size") if value else "–" for name, value in found]
                name = f"{group['name']}, sets for K = {at}" if at else group["name"]
                lines.append(f"| {as_markdown(name)} | {len(group['seeds'])} | {' | '.join(cells)} |")
        lines.append("")
    lines.append("Mean ± half width of the 95% confidence interval over seeds (Student's t); accuracies in percent.")
    return "\n".join(lines) + "\n"


def write_report(folders: Sequence[str | Path], out: str | Path) -> str:
    """Write report.md and report.json to a folder and return the Markdown."""
    groups = report(folders)
    text = markdown(groups)
    write_text(Path(out) / "report.md", text)
    write_text(Path(out) / "report.json", json.dumps(groups, indent=2, ensure_ascii=False) + "\n")
    return text
