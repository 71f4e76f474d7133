"""A split that is read as it comes, from its beginning to its end: of the Hub, parquet files or tars, nothing copied.

The number of its images, on which thresholds depend, is given, or counted in a pass before.
"""

import copy
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from itertools import islice
from typing import Any

import fsspec
from datasets import ClassLabel, Features, Image, IterableDataset, Value
from huggingface_hub.utils import tqdm
from torch.utils.data import DataLoader, get_worker_info
from torch.utils.data import IterableDataset as TorchStream
from transformers import default_data_collator
from transformers.utils import logging

from ..checks import check_whole
from ..processes import gather_list, rank, world_size
from ..shell import printable
from .classes import class_names, nfc
from .containers import HUB, MOST_BYTES
from .datasets import contract, image_fault
from .transforms import ImageTransform

logger = logging.get_logger(__name__)
READ = 16  # rows that are taken from a stream at once, with their encoded images
Row = dict[str, Any]


class Stream:
    """One split of `load_streams`, or a `datasets.IterableDataset` with `image` and `label`.

    Batches are those of the same rows in a `Dataset`, whatever the number of processes and workers: each of them reads
    all rows, and opens the images of its own batches only.

    Args:
        rows: The rows, whose columns have to be known.
        num_examples: n, where it is known; None to count them. Another number is refused when all were read.
        check: Refuses the path of an image that may not be opened; by default addresses, but for those of the Hub.

    Attributes:
        bad: {position: why} of images that are left out.
    """

    def __init__(
        self, rows: IterableDataset, num_examples: int | None = None, check: Callable[[str], None] | None = None
    ) -> None:
        known = rows.column_names or []
        if "image" not in known:
            raise ValueError(f"the stream has no column 'image', only {known}: rename the one with images, cast it.")
        self.column_names = [name for name in ("image", "label") if name in known]
        self.rows = undecoded(rows, "image").select_columns(self.column_names)
        self.split, self.check, self.bad = rows.split, check or on_disk_or_hub, {}
        self.num_examples = None if num_examples is None else check_whole("num_examples", num_examples, 1)
        feature = rows.features.get("label")
        if not isinstance(feature, ClassLabel | Value | None):
            raise ValueError(f"the column 'label' holds no classes but {feature}: name another one.")
        self.names = list(map(nfc, feature.names)) if isinstance(feature, ClassLabel) else None
        self._ids: dict[Any, int] = dict(enumerate(range(len(self.names or []))))  # of what `label` holds

    def __len__(self) -> int:
        """The number of images that count."""
        return self.num_examples

    @property
    def features(self) -> Features:
        """Those of the contract."""
        return contract(self.names)

    def with_ids(self, ids: Sequence[int]) -> "Stream":
        """The same with other class ids: of the i-th class `ids[i]`."""
        other = copy.copy(self)
        other._ids = {label: ids[i] for label, i in self._ids.items()}
        return other

    def counted(self, skip: bool = False, num_workers: int = 0, report: bool = True) -> "Stream":
        """The same with the number of its images and its classes, read once for what of them is not known.

        Args:
            skip: Whether images that cannot be read are left out; all are opened, in one more pass.
            num_workers: Processes that open them.
            report: Whether to warn when images are left out.
        """
        if self.num_examples is not None:
            if skip:
                raise ValueError("images that are skipped do not count: leave num_examples out, and they are counted.")
            if "label" in self.column_names and self.names is None:
                raise ValueError(
                    "the names of the classes are known only when all rows were read: leave num_examples out, or store"
                    " the column of classes as ClassLabel."
                )
            return self
        found = copy.copy(self)
        number, labels = 0, set()
        for block in tqdm(self.rows.iter(READ), desc="count", unit=f"x{READ} rows", disable=rank() > 0):
            number += len(block["image"])
            labels.update(block.get("label", ()))
        if not number:
            raise ValueError(f"the stream {self.split or ''} is empty.")
        if labels and self.names is None:
            found.names = class_names(list(labels), f"the stream {self.split or ''}: the column of classes")
            places = {name: i for i, name in enumerate(found.names)}
            found._ids = {label: places[nfc(label)] for label in labels}
        found.num_examples = number
        return found._readable(num_workers, report) if skip else found

    def _readable(self, num_workers: int, report: bool) -> "Stream":
        """The same without the images that cannot be read."""
        faults = [fault for batch in self._loader(self._faults, READ, num_workers) for fault in batch]
        faults = sorted(gather_list(faults))
        if len(faults) == self.num_examples:
            raise ValueError(f"none of the {len(faults)} images can be read, e.g. {faults[0][1]}")
        if faults and report:
            shown = " ".join(fault for _, fault in faults[:3]) + f" (and {len(faults) - 3} more)" * (len(faults) > 3)
            text = f"{len(faults)} of {self.num_examples} images cannot be read and are left out: {shown}"
            logger.warning(printable(text))
        found = copy.copy(self)
        found.bad, found.num_examples = dict(faults), self.num_examples - len(faults)
        return found

    def loader(self, transform: ImageTransform, batch_size: int, num_workers: int = 0) -> DataLoader:
        """The batches of this process, as the model takes them: batch i of process r is batch i W + r of all."""
        return self._loader(partial(self._prepared, transform), batch_size, num_workers)

    def _loader(self, make: Callable[[list[Row]], Any], batch_size: int, num_workers: int) -> DataLoader:
        return DataLoader(_Batches(self, make, batch_size), batch_size=None, collate_fn=_same, num_workers=num_workers)

    def examples(self) -> Iterator[Row]:
        """The rows that count, each with its `index`; another number of them than announced is refused."""
        place = -1
        for block in self.rows.iter(READ):
            for values in zip(*block.values(), strict=True):
                place += 1
                if place == self.num_examples + len(self.bad):
                    raise ValueError(f"more than the announced num_examples={self.num_examples} images were given.")
                if place not in self.bad:
                    yield {**dict(zip(block, values, strict=True)), "index": place}
        if place + 1 < self.num_examples + len(self.bad):
            raise ValueError(f"{place + 1} images were given, but num_examples={self.num_examples} were announced.")

    def _stored(self, row: Row) -> Row:
        """A row whose image can be opened where its path may be."""
        image = row["image"] or {}
        path = image.get("path") if isinstance(image, dict) and image.get("bytes") is None else None
        if path is None:
            return {**row, "image": image}
        self.check(path)
        if "://" in path:
            with fsspec.open(path, "rb") as file:
                image = {"bytes": file.read(MOST_BYTES + 1), "path": path}
            if len(image["bytes"]) > MOST_BYTES:
                raise ValueError(f"{path[:300]} has more than {MOST_BYTES} bytes, the limit of an image; remove it.")
        return {**row, "image": image}

    def _faults(self, rows: list[Row]) -> list[tuple[int, str]]:
        found = ((row["index"], image_fault(self._stored(row))) for row in rows)
        return [(place, fault) for place, fault in found if fault is not None]

    def _prepared(self, transform: ImageTransform, rows: list[Row]) -> dict[str, Any]:
        rows = [self._stored(row) for row in rows]
        for row in rows if "label" in self.column_names else ():
            if row["label"] not in self._ids:
                place = f"{self.split or 'the stream'}, row {row['index']}: the label {str(row['label'])[:100]!r}"
                raise ValueError(f"{place} is none of the {len(self._ids)} classes: leave such images out.")
            row["label"] = self._ids[row["label"]]
        made = transform({name: [row[name] for row in rows] for name in rows[0]})
        columns = zip(*made.values(), strict=True)
        return default_data_collator([dict(zip(made, values, strict=True)) for values in columns])


def on_disk_or_hub(path: str) -> None:
    """Refuse an address that is none of the Hub."""
    place = path.rpartition("::")[2]
    if "://" in place and not place.startswith(HUB):
        raise ValueError(f"the image {path[:300]!r} is an address, and none of the Hub: fetch such images first.")


def anywhere(path: str) -> None:
    """Permit any path."""


def undecoded(rows: IterableDataset, column: str) -> IterableDataset:
    """Rows with images as they are stored: before any other change, which would decode them, whatever they are."""
    return rows.decode(False).cast_column(column, Image(decode=False))


class _Batches(TorchStream):
    """What `make` gives for the batches of a stream that are those of this process and worker."""

    def __init__(self, stream: Stream, make: Callable[[list[Row]], Any], batch_size: int) -> None:
        self.stream, self.make, self.batch_size = stream, make, batch_size
        self.rank, self.world_size = rank(), world_size()  # which workers do not know

    def __iter__(self) -> Iterator[Any]:
        worker, rows, number = get_worker_info(), self.stream.examples(), 0
        own, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        while block := list(islice(rows, self.batch_size)):
            turn, process = divmod(number, self.world_size)
            if process == self.rank and turn % workers == own:
                yield self.make(block)
            number += 1


def _same(batch: Any) -> Any:
    return batch
