"""What tables of results show: one list of columns, how a number stands in a cell, and a table as Markdown."""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from ..sets import k_key

MISSING = "–"


@dataclass(frozen=True)
class Column:
    """One column of a table of results.

    Args:
        metric: Which metric it shows.
        title: Its heading.
        percent: Whether the metric is a share.
        tables: The tables that have it: of `avgk compare` ("study", and "balance" about balances), of `avgk report`
            and of `avgk demo`.

    Example:
        >>> COLUMNS[0].heading(3), COLUMNS[0].cell({"mean": 0.9712, "half_width": 0.0031, "n": 5})
        ('average-3 accuracy', '97.12 ± 0.31')
    """

    metric: str
    title: str
    percent: bool = True
    tables: tuple[str, ...] = ("study", "report", "demo", "balance")

    def heading(self, k: float | None = None) -> str:
        """The title, for one K where the whole table is about it."""
        return self.title if k is None else self.title.replace("-K", f"-{k_key(k)}")

    def number(self, value: float) -> float:
        """A value in the unit of the table."""
        return 100 * value if self.percent else value

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
    Column("top1_accuracy", "top-1", tables=("report", "demo")),
    Column("topk_accuracy", "top-K", tables=("report",)),
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
