"""The report of a comparison: tables, differences to the baseline, ablations and pictures, from the finished runs."""

import itertools
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from .comparison import (
    SCORES,
    Comparison,
    Results,
    Run,
    best_of_curve,
    choose,
    finished,
    plan,
    write_json,
)
from .configuration import read_json
from .data.glyphs import noise_bound, outline_bound
from .files import write_text
from .model_card import as_markdown
from .plots import accuracy_intervals, learning_curves, set_size_histogram, sweep_curve
from .report import as_text, interval
from .sets import HEADS, k_key

SHOWN = {
    "average_k_accuracy": "average-K accuracy",
    "mean_set_size": "mean set size",
    "few_shot_accuracy": "few shot",
    "medium_shot_accuracy": "medium shot",
    "many_shot_accuracy": "many shot",
}
ACCURACIES = [name for name in SHOWN if name.endswith("accuracy")]
BOUND_IMAGES = 2000


def summarise(comparison: Comparison) -> dict[str, Any]:
    """All numbers of the report, from the files of the finished runs."""
    runs, unknown = plan(comparison)
    results = [(run, finished(comparison, run)) for run in runs]
    if unknown or any(result is None for _, result in results):
        raise ValueError(f"{comparison.output_dir} is not complete: run the command again without --dry-run.")
    final = {  # {(loss, K): {seed: what is reported}}
        (loss, k): dict(_reported(results, loss, k)) for loss in comparison.losses for k in comparison.k
    }
    limits = _limits(comparison, results)
    rows = []
    for (loss, k), entries in final.items():
        row = {"loss": loss, "k": k, "values": choose(comparison, loss, k), "seeds": sorted(entries)}
        row["metrics"] = _intervals([_answer(entry, k) for entry in entries.values()], SHOWN)
        row["difference"] = _differences(entries, final[comparison.baseline, k], lambda entry, k=k: _answer(entry, k))
        row["to_best"] = {
            name: of_k[k_key(k)] - row["metrics"]["average_k_accuracy"]["mean"]
            for name, of_k in limits.items()
            if "average_k_accuracy" in row["metrics"]
        }
        rows.append(row)
    failed = [f"{run}: {result['error']}" for run, result in results if result["error"] and run.phase != "tune"]
    return {
        "dataset": results[0][1]["config"]["dataset"],
        "images": next(result["images"] for run, result in results if run.phase == "final"),
        "k": comparison.k,
        "tune_k": comparison.tune_k,
        "baseline": comparison.baseline,
        "budget": {loss: len(comparison.configurations(loss)) for loss in comparison.losses},
        "seeds": comparison.seeds,
        "versions": results[0][1]["versions"],
        "rows": rows,
        "limits": limits,
        "heads": _heads(comparison, final),
        "scores": _scores(comparison, final),
        "transfer": _transfer(comparison, final),
        "diverged": failed,
        "diverged_tuning": sum(bool(result["error"]) for run, result in results if run.phase == "tune"),
        "hours": sum(result["seconds"] for _, result in results) / 3600,
    }


def _reported(results: list[tuple[Run, Results]], loss: str, k: float) -> Iterator[tuple[int, dict[str, Any]]]:
    """(seed, what was kept for this K) of a loss."""
    for run, result in results:
        if run.phase == "final" and run.loss == loss:
            for entry in result["kept"]:
                if k in entry["k"]:
                    yield run.seed, entry


def _answer(entry: dict[str, Any], k: float, split: str = "test") -> dict[str, float]:
    """The metrics of the score and head that answer."""
    return entry[split][entry["score"]][entry["head"][k_key(k)]][k_key(k)]


def _intervals(found: list[dict[str, float]], names: Sequence[str]) -> dict[str, Any]:
    return {name: interval([m[name] for m in found]) for name in names if found and all(name in m for m in found)}


def _differences(
    own: dict[int, dict], other: dict[int, dict], metrics: Callable[[dict], dict[str, float]]
) -> dict[str, dict[str, Any]]:
    """Of every accuracy the difference to another loss with the same seeds: interval, and how many seeds it won."""
    pairs = [(metrics(own[seed]), metrics(other[seed])) for seed in sorted(own.keys() & other.keys())]
    return {
        name: {
            **interval(values),
            "won": sum(value > 0 for value in values),
            "lost": sum(value < 0 for value in values),
        }
        for name in ACCURACIES
        if (values := [a[name] - b[name] for a, b in pairs if name in a and name in b])
    }


def _limits(comparison: Comparison, results: list[tuple[Run, Results]]) -> dict[str, dict[str, float]]:
    """The yardsticks of generated data: {name: {K: accuracy}}."""
    if not comparison.on_glyphs:
        return {}
    path = Path(comparison.output_dir) / "bounds.json"
    stored = read_json(path) if path.is_file() else {}
    if not all(k_key(k) in stored.get("noise", {}) for k in comparison.k):
        stored = {
            "outline": {k_key(k): value for k, value in outline_bound(comparison.k).items()},
            "noise": {k_key(k): value for k, value in noise_bound(comparison.k, BOUND_IMAGES).items()},
            "images": BOUND_IMAGES,
        }
        write_json(path, stored)
    limits = {
        "bound from outlines": stored["outline"],
        "bound from noise": {key: value["accuracy"] for key, value in stored["noise"].items()},
    }
    for run, result in results:
        if run.phase == "more_data" and not result["error"]:
            entries = {k_key(k): _answer(entry, k) for entry in result["kept"] for k in entry["k"]}
            name = f"{run.loss} on {comparison.more_data} times the data"
            limits[name] = {key: metrics["average_k_accuracy"] for key, metrics in entries.items()}
    return limits


def _heads(comparison: Comparison, final: dict) -> list[dict[str, Any]]:
    """For losses with two heads: each, their mean, and the one chosen on validation, also against the baseline."""
    rows = []
    for (loss, k), entries in final.items():
        if not entries or any("sccp" not in entry["test"][entry["score"]] for entry in entries.values()):
            continue

        def metrics(entry: dict, head: str, k: float = k) -> dict[str, float]:
            if head == "auto":
                on_validation = entry["validation"][entry["score"]]
                head = max(on_validation, key=lambda name: on_validation[name][k_key(k)]["average_k_accuracy"])
            return entry["test"][entry["score"]][head][k_key(k)]

        for head in (*HEADS, "auto"):
            found = _intervals([metrics(entry, head) for entry in entries.values()], SHOWN)
            own = {seed: metrics(entry, head) for seed, entry in entries.items()}
            other = {seed: _answer(entry, k) for seed, entry in final[comparison.baseline, k].items()}
            difference = _differences(own, other, dict)
            rows.append({"loss": loss, "k": k, "head": head, "metrics": found, "difference": difference})
    return rows


def _scores(comparison: Comparison, final: dict) -> list[dict[str, Any]]:
    """What thresholding the sigmoid instead of the softmax gives, with the head that answers."""
    rows = []
    for (loss, k), entries in final.items():
        for kind in SCORES if entries else ():
            of_kind = [entry["test"][kind][entry["head"][k_key(k)]][k_key(k)] for entry in entries.values()]
            rows.append({"loss": loss, "k": k, "score": kind, "metrics": _intervals(of_kind, SHOWN)})
    return rows


def _transfer(comparison: Comparison, final: dict) -> list[dict[str, Any]]:
    """Models trained for one K, calibrated for and tested at another."""
    rows = []
    for (loss, k), entries in final.items():
        if not comparison.loss(loss).needs_k or not entries:
            continue
        for other in comparison.k:
            found = _intervals([_answer(entry, other) for entry in entries.values()], SHOWN)
            rows.append({"loss": loss, "trained": k, "tested": other, "metrics": found})
    return rows


def markdown(summary: dict[str, Any]) -> str:
    """The report as Markdown."""
    images, seeds = summary["images"], summary["seeds"]
    at = "for each K" if summary["tune_k"] is None else f"at K = {k_key(summary['tune_k'])}"
    sizes = ", ".join(f"{number} {part}" for part, number in images.items())
    budgets = sorted(set(summary["budget"].values()))
    lines = [
        f"# Comparison on {summary['dataset']}",
        "",
        f"{sizes} images; {seeds} seeds. Every loss was tuned {at} by {' to '.join(map(str, budgets))} trainings with"
        " a seed of their own, by validation average-K accuracy; the epoch that is kept was chosen on validation as"
        " well, for every K by itself. Thresholds come from validation, the numbers below from test. Mean ± half width"
        " of the 95% confidence interval over seeds (Student's t); accuracies in percent, few, medium and many shot"
        f" are means over classes. Differences to {summary['baseline']} are paired by seed; `won` counts the seeds"
        " ahead of it.",
        "",
    ]
    if seeds < 5:
        lines += [f"**{seeds} seed(s) are too few to conclude anything; take 5 or more.**", ""]
    for text in summary["diverged"]:
        lines += [f"**Missing:** {text}", ""]
    if summary["diverged_tuning"]:
        lines += [f"{summary['diverged_tuning']} of the trainings to tune diverged; they count as worst.", ""]
    limits = summary["limits"]
    lines += _in_short(summary)
    for k in summary["k"]:
        rows = [row for row in summary["rows"] if row["k"] == k]
        names = [name for name in SHOWN if any(name in row["metrics"] for row in rows)]
        titles = [SHOWN[name].replace("-K", f"-{k_key(k)}") for name in names]
        head = ["loss", *titles, f"difference to {summary['baseline']}", "won", *(f"to {name}" for name in limits)]
        lines += [f"## K = {k_key(k)}", "", f"| {' | '.join(head)} |", "|---" * len(head) + "|"]
        for row in rows:
            cells = [_cell(row["metrics"].get(name), name != "mean_set_size") for name in names]
            difference = row["difference"].get("average_k_accuracy")
            own = row["loss"] == summary["baseline"]
            cells += ["–", "–"] if own else [_cell(difference, sign=True), _won(difference)]
            cells += [f"{100 * row['to_best'][name]:.2f}" if name in row["to_best"] else "–" for name in limits]
            lines.append(f"| {row['loss']} | {' | '.join(cells)} |")
        lines.append("")
    lines += _difference_by_shot(summary)
    if limits:
        lines += ["## The best possible", "", _explain_limits(summary), ""]
        lines += ["| | " + " | ".join(f"K = {k_key(k)}" for k in summary["k"]) + " |"]
        lines.append("|---" * (1 + len(summary["k"])) + "|")
        for name, of_k in limits.items():
            lines.append(f"| {name} | " + " | ".join(f"{100 * of_k[k_key(k)]:.3f}" for k in summary["k"]) + " |")
        lines.append("")
    lines += ["## What was chosen on validation", "", "| loss | K | hyperparameters |", "|---|---|---|"]
    for row in summary["rows"]:
        values = ", ".join(f"{name} {value}" for name, value in row["values"].items())
        lines.append(f"| {row['loss']} | {k_key(row['k'])} | {as_markdown(values)} |")
    lines += ["", *_ablations(summary)]
    return "\n".join(lines) + "\n"


def _in_short(summary: dict[str, Any]) -> list[str]:
    """Accuracies with set sizes, and the differences to the baseline: one row for each loss."""
    rows = {(row["loss"], row["k"]): row for row in summary["rows"]}
    losses = list(dict.fromkeys(loss for loss, _ in rows))
    titles = " | ".join(f"K = {k_key(k)}" for k in summary["k"])
    rule = "|---" * (1 + len(summary["k"])) + "|"
    lines = ["## In short", "", "Average-K accuracy, and in brackets the mean set size on test:", ""]
    lines += [f"| loss | {titles} |", rule]
    for loss in losses:
        of_k = [rows[loss, k]["metrics"] for k in summary["k"]]
        cells = [
            f"{_cell(found['average_k_accuracy'])} ({found['mean_set_size']['mean']:.2f})" if found else "–"
            for found in of_k
        ]
        lines.append(f"| {loss} | {' | '.join(cells)} |")
    lines += ["", f"Paired difference to {summary['baseline']}, and in brackets the seeds won:", ""]
    lines += [f"| loss | {titles} |", rule]
    for loss in losses:
        of_k = [rows[loss, k]["difference"].get("average_k_accuracy") for k in summary["k"]]
        cells = [f"{_cell(found, sign=True)} ({_won(found)})" if found else "–" for found in of_k]
        if loss != summary["baseline"]:
            lines.append(f"| {loss} | {' | '.join(cells)} |")
    return [*lines, ""]


def _cell(found: dict[str, Any] | None, percent: bool = True, sign: bool = False) -> str:
    if found is None:
        return "–"
    text = as_text(found, percent)
    return f"+{text}" if sign and found["mean"] >= 0 else text


def _won(found: dict[str, Any] | None) -> str:
    return "–" if found is None else f"{found['won']}/{found['n']}"


def _difference_by_shot(summary: dict[str, Any]) -> list[str]:
    names = [name for name in ACCURACIES if any(name in row["difference"] for row in summary["rows"])]
    others = [row for row in summary["rows"] if row["loss"] != summary["baseline"]]
    if not others:
        return []
    lines = [f"## Paired differences to {summary['baseline']}, by shot", ""]
    lines.append(f"| loss | K | {' | '.join(SHOWN[name] for name in names)} |")
    lines.append("|---" * (2 + len(names)) + "|")
    for row in others:
        found = [row["difference"].get(name) for name in names]
        cells = [f"{_cell(of, sign=True)} ({_won(of)})" if of else "–" for of in found]
        lines.append(f"| {row['loss']} | {k_key(row['k'])} | {' | '.join(cells)} |")
    return [*lines, ""]


def _explain_limits(summary: dict[str, Any]) -> str:
    return (
        "The generator is known, so the average-K accuracy of the best classifier can be enclosed. *Bound from"
        " outlines*: a classifier that is told face and outline confuses only characters whose outlines are equal to"
        " the bit, and gives them their frequencies; exact, and an upper bound, because blur, noise and unknown place"
        " are ignored. *Bound from noise*: one that is told face, place and severity, and knows the probability of"
        f" every pixel under the noise; estimated on {BOUND_IMAGES} drawn images, still an upper bound, because no"
        " classifier of images is told these. Both are nearly 100% from K = 2 on. The same model trained on many times"
        " the data, where it is listed, shows what can be reached: it bounds the best possible from below, up to the"
        " chance of its test images."
    )


def _ablations(summary: dict[str, Any]) -> list[str]:
    lines = []
    tables = (
        ("heads", "Which head answers", "head", "auto: the head with the highest validation accuracy, for each seed."),
        ("scores", "Which score is thresholded", "score", "With the head that answers in the tables above."),
    )
    for part, title, column, note in tables:
        rows = summary[part]
        if not rows:
            continue
        kinds = list(dict.fromkeys(row[column] for row in rows))
        lines += [f"## {title}", "", note, "", f"| loss | K | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
        for loss, k in dict.fromkeys((row["loss"], row["k"]) for row in rows):
            found = {
                row[column]: row["metrics"].get("average_k_accuracy")
                for row in rows
                if (row["loss"], row["k"]) == (loss, k)
            }
            lines.append(f"| {loss} | {k_key(k)} | {' | '.join(_cell(found.get(kind)) for kind in kinds)} |")
        lines.append("")
        if part == "heads":
            lines += [f"The same as paired difference to {summary['baseline']}, and in brackets the seeds won:", ""]
            lines += [f"| loss | K | {' | '.join(kinds)} |", "|---" * (2 + len(kinds)) + "|"]
            for loss, k in dict.fromkeys((row["loss"], row["k"]) for row in rows):
                found = [r["difference"].get("average_k_accuracy") for r in rows if (r["loss"], r["k"]) == (loss, k)]
                cells = [f"{_cell(of, sign=True)} ({_won(of)})" if of else "–" for of in found]
                lines.append(f"| {loss} | {k_key(k)} | {' | '.join(cells)} |")
            lines.append("")
    if summary["transfer"]:
        lines += ["## Trained for one K, calibrated for another", ""]
        lines += [f"| loss | trained for | {' | '.join(f'tested at K = {k_key(k)}' for k in summary['k'])} |"]
        lines.append("|---" * (2 + len(summary["k"])) + "|")
        for loss, k in dict.fromkeys((row["loss"], row["trained"]) for row in summary["transfer"]):
            cells = [
                _cell(row["metrics"].get("average_k_accuracy"))
                for row in summary["transfer"]
                if (row["loss"], row["trained"]) == (loss, k)
            ]
            lines.append(f"| {loss} | {k_key(k)} | {' | '.join(cells)} |")
        lines.append("")
    return lines


def write_comparison(comparison: Comparison) -> str:
    """Write report.md, report.json and the pictures to the output folder and return the Markdown."""
    summary = summarise(comparison)
    text = markdown(summary)
    folder = Path(comparison.output_dir)
    write_text(folder / "report.md", text)
    write_json(folder / "report.json", summary)
    for ending in ("png", "svg"):
        _pictures(comparison, summary, folder, ending)
    return text


def _pictures(comparison: Comparison, summary: dict[str, Any], folder: Path, ending: str) -> None:
    curves: dict[str, list] = {}
    for row in summary["rows"]:
        if "average_k_accuracy" in row["metrics"]:
            curves.setdefault(row["loss"], []).append({"k": row["k"], **row["metrics"]["average_k_accuracy"]})
    limits = {name: {float(key): value for key, value in of_k.items()} for name, of_k in summary["limits"].items()}
    accuracy_intervals(curves, folder / f"accuracy_against_k.{ending}", limits)
    runs = [(run, finished(comparison, run)) for run in plan(comparison)[0]]
    k = min(comparison.k, key=lambda k: abs(k - 5))  # the paper's
    shown = list(dict.fromkeys((comparison.baseline, *(["avgk"] if "avgk" in comparison.losses else []))))
    sizes = {loss: _pooled(dict(_reported(runs, loss, k)), k) for loss in shown}
    title = f"Set sizes on test, K = {k_key(k)}, all seeds"
    if all(sizes.values()):
        set_size_histogram({loss: of["all"] for loss, of in sizes.items()}, folder / f"set_sizes.{ending}", title)
        by_shot = {
            f"{name} shot": sizes[shown[-1]][name] for name in ("few", "medium", "many") if sum(sizes[shown[-1]][name])
        }
        set_size_histogram(by_shot, folder / f"set_sizes_by_shot.{ending}", f"{title}, {shown[-1]}")
    longest = {}
    for loss in comparison.losses:
        tuned = [result for run, result in runs if run.phase == "tune" and run.loss == loss and not result["error"]]
        at = comparison.tune_k or comparison.k[0]
        tuned = [result for result in tuned if result["k"] in (None, at)]
        if tuned:  # of the longest trainings the best, because a short one may end before it overfits
            most = max(result["epochs"] for result in tuned)
            best = max((r for r in tuned if r["epochs"] == most), key=lambda r: best_of_curve(r, at))
            longest[loss] = [
                {"epoch": p["epoch"], "accuracy": p["average_k_accuracy"][k_key(at)], "loss": p["validation_loss"]}
                for p in best["curve"]
            ]
    title = f"The longest trainings that tuned each loss, K = {k_key(comparison.tune_k or comparison.k[0])}"
    learning_curves(longest, folder / f"learning_curves.{ending}", title)
    for sweep in comparison.sweeps:
        path = Path(sweep) / "sweep.json"
        content = read_json(path) if path.is_file() else {"search": {}}
        if len(content["search"]) == 1:
            (name,) = content["search"]
            whole = [row for row in content["summary"] if row["n"] and not row["diverged"]]
            points = [{"value": row["values"][name], **row} for row in whole]
            sweep_curve(points, name, folder / f"sensitivity_{Path(sweep).name}.{ending}")


def _pooled(entries: dict[int, dict[str, Any]], k: float) -> dict[str, list[int]]:
    """The set sizes of all seeds together."""
    pooled: dict[str, list[int]] = {}
    for entry in entries.values():
        for name, counts in entry["set_sizes"][k_key(k)].items():
            pooled[name] = [a + b for a, b in itertools.zip_longest(pooled.get(name, []), counts, fillvalue=0)]
    return pooled
