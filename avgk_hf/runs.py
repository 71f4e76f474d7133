"""The folder of a run: its checkpoints, which one to go on from, room for more, and the log."""

import datetime
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

import torch
from transformers import TrainerCallback
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .configuration import read_json
from .files import open_log, output_folder
from .losses import LOSSES
from .modeling import check_folder, check_safetensors

logger = logging.get_logger(__name__)
OBJECTIVE_STATE = "objective.safetensors"
LOG = "train.log"


def check_checkpoint(folder: str | Path) -> None:
    """Refuse a checkpoint from which training cannot go on exactly, with the name of the file that is at fault."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder {str(folder)!r}.")
    check_folder(folder)
    needed = ["trainer_state.json", "optimizer.pt", "scheduler.pt"]
    objective = str(read_json(folder / "config.json").get("objective"))
    if objective in LOSSES and LOSSES[objective].has_state:
        needed.append(OBJECTIVE_STATE)
    for name in needed:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder / name} is missing, so training cannot go on from this checkpoint.")
    if not isinstance(read_json(folder / "trainer_state.json").get("global_step"), int):
        raise ValueError(f"{folder / 'trainer_state.json'} has no number `global_step`.")
    if OBJECTIVE_STATE in needed:
        check_safetensors(folder / OBJECTIVE_STATE)
    random_states = sorted(folder.glob("rng_state*.pth"))
    if not random_states:
        raise FileNotFoundError(f"{folder / 'rng_state.pth'} is missing, so training cannot go on exactly.")
    scaler = [path for path in [folder / "scaler.pt"] if path.is_file()]
    for path in (folder / "optimizer.pt", folder / "scheduler.pt", *scaler, *random_states):
        _check_tensors(path)


def _check_tensors(path: Path) -> None:
    """Refuse a file of `torch.save` that is damaged or holds more than tensors and numbers; no code in it is run."""
    try:
        with safe_globals():
            torch.load(path, map_location="cpu", weights_only=True, mmap=True)  # mapped: tensors are not read
    except Exception as error:  # torch raises errors of many kinds for a file it cannot read
        raise ValueError(
            f"{path} is cut off or damaged, or holds more than tensors and numbers; nothing in it was run."
        ) from error


def last_checkpoint(run: str | Path, warn: bool = True) -> Path | None:
    """The newest complete checkpoint of a run; with `warn`, newer ones that are passed over are named."""
    found = [(match, path) for path in Path(run).glob("*") if (match := re.fullmatch(r"checkpoint-(\d+)", path.name))]
    for _, path in sorted(found, key=lambda item: -int(item[0][1])):
        try:
            check_checkpoint(path)
            return path
        except (OSError, ValueError) as error:
            if warn:
                logger.warning(f"{path} is passed over: {error}")
    return None


def where_to_go_on(run: str | Path, command: str = "`--resume_from_checkpoint last`") -> str:
    """A sentence for an error: the last checkpoint and how to resume."""
    last = last_checkpoint(run, warn=False)
    return f"The last checkpoint is {last}; go on with {command}." if last else f"There is no checkpoint in {run} yet."


def check_output_dir(folder: str | Path, option: str = "output_dir") -> None:
    """Create the folder and refuse one that cannot be written to, before anything else is done."""
    try:
        output_folder(folder)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"1")
    except OSError as error:
        raise OSError(
            f"{option}={str(folder)!r} cannot be written to ({error.strerror or error}); choose another `{option}`."
        ) from error


def check_space(folder: str | Path, checkpoint_size: int, checkpoints: int, model_size: int) -> None:
    """Refuse to start where the disk has no room for the checkpoints to come and the model.

    Args:
        folder: The run.
        checkpoint_size: Bytes of one checkpoint, about.
        checkpoints: How many will stand there at once, besides those that do already.
        model_size: Bytes of the model that is saved in the end.
    """
    free, needed = shutil.disk_usage(folder).free, checkpoints * checkpoint_size + model_size
    if needed > free:
        raise OSError(
            f"{folder} has {free / 2**20:,.0f} MiB free, but {checkpoints:,} checkpoint(s) of about"
            f" {checkpoint_size / 2**20:,.1f} MiB and the model need {needed / 2**20:,.0f} MiB: free some space, keep"
            " fewer with `save_total_limit: 2`, or choose another `output_dir:`."
        )


class LogFile(TrainerCallback):
    """Writes what the Trainer logs while training to train.log; a resumed run goes on in the same file."""

    def __init__(self) -> None:
        self._training = False

    def _write(self, args: Any, state: Any, text: str) -> None:
        if not state.is_world_process_zero:
            return
        time = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        try:
            with open_log(Path(args.output_dir) / LOG) as file:
                file.write(f"{time}  step {state.global_step}/{state.max_steps}  {text}\n")
        except OSError as error:  # a full disk ends the training where something is lost, at the next checkpoint
            logger.warning_once(f"{Path(args.output_dir) / LOG} could not be written ({error}).")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say where training starts."""
        self._training = True
        self._write(args, state, "training goes on" if state.global_step else "training starts")

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, Any] | None = None, **kwargs: Any) -> None:
        """One line for one set of numbers."""
        if self._training:
            numbers = (f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in (logs or {}).items())
            self._write(args, state, "  ".join(numbers))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that a checkpoint is complete."""
        self._write(args, state, f"saved {PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say that training ended by itself; what follows, e.g. results on test data, is logged as well."""
        self._write(args, state, f"training ends, best checkpoint: {state.best_model_checkpoint or 'none'}")
