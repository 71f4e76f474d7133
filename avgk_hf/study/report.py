"""The report of a comparison: tables, differences to the baseline, ablations and pictures, from the finished runs."""

import itertools
import json
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from ..configuration import read_json
from ..data.glyphs import noise_bound, outline_bound
from ..files import write_text
from ..model_card import as_markdown
from ..scores import HEADS
from ..sets import k_key
from .balances import balance_text, summarise_balances
from .columns import ACCURACY, MISSING, SIZE, as_table, columns_of
from .plots import (
    accuracy_curve,
    balance_curves,
    by_shot,
    in_both_formats,
    learning_curves,
    set_size_histogram,
)
from .seeds import against, intervals
from .spec import Comparison, Results, Run, best_of_curve, choose, finished, plan
from .variants import LOGITS

SCORES = ("softmax", "sigmoid")  # those that are compared
BOUND_IMAGES = 2000
SHOWN = {column.metric: column for column in columns_of("study")}
Entries = dict[int, dict[str, Any]]  # by seed: what a run kept for one K
# what the same weights are asked: an option of `variants`, and the head; "auto" is the best of those without logits
ANSWERS = {"as above": ("none", "auto"), "temperature": ("temperature", "auto"), "flip": ("flip", "auto")}
ANSWERS |= {"flip, temperature": ("flip, temperature", "auto"), "mean of logits": ("none", LOGITS)}
ANSWERS["mean of logits, temperature"] = ("temperature", LOGITS)


def summarise(comparison: Comparison, so_far: bool = False) -> dict[str, Any]:
    """All numbers of the report, from the files of the finished runs; with `so_far` these need not be all."""
    planned = [(run, finished(comparison, run)) for run in plan(comparison)]
    results = [(run, result) for run, result in planned if result is not None]
    if len(results) < len(planned) and not so_far:
        raise ValueError(f"{comparison.output_dir} is not complete: run the command again without --dry-run.")
    if not any(run.phase == "final" for run, _ in results):
        raise ValueError(f"{comparison.output_dir} has no finished training to report yet.")
    limits = _limits(comparison, results)
    names = ("rows", "heads", "scores", "transfer", "options")
    parts: dict[str, list[dict[str, Any]]] = {name: [] for name in names}
    for loss, k in itertools.product(comparison.losses, comparison.k):
        entries, of_baseline = _entries(results, loss, k), _entries(results, comparison.baseline, k)
        if so_far and not entries:
            continue
        own, baseline = {"loss": loss, "k": k}, _metrics(of_baseline, k)
        row = {**own, "values": choose(comparison, loss, k), "seeds": sorted(entries)}
        row |= against(_metrics(entries, k), baseline, SHOWN.values())
        reached = row["metrics"].get(ACCURACY.metric)
        row["to_best"] = {name: of_k[k_key(k)] - reached["mean"] for name, of_k in limits.items() if reached}
        parts["rows"].append(row)
        two_heads = entries and all("sccp" in entry["test"][entry["score"]] for entry in entries.values())
        for head in (*HEADS, "auto") if two_heads else ():
            found = against(_metrics(entries, k, head=head), baseline, SHOWN.values())
            parts["heads"].append({**own, "head": head, **found})
        for score in SCORES if entries else ():
            found = _metrics(entries, k, score=score)
            parts["scores"].append({**own, "score": score, "metrics": _shown(found)})
        each_k = entries and comparison.loss(loss).needs_k and comparison.train_k is None
        for other in comparison.k if each_k else ():
            found = _shown(_metrics(entries, other))
            parts["transfer"].append({"loss": loss, "trained": k, "tested": other, "metrics": found})
        parts["options"] += [{**own, **row} for row in _option_rows(entries, of_baseline, k)]
    diverged = [(run, result["error"]) for run, result in results if result["error"]]
    return {
        "dataset": results[0][1]["config"]["dataset"],
        "images": next(result["images"] for run, result in results if run.phase == "final"),
        "k": comparison.k,
        "tune_k": comparison.tune_k,
        "baseline": comparison.baseline,
        "budget": {loss: len(comparison.configurations(loss)) for loss in comparison.losses},
        "seeds": comparison.seeds,
        "versions": results[0][1]["versions"],
        **parts,
        **summarise_balances(comparison, lambda loss, k: _entries(results, loss, k)),
        "limits": limits,
        "diverged": [f"{run}: {error}" for run, error in diverged if run.phase != "tune"],
        "diverged_tuning": sum(run.phase == "tune" for run, _ in diverged),
        "hours": sum(result["seconds"] for _, result in results) / 3600,
        **({"finished": len(results), "planned": len(planned)} if len(results) < len(planned) else {}),
    }


def _entries(results: list[tuple[Run, Results]], loss: str, k: float, phase: str = "final") -> Entries:
    return {
        run.seed: entry
        for run, result in results
        if (run.phase, run.loss) == (phase, loss)
        for entry in result["kept"]
        if k in entry["k"]
    }


def _metrics(
    entries: Entries, k: float, head: str | None = None, score: str | None = None
) -> dict[int, dict[str, float]]:
    """By seed the metrics on test of a head and a score, by default of those that answer."""
    found, key = {}, k_key(k)
    for seed, entry in entries.items():
        kind, of_seed = score or entry["score"], head or entry["head"][key]
        if of_seed == "auto":
            validation = entry["validation"][kind]
            of_seed = max(validation, key=lambda name: validation[name][key][ACCURACY.metric])
        found[seed] = entry["test"][kind][of_seed][key]
    return found


def _option_rows(entries: Entries, baseline: Entries, k: float) -> list[dict[str, Any]]:
    """Of every option: accuracy, difference to the same weights without it, and to the baseline with it."""
    if not entries or not all("variants" in entry for entry in (*entries.values(), *baseline.values())):
        return []
    plain, rows = _optional(entries, k, "none", "auto"), []
    for name, (option, head) in ANSWERS.items():
        own = _optional(entries, k, option, head)
        if own:
            metrics = {seed: entry["test"] for seed, entry in own.items()}
            gain = against(metrics, {seed: entry["test"] for seed, entry in plain.items()}, SHOWN.values())
            other = _optional(baseline, k, option, "auto")
            ahead = against(metrics, {seed: entry["test"] for seed, entry in other.items()}, SHOWN.values())
            rows.append({"option": name, **gain, "ahead": {"difference": ahead["difference"]}})
            rows[-1]["temperatures"] = sorted({entry["temperature"] for entry in own.values()})
    return rows


def _optional(entries: Entries, k: float, option: str, head: str) -> Entries:
    """By seed what was measured with an option, of a head, or of that which is best with it on validation."""
    found = {}
    for seed, entry in entries.items():
        of_head = {name: of_k[k_key(k)] for name, of_k in entry["variants"].get(option, {}).items()}
        own = [of_head[name] for name in (HEADS if head == "auto" else (head,)) if name in of_head]
        if own:
            found[seed] = max(own, key=lambda measured: measured["validation"])
    return found


def _shown(own: dict[int, dict[str, float]]) -> dict[str, Any]:
    return intervals(list(own.values()), SHOWN)


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
        _write_json(path, stored)
    limits = {
        "bound from outlines": stored["outline"],
        "bound from noise": {key: value["accuracy"] for key, value in stored["noise"].items()},
    }
    more = {k: _metrics(_entries(results, comparison.baseline, k, "more_data"), k) for k in comparison.k}
    reached = {k_key(k): found[ACCURACY.metric] for k, of_seed in more.items() for found in of_seed.values()}
    return (
        {**limits, f"{comparison.baseline} on {comparison.more_data} times the data": reached} if reached else limits
    )


def comparison_text(summary: dict[str, Any]) -> str:
    """The report as Markdown."""
    baseline, seeds, rows = summary["baseline"], summary["seeds"], summary["rows"]
    at = "for each K" if summary["tune_k"] is None else f"at K = {k_key(summary['tune_k'])}"
    sizes = ", ".join(f"{number} {part}" for part, number in summary["images"].items())
    budgets = sorted(set(summary["budget"].values()))
    blocks = [
        f"# Comparison on {summary['dataset']}",
        f"{sizes} images; {seeds} seeds. Every loss was tuned {at} by {' to '.join(map(str, budgets))} trainings with"
        " a seed of their own, by validation average-K accuracy; the epoch that is kept was chosen on validation as"
        " well, for every K by itself. Thresholds come from validation, the numbers below from test. Mean ± half width"
        " of the 95% confidence interval over seeds (Student's t); accuracies in percent, few, medium and many shot"
        f" are means over classes. Differences to {baseline} are paired by seed; `won` counts the seeds ahead of it.",
    ]
    if seeds < 5:
        blocks.append(f"**{seeds} seed(s) are too few to conclude anything; take 5 or more.**")
    if "planned" in summary:
        blocks.append(f"**{summary['finished']} of {summary['planned']} trainings are finished; this is from them.**")
    blocks += [f"**Missing:** {text}" for text in summary["diverged"]]
    if summary["diverged_tuning"]:
        blocks.append(f"{summary['diverged_tuning']} of the trainings to tune diverged; they count as worst.")
    others, losses = [row for row in rows if row["loss"] != baseline], {"loss": "loss"}
    blocks += ["## In short", "Average-K accuracy, and in brackets the mean set size on test:"]
    blocks.append(_pivot(rows, losses, "k", _accuracy_and_size, "K = {}"))
    if others:
        blocks.append(f"Paired difference to {baseline}, and in brackets the seeds won:")
        blocks.append(_pivot(others, losses, "k", _difference, "K = {}"))
    for k in summary["k"]:
        blocks += [f"## K = {k_key(k)}", _table_of_k(summary, k)]
    if others:
        columns = [c for c in SHOWN.values() if any(c.metric in row["difference"] for row in rows)]
        cells = [[_difference(row, column.metric) for column in columns] for row in others]
        body = [[row["loss"], k_key(row["k"]), *own] for row, own in zip(others, cells, strict=True)]
        blocks.append(f"## Paired differences to {baseline}, by shot")
        blocks.append(as_table(["loss", "K", *(column.heading() for column in columns)], body))
    if summary["limits"]:
        body = [[name, *(f"{100 * of[k_key(k)]:.3f}" for k in summary["k"])] for name, of in summary["limits"].items()]
        head = ["", *(f"K = {k_key(k)}" for k in summary["k"])]
        blocks += ["## The best possible", EXPLAIN_LIMITS, as_table(head, body)]
    chosen = [", ".join(f"{name} {value}" for name, value in row["values"].items()) for row in rows]
    body = [[row["loss"], k_key(row["k"]), as_markdown(values)] for row, values in zip(rows, chosen, strict=True)]
    blocks += ["## What was chosen on validation", as_table(["loss", "K", "hyperparameters"], body)]
    return "\n\n".join([*blocks, *_ablations(summary), *balance_text(summary)]) + "\n\n"


def _table_of_k(summary: dict[str, Any], k: float) -> str:
    """Everything about one K: a row for each loss."""
    rows, limits = [row for row in summary["rows"] if row["k"] == k], summary["limits"]
    columns = [column for name, column in SHOWN.items() if any(name in row["metrics"] for row in rows)]
    head = ["loss", *(column.heading(k) for column in columns), f"difference to {summary['baseline']}", "won"]
    body = []
    for row in rows:
        found = None if row["loss"] == summary["baseline"] else row["difference"].get(ACCURACY.metric)
        cells = [column.cell(row["metrics"].get(column.metric)) for column in columns]
        cells += [
            ACCURACY.cell(found, sign=True),
            _won(found),
            *(ACCURACY.cell(row["to_best"].get(n)) for n in limits),
        ]
        body.append([row["loss"], *cells])
    return as_table([*head, *(f"to {name}" for name in limits)], body)


def _pivot(
    rows: Iterable[dict[str, Any]],
    index: dict[str, str],
    column: str,
    cell: Callable[[dict[str, Any]], str],
    heading: str = "{}",
) -> str:
    """A table with a row for each value of the fields of `index`, {field: title}, and a column for each of another."""
    found: dict[tuple[str, ...], dict[str, str]] = {}
    for row in rows:
        *key, kind = (
            value if isinstance(value, str) else k_key(value) for value in (row[n] for n in (*index, column))
        )
        found.setdefault(tuple(key), {})[kind] = cell(row)
    kinds = dict.fromkeys(kind for cells in found.values() for kind in cells)
    body = [[*key, *(cells.get(kind, MISSING) for kind in kinds)] for key, cells in found.items()]
    return as_table([*index.values(), *(heading.format(kind) for kind in kinds)], body)


def _accuracy(row: dict[str, Any]) -> str:
    return ACCURACY.cell(row["metrics"].get(ACCURACY.metric))


def _accuracy_and_size(row: dict[str, Any]) -> str:
    size = row["metrics"].get(SIZE.metric)
    return f"{_accuracy(row)} ({SIZE.cell(size['mean'])})" if size else MISSING


def _difference(row: dict[str, Any], metric: str = ACCURACY.metric) -> str:
    found = row["difference"].get(metric)
    return f"{ACCURACY.cell(found, sign=True)} ({_won(found)})" if found else MISSING


def _won(found: dict[str, Any] | None) -> str:
    return MISSING if found is None else f"{found['won']}/{found['n']}"


EXPLAIN_LIMITS = (
    "The generator is known, so the average-K accuracy of the best classifier can be enclosed. *Bound from"
    " outlines*: a classifier that is told face and outline confuses only characters whose outlines are equal to"
    " the bit, and gives them their frequencies; exact, and an upper bound, because blur, noise and unknown place"
    " are ignored. *Bound from noise*: one that is told face, place and severity, and knows the probability of"
    f" every pixel under the noise; estimated on {BOUND_IMAGES} drawn images, still an upper bound, because no"
    " classifier of images is told these. Both are nearly 100% from K = 2 on. The same model trained on many"
    " times the data, where it is listed, shows what can be reached: it bounds the best possible from below, up"
    " to the chance of its test images."
)


EXPLAIN_OPTIONS = (
    "Temperature: the score is softmax(z / T), with that of ten values of T from 0.35 to 8 that has the highest"
    " validation accuracy, for every K, head and seed. Flip: the mean of the scores of the image and of its mirror"
    " image. Mean of logits: the score of the mean of both heads' logits, in place of the mean of their"
    " probabilities, and compared with the baseline's own. Head and thresholds come from validation with the same"
    " option."
)


def _ablations(summary: dict[str, Any]) -> list[str]:
    blocks, index = [], {"loss": "loss", "k": "K"}
    if summary["heads"]:
        blocks += ["## Which head answers", "auto: the head with the highest validation accuracy, for each seed."]
        blocks.append(_pivot(summary["heads"], index, "head", _accuracy))
        blocks.append(f"The same as paired difference to {summary['baseline']}, and in brackets the seeds won:")
        blocks.append(_pivot(summary["heads"], index, "head", _difference))
    if summary["scores"]:
        blocks += ["## Which score is thresholded", "With the head that answers in the tables above."]
        blocks.append(_pivot(summary["scores"], index, "score", _accuracy))
    if summary["options"]:
        blocks += ["## What else the same weights answer", EXPLAIN_OPTIONS]
        blocks.append(_pivot(summary["options"], index, "option", _accuracy))
        blocks.append("Paired difference to the same weights without it, and in brackets the seeds won:")
        changed = [row for row in summary["options"] if row["option"] != "as above"]
        blocks.append(_pivot(changed, index, "option", _difference))
        blocks.append(f"Paired difference to {summary['baseline']} with the same option:")
        others = [row for row in summary["options"] if row["loss"] != summary["baseline"]]
        blocks.append(_pivot(others, index, "option", lambda row: _difference(row["ahead"])))
        blocks.append("Temperatures that validation chose:")
        chosen = [row for row in summary["options"] if "temperature" in row["option"]]
        blocks.append(_pivot(chosen, index, "option", lambda row: ", ".join(map(k_key, row["temperatures"]))))
    if summary["transfer"]:
        index = {"loss": "loss", "trained": "trained for"}
        blocks.append("## Trained for one K, calibrated for another")
        blocks.append(_pivot(summary["transfer"], index, "tested", _accuracy, "tested at K = {}"))
    return blocks


def _write_json(path: Path, content: Any) -> None:
    write_text(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


def write_comparison(comparison: Comparison, so_far: bool = False) -> str:
    """Write report.md, report.json and the pictures to the output folder and return the Markdown.

    Args:
        comparison: What was compared.
        so_far: Whether to report what is finished, if not all is.
    """
    summary = summarise(comparison, so_far)
    text = comparison_text(summary)
    folder = Path(comparison.output_dir)
    write_text(folder / "report.md", text)
    _write_json(folder / "report.json", summary)
    curves: dict[str, dict[float, Any]] = {}
    for row in summary["rows"]:
        if ACCURACY.metric in row["metrics"]:
            curves.setdefault(row["loss"], {})[row["k"]] = row["metrics"][ACCURACY.metric]
    limits = {name: {float(key): value for key, value in of_k.items()} for name, of_k in summary["limits"].items()}
    title = "Average-K accuracy on test, mean and 95% interval over seeds"
    in_both_formats(accuracy_curve, folder / "accuracy_against_k", curves, limits=limits, title=title)
    results = [(run, result) for run in plan(comparison) if (result := finished(comparison, run)) is not None]
    _draw_set_sizes(comparison, results, folder)
    _draw_learning(comparison, results, folder)
    for loss, rows in summary.get("balance_curves", {}).items():
        in_both_formats(balance_curves, folder / f"balance_{loss}", rows)
    return text


def _draw_set_sizes(comparison: Comparison, results: list[tuple[Run, Results]], folder: Path) -> None:
    """Of the baseline and of AVG-K, the sizes of all seeds together."""
    k = min(comparison.k, key=lambda k: abs(k - 5))  # the paper's
    shown = list(dict.fromkeys((comparison.baseline, *(loss for loss in comparison.losses if loss == "avgk"))))
    sizes: dict[str, dict[str, list[int]]] = {loss: {} for loss in shown}
    for loss, pooled in sizes.items():
        for entry in _entries(results, loss, k).values():
            for name, counts in entry["set_sizes"][k_key(k)].items():
                pooled[name] = [a + b for a, b in itertools.zip_longest(pooled.get(name, []), counts, fillvalue=0)]
    if all(sizes.values()):
        title, last = f"Set sizes on test, K = {k_key(k)}, all seeds", shown[-1]
        of_all = {loss: of["all"] for loss, of in sizes.items()}
        in_both_formats(set_size_histogram, folder / "set_sizes", of_all, title=title)
        title = f"{title}, {last}"
        in_both_formats(set_size_histogram, folder / "set_sizes_by_shot", by_shot(sizes[last]), title=title)


def _draw_learning(comparison: Comparison, results: list[tuple[Run, Results]], folder: Path) -> None:
    """Of the longest trainings that tuned a loss the best, because a short one may end before it overfits."""
    at, longest = comparison.first_k, {}
    for loss in comparison.losses:
        phase = "tune" if comparison.searched(loss) else "final"
        of_loss = [result for run, result in results if run.phase == phase and run.loss == loss]
        tuned = [result for result in of_loss if not result["error"] and result["k"] in (None, at)]
        if tuned:
            best = max(tuned, key=lambda result: (result["epochs"], best_of_curve(result, at)))
            longest[loss] = [
                {"epoch": p["epoch"], "accuracy": p["average_k_accuracy"][k_key(at)], "loss": p["validation_loss"]}
                for p in best["curve"]
            ]
    title = f"The longest trainings that tuned each loss, K = {k_key(at)}"
    in_both_formats(learning_curves, folder / "learning_curves", longest, title=title)
