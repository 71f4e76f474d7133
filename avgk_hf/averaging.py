"""An exponential moving average of the weights while training: `ema_decay: 0.999` in a recipe.

The average is what is evaluated, saved and kept in the end; training goes on with the weights themselves, which stand
beside it in a checkpoint.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from timm.utils import ModelEmaV3
from torch import Tensor, nn
from transformers import TrainerCallback

LAST_WEIGHTS = "last_weights.safetensors"  # those that training goes on with, in a checkpoint


class WeightAverage(TrainerCallback):
    """Keeps timm's `ModelEmaV3` of the model that is trained.

    After step t it is d_t times the average before, plus 1 - d_t times the weights, BatchNorm's statistics too. d_t
    rises to `decay`, as min(decay, 1 - t^(-2/3)), so that the average soon forgets how the training began.

    Args:
        decay: In (0, 1).
    """

    def __init__(self, decay: float) -> None:
        self.decay = decay
        self.ema: ModelEmaV3 | None = None  # while training

    def start(self, model: nn.Module) -> None:
        """Begin with these weights."""
        self.ema = ModelEmaV3(model, self.decay, use_warmup=True)

    def on_train_begin(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Begin, unless a checkpoint was loaded."""
        if self.ema is None:
            self.start(model)

    def on_step_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Take in one step; what d_t is follows from its number, so that a resumed training goes on exactly."""
        self.ema.update(model, state.global_step)

    def on_train_end(self, args: Any, state: Any, control: Any, model: nn.Module, **kwargs: Any) -> None:
        """Leave the average in the model, unless that is the best checkpoint's, which is an average itself."""
        if not (args.load_best_model_at_end and state.best_model_checkpoint):
            _copy(self.ema.module.state_dict(), model)
        self.ema = None

    @contextmanager
    def applied(self, model: nn.Module) -> Iterator[None]:
        """Meanwhile the model has the average; afterwards its own weights again, to the last bit."""
        if self.ema is None:
            yield
            return
        own = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
        _copy(self.ema.module.state_dict(), model)
        ema, self.ema = self.ema, None  # what is nested finds the average in place
        try:
            yield
        finally:
            self.ema = ema
            _copy(own, model)

    def save(self, model: nn.Module, folder: Path) -> None:
        """Write the weights themselves to a checkpoint of the average."""
        plain = {"memory_format": torch.contiguous_format}
        tensors = {name: tensor.detach().clone(**plain) for name, tensor in model.state_dict().items()}
        save_file(tensors, folder / LAST_WEIGHTS)

    def load(self, model: nn.Module, folder: Path) -> None:
        """Begin with the average, which the model has from a checkpoint, and give it the weights themselves."""
        self.start(model)
        _copy(load_file(folder / LAST_WEIGHTS), model)


@torch.no_grad()
def _copy(tensors: dict[str, Tensor], model: nn.Module) -> None:
    for name, tensor in model.state_dict().items():
        tensor.copy_(tensors[name])


def check_average(folder: Path, averaged: bool) -> None:
    """Refuse to go on from a checkpoint that was written with another choice of `ema_decay`."""
    if (folder / LAST_WEIGHTS).is_file() != averaged:
        how, remedy = ("without", "leave it out") if averaged else ("with", "set it")
        raise ValueError(f"{folder} was written {how} ema_decay: {remedy}, or train from the start.")
