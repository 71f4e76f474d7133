"""What a dataset of somebody else may point to: files of its own, not those of its reader or addresses on the network.

`load_splits(..., allow_outside=True)` leaves these checks out.
"""

import os
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.compute as pc
from datasets import DatasetDict, config
from huggingface_hub import HfApi
from huggingface_hub.constants import HF_HUB_CACHE
from huggingface_hub.errors import RepositoryNotFoundError
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.repocard import REGEX_YAML_BLOCK

from ..configuration import read_json
from ..plain_yaml import load_yaml

READERS = ("imagefolder", "parquet", "arrow", "csv", "json", "webdataset", "cache")  # of `datasets`
SETTINGS = ("config_name", "data_dir", "data_files", "default", "description", "version", "drop_labels")
SETTINGS += ("drop_metadata", "sep", "delimiter")  # what a README may tell the reader
WAIT = 10  # seconds for the Hub to answer at all
REMEDY = "remove it, or permit it with `allow_outside: true` in a recipe, `--allow-outside` for a command"


class Refused(ValueError):
    """What a dataset would have `datasets` read."""


def check_folder(folder: Path) -> None:
    """Refuse a folder with links that lead out of it, or whose README or index does."""
    roots = _roots(str(folder))
    for entry in _entries(folder):
        if entry.is_symlink():
            if not _within(os.path.realpath(entry.path), roots):
                raise ValueError(f"{entry.path} is a link that leads out of {folder}: {REMEDY}.")
        elif not entry.is_file() and not entry.is_dir():
            raise ValueError(f"{entry.path} is neither a file nor a folder: remove it.")
        elif entry.name in ("dataset_dict.json", "state.json"):
            _check_names(Path(entry.path))
    for path in (folder / config.REPOCARD_FILENAME, folder / config.REPOYAML_FILENAME):
        if path.is_file():
            _check_readme(path)


def check_reach(name: str) -> None:
    """Refuse at once what is no dataset on the Hub, or not within reach.

    `datasets` would try for half a minute, and then take its copy of a folder of this name that it read somewhere.
    """
    if "/" in name and Path(config.HF_DATASETS_CACHE, name.replace("/", "___")).is_dir():
        return
    try:
        HfApi().dataset_info(name, timeout=WAIT)
    except RepositoryNotFoundError:
        raise FileNotFoundError("the Hub has no such dataset for you") from None


def check_linked(folder: Path) -> None:
    """Refuse a linked folder, whose images `datasets` would leave out without a word."""
    for entry in _entries(folder):
        if entry.is_symlink() and entry.is_dir():
            raise ValueError(f"{entry.path} is a link to a folder, and is not followed: link its files, or copy it.")


def _roots(dataset: str) -> list[str]:
    """Where the files of a folder may lie, those of a snapshot of the Hub in its blobs too; or those of a Hub id."""
    if not Path(dataset).is_dir():
        own = Path(HF_HUB_CACHE) / repo_folder_name(repo_id=dataset, repo_type="dataset")
        return [os.path.realpath(place) for place in (own, config.DOWNLOADED_DATASETS_PATH)]
    root = Path(os.path.realpath(dataset))
    return [str(root), *([str(root.parent.parent / "blobs")] if root.parent.name == "snapshots" else [])]


def check_builder(builder: Any, dataset: str) -> None:
    """Refuse what `load_dataset_builder` gives for a folder or Hub id: a reader that is not known, data elsewhere."""
    reader = type(builder).__module__.rpartition(".")[2]
    if reader not in READERS:
        raise Refused(
            f"it would be read as {reader}; only {', '.join(READERS[:-1])} are: images belong in train/<class>/"
        )
    local, roots = Path(dataset).is_dir(), _roots(dataset)
    for file in (file for files in (builder.config.data_files or {}).values() for file in map(str, files)):
        if not (_within(file, roots) if local else file.startswith(f"hf://datasets/{dataset}@")):
            raise Refused(f"{file} would be read with it, which lies outside of it: {REMEDY}")


def check_images(splits: DatasetDict, dataset: str) -> None:
    """Refuse rows whose image is a path that leads out of the folder or Hub id."""
    check = Inside(dataset)
    for chunk in (chunk for split in splits.values() for chunk in split.data.column("image").chunks):
        stored = pc.is_null(pc.struct_field(chunk, "bytes"))
        for path in pc.struct_field(chunk, "path").filter(stored).drop_null().to_pylist():
            check(path)


class Inside:
    """Refuses the path of an image that leads out of a folder or Hub id; of the latter, a file there is inside too."""

    def __init__(self, dataset: str) -> None:
        self.dataset, self.roots = dataset, _roots(dataset)
        self.on_hub = None if Path(dataset).is_dir() else f"hf://datasets/{dataset}@"
        self.seen: dict[str, bool] = {}  # folders

    def __call__(self, path: str) -> None:
        """Refuse a path, or do nothing."""
        archive, _, place = path.rpartition("::")
        if self.on_hub and place.startswith(self.on_hub) and re.fullmatch(r"(zip://[^:]*)?", archive):
            return
        folder, name = os.path.split(path)
        if folder not in self.seen:
            self.seen[folder] = "://" not in path and _within(os.path.realpath(folder), self.roots)
        link = os.path.islink(path) and not _within(os.path.realpath(path), self.roots)
        if not self.seen[folder] or link or name == "..":
            raise ValueError(f"dataset {self.dataset!r} names the image {path[:300]!r}, outside of it: {REMEDY}.")


def listed_image(source: Path, folder: Path, name: str) -> str:
    """The path of an image that a list names, which must be a file below the folder."""
    parts = name.split("/")
    if {"", ".", ".."} & set(parts) or set(name) & set("\\:\0"):
        raise ValueError(f"{source} names the image {name[:300]!r}, which is no plain path below {folder}.")
    path = os.path.join(folder, *parts)
    if not os.path.isfile(path):
        raise FileNotFoundError(f"{source} names {name[:300]!r}, but {folder} has no such file: unpack it again.")
    return path


def _entries(folder: Path | str) -> Iterator[os.DirEntry]:
    for entry in os.scandir(folder):
        yield entry
        if entry.is_dir(follow_symlinks=False):
            yield from _entries(entry.path)


def _within(path: str, roots: Iterable[str]) -> bool:
    return any(os.path.commonpath([path, root]) == root for root in roots if os.path.isabs(path))


def _check_names(path: Path) -> None:
    """Refuse an index, written by `save_to_disk`, that names splits or files of another folder."""
    content = read_json(path)
    files = [content.get(key) or [] for key in ("_data_files", "_indices_files")]
    names = [file.get("filename") if isinstance(file, dict) else file for group in files for file in group]
    for name in [*names, *(content.get("splits") or [])]:
        if not isinstance(name, str) or name in ("", ".", "..") or set(name) & set("/\\:"):
            raise ValueError(f"{path} names {str(name)[:300]!r}, which is no file beside it: {REMEDY}.")


def _check_readme(path: Path) -> None:
    """Refuse settings for `datasets` that are not known, and files that are not below the folder."""
    try:
        with path.open(encoding="utf-8", newline="") as file:
            text = file.read()
        if path.suffix == ".md":
            block = REGEX_YAML_BLOCK.search(text)
            text = block[2] if block else ""
        content = load_yaml(text) or {}
    except ValueError as error:
        raise ValueError(f"the YAML of {path} cannot be read ({error}): mend or remove it.") from None
    configs = content.get("configs") if isinstance(content, dict) else None
    for settings in configs if isinstance(configs, list) else []:
        for name, value in settings.items() if isinstance(settings, dict) else ():
            if name not in SETTINGS:
                raise ValueError(f"{path} sets {str(name)[:100]!r} for its reader, which is not known: {REMEDY}.")
            for place in _texts(value) if name in ("data_dir", "data_files") else ():
                if place.startswith(("/", "~")) or ".." in place.split("/") or set(place) & set(":\\"):
                    raise ValueError(f"{path} points to {place[:300]!r}, outside of its folder: {REMEDY}.")


def _texts(value: Any) -> Iterator[str]:
    """All text in nested lists and mappings."""
    if isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _texts(item)
    elif value is not None:
        yield str(value)
