"""Images of which nothing is known but where they are: files, folders, lists, tars, Parquet, datasets.

A source is gone through as pieces, which name images and hold none of them: what is passed over is not read, and a
piece can be sent to another process, or to another machine with the same files. What stands in a list, a tar, Parquet
or a dataset was written by others (`boundary.py`); nothing is unpacked to disk, and what is held is bounded.
"""

import os
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from datasets import Dataset, Image, load_dataset_builder, load_from_disk
from PIL import Image as Pillow

from ..checks import is_hub_id, leads_inside, reason_of
from ..files import leads_out
from ..images import known_formats
from .boundary import REMEDY, check_builder, check_folder, check_reach
from .containers import HUB, Parquet, Part, tar_members

LIST, TAR, PARQUET = ".txt", ".tar", ".parquet"
MOST_LINE = 2**14  # of a path in a list
TOGETHER = 512  # images in a piece, or rows that are read at once
PHOTOGRAPHS = {".heic", ".heif", ".cr2", ".cr3", ".nef", ".arw", ".dng", ".orf", ".rw2"}  # of phones and cameras
SAVED = ("dataset_dict.json", "dataset_info.json")  # what `save_to_disk` writes


def image_suffixes() -> set[str]:
    """The endings of files that `open_image` takes."""
    known = known_formats()
    return {suffix for suffix, kind in Pillow.registered_extensions().items() if kind in known}


def walk(
    folder: str | Path, suffixes: Iterable[str], links: bool = False, inside: str = "", above: tuple[Path, ...] = ()
) -> Iterator[str]:
    """The files below a folder with one of the endings, relative to it, in order of their names; no hidden ones.

    The names of one folder are held at a time.

    Args:
        folder: The folder.
        suffixes: The endings.
        links: Whether links to folders are followed, unless they lead round; those that are not are named.
        inside: Where to begin.
        above: The folders that this is in, wherever they really are.
    """
    above = (*above, Path(os.path.realpath(os.path.join(folder, inside))))
    for entry in sorted(os.scandir(os.path.join(folder, inside)), key=lambda entry: entry.name):
        path = os.path.join(inside, entry.name)
        if entry.name[0] == ".":
            continue
        if entry.is_dir() and entry.is_symlink():
            place = os.path.realpath(entry.path)
            if not links or any(each.is_relative_to(place) for each in above):
                yield path
                continue
        if entry.is_dir():
            yield from walk(folder, suffixes, links, path, above)
        elif os.path.splitext(entry.name)[1].lower() in suffixes and entry.is_file():
            yield path


def image_files(folder: str | Path) -> list[Path]:
    """The files below a folder that `open_image` takes, in order of their names; hidden ones are left out."""
    paths = (Path(folder, path) for path in walk(folder, image_suffixes())) if Path(folder).is_dir() else ()
    return [path for path in paths if path.is_file()]


def left_out(*places: str | Path) -> str | None:
    """A sentence about photographs in folders whose formats are not opened here; None where there are none."""
    endings = PHOTOGRAPHS - image_suffixes()
    paths = (path for place in places if os.path.isdir(place) for path in walk(place, endings))
    found = Counter(ending for path in paths if (ending := os.path.splitext(path)[1].lower()) in endings)
    files, them = ("1 file is", "it") if found.total() == 1 else (f"{found.total():,} files are", "them")
    kinds = ", ".join(f"{number:,} {ending}" for ending, number in found.most_common())
    return f"{files} left out: {kinds}; convert {them} to JPEG" if found else None


class Piece(NamedTuple):
    """Images that follow each other in one place.

    Args:
        kind: `"named"` (files, as the user named them), `"inside"` (files that have to be in the folder `place`),
            `"hub"` (files there), or what `place` is: `"tar"`, `"parquet"`, `"saved"`, or `"broken"`.
        place: The folder or file that holds them.
        items: Of each image the path, its place in the tar (name, first byte, bytes), or its row; of a file that is
            broken why, which counts as one image.
    """

    kind: str
    place: str
    items: Sequence[Any]

    def name(self, position: int = 0) -> str:
        """What one of the images is called."""
        item = self.items[position]
        if self.kind == "broken":
            return self.place
        if self.kind in ("tar", "parquet", "saved"):
            return f"{self.place}::{item[0] if self.kind == 'tar' else item}"
        return os.path.join(self.place, item)

    def packed(self) -> tuple[str, str, list[Any]]:
        """The same in a form that JSON takes, for `unpacked`."""
        rows = isinstance(self.items, range)
        return self.kind, self.place, [self.items.start, self.items.stop] if rows else list(self.items)

    @classmethod
    def unpacked(cls, kind: str, place: str, items: list[Any]) -> "Piece":
        """What was packed."""
        return cls(kind, place, range(*items) if kind in ("parquet", "saved") else items)


@dataclass
class Source:
    """What images are taken from, as it is named on a command line.

    Args:
        places: Image files, lists of paths (`.txt`, relative to the list), WebDataset's `.tar`, `.parquet`, folders of
            images, tars and Parquet files, datasets written by `save_to_disk`, or ids of datasets on the Hub.
        split: Which split of a dataset.
        column: The column of images in Parquet files and saved datasets, by default `image`.
        allow_outside: Whether links, lists and rows may lead to files of other folders.
    """

    places: Sequence[str]
    split: str | None = None
    column: str | None = None
    allow_outside: bool = False
    _held: dict[str, Any] = field(default_factory=dict, init=False, repr=False)  # what is open

    def record(self) -> dict[str, Any]:
        """What it was made from."""
        return {name: value for name, value in vars(self).items() if name != "_held"}

    @property
    def _column(self) -> str:
        return self.column or "image"

    def pieces(self) -> Iterator[Piece]:
        """All images, in an order that is always the same."""
        if not any(os.path.exists(place) or _on_hub(place) for place in self.places):
            raise FileNotFoundError(f"{self.places[0]}: there is no such file; check the path.")
        for place in self.places:
            pieces = self._of_place(place)
            if (first := next(pieces, None)) is None:
                remedy = left_out(place) or "name image files, or a folder with PNG or JPEG files"
                raise ValueError(f"{place} holds no images; {remedy}.")
            yield first
            yield from pieces

    def number(self) -> int | None:
        """How many images there are, or None where a tar would have to be gone through for it."""
        total = 0
        for piece in self.pieces():
            if piece.kind == "tar":
                return None
            total += len(piece.items)
        return total

    def shards(self, size: int) -> Iterator[list[Piece]]:
        """The pieces of `size` images each; the last shard may have fewer."""
        shard: list[Piece] = []
        left = size
        for piece in self.pieces():
            while len(piece.items):
                shard.append(piece._replace(items=piece.items[:left]))
                piece = piece._replace(items=piece.items[left:])
                left -= len(shard[-1].items)
                if not left:
                    yield shard
                    shard, left = [], size
        if shard:
            yield shard

    def read(self, pieces: Iterable[Piece]) -> Iterator[tuple[str, Any]]:
        """Each image's name, and what `load` takes."""
        for piece in pieces:
            readers = {"tar": _in_tar, "parquet": self._in_rows, "saved": self._in_rows, "broken": _in_none}
            reader = readers.get(piece.kind, self._in_files)
            for position, stored in enumerate(reader(piece)):
                yield piece.name(position), stored

    def _of_place(self, place: str) -> Iterator[Piece]:
        if any(os.path.exists(os.path.join(place, name)) for name in SAVED):
            yield Piece("saved", place, range(len(self._hold(place, self._saved))))
        elif _on_hub(place):
            yield from self._of_files(_hub_files(place, self.split, self.allow_outside), "hub")
        elif self.split is not None:
            inside = os.path.join(place, self.split)
            remedy = f"name the folder, {inside}" if os.path.isdir(inside) else "leave it out"
            raise ValueError(f"--split {self.split} is for saved datasets and the Hub's, not for {place}: {remedy}.")
        elif os.path.isdir(place):
            ends = {*image_suffixes(), TAR, PARQUET}
            yield from self._of_files(walk(place, ends, self.allow_outside), "inside", place)
        elif os.path.isfile(place) and place.lower().endswith(LIST):
            yield from self._of_files(_lines(place), "inside", os.path.dirname(place))
        elif self.column is not None and not place.lower().endswith(PARQUET):
            raise ValueError(f"--image-column {self.column} is for Parquet and datasets, and {place} is none of them.")
        else:
            yield from self._of_files([place], "named")

    def _of_files(self, paths: Iterable[str], kind: str, root: str = "") -> Iterator[Piece]:
        """Files of all kinds as they come; paths are relative to the root."""
        images: list[str] = []
        for path in paths:
            ending = os.path.splitext(path)[1].lower()
            if images and (ending in (TAR, PARQUET) or len(images) == TOGETHER):
                yield Piece(kind, root, images)
                images = []
            if ending not in (TAR, PARQUET):
                images.append(path)
                continue
            # a line of a list that reads like an address is the name of a file
            file = path if kind == "hub" else os.path.join(root or os.curdir * path.startswith(HUB), path)
            if kind == "inside":
                self._check_inside(file, root)
            yield from _tar_pieces(file) if ending == TAR else [self._parquet_piece(file, kind)]
        if images:
            yield Piece(kind, root, images)

    def _hold(self, place: str, make: Callable[[str], Any]) -> Any:
        """What is open stays so: one shard goes on where the one before ended, maybe in the file before."""
        if place not in self._held:
            self._held = {**dict(list(self._held.items())[-1:]), place: make(place)}
        return self._held[place]

    def _check_inside(self, path: str, root: str) -> None:
        if not self.allow_outside and leads_out(Path(path), Path(root)):
            raise ValueError(f"{path[:300]} leads out of {root or os.curdir}: {REMEDY}.")

    def _parquet_piece(self, file: str, kind: str) -> Piece:
        try:
            reader = self._hold(file, lambda file: Parquet(file, self._column))
        except ValueError as error:
            if kind == "named":
                raise
            return Piece("broken", file, [str(error)])
        if self._column not in reader.names:
            raise ValueError(_no_column(file, self._column, reader.names))
        if reader.fault:
            raise ValueError(
                f"{file}: {self._column!r} {reader.fault}; name that of the images with `--image-column`."
            )
        return Piece("parquet", file, range(reader.starts[-1]))

    def _saved(self, folder: str) -> Dataset:
        """One split of what `save_to_disk` wrote, which stays on disk; images as they are stored."""
        if not self.allow_outside:
            check_folder(Path(folder))
        splits = load_from_disk(folder)
        splits = {splits.split or "train": splits} if isinstance(splits, Dataset) else splits
        dataset = splits[_split(folder, splits, self.split)]
        if self._column not in dataset.column_names:
            raise ValueError(_no_column(folder, self._column, dataset.column_names))
        return dataset.select_columns(self._column).cast_column(self._column, Image(decode=False))

    def _in_files(self, piece: Piece) -> Iterator[Any]:
        for path in (piece.name(position) for position in range(len(piece.items))):
            try:
                if piece.kind == "inside":
                    self._check_inside(path, piece.place)
                if os.path.isdir(path):
                    raise ValueError(f"{path[:300]} is a link to a folder: {REMEDY}.")
                yield Part(path) if piece.kind == "hub" else path
            except ValueError as error:
                yield error

    def _in_rows(self, piece: Piece) -> Iterator[Any]:
        if piece.kind == "saved":
            dataset = self._hold(piece.place, self._saved)
            rows = (dataset[row][self._column] for row in piece.items)
        else:
            rows = self._hold(piece.place, lambda file: Parquet(file, self._column)).rows(piece.items)
        for row, stored in zip(piece.items, rows, strict=True):
            if isinstance(stored, str):
                stored = {"path": stored}
            elif isinstance(stored, dict):
                stored = {name: stored.get(name) for name in ("bytes", "path")}
            path = stored.get("path") if isinstance(stored, dict) and stored.get("bytes") is None else None
            if path is not None and not isinstance(path, str):
                stored = ValueError(f"{piece.place}, row {row}, names no file but {str(path)[:100]!r}; remove it.")
            elif path:
                stored = os.path.join(os.path.dirname(piece.place), stored["path"])
                if not self.allow_outside:
                    text = f"{piece.place}, row {row}, names the file {stored[:300]!r} and holds no image"
                    stored = ValueError(f"{text}: {REMEDY}.")
            yield stored


def load(stored: Any, transform: Any, name: str) -> Any:
    """The tensor (C, H, W) of an image that `Source.read` found; an error says why there is none."""
    if isinstance(stored, Exception):
        raise stored
    if isinstance(stored, Part):
        stored = stored.read()
    if stored is not None and not isinstance(stored, (str, bytes, dict)):
        raise ValueError(f"{name} is no image but {type(stored).__name__}; name their column with `--image-column`.")
    return transform.image({} if stored is None else stored, name)


def _on_hub(place: str) -> bool:
    """Whether a name is that of a dataset on the Hub: no file, nor what can only be meant for one."""
    ending = os.path.splitext(place)[1].lower()
    here = os.path.exists(place) or leads_inside(place)
    return not here and is_hub_id(place) and ending not in {*image_suffixes(), LIST, TAR, PARQUET}


def _hub_files(name: str, split: str | None, allow_outside: bool) -> list[str]:
    try:
        check_reach(name)
        builder = load_dataset_builder(name)
        if not allow_outside:
            check_builder(builder, name)
    except Exception as error:  # of the network, or of a README
        text = f"there is no file {name!r} here, and as a dataset on the Hub it cannot be read ({reason_of(error)})"
        raise OSError(f"{text}: check the name.") from error
    files = builder.config.data_files or {}
    known = {*image_suffixes(), TAR, PARQUET}
    files = [str(file) for file in files[_split(name, files, split)]]
    return [file for file in files if os.path.splitext(file)[1].lower() in known]


def _no_column(place: str, column: str, names: list[str]) -> str:
    return f"{place} has no column {column!r}, only {names}; name that of the images with `--image-column`."


def _split(name: str, splits: Iterable[Any], asked: str | None) -> Any:
    splits = {str(split): split for split in splits}
    if asked is None and len(splits) == 1:
        return next(iter(splits.values()))
    if asked not in splits:
        raise ValueError(f"{name} has the splits {', '.join(splits)}: choose one with `--split`.")
    return splits[asked]


def _lines(path: str) -> Iterator[str]:
    """The paths of a list, one in a line."""
    known = {*image_suffixes(), TAR, PARQUET}  # an image that is not there is named when it is read
    with open(path, encoding="utf-8-sig") as file:
        try:
            for number, line in enumerate(iter(lambda: file.readline(MOST_LINE), ""), 1):
                if len(line) == MOST_LINE:
                    raise ValueError(f"a line of {MOST_LINE} characters or more")
                name = line.rstrip("\r\n")
                if number == 1 and name.strip() and os.path.splitext(name)[1].lower() not in known:
                    if not os.path.lexists(os.path.join(os.path.dirname(path), name)):
                        text = f"line 1 of {path} names no file: {name[:100]!r}"
                        raise FileNotFoundError(f"{text} (a .txt is read as a list of images).")
                if name.strip():
                    yield name
        except ValueError as error:  # no UTF-8 is one, too
            raise ValueError(f"{path} is no list of paths, one in a line ({error}).") from None


def _tar_pieces(path: str) -> Iterator[Piece]:
    """Where the images of a tar are; what cannot be read of it counts as one more, which has an error."""
    suffixes = image_suffixes()
    found = (each for each in tar_members(path) if each[1] < 0 or os.path.splitext(each[0])[1].lower() in suffixes)
    while items := list(islice(found, TOGETHER)):
        yield Piece("tar", path, items)


def _in_tar(piece: Piece) -> Iterator[Any]:
    for name, first, size in piece.items:
        yield Part(piece.place, first, size) if first >= 0 else ValueError(f"{piece.place}: {name}; copy it again.")


def _in_none(piece: Piece) -> Iterator[Any]:
    yield from map(ValueError, piece.items)
