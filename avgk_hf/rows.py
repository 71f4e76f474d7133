"""Predicted sets as rows of a table: one for each image and question, as CSV, JSON lines or Parquet.

A row is a mapping: `image`, what was asked for under its own name (`k`, `coverage`, ...), with a balance other than 0
`balance`, `size`, `below_threshold`, whether no class reached the threshold and the best is listed all the same,
`set`, a list of `{"label", "score"}`, best first, and `error`, why there is none. In CSV, which people open in a
spreadsheet, a set is the cells `best` and `best_score`, and of all its classes `classes` and `scores`, joined by ` |
`. No cell begins like a formula there: one that would has an apostrophe before it. A CSV file begins with a byte order
mark, without which Excel garbles names in other scripts.
"""

import csv
import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from .files import new_file
from .shell import printable

BETWEEN = " | "  # names of a set in one cell: no separator of columns in any country
FORMULA = ("=", "+", "-", "@")  # how a cell begins that a spreadsheet would compute
TOGETHER = 8192  # rows of a Parquet file that are written at once
NAMES = "avgk_images"  # in a Parquet file of rows: `Digest` of the names of its images
Row = Mapping[str, Any]


def row(
    image: str,
    asked: tuple[str, float],
    found: list[dict[str, Any]],
    error: str | None = None,
    lambda_val: float | None = None,
    balance: float = 0.0,
) -> Row:
    """One row: the set of an image, and whether its best class is below the threshold, or why there is no set."""
    name, value = asked
    found = [{**each, "label": plain_text(each["label"])} for each in found]
    below = bool(found) and lambda_val is not None and found[0]["score"] < lambda_val
    sizes = (
        {"size": len(found), "below_threshold": below} if error is None else {"size": None, "below_threshold": None}
    )
    error = None if error is None else plain_text(error)
    asked_for = {name: plain_number(value), **({"balance": plain_number(balance)} if balance else {})}
    return {"image": plain_text(image), **asked_for, **sizes, "set": found, "error": error}


def plain_number(value: float) -> float:
    """A number as people write it.

    >>> plain_number(2.0), plain_number(1.5)
    (2, 1.5)
    """
    return int(value) if float(value).is_integer() else value


def plain_text(text: str) -> str:
    r"""Text that can be written as UTF-8, which the names of files need not be.

    >>> plain_text("café.png"), plain_text(b"caf\xe9.png".decode("utf-8", "surrogateescape"))
    ('café.png', 'caf\\udce9.png')
    """
    return text.encode("utf-8", "backslashreplace").decode()


class Digest:
    """A digest of the names of images that follow each other, however many rows each of them has."""

    def __init__(self) -> None:
        self._hash, self._before = hashlib.sha256(), None

    def add(self, names: Iterable[str]) -> "Digest":
        """Take in further names."""
        for name in map(plain_text, names):
            if name != self._before:
                self._hash.update(f"{len(name)} {name}".encode())
            self._before = name
        return self

    def text(self) -> str:
        """The digest of all so far."""
        return self._hash.hexdigest()


def cell(value: Any) -> str:
    r"""A value as a spreadsheet shows it and does not compute it.

    >>> cell("oak"), cell("=1+1"), cell("-2.5"), cell("@a\tb"), cell(None), cell(True)
    ('oak', "'=1+1", '-2.5', "'@a\\tb", '', 'yes')
    """
    text = "yes" if value is True else "" if value is None or value is False else printable(value)
    if not text.startswith(FORMULA):
        return text
    try:
        float(text)
    except ValueError:
        return f"'{text}"
    return text


def cells(found: Row) -> dict[str, str]:
    """A row as CSV has it: text, and the set in two cells.

    >>> found = cells(row("a.png", ("k", 2), [{"label": "=oak", "score": 0.75}, {"label": "elm", "score": 0.25}]))
    >>> list(found), list(found.values())[2:]  # doctest: +NORMALIZE_WHITESPACE
    (['image', 'k', 'size', 'below_threshold', 'best', 'best_score', 'classes', 'scores', 'error'],
     ['2', '', "'=oak", '0.7500', "'=oak | elm", '0.7500 | 0.2500', ''])
    """
    plain = {}
    for name, value in found.items():
        if name == "set":
            names, scores = [cell(each["label"]) for each in value], [f"{each['score']:.4f}" for each in value]
            plain |= {"best": names[0] if names else "", "best_score": scores[0] if scores else ""}
            plain |= {"classes": BETWEEN.join(names), "scores": cell(BETWEEN.join(scores))}
        else:
            plain[name] = cell(value)
    return plain


def write_csv(file: TextIO) -> Callable[[Iterable[Row]], None]:
    """A function that writes rows to an open file, the first of them after a line of headings."""
    writer: csv.DictWriter | None = None

    def write(rows: Iterable[Row]) -> None:
        nonlocal writer
        for found in map(cells, rows):
            if writer is None:
                writer = csv.DictWriter(file, list(found), lineterminator="\n")
                writer.writeheader()
            writer.writerow(found)

    return write


@contextmanager
def _parquet_file(path: Path) -> Iterator[Callable[[Iterable[Row]], None]]:
    import pyarrow as pa
    import pyarrow.parquet as pq

    types = {"image": pa.string(), "size": pa.int32(), "below_threshold": pa.bool_(), "error": pa.string()}
    types["set"] = pa.list_(pa.struct({"label": pa.string(), "score": pa.float32()}))

    held: list[Row] = []
    digest = Digest()
    writer: pq.ParquetWriter | None = None

    def write(rows: Iterable[Row], last: bool = False) -> None:
        nonlocal writer
        held.extend(rows)
        if held and writer is None:
            for name, value in held[0].items():
                numbers = pa.int64() if all(isinstance(each[name], int) for each in held) else pa.float64()
                types.setdefault(name, pa.string() if isinstance(value, str) else numbers)
            writer = pq.ParquetWriter(path, pa.schema([(name, types[name]) for name in held[0]]))
        if held and (last or len(held) >= TOGETHER):
            writer.write_table(pa.Table.from_pylist(held, writer.schema))
            digest.add(each["image"] for each in held if "image" in each)
            held.clear()

    yield write
    write((), last=True)
    if writer is not None:
        writer.add_key_value_metadata({NAMES: digest.text()})
        writer.close()


ENDINGS = (".csv", ".jsonl", ".parquet")


def check_ending(path: str | Path) -> Path:
    """Refuse a file whose ending says nothing of its format."""
    if Path(path).suffix.lower() not in ENDINGS:
        raise ValueError(f"{path} ends with none of {', '.join(ENDINGS)}, which say how rows are written.")
    return Path(path)


@contextmanager
def written_to(path: str | Path) -> Iterator[Callable[[Iterable[Row]], None]]:
    """A function that writes rows to a file by its ending; the file is there whole or not at all.

    Rows are written as they come, so that memory does not grow with their number.
    """
    ending = check_ending(path).suffix.lower()
    with new_file(path) as new:
        if ending == ".parquet":
            with _parquet_file(new) as write:
                yield write
            return
        with open(new, "w", encoding="utf-8-sig" if ending == ".csv" else "utf-8", newline="") as file:
            if ending == ".csv":
                yield write_csv(file)
            else:
                yield lambda rows: file.writelines(json.dumps(each, ensure_ascii=False) + "\n" for each in rows)
