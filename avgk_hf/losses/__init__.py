"""The training objectives: `loss(outputs, labels, index=None) -> Tensor`, one file each."""

import inspect
from typing import Any

from torch import nn

from .avgk import AvgKLoss
from .ce import CrossEntropyLoss

LOSSES = {"ce": CrossEntropyLoss, "avgk": AvgKLoss}


def make_loss(config: Any) -> nn.Module:
    """The loss that `config.objective` names, with its hyperparameters read from the config's fields of that name."""
    loss = LOSSES[config.objective]
    wanted = inspect.signature(loss).parameters
    return loss(**{name: getattr(config, name) for name in wanted if hasattr(config, name)})
