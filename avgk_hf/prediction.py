"""From a source of images to rows of sets, as they come or as Parquet shards in a folder.

A shard is a file of the sets of `size` images that follow each other in the source: it is there whole or not at all,
and shard i of a source is always of the same images. So a run that was killed goes on with the shards that are not
there, and of several processes process r takes the shards r, r + W, r + 2 W, ...; they exchange nothing.
"""

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.parquet as pq
import torch
from huggingface_hub.utils import tqdm
from torch.utils.data import DataLoader
from transformers import PreTrainedModel

from .calibration import FIELDS, Calibration
from .checks import read_json, reason_of
from .classifiers import forward, transform_for
from .data.containers import MOST_BYTES, OutOfReach
from .data.sources import Piece, Source, load
from .files import UNFINISHED, make_folder, write_text
from .questions import Question
from .rows import NAMES, Digest, Row, row, written_to
from .scores import NotFinite, head_logits

RECORD = "_predict.json"  # of a folder of shards: what they are answers to; readers of Parquet pass over the name
FEW = 20  # images for which no process is started and no progress shown
MOST_FAULTS = 100  # that are listed
IN_LOGS = 30  # seconds between two lines of progress where a log is written
ELSEWHERE = ("_name_or_path", "transformers_version")  # of a config: what it does not depend on


class Batch(NamedTuple):
    """What the processes that read images give: some of them with why they cannot be read.

    Args:
        shard: What they belong to.
        names: Of all images.
        errors: Of each, None where there is none.
        images: Of the others, tensors (b, C, H, W); several where shapes differ.
    """

    shard: int
    names: list[str]
    errors: list[str | None]
    images: list[torch.Tensor]


class _Images(torch.utils.data.Dataset):
    """Opens what it is asked for: the keys are the images as a source describes them, so none has to be known before.

    Args:
        transform: From images to tensors.
    """

    def __init__(self, transform: Any) -> None:
        self.transform = transform

    def __getitems__(self, keys: list[tuple[int, str, Any]]) -> Batch:
        errors, groups = [], []
        for _, name, stored in keys:
            try:
                image = load(stored, self.transform, name)
                if not groups or groups[-1][0].shape != image.shape:
                    groups.append([])
                groups[-1].append(image)
                errors.append(None)
            except OutOfReach:  # it may be there later
                raise
            except (OSError, ValueError) as error:
                errors.append(str(error))
        return Batch(keys[0][0], [name for _, name, _ in keys], errors, [torch.stack(images) for images in groups])


@dataclass
class Tally:
    """What a prediction came to.

    Args:
        images: Their number.
        left_out: How many of them cannot be read.
        faults: Why, of the first of these.
        sizes: By what was asked, as text, the sum of the set sizes.
        below: By the same, how many sets hold only what `min_size` put there: no class reached the threshold.
        first: How many sets of the first question begin with each class.
    """

    images: int = 0
    left_out: int = 0
    faults: list[str] = field(default_factory=list)
    sizes: Counter[str] = field(default_factory=Counter)
    below: Counter[str] = field(default_factory=Counter)
    first: Counter[str] = field(default_factory=Counter)

    def add(self, batch: Batch, rows: Sequence[Row], column: str, questions: int) -> None:
        """Count a batch and its rows."""
        faults = [error for error in batch.errors if error is not None]
        self.merge(Tally(len(batch.names), len(faults), faults))
        for found in rows:
            asked = f"{found[column]:g}"
            self.sizes[asked] += found["size"] or 0  # None where there is no set
            self.below[asked] += found["below_threshold"] or 0
        self.first.update(found["set"][0]["label"] for found in rows[::questions] if found["set"])

    def merge(self, other: "Tally") -> None:
        """Add what another one counted."""
        self.images += other.images
        self.left_out += other.left_out
        self.faults += other.faults[: MOST_FAULTS - len(self.faults)]
        self.sizes.update(other.sizes)
        self.below.update(other.below)
        self.first.update(other.first)


class Predictor:
    """A model with the questions that it is asked about every image.

    Args:
        model: Any classifier, where it is to compute.
        questions: At least one; all of one kind.
        batch_size: Images per forward pass.
        workers: Processes that read images; 0 for this one.
        bf16: Whether the model computes in bfloat16; scores are float32.
        on_bad_image: `"skip"` makes an image that cannot be read a row with its error, `"error"` refuses it.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        questions: Sequence[Question],
        batch_size: int = 64,
        workers: int = 0,
        bf16: bool = False,
        on_bad_image: str = "skip",
    ) -> None:
        self.model, self.questions, self.bf16, self.on_bad_image = model.eval(), questions, bf16, on_bad_image
        self.batch_size, self.workers, self.tally = batch_size, workers, Tally()
        self.calibration = Calibration.of(model.config).at(questions[0].balance)
        self.answers = [(self._asked(question), self.calibration.answer(question)) for question in questions]
        self.column = self.answers[0][0][0]

    def _asked(self, question: Question) -> tuple[str, float]:
        """What a question asks for: a name and a number."""
        for name in ("coverage", "cumulative", "lambda_val", "k"):
            if getattr(question, name) is not None:
                return name, getattr(question, name)
        return "k", self.calibration.k

    def rows(self, source: Source) -> Iterator[list[Row]]:
        """The rows of all images, batch by batch: of each image those of all questions."""
        for _, found in self.predicted([(0, source.pieces())], source, source.number(), sys.stderr.isatty()):
            yield found

    def loader(self, shards: Iterable[tuple[int, Iterable[Piece]]], source: Source, workers: int) -> DataLoader:
        """What reads the images of these shards, batch by batch."""
        return DataLoader(
            _Images(transform_for(self.model)),
            batch_sampler=_batches(shards, source, self.batch_size),
            collate_fn=_as_it_is,
            num_workers=workers,
            pin_memory=self.model.device.type == "cuda",
        )

    def predicted(
        self, shards: Iterable[tuple[int, Iterable[Piece]]], source: Source, number: int | None, shown: bool = True
    ) -> Iterator[tuple[int, list[Row]]]:
        """The rows of every batch, with the number of its shard."""
        few = number is not None and number < FEW
        loader = self.loader(shards, source, 0 if few else self.workers)
        how = (
            {}
            if sys.stderr.isatty()
            else {"mininterval": IN_LOGS, "bar_format": "{desc}: {n_fmt} of {total_fmt} images"}
        )
        with tqdm(desc="predict", unit="image", total=number, disable=few or not shown, **how) as bar:
            for batch in loader:
                fault = next((error for error in batch.errors if error is not None), None)
                if fault is not None and self.on_bad_image == "error":
                    raise ValueError(fault)
                rows = self._rows(batch)
                self.tally.add(batch, rows, self.column, len(self.answers))
                yield batch.shard, rows
                bar.update(len(batch.names))

    @torch.inference_mode()
    def _rows(self, batch: Batch) -> list[Row]:
        sets = iter([found for images in batch.images for found in self._sets(images, batch.names[0])])
        rows = []
        for name, error in zip(batch.names, batch.errors, strict=True):
            found = next(sets) if error is None else [[]] * len(self.answers)
            for (asked, answer), own in zip(self.answers, found, strict=True):
                rows.append(row(name, asked, own, error, answer.lambda_val, self.calibration.balance))
        return rows

    def _sets(self, images: torch.Tensor, name: str) -> list[tuple[list[dict[str, Any]], ...]]:
        """Of each image the sets of all questions, from one pass through the model."""
        with torch.autocast(self.model.device.type, torch.bfloat16, enabled=self.bf16):
            output = forward(self.model, images)
        by_question, labels = [], self.model.config.id2label
        for _, answer in self.answers:
            try:
                scores = self.calibration.scores(*head_logits(output), answer.head).cpu()  # (b, L)
            except NotFinite as error:
                raise NotFinite(f"images from {name} on, counted from 0: {error}") from None
            sets = zip(scores.numpy(), answer.classes(scores), strict=True)
            by_question.append([[{"label": labels[j], "score": float(own[j])} for j in ids] for own, ids in sets])
        return list(zip(*by_question, strict=True))

    def record(self, source: Source, size: int) -> dict[str, Any]:
        """What shards of a source depend on."""
        config = self.model.config
        own = {name: value for name, value in config.to_dict().items() if name not in ELSEWHERE}
        own |= {name: getattr(config, name, None) for name in FIELDS}
        own["transform"] = transform_for(self.model).described()
        digest = hashlib.sha256(json.dumps(own, sort_keys=True, default=str).encode())
        for name, weights in sorted(self.model.state_dict().items()):
            digest.update(name.encode())
            digest.update(weights.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
        return {
            "name": config.name_or_path,
            "model": digest.hexdigest(),
            "question": [vars(question) for question in self.questions],
            "source": source.record(),
            "bf16": self.bf16,
            "shard size": size,
        }


class Shards:
    """A folder of shards, some of which may be there already; one of another model, question or source is refused.

    `broken` counts images of shards that were there which could not be read.

    Args:
        folder: Is made where there is none.
        predictor: The model and its questions.
        source: The images.
        size: Images in a shard.
    """

    def __init__(self, folder: str | Path, predictor: Predictor, source: Source, size: int) -> None:
        self.folder, self.predictor, self.source, self.size = make_folder(folder), predictor, source, size
        self.seen = self.images = self.broken = 0
        self.record = json.loads(json.dumps({**predictor.record(source, size), "images": None}))
        # looked at first: another process may begin now
        held = any(path.name[0] != "." for path in self.folder.iterdir())
        stored = read_json(self.folder / RECORD) if (self.folder / RECORD).exists() else None
        for name in set(self.record) - {"name", "images"} if stored else ():
            if stored.get(name) != self.record[name]:
                shown = "name" if name == "model" else name
                values = " and ".join(_said(record.get(shown))[:200] for record in (stored, self.record))
                raise ValueError(f"{folder} holds sets of another {name} ({values}): choose another folder.")
        if not stored and held:
            text = f"{folder} holds other files, and sets get a folder of their own"
            raise ValueError(f"{text}: name a new one, or a file, {Path(folder) / 'sets.csv'}.")
        if not stored:
            self._write_record()

    def _write_record(self) -> None:
        write_text(self.folder / RECORD, json.dumps(self.record, indent=2) + "\n")

    def path(self, shard: int) -> Path:
        """The file of a shard."""
        return self.folder / f"part-{shard:06d}.parquet"

    def missing(self, rank: int = 0, world_size: int = 1) -> Iterator[tuple[int, list[Piece]]]:
        """A process's own shards that are not there; one that is and has other images than the source is refused."""
        self.seen = self.images = 0
        for shard, pieces in enumerate(self.source.shards(self.size)):
            self.seen, self.images = shard + 1, self.images + sum(len(piece.items) for piece in pieces)
            if shard % world_size == rank:
                if not self.path(shard).exists():
                    yield shard, pieces
                else:
                    self._check(shard, pieces)

    def _check(self, shard: int, pieces: list[Piece]) -> None:
        try:
            found = pq.read_metadata(self.path(shard))
        except (OSError, ValueError) as error:
            text = f"{self.path(shard)} cannot be read ({reason_of(error)})"
            raise ValueError(f"{text}: remove it, and the same command writes it again.") from error
        names = Digest().add(piece.name(place) for piece in pieces for place in range(len(piece.items)))
        if (found.metadata or {}).get(NAMES.encode()) != names.text().encode():
            text = f"{self.path(shard)} has other images than the source has in its place, from {pieces[0].name()} on"
            raise ValueError(f"{text}: some came or went; choose another folder.")
        groups = map(found.row_group, range(found.num_row_groups))
        columns = (column for group in groups for column in map(group.column, range(group.num_columns)))
        errors = [column for column in columns if column.path_in_schema == "error"]
        rows = sum(column.num_values - column.statistics.null_count for column in errors)
        self.broken += rows // len(self.predictor.answers)
        if self.broken and self.predictor.on_bad_image == "error":
            raise ValueError(f"{self.path(shard)} has images that cannot be read: its column `error` says which.")

    def write(
        self, pieces: Iterable[tuple[int, Iterable[Piece]]], number: int | None = None, shown: bool = True
    ) -> None:
        """Write these shards, one after the other; `number` is that of their images, where it is known."""
        found = self.predictor.predicted(pieces, self.source, number, shown)
        for shard, batches in groupby(found, key=lambda batch: batch[0]):
            with written_to(self.path(shard)) as write:
                for _, rows in batches:
                    write(rows)

    def number(self, rank: int = 0, world_size: int = 1) -> int | None:
        """How many images are in a process's own shards that are not there; None where it is not known."""
        number = self.source.number()
        if number is None:
            return None
        own = range(rank * self.size, number, world_size * self.size)
        left = (first for first in own if not self.path(first // self.size).exists())
        return sum(min(self.size, number - first) for first in left)

    def write_share(self, rank: int, world_size: int) -> None:
        """Write every shard that is not there, and of several processes every W-th."""
        number = self.number(rank, world_size) if rank == 0 else None  # for the bar
        try:
            self.write(self.missing(rank, world_size), number, shown=rank == 0)
        except KeyboardInterrupt as stop:
            raise type(stop)("stopped; the same command goes on.") from None

    def finish(self) -> int:
        """How many shards are not there, after all were gone through; where none is, the record says so."""
        left = sum(not self.path(shard).exists() for shard in range(self.seen))
        numbers = (path.stem.removeprefix("part-") for path in self.folder.glob("part-*.parquet"))
        if any(not number.isdecimal() or int(number) >= self.seen for number in numbers):
            raise ValueError(
                f"{self.folder} has more files than the source images: it lost some; choose another folder."
            )
        if not left:
            self.record["images"] = self.images
            self._write_record()
            for path in self.folder.glob(f"{UNFINISHED}-*.parquet"):  # of processes that were killed
                path.unlink(missing_ok=True)
        return left


def _said(value: Any) -> str:
    """A part of a record as people read it: of questions and sources what is not left out."""
    if isinstance(value, list):
        return "; ".join(map(_said, value))
    if isinstance(value, dict):
        return ", ".join(f"{name} {_said(each)}" for name, each in value.items() if each not in (None, False))
    return str(value)


def _batches(
    shards: Iterable[tuple[int, Iterable[Piece]]], source: Source, size: int
) -> Iterator[list[tuple[int, str, Any]]]:
    """The keys of every batch; none is of two shards, so that a shard is the same whatever was there before.

    A batch ends early where images that were read already are large.
    """
    for shard, pieces in shards:
        batch, held = [], 0
        for name, stored in source.read(pieces):
            batch.append((shard, name, stored))
            own = stored.get("bytes") if isinstance(stored, dict) else stored
            held += len(own) if isinstance(own, bytes) else 0
            if len(batch) == size or held >= MOST_BYTES:
                yield batch
                batch, held = [], 0
        if batch:
            yield batch


def _as_it_is(batch: Batch) -> Batch:
    return batch
