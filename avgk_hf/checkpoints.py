"""A Trainer that can be killed: complete checkpoints, which one to go on from, the best model, room for them, a log.

What private methods of transformers' Trainer are needed for stands here and nowhere else: `HOOKS` names them.
"""

import math
import os
import re
import shutil
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader
from transformers import EarlyStoppingCallback, Trainer, TrainerCallback, TrainerState, TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_pt_utils import safe_globals
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    HubStrategy,
    IntervalStrategy,
    SaveStrategy,
    get_last_checkpoint,
    has_length,
    rotate_checkpoints,
)
from transformers.utils import logging

from .averaging import WeightAverage, check_average
from .checks import read_json
from .data.transforms import ImageTransform
from .files import UNFINISHED, check_output_dir, fresh_folder, make_folder, new_file, replacing
from .hub import OBJECTIVE_STATE, push_folder
from .losses import LOSSES
from .progress import LogFile, look_for_unused, print_lines
from .scores import NotFinite
from .training_args import optimizer_states
from .weights import ADAPTER, check_folder, check_safetensors, shared_names, weight_names, with_calibration

logger = logging.get_logger(__name__)
HOOKS = {  # the private methods of Trainer that are overridden, and why nothing public will do
    "_save_checkpoint": "a checkpoint is written aside and takes its place when it is complete",
    "_get_grad_norm": "no look at gradients whose norm is not logged, nor at those of a frozen backbone",
    "_load_from_checkpoint": "thresholds and the state of the objective come back with the weights",
    "_load_best_model": "thresholds come back with the best weights, before a callback sees the model",
}


class CheckpointTrainer(Trainer):
    """A Trainer whose run can be killed at any moment and go on to the same end, to the last bit.

    A subclass sets `criterion`, whose state checkpoints hold beside the model, before `Trainer` is initialised, and
    has the methods `_load_calibration(checkpoint)` and `write_results(folder)`.
    """

    criterion: nn.Module

    def __init__(self, *, args: TrainingArguments, callbacks: list | None = None, **kwargs: Any) -> None:
        if args.should_save:
            check_output_dir(args.output_dir, keep=True)
        self._resumed: TrainerState | None = None
        self._epochs = self._steps_per_epoch = self._best_step = None
        look_for_unused(args, kwargs.get("model"))
        self.average = WeightAverage(args.ema_decay) if args.ema_decay else None
        own = [GoingOn(self), *([self.average] if self.average else [])]
        super().__init__(args=args, callbacks=[*own, *(callbacks or [])], **kwargs)
        print_lines(self)
        self.add_callback(LogFile())

    def averaged(self) -> AbstractContextManager:
        """Meanwhile the model has the average of its weights, where there is one and training goes on."""
        return self.average.applied(self.model) if self.average else nullcontext()

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`.

        Args:
            resume_from_checkpoint: `"last"` or True: the newest complete checkpoint in `output_dir`, or from the start
                where there is none, so that the same command can be repeated. A folder: that checkpoint.
            args: As in `Trainer`.
            kwargs: As in `Trainer`.
        """
        checkpoint, self._best_step = self._start(resume_from_checkpoint), None
        self._resumed = TrainerState.load_from_json(f"{checkpoint}/{TRAINER_STATE_NAME}") if checkpoint else None
        for callback in self._stateful_callbacks() if checkpoint else ():  # what it counted; its settings are new
            saved = self._resumed.stateful_callbacks.get(type(callback).__name__)
            vars(callback).update(saved.get("attributes", {}) if isinstance(saved, dict) else {})
        if self.args.should_save and self.model is not None:  # none yet between the trials of a search
            check_space(self.args.output_dir, *self._foreseen())
        return super().train(str(checkpoint) if checkpoint else None, *args, **kwargs)

    def _start(self, asked: str | bool | None) -> str | Path | None:
        """The checkpoint to go on from, which must be complete."""
        run, first, word = self.args.output_dir, self.is_world_process_zero(), str(asked).lower()
        foreign = self.is_deepspeed_enabled or self.is_fsdp_enabled  # these have checkpoints of their own
        if word in ("none", "false"):
            return None
        if word in ("last", "true"):
            asked = get_last_checkpoint(run) if foreign else last_checkpoint(run, warn=first)
            start = f"starts from the beginning: there is no complete checkpoint in {run}"
            if first:
                logger.warning(f"training {f'goes on from {asked}' if asked else start}.")
        elif not foreign:
            check_checkpoint(asked)
        return asked

    def _stateful_callbacks(self) -> list[TrainerCallback]:
        return [callback for callback in self.callback_handler.callbacks if isinstance(callback, ExportableState)]

    def set_initial_training_values(self, args: TrainingArguments, dataloader: DataLoader) -> tuple:
        """As in `Trainer`, without an epoch for a training that had ended when its checkpoint was saved."""
        epochs, steps_per_epoch, *others, max_steps = super().set_initial_training_values(args, dataloader)
        self._epochs, self._steps_per_epoch = epochs, steps_per_epoch
        if self._resumed:
            stopped = [
                callback.early_stopping_patience_counter >= callback.early_stopping_patience
                for callback in self._stateful_callbacks()
                if isinstance(callback, EarlyStoppingCallback)
            ]
            epochs = 0 if any(stopped) or self._resumed.global_step >= max_steps else epochs
        return epochs, steps_per_epoch, *others, max_steps

    def _foreseen(self) -> tuple[int, int, int]:
        """About how many bytes a checkpoint will take, how many more will stand at once, and the model's bytes."""
        args = self.args
        model_size = sum(value.nbytes for value in self.model.state_dict().values())
        trained = [p for p in (*self.model.parameters(), *self.criterion.parameters()) if p.requires_grad]
        size = model_size * (2 if self.average else 1)
        size += optimizer_states(args) * sum(parameter.nbytes for parameter in trained)
        size += sum(value.nbytes for value in self.criterion.state_dict().values())
        planned = 1
        if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH) and has_length(self.train_dataset):
            in_epoch = max(math.ceil(len(self.train_dataset) / self.get_total_train_batch_size(args)), 1)
            steps = args.max_steps if args.max_steps > 0 else args.num_train_epochs * in_epoch
            every = args.save_steps if args.save_strategy == SaveStrategy.STEPS else in_epoch
            planned = math.ceil(steps / (every if every >= 1 else every * steps))
        if args.save_total_limit:  # the oldest goes when the newest is complete
            planned = min(planned, args.save_total_limit + 1)
        standing = len(list(Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")))
        return size, 0 if args.save_strategy == SaveStrategy.NO else max(planned - standing, 1), model_size

    def _refuse_divergence(self, what: str) -> None:
        args = self.args
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"
        raise NotFinite(
            f"{what} in step {self.state.global_step + 1} of {self.state.max_steps}, so training was ended. Lower"
            f" learning_rate={args.learning_rate:g}"
            + ("" if precision == "float32" else f" or train without {precision}")
            + f"; max_grad_norm={args.max_grad_norm:g} and warmup_steps={args.warmup_steps:g} matter too."
            f" {where_to_go_on(args.output_dir)}"
        )

    def _get_grad_norm(self, model: nn.Module, grad_norm: Any = None) -> Any:
        if grad_norm is None and not self._logs_next():
            return None
        return super()._get_grad_norm(self.model.learning() if model is self.model else model, grad_norm)

    def _logs_next(self) -> bool:
        """Whether the step that is under way ends with a line in the log."""
        step, args, state = self.state.global_step + 1, self.args, self.state
        if args.logging_strategy == IntervalStrategy.EPOCH and self._steps_per_epoch:
            logged = step % self._steps_per_epoch == 0 or step == state.max_steps
        else:
            logged = args.logging_strategy == IntervalStrategy.STEPS and step % state.logging_steps == 0
        return logged or (step == 1 and args.logging_first_step)

    def save_state(self) -> None:
        """As in `Trainer`, not through a link."""
        if self.is_world_process_zero():
            with new_file(Path(self.args.output_dir) / TRAINER_STATE_NAME) as new:
                self.state.save_to_json(str(new))

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """As in `Trainer`, without the pickled training arguments, and with the thresholds beside an adapter."""
        output_dir, writes = Path(output_dir or self.args.output_dir), self.args.should_save
        aside = writes and not self.is_deepspeed_enabled  # whose processes may all write
        with replacing(output_dir) if aside else nullcontext(output_dir) as folder:
            super().save_model(str(folder), _internal_call=True)
            if writes:
                (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
                if not (folder / "config.json").exists():  # peft saves its adapter only
                    self.model.config.save_pretrained(folder)
                    for name in ("", *self.model.peft_config):  # one of another name than the default has a folder
                        if (path := folder / name / ADAPTER).is_file():
                            tensors = load_file(path) | with_calibration(self.model.config)
                            save_file(tensors, path, {"format": "pt"})
        if writes and not _internal_call:  # after the model: who finds results finds a whole run
            with after_the_model(output_dir):
                self.write_results(output_dir)
        if self.args.push_to_hub and not _internal_call:
            self.push_to_hub(commit_message="Model save")

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save model and card and upload both. A failed upload leaves the run intact and says how to go on."""
        if self.hub_model_id is None:
            self.hub_model_id = self.args.hub_model_id or Path(self.args.output_dir).name
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        if not self.is_world_process_zero():
            return None
        return push_folder(
            self.args.output_dir,
            self.hub_model_id,
            self.args.hub_private_repo if private is None else private,
            token or self.args.hub_token,
            commit_message=commit_message,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
        )

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        if not all(torch.isfinite(parameter).all() for parameter in self.model.parameters()):
            self._refuse_divergence("weights are not finite any more")
        args, name = self.args, f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        kept, final = (args.output_dir, args.push_to_hub), Path(self._get_output_dir(trial)) / name
        unfinished = final.parent / UNFINISHED
        for stateful in (*self._stateful_callbacks(), self.control):  # a checkpoint that was resumed may not know it
            self.state.stateful_callbacks.setdefault(type(stateful).__name__, {})
        try:
            if args.should_save:
                fresh_folder(unfinished)  # in the place of what a process left that was killed
            self.accelerator.wait_for_everyone()
            args.output_dir, args.push_to_hub = str(unfinished), False
            written = Path(self._get_output_dir(trial)) / name
            with self.averaged():
                super()._save_checkpoint(model, trial)
            if self.average and args.should_save:
                self.average.save(self.model, written)
            if self.state.best_model_checkpoint == str(written):
                self.state.best_model_checkpoint = str(final)
            self.accelerator.wait_for_everyone()  # each has its random state there
            if args.should_save:
                self._complete(written, final)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save has no error of its own for a full disk
            raise OSError(
                f"{final} could not be written ({' '.join(str(error).split())}). Free some space, or choose another"
                f" `output_dir:`. {where_to_go_on(final.parent)}"
            ) from error
        finally:
            args.output_dir, args.push_to_hub = kept
            if args.should_save:
                shutil.rmtree(unfinished, ignore_errors=True)
        if args.push_to_hub and self.is_world_process_zero() and args.hub_strategy != HubStrategy.END:
            try:
                push_folder(
                    final, self.hub_model_id, args.hub_private_repo, args.hub_token, revision=args.hub_revision
                )
            except OSError as error:  # which must not end the training
                logger.warning(f"{error} Training goes on.")
        if args.should_save:
            rotate_checkpoints(str(final.parent), args.save_total_limit, self.state.best_model_checkpoint, True)
        self.accelerator.wait_for_everyone()

    def _complete(self, written: Path, final: Path) -> None:
        """Add what the stock Trainer does not know, and put the checkpoint in its place."""
        if self.criterion.state_dict() and not self.args.save_only_model:
            save_file(self.criterion.state_dict(), written / OBJECTIVE_STATE)
        self.state.save_to_json(str(written / TRAINER_STATE_NAME))  # with the place of the best checkpoint
        if os.path.lexists(final):  # of an earlier run in the same folder
            os.replace(final, written.with_name("old"))
        make_folder(final.parent)
        os.replace(written, final)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        check_average(Path(resume_from_checkpoint), self.average is not None)
        self._check_fits(resume_from_checkpoint)
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        if self.average:
            self.average.load(self.model, Path(resume_from_checkpoint))
        self._load_calibration(resume_from_checkpoint)
        if self.criterion.state_dict():
            self.criterion.load_state_dict(load_file(Path(resume_from_checkpoint) / OBJECTIVE_STATE))

    def _load_best_model(self) -> None:
        self._check_fits(self.state.best_model_checkpoint)
        super()._load_best_model()
        self._load_calibration(self.state.best_model_checkpoint)
        self._best_step = self.state.best_global_step

    @property
    def weights_step(self) -> int:
        """The step whose weights the model has: that of the best checkpoint after it was loaded."""
        return self.state.global_step if self._best_step is None else self._best_step

    def _check_fits(self, checkpoint: str) -> None:
        """Refuse weights that are not those of the model, of which the stock Trainer only warns."""
        found, own = weight_names(Path(checkpoint)), set(self.model.state_dict()) - set(shared_names(self.model))
        if found and found != own:
            raise ValueError(
                f"the checkpoint does not fit the model: missing {sorted(own - found)}, unexpected"
                f" {sorted(found - own)}."
            )


class GoingOn(TrainerCallback):
    """What exact resuming takes besides checkpoints, where training begins and where an epoch does."""

    def __init__(self, trainer: CheckpointTrainer) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Find the best checkpoint again in a run whose folder was moved; it must be whole."""
        state.num_train_epochs = self.trainer._epochs
        if state.best_global_step and state.best_model_checkpoint is None:
            moved = Path(args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            state.best_model_checkpoint = str(moved) if moved.is_dir() else None
        if state.best_model_checkpoint and args.load_best_model_at_end:
            check_folder(state.best_model_checkpoint)  # now, and not when it is loaded in the end

    def on_epoch_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Draw the changes to images from seed, epoch and image, before workers start."""
        transform = getattr(self.trainer.train_dataset, "format", {}).get("format_kwargs", {}).get("transform")
        if isinstance(transform, ImageTransform):
            seed = args.seed if args.data_seed is None else args.data_seed
            transform.seed(seed, state.global_step // self.trainer._steps_per_epoch)


def check_checkpoint(folder: str | Path) -> None:
    """Refuse a checkpoint from which training cannot go on exactly, with the name of the file that is at fault."""
    folder = Path(folder)
    if not folder.is_dir():
        raise FileNotFoundError(f"there is no checkpoint folder {str(folder)!r}.")
    check_folder(folder)
    objective = LOSSES.get(str(read_json(folder / "config.json").get("objective")))
    random_states = sorted(folder.glob("rng_state*.pth")) or [folder / "rng_state.pth"]
    tensors = [folder / "optimizer.pt", folder / "scheduler.pt", *random_states]
    own = [folder / OBJECTIVE_STATE] if objective and objective.has_state else []
    for path in (folder / TRAINER_STATE_NAME, *tensors, *own):
        if not path.is_file():
            raise FileNotFoundError(f"{path} is missing, so training cannot go on exactly from this checkpoint.")
    if not isinstance(read_json(folder / TRAINER_STATE_NAME).get("global_step"), int):
        raise ValueError(f"{folder / TRAINER_STATE_NAME} has no number `global_step`.")
    for path in own:
        check_safetensors(path)
    for path in (*tensors, *folder.glob("scaler.pt")):
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


def where_to_go_on(run: str | Path, command: str = "`--resume_from_checkpoint last`", start: str = "it") -> str:
    """A sentence for an error: the last checkpoint and how to resume."""
    last = last_checkpoint(run, warn=False)
    if last is None:
        return f"There is no checkpoint in {run} yet: start {start} again."
    return f"The last checkpoint is {last}; go on with {command}."


@contextmanager
def after_the_model(folder: str | Path) -> Iterator[None]:
    """What is written meanwhile comes after the model, which is there whatever happens to it."""
    try:
        yield
    except OSError as error:
        raise OSError(
            f"the results could not be written to {folder} ({error.strerror}), the model was. Free some space."
            f" {where_to_go_on(folder)}"
        ) from error


def check_space(folder: str | Path, checkpoint_size: int, checkpoints: int, model_size: int) -> None:
    """Refuse to start where the disk has no room for so many checkpoints of so many bytes, and the model."""
    free, needed = shutil.disk_usage(folder).free, checkpoints * checkpoint_size + model_size
    if needed > free:
        raise OSError(
            f"{folder} has {free / 2**20:,.0f} MiB free, but {checkpoints:,} checkpoint(s) of about"
            f" {checkpoint_size / 2**20:,.1f} MiB and the model need {needed / 2**20:,.0f} MiB: free some space, keep"
            " fewer with `save_total_limit: 2`, or choose another `output_dir:`."
        )
