"""What tables of results show: one list of columns, how a number stands in a cell, and a table as Markdown."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ..sets import k_key

MISSING = "–"
COUNTED = {"num_images": "image{}", "skipped": "image{} left out"}  # metrics that count

SHOT_WORDS = {"few_shot_accuracy": "under 20", "medium_shot_accuracy": "20 to 100", "many_shot_accuracy": "over 100"}


@dataclass(frozen=True)
class Column:
    """One column of a table of results.

    Args:
        metric: Which metric it shows.
        title: Its heading.
        percent: Whether the metric is a share.
        tables: The tables that have it: of `avgk compare` ("study", and "balance" for balances), of `avgk report`, of
            `avgk demo`, and of `avgk evaluate` and `avgk calibrate` ("command").

    Example:
        >>> COLUMNS[0].heading(3), COLUMNS[0].cell({"mean": 0.9712, "half_width": 0.0031, "n": 5})
        ('average-3 accuracy', '97.12 ± 0.31')
    """

    metric: str
    title: str
    percent: bool = True
    tables: tuple[str, ...] = ("study", "report", "demo", "balance", "command")

    def heading(self, k: float | None = None) -> str:
        """The title, for one K where the whole table is about it."""
        return self.title if k is None else self.title.replace("-K", f"-{k_key(k)}")

    def number(self, value: float) -> float:
        """A value in the unit of the table."""
        return 100 * value if self.percent else value

    def percent_cell(self, value: float | None) -> str:
        """A number with its unit."""
        return MISSING if value is None else f"{self.number(value):.2f}{'%' * self.percent}"

    def cell(self, found: dict[str, Any] | float | None, sign: bool = False) -> str:
        """A number, or a mean with the half width of its interval, as `interval` gives it."""
        if found is None:
            return MISSING
        mean, half_width = (found["mean"], found["half_width"]) if isinstance(found, dict) else (found, None)
        text = f"{self.number(mean):{'+' if sign else ''}.2f}"
        return text if half_width is None else f"{text} ± {self.number(half_width):.2f}"


ACCURACY = Column("average_k_accuracy", "average-K accuracy")
SIZE = Column("mean_set_size", "mean set size", percent=False)
COLUMNS = (
    ACCURACY,
    SIZE,
    Column("empty_sets", "empty sets", tables=("command",)),
    Column("top1_accuracy", "top-1", tables=("report", "demo")),
    Column("topk_accuracy", "top-K", tables=("report", "command")),
    Column("macro_accuracy", "mean over classes", tables=("balance",)),
    Column("few_shot_accuracy", "few shot"),
    Column("medium_shot_accuracy", "medium shot"),
    Column("many_shot_accuracy", "many shot"),
)


def columns_of(table: str) -> list[Column]:
    """The columns that a table has."""
    return [column for column in COLUMNS if table in column.tables]


def as_table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    first, *others = ("".join(f"| {cell} " if cell else "| " for cell in row) + "|" for row in (head, *rows))
    return "\n".join([first, "|---" * len(head) + "|", *others])


def as_text(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table for a terminal: columns as wide as they need, numbers flush right.

    >>> print(as_text(["K", "accuracy"], [["1", "87.50%"], ["10", "99.00%"]]))
     K  accuracy
     1    87.50%
    10    99.00%
    """
    lines = [list(head), *map(list, rows)]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join("  ".join(map(str.rjust, line, widths)) for line in lines)


def share_interval(share: float, number: int) -> tuple[float, float]:
    """The 95% interval of Wilson for a share that was measured on so many images.

    >>> low, high = share_interval(0.9, 110)
    >>> f"{low:.3f} to {high:.3f}"
    '0.830 to 0.943'
    """
    z = 1.96
    middle = (share + z * z / (2 * number)) / (1 + z * z / number)
    half = z * math.sqrt(share * (1 - share) / number + z * z / (4 * number * number)) / (1 + z * z / number)
    return middle - half, middle + half


def by_k(metrics: Mapping[str, float], own_k: float | None, number: int | None = None) -> str:
    """Metrics of an evaluation as people read them: a row for each K, then the coverages, then what has no K.

    Args:
        metrics: As `evaluation.evaluate` names them.
        own_k: The K whose metrics have none behind their names.
        number: Of images, for the interval of an accuracy.
    """
    columns, found = columns_of("command"), {}
    for name, value in metrics.items():
        metric, _, key = name.partition("@")
        if metric in {column.metric for column in columns} and (key or own_k is not None):
            found.setdefault(float(key or own_k), {})[metric] = value
    columns = [column for column in columns if any(column.metric in of_k for of_k in found.values())]
    rows = [[k_key(k), *(each.percent_cell(found[k].get(each.metric)) for each in columns)] for k in sorted(found)]
    titles = [column.title.replace("average-K ", "").replace(" shot", "") for column in columns]
    parts = [as_text(["K", *titles], rows)]
    levels = [name for name in metrics if name.startswith("coverage_") and f"{name}_size" in metrics]
    if levels:
        levels.sort(key=lambda name: (name.rpartition("_")[0], float(name.rpartition("_")[2])))
        words = [name.removeprefix("coverage_").replace("_", " ") for name in levels]
        sizes = [SIZE.percent_cell(metrics[f"{name}_size"]) for name in levels]
        of_levels = zip(words, [ACCURACY.percent_cell(metrics[name]) for name in levels], sizes, strict=True)
        parts.append(as_text(["coverage", "measured", "mean set size"], of_levels))
    others = [f"top-1 accuracy {100 * metrics['top1_accuracy']:.2f}%"] if "top1_accuracy" in metrics else []
    for name in (name for name in levels if f"{name}_mean_class" in metrics):
        mean, worst = (ACCURACY.percent_cell(metrics[f"{name}_{part}_class"]) for part in ("mean", "worst"))
        asked = name.removeprefix("coverage_").replace("_", " ")
        others.append(f"{asked}: mean over classes {mean}, worst class {worst}")
    counted = [(metrics[name], words) for name, words in COUNTED.items() if name in metrics]
    others += [f"{number:,} {words.format('s' * (number != 1))}" for number, words in counted]
    notes, labelled = [], {k: of_k[ACCURACY.metric] for k, of_k in found.items() if ACCURACY.metric in of_k}
    if labelled:
        notes += ["K: classes in a set on average; accuracy: share of all images whose set holds the true class"]
    if any("topk_accuracy" in of_k for of_k in found.values()):
        notes += ["top-K: the same share for lists of K classes, as many for every image"]
    if labelled and number:
        k = metrics.get("monitored_k", own_k)
        k = k if k in labelled else min(labelled)
        low, high = share_interval(labelled[k], number)
        text = (
            f"{round(number * labelled[k]):,} of {number:,} images at K = {k_key(k)}; of many more like them it would"
        )
        notes += [f"{text} be {100 * low:.1f} to {100 * high:.1f}%, with 95% confidence"]
    empty = any(of_k.get("empty_sets") for of_k in found.values())
    text = "sets may be empty here; `avgk predict` names the best class instead, unless --min-size 0 is given"
    notes += [text] if empty else []
    present = set().union(*found.values())
    shots = [f"{name.partition('_')[0]} {words}" for name, words in SHOT_WORDS.items() if name in present]
    if shots:
        notes.append(f"shots: mean over classes, by the images that were left to train on: {', '.join(shots)}")
    last = [*([", ".join(others)] if others else []), *(f"({note})" for note in notes)]
    return "\n\n".join([*parts, *(["\n".join(last)] if last else [])])
