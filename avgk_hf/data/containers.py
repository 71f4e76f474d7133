"""Files that hold many images: tars and Parquet, on disk or on the Hub, read piece by piece and within bounds.

They were written by others. What cannot be read of one is an error of the images that it concerns, the same whoever
begins to read it where; a Hub that does not answer is none of theirs, and ends whatever reads.
"""

import functools
import os
import tarfile
from bisect import bisect_right
from collections.abc import Iterator
from itertools import accumulate
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from huggingface_hub import HfFileSystem

from ..checks import reason_of

HUB = "hf://"
NO_FILE = FileNotFoundError, IsADirectoryError, PermissionError
MOST_BYTES = 2**28  # of an image in a tar, in Parquet or on the Hub, and of a tar's header


class OutOfReach(ConnectionError):
    """A file on the Hub that cannot be read now, which says nothing about its images."""


class Bounded:
    """A file of which no more is read at once than an image may have; tarfile would read any header whole."""

    def __init__(self, place: str) -> None:
        self.place = place
        self.file = self._tried(HfFileSystem().open, place) if place.startswith(HUB) else open(place, "rb")
        self.seek, self.tell, self.close = self.file.seek, self.file.tell, self.file.close

    def __enter__(self) -> "Bounded":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["file"], name)  # what arrow asks of a file

    def read(self, size: int | None = -1) -> bytes:
        """The next bytes; more than an image may have, or all that are left, are refused."""
        if size is None or not 0 <= size <= MOST_BYTES:
            raise tarfile.ReadError(f"{size} bytes in one part, the limit is {MOST_BYTES}")
        return self._tried(self.file.read, size)

    def _tried(self, call: Any, value: Any) -> Any:
        try:
            return call(value)
        except Exception as error:
            if not self.place.startswith(HUB):
                raise
            text = f"{self.place} cannot be read from the Hub now ({reason_of(error)})"
            raise OutOfReach(f"{text}; start the same command again.") from error


class Part(NamedTuple):
    """Where an image is: `size` bytes of a file from `first` on; None for all of it."""

    place: str
    first: int = 0
    size: int | None = None

    def read(self) -> bytes:
        """Its bytes, at most `MOST_BYTES`."""
        if self.size is None:
            with Bounded(self.place) as file:
                return file.read(MOST_BYTES)
        if self.size > MOST_BYTES:
            raise ValueError(f"{self.place}: {self.size} bytes in one image, the limit is {MOST_BYTES}; remove it.")
        file = _held(self.place, os.getpid())
        file.seek(self.first)
        return file.read(self.size)


@functools.lru_cache(maxsize=2)
def _held(place: str, process: int) -> Bounded:
    """A file that stays open, because its images follow each other; a forked process opens its own."""
    return Bounded(place)


def tar_members(path: str) -> Iterator[tuple[str, int, int]]:
    """Name, first byte and size of every file in a tar; in the end, if the rest is none, why, -1 and 0."""
    try:
        with Bounded(path) as file, tarfile.open(fileobj=file, mode="r:") as tar:
            before = -1
            while (member := tar.next()) is not None:
                tar.members.clear()  # or they would all be held
                if member.size < 0 or tar.offset <= before:
                    raise tarfile.ReadError("a file of negative size")
                before = tar.offset
                if member.isreg() and not member.issparse():
                    yield member.name, member.offset_data, member.size
    except (tarfile.TarError, ValueError, RecursionError, *NO_FILE) as error:  # any other fault may pass
        yield f"the rest cannot be read as a tar without compression ({reason_of(error)})", -1, 0


class Parquet:
    """One column of a Parquet file, row by row; going on from where it was read to costs nothing.

    Every row group is read from its beginning, so that a fault in it spoils the same rows for every reader.

    Attributes:
        starts: The first row of every row group, and the number of rows.
        names: Of all columns.
        fault: Why the column holds no images, or None.
    """

    def __init__(self, path: str, column: str) -> None:
        try:
            # not all of a row group at once: some files have only one
            self.file = pq.ParquetFile(Bounded(path), buffer_size=2**20, pre_buffer=False)
        except OutOfReach:
            raise
        except Exception as error:  # of arrow, for a broken file
            raise ValueError(f"{path} cannot be read as parquet ({reason_of(error)}); replace it.") from error
        groups = range(self.file.num_row_groups)
        self.starts = [0, *accumulate(self.file.metadata.row_group(group).num_rows for group in groups)]
        self.path, self.column, self.at, self.values = path, column, -1, iter(())
        self.names = self.file.schema_arrow.names
        self.fault = _fault(self.file.schema_arrow.field(column).type) if column in self.names else None

    def rows(self, wanted: range) -> Iterator[Any]:
        """What these rows hold: bytes, text, a mapping of `bytes` and `path`, None, or why a row cannot be read."""
        group = bisect_right(self.starts, wanted.start) - 1
        if not self.starts[group] <= self.at <= wanted.start:
            self.at, self.values = self.starts[group], self._values(group)
        while self.at < wanted.stop:
            value, self.at = next(self.values), self.at + 1
            if self.at > wanted.start:
                yield value

    def _values(self, first: int) -> Iterator[Any]:
        for group in range(first, self.file.num_row_groups):
            number, reason, found = self.starts[group + 1] - self.starts[group], "it is cut off", 0
            try:
                # one by one: a small file may hold the same large image many times
                for batch in self.file.iter_batches(1, [group], [self.column], use_threads=False):
                    for value in map(self._checked, batch.column(0)):
                        found += 1
                        yield value
            except OutOfReach:
                raise
            except Exception as error:  # of arrow, for broken pages
                reason = reason_of(error)
            for _ in range(number - found):
                yield ValueError(f"{self.path}: this row cannot be read ({reason}); write the file again.")

    def _checked(self, value: pa.Scalar) -> Any:
        size = value.as_buffer().size if _is_bytes(value.type) and value.is_valid else 0
        if pa.types.is_struct(value.type) and value.is_valid:
            parts = [value[i] for i in range(value.type.num_fields) if _is_bytes(value.type.field(i).type)]
            size = max((part.as_buffer().size for part in parts if part.is_valid), default=0)
        if size > MOST_BYTES:
            return ValueError(f"{self.path}: a row has {size} bytes, the limit is {MOST_BYTES}; remove it.")
        return value.as_py()


def _is_bytes(kind: pa.DataType) -> bool:
    checks = (pa.types.is_binary, pa.types.is_large_binary, pa.types.is_string, pa.types.is_large_string)
    return any(check(kind) for check in checks)


def _fault(kind: pa.DataType) -> str | None:
    """Why a column of this type holds no images."""
    known = [kind.field(i) for i in range(kind.num_fields)] if pa.types.is_struct(kind) else []
    known = [field.type for field in known if field.name in ("bytes", "path")]
    if _is_bytes(kind) or (known and all(_is_bytes(each) or pa.types.is_null(each) for each in known)):
        return None
    return f"holds no images but {kind}"
