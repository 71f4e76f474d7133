"""Uploading a run: what belongs on the Hub, and nothing else; and folders that are ready to be uploaded."""

import json
import os
import re
import shutil
import tempfile
from fnmatch import fnmatchcase
from importlib import metadata
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from transformers.utils import logging

from .averaging import LAST_WEIGHTS
from .checks import read_json
from .classifiers import CARRIED, carried_code
from .configuration import AvgKConfig, code_files
from .files import copy_file, leads_out, make_folder, write_text
from .records import FILE
from .shell import masked
from .weights import check_folder

logger = logging.get_logger(__name__)
PACKAGE = Path(__file__).parent
# weights, thresholds, card and pictures; no optimizer state, pickle, local path, or code that is not of this package
PUSHED = ("*.safetensors", "*.safetensors.index.json", "config.json", FILE, "preprocessor_config.json", "README.md")
PUSHED += ("*.png", "*.svg")
OBJECTIVE_STATE = "objective.safetensors"  # of a loss, in a checkpoint
NOT_PUSHED = (OBJECTIVE_STATE, LAST_WEIGHTS, ".*")
HERE = "  # the folder of this card, seen from the one that holds it"  # where a card names no Hub id
NEEDED = ("config.json", "model*.safetensors*", "adapter_model.safetensors")


def published(folder: str | Path) -> dict[str, Path]:
    """{name: file} of what others get of a model folder: known names at its top, and the code of this package.

    What a link leads to is taken only from inside the folder, or from the blobs of the Hub's cache beside it.
    """
    folder = Path(os.path.realpath(folder))
    blobs = folder.parent.parent / "blobs" if folder.parent.name == "snapshots" else None
    files, left_out = {}, []
    for path in sorted(folder.iterdir()):
        target = Path(os.path.realpath(path))
        if not _matches(path.name, PUSHED) or _matches(path.name, NOT_PUSHED) or not target.is_file():
            continue
        if leads_out(path) and target.parent != blobs:
            left_out.append(path.name)
        else:
            files[path.name] = target
    missing = [name for name in left_out if _matches(name, NEEDED)]
    if missing:
        raise ValueError(
            f"{folder / missing[0]} is a link that leads out of the folder and is not followed; put the file itself in"
            " its place."
        )
    if left_out:
        logger.warning(f"left out, because they are links that lead out of {folder}: {', '.join(left_out)}")
    config = read_json(folder / "config.json")
    if config.get("model_type") == AvgKConfig.model_type:
        files |= code_files()
    elif config.get("custom_pipelines") == CARRIED:
        files |= carried_code()
    return files


def _matches(name: str, patterns: tuple[str, ...]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _named(path: Path, repo_id: str) -> str | bytes:
    """A file to upload; a card that calls the model by its folder calls it by its id there."""
    if path.name != "README.md":
        return str(path)
    name = f"model = {json.dumps(repo_id)}"
    return re.sub(f"(?m)^model = .*{HERE}$", lambda _: name, path.read_text(encoding="utf-8")).encode()


def push_folder(
    folder: str | Path, repo_id: str, private: bool | None = None, token: str | None = None, **kwargs: Any
) -> Any:
    """Upload the folder of a trained model in one commit.

    Args:
        folder: The run; only what belongs on the Hub is taken from it, and nothing in it is changed.
        repo_id: `user/name`; created if it does not exist.
        private: Whether a new repository is private.
        token: Access token; default: the one that is logged in.
        kwargs: As in `HfApi.create_commit`, e.g. `commit_message`.
    """
    folder = Path(folder)
    check_folder(folder)
    if read_json(folder / "config.json").get("model_type") == AvgKConfig.model_type:
        AvgKConfig.from_pretrained(folder)  # refuses thresholds that nobody could use
    files, api = published(folder), HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        files = [CommitOperationAdd(name, _named(path, repo_id)) for name, path in files.items()]
        return api.create_commit(repo_id, files, **{"commit_message": "Upload model", **kwargs})
    except Exception as error:  # the client raises errors of many libraries; all leave the folder as it was
        raise OSError(
            f"the upload to {repo_id} failed ({masked(str(error.__cause__ or error), token)}). {folder} is intact; go"
            f" on with `avgk push {folder} {repo_id}`."
        ) from error


def check_new(folder: str | Path, option: str) -> Path:
    """The folder, if it is new or empty; any other is refused."""
    folder = Path(folder)
    if folder.is_symlink() or (folder.exists() and (not folder.is_dir() or any(folder.iterdir()))):
        raise ValueError(f"{option} {folder} exists and is not an empty folder; name a new one.")
    return folder


def requirements() -> list[str]:
    """What this package needs where it is not installed but copied."""
    try:
        return [text for text in metadata.requires("avgk_hf") or [] if "extra ==" not in text]
    except metadata.PackageNotFoundError:
        raise ImportError(
            "what has to be installed elsewhere is read from the installed avgk_hf, and here its files are used"
            " without: `pip install avgk_hf`."
        ) from None


def write_whole(folder: Path, texts: dict[str, str], copies: dict[str, Path]) -> None:
    """Write a folder with texts, copies of files and this package, or nothing."""
    parent = folder.absolute().parent
    parent.mkdir(parents=True, exist_ok=True)
    inside = folder if folder.is_dir() else parent  # an empty folder may be a volume of its own
    with tempfile.TemporaryDirectory(dir=inside, prefix=".avgk-") as unfinished:
        new = Path(unfinished)
        for name, text in texts.items():
            write_text(new / name, f"{text.rstrip()}\n")
        for name, path in copies.items():
            copy_file(path, new / name)
        shutil.copytree(PACKAGE, new / PACKAGE.name, ignore=shutil.ignore_patterns("__pycache__", "recipes"))
        make_folder(folder)
        for path in new.iterdir():
            shutil.move(path, folder / path.name)
