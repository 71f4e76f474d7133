"""Balances in a comparison: what rare classes gain and all images lose, and what covers the tail.

Measured on the same trainings as everything else: thresholds from validation, numbers from test.
"""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

from datasets import Dataset

from ..calibration import Calibration
from ..data import prepare
from ..evaluation import Evaluation
from ..scope import GRID, Balancing
from ..sets import k_key
from ..trainer import AvgKTrainer
from .columns import ACCURACY, as_table, columns_of
from .seeds import against, intervals
from .spec import Comparison

LEVEL = 0.9  # of the coverages that are compared
COVERAGES = {  # the questions by which they are reached
    "LAC": {},
    "prevalence-adjusted LAC": {"balance": 1.0},
    "between, weight 0.5": {"per_class": 0.5},
    "per class": {"per_class": True},
}
GIVE_UP = 0.5
SHOWN = {column.metric: column for column in columns_of("balance")}
DRAWN = (ACCURACY.metric, "macro_accuracy", "few_shot_accuracy", "mean_set_size")
PARTS = {"coverage": "of all images", "mean_class": "mean over classes", "worst_decile": "worst tenth of classes"}


def measure_balances(trainer: AvgKTrainer, test: Dataset, ks: Sequence[float]) -> dict[str, Any]:
    """Every balance of the grid, and every way to cover the tail, in one pass over validation and one over test.

    Args:
        trainer: Holds model, settings and validation images; its model has no thresholds afterwards.
        test: As it was loaded.
        ks: Average set sizes.

    Returns:
        `grid` {balance: {split: {head: {K: metrics}}}} and `coverage` {name: what `SetStatistics.answered` says}.
    """
    config, images = trainer.model.config, trainer.eval_dataset
    balancing = Balancing.of(config, "auto")
    validation = Evaluation(config, len(images), ks, True, [LEVEL], per_class=True, balancing=balancing)
    trainer.collect([validation], trainer.get_eval_dataloader(images))
    validation.store()
    number, grid = len(test), {}
    for balance in GRID:
        own = Balancing(balance, balancing.prevalence)
        lambdas = validation.lambdas(balance)
        grid[balance] = Evaluation(config, number, ks, thresholds=lambdas, balancing=own)
    coverages = {
        name: Evaluation(config, number, ks, levels=[LEVEL], **{"balance": 0.0, **question})
        for name, question in COVERAGES.items()
    }
    evaluations = [*grid.values(), *coverages.values()]
    trainer.collect(evaluations, trainer.get_eval_dataloader(prepare(test, config)))
    heads = {name: Calibration.of(config).at(each.balance).head() for name, each in coverages.items()}
    found = {
        "grid": {
            f"{balance:g}": {
                "validation": _of_heads(validation.results_at(balance)),
                "test": _of_heads(evaluation.results),
            }
            for balance, evaluation in grid.items()
        },
        "coverage": {
            name: next(iter(each.statistics[heads[name]].answered().values())) for name, each in coverages.items()
        },
    }
    Calibration.drop(config)
    return found


def _of_heads(results: dict[str, dict[float, dict[str, float]]]) -> dict[str, Any]:
    return {
        head: {k_key(k): {name: found[name] for name in SHOWN if name in found} for k, found in of_k.items()}
        for head, of_k in results.items()
    }


def chosen(grid: dict[str, Any], k: float, head: str, balance: float | str) -> dict[str, float]:
    """The metrics on test of a balance, or of the one that `"auto"` chooses on validation.

    Args:
        grid: As `measure_balances` gives it.
        k: Average set size.
        head: One of the heads, or `"auto"` for the best on validation at each balance.
        balance: One of the grid, or `"auto"`.
    """

    def of(split: str, balance: float) -> dict[str, float]:
        heads, key = grid[f"{balance:g}"], k_key(k)
        best = max(heads["validation"], key=lambda name: heads["validation"][name][key][ACCURACY.metric])
        return {**heads[split][best if head == "auto" else head][key], "balance": balance}

    if balance == "auto":
        reached = {each: of("validation", each)[ACCURACY.metric] for each in GRID}
        least = reached[0.0] - GIVE_UP / 100 - 1e-9
        balance = max(each for each, accuracy in reached.items() if accuracy >= least)
    return of("test", balance)


def summarise_balances(comparison: Comparison, entries: Callable[[str, float], Any]) -> dict[str, Any]:
    """All numbers about balances.

    Args:
        comparison: What was compared.
        entries: Of a loss and a K what its runs kept, by seed.
    """
    rows, coverages, curves = [], [], {}

    def metrics(loss: str, k: float, head: str, balance: float | str) -> dict[int, dict[str, float]]:
        found = entries(loss, k).items()
        return {seed: chosen(entry["balances"]["grid"], k, head, balance) for seed, entry in found}

    for loss, k in itertools.product(comparison.losses, comparison.k) if comparison.balances else ():
        kept = list(entries(loss, k).values())
        two_heads = any("sccp" in entry["balances"]["grid"]["0"]["test"] for entry in kept)
        heads = {entry["head"][k_key(k)] for entry in kept}
        for head in [*sorted(heads), *["auto"] * (two_heads and "auto" not in heads)]:
            for balance in dict.fromkeys((0.0, *comparison.balances)):
                of_seed, plain = metrics(loss, k, head, balance), metrics(comparison.baseline, k, "ml", 0.0)
                row = {"loss": loss if head in heads else f"{loss}, head {head}", "k": k, "balance": balance}
                row["taken"] = sorted(found["balance"] for found in of_seed.values())
                rows.append({**row, **against(of_seed, {} if of_seed == plain else plain, SHOWN.values())})
        for balance in GRID if kept else ():
            found = intervals(list(metrics(loss, k, max(heads), balance).values()), SHOWN)
            means = [found[name]["mean"] if name in found else None for name in DRAWN]
            curves.setdefault(loss, []).append([k, balance, *means])
        for name in COVERAGES:
            found = intervals([entry["balances"]["coverage"][name] for entry in kept], (*PARTS, "size"))
            coverages.append({"loss": loss, "k": k, "name": name, "metrics": found})
    found = {"balances": rows, "balance_curves": curves, "tail_coverages": coverages}
    return found if comparison.balances else {}


def balance_text(summary: dict[str, Any]) -> list[str]:
    """The blocks of the report about balances."""
    if not summary.get("balances"):
        return []
    blocks = [
        "## Rare classes",
        "Balance b thresholds p / prevalence^b, with no further training: 0 is what the tables above show. `auto` is"
        f" the largest of {', '.join(f'{b:g}' for b in GRID)} that costs at most {GIVE_UP} points of average-K"
        " accuracy on validation, for each seed. In brackets the paired difference to"
        f" {summary['baseline']} with balance 0.",
    ]
    for k in summary["k"]:
        rows = [row for row in summary["balances"] if row["k"] == k]
        head = ["loss", "balance", *(column.heading(k) for column in SHOWN.values())]
        blocks += [f"### K = {k_key(k)}", as_table(head, [_cells(row) for row in rows])]
    blocks += [
        "### Covering the tail",
        f"Coverage {LEVEL:g} asked for, thresholds from validation: the share of test images whose set holds the true"
        " class, the mean of it over classes, and over the tenth of the classes that are covered least.",
    ]
    at = summary["tune_k"] or summary["k"][0]
    rows = [row for row in summary["tail_coverages"] if row["k"] == at]
    body = [
        [
            f"{row['loss']}, K = {k_key(row['k'])}",
            row["name"],
            *(ACCURACY.cell(row["metrics"][name]) for name in PARTS),
            f"{row['metrics']['size']['mean']:.2f} ± {row['metrics']['size']['half_width'] or 0:.2f}",
        ]
        for row in rows
    ]
    blocks.append(as_table(["trained with", "thresholds", *PARTS.values(), "mean set size"], body))
    return blocks


def _cells(row: dict[str, Any]) -> list[str]:
    cells = []
    for name, column in SHOWN.items():
        text, difference = column.cell(row["metrics"].get(name)), row["difference"].get(name)
        cells.append(f"{text} ({column.cell(difference, sign=True)})" if difference else text)
    balance = row["balance"] if isinstance(row["balance"], str) else f"{row['balance']:g}"
    if balance == "auto":
        balance += f" ({', '.join(f'{b:g}' for b in row['taken'])})"
    return [row["loss"], balance, *cells]
