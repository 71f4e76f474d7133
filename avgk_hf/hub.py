"""Uploading a run: what belongs on the Hub, and nothing else."""

import json
import os
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from huggingface_hub import CommitOperationAdd, HfApi
from transformers.utils import logging

from .averaging import LAST_WEIGHTS
from .checks import read_json
from .classifiers import CARRIED, carried_code
from .configuration import AvgKConfig, code_files
from .files import leads_out
from .records import FILE
from .shell import masked
from .weights import check_folder

logger = logging.get_logger(__name__)
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
