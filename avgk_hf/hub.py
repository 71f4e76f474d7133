"""Uploading a run: what belongs on the Hub, and nothing else."""

from pathlib import Path
from typing import Any

from huggingface_hub import HfApi

from .configuration import AvgKConfig, read_json
from .modeling import CODE, UNFINISHED, check_folder

# weights, thresholds, card, pictures and the code for trust_remote_code; no optimizer state, pickle or local path
PUSHED = ["*.safetensors", "*.safetensors.index.json", "config.json", "preprocessor_config.json", "README.md"]
PUSHED += ["*.png", "*.svg", *CODE]
NOT_PUSHED = ["checkpoint-*", "objective.safetensors", f"{UNFINISHED}/*"]


def push_folder(
    folder: str | Path, repo_id: str, private: bool | None = None, token: str | None = None, **kwargs: Any
) -> Any:
    """Upload the folder of a trained model in one commit.

    Args:
        folder: The run; only what belongs on the Hub is taken from it, and nothing in it is changed.
        repo_id: `user/name`; created if it does not exist.
        private: Whether a new repository is private.
        token: Access token; default: the one that is logged in.
        kwargs: As in `HfApi.upload_folder`, e.g. `commit_message`.
    """
    folder = Path(folder)
    check_folder(folder)
    if read_json(folder / "config.json").get("model_type") == AvgKConfig.model_type:
        AvgKConfig.from_pretrained(folder)  # refuses thresholds that nobody could use
    api = HfApi(token=token)
    try:
        repo_id = api.create_repo(repo_id, private=private, exist_ok=True).repo_id
        return api.upload_folder(
            repo_id=repo_id, folder_path=folder, allow_patterns=PUSHED, ignore_patterns=NOT_PUSHED, **kwargs
        )
    except Exception as error:  # the client raises errors of many libraries; all leave the folder as it was
        raise OSError(
            f"the upload to {repo_id} failed ({error.__cause__ or error}). {folder} is intact; go on with `avgk push"
            f" {folder} {repo_id}`."
        ) from error
