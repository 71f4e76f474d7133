"""What a training says: one line for each evaluation, on a terminal one progress bar, and all of it in train.log."""

import datetime
import logging as py_logging
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.func import functional_call
from transformers import (
    PrinterCallback,
    ProgressCallback,
    Trainer,
    TrainerCallback,
    TrainerState,
    TrainingArguments,
)
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .files import open_log
from .scores import head_logits
from .sets import k_key

logger = logging.get_logger(__name__)
LOG, NAME = "train.log", "eval_average_k_accuracy"


class EpochLines(ProgressCallback):
    """In place of transformers' own callbacks, which print every metric of every evaluation as a dictionary.

    All of them are in train.log and wherever `report_to` leads.

    Args:
        bars: Whether there are progress bars; on what is no terminal there are none.
    """

    def __init__(self, bars: bool = True) -> None:
        super().__init__()
        self.bars, self._training, self._loss, self._rarely = bars, False, None, False

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Begin to count the time."""
        self._training, self._start, self._first = True, time.monotonic(), state.global_step
        if self.bars and sys.stderr.isatty():
            super().on_train_begin(args, state, control, **kwargs)

    def on_step_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if self.training_bar is not None:
            super().on_step_end(args, state, control, **kwargs)

    def on_prediction_step(
        self, args: TrainingArguments, state: TrainerState, control: Any, eval_dataloader: Any = None, **kwargs: Any
    ) -> None:
        """One bar at a time: that of an evaluation only where nothing is trained."""
        if self.bars and not self._training and sys.stderr.isatty():
            super().on_prediction_step(args, state, control, eval_dataloader, **kwargs)

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        """Keep the training loss for the next line."""
        self._loss = (logs or {}).get("loss", self._loss)

    def on_evaluate(
        self, args: TrainingArguments, state: TrainerState, control: Any, metrics: Any = None, **kwargs: Any
    ) -> None:
        """Print the line of an evaluation while training."""
        super().on_evaluate(args, state, control, **kwargs)
        best = args.metric_for_best_model or NAME
        self._print(
            state, metrics or {}, kwargs["model"].config.k, best if best.startswith("eval_") else f"eval_{best}"
        )

    def on_epoch_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        """Print the line of an epoch that nothing is evaluated after."""
        if args.eval_strategy == "no":
            self._print(state, {}, 0)

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._training = False
        if self.training_bar is not None:
            super().on_train_end(args, state, control, **kwargs)
        if state.global_step < state.max_steps and state.is_world_process_zero:
            print(f"stopped early, after epoch {state.epoch:.4g} of {state.num_train_epochs:g}")

    def _print(self, state: TrainerState, metrics: dict[str, float], k: float, chosen: str = NAME) -> None:
        if not self._training or not state.is_world_process_zero:
            return
        parts = [f"epoch {round(state.epoch or 0, 2):g}/{state.num_train_epochs:g}"]
        self._rarely |= (
            self._loss is None
        )  # then its own loss stands in some lines only, and that of validation in all
        if self._loss is not None:
            parts.append(f"loss {self._loss:.2f}")
        if self._rarely and "eval_loss" in metrics:
            parts.append(f"validation loss {metrics['eval_loss']:.2f}")
        self._loss = None
        few = metrics.get("eval_few_shot_accuracy")
        if NAME in metrics:
            best = max(entry[NAME] for entry in (*state.log_history, metrics) if NAME in entry)
            text = f" (best {100 * best:.1f}%)" * (chosen == NAME)
            parts.append(f"average-{k_key(k)} {100 * metrics[NAME]:.1f}%{text}")
        if chosen != NAME and chosen in metrics:  # which says which weights are kept
            parts.append(f"{chosen.removeprefix('eval_')} {metrics[chosen]:.4g}")
        parts += [] if few is None else [f"few shot {100 * few:.0f}%"]
        done = state.global_step - self._first
        if done:
            left = round((time.monotonic() - self._start) / done * (state.max_steps - state.global_step))
            hours, minutes, seconds = left // 3600, left // 60 % 60, left % 60
            parts.append(f"{hours}:{minutes:02}:{seconds:02} left" if hours else f"{minutes}:{seconds:02} left")
        write = print if self.training_bar is None else self.training_bar.write
        write("  ".join(parts))


def leaves_parameters_out(model: nn.Module) -> bool | None:
    """Whether some parameter gets no gradient from the heads, found without computing; None where that fails."""
    tensors = {name: torch.empty_like(each, device="meta") for name, each in model.named_buffers()}
    trained = {name: each for name, each in model.named_parameters() if each.requires_grad}
    shapes = {name: torch.empty_like(each, device="meta") for name, each in model.named_parameters()}
    leaves = [shapes[name].requires_grad_() for name in trained]
    try:
        images = torch.empty(2, *model.config.pretrained_cfg["input_size"], device="meta")
        output = functional_call(model, {**tensors, **shapes}, kwargs={"pixel_values": images, "return_dict": True})
        total = sum(logits.sum() for logits in head_logits(output) if logits is not None)
        return any(each is None for each in torch.autograd.grad(total, leaves, allow_unused=True))
    except (RuntimeError, NotImplementedError, TypeError, KeyError):
        return None


def look_for_unused(args: TrainingArguments, model: nn.Module | None) -> None:
    """Let several processes look for parameters without a gradient only if there are any.

    The stock trainer lets them look in every step, and torch warns that there was nothing to be found.
    """
    checkpointing = args.gradient_checkpointing or args.activation_checkpointing
    if args.world_size > 1 and args.ddp_find_unused_parameters is None and model is not None and not checkpointing:
        args.ddp_find_unused_parameters = leaves_parameters_out(model)


def _is_news(record: py_logging.LogRecord) -> bool:
    """Not that two checkpoints of short epochs are of the same second, and are ordered by their steps."""
    return "mtime may not be reliable" not in record.getMessage()


def print_lines(trainer: Trainer) -> None:
    """Put `EpochLines` in the place of what a trainer prints by default; what a notebook shows stays."""
    py_logging.getLogger("transformers.trainer_utils").addFilter(_is_news)
    for stock in (ProgressCallback, PrinterCallback):
        if trainer.pop_callback(stock) is not None:
            trainer.add_callback(EpochLines(bars=stock is ProgressCallback))
            return


class LogFile(TrainerCallback):
    """Writes what the Trainer logs while training to train.log; a resumed run goes on in the same file."""

    _training = False

    def _write(self, args: TrainingArguments, state: TrainerState, text: str) -> None:
        if not state.is_world_process_zero:
            return
        time = datetime.datetime.now().strftime("%Y-%m-%d %H:%M:%S")
        try:
            with open_log(Path(args.output_dir) / LOG) as file:
                file.write(f"{time}  step {state.global_step}/{state.max_steps}  {text}\n")
        except OSError as error:  # a full disk ends the training where something is lost, at the next checkpoint
            logger.warning_once(f"{Path(args.output_dir) / LOG} could not be written ({error}).")

    def on_train_begin(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._training = True
        self._write(args, state, "training goes on" if state.global_step else "training starts")

    def on_log(self, args: TrainingArguments, state: TrainerState, control: Any, logs: Any = None, **_: Any) -> None:
        if self._training:
            numbers = (f"{k} {v:.6g}" if isinstance(v, float) else f"{k} {v}" for k, v in (logs or {}).items())
            self._write(args, state, "  ".join(numbers))

    def on_save(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write(args, state, f"saved {PREFIX_CHECKPOINT_DIR}-{state.global_step}")

    def on_train_end(self, args: TrainingArguments, state: TrainerState, control: Any, **kwargs: Any) -> None:
        self._write(args, state, f"training ends, best checkpoint: {state.best_model_checkpoint or 'none'}")
