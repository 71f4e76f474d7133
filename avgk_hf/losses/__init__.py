"""The training objectives: `loss(outputs, labels, index=None) -> Tensor`, one file each."""

import inspect
from typing import Any

from torch import nn

from .an import AssumeNegativeLoss
from .avgk import AvgKLoss
from .ce import CrossEntropyLoss
from .epr import ExpectedPositiveLoss
from .role import OnlineLabelLoss
from .topk import NoisedTopKLoss

LOSSES = {
    "ce": CrossEntropyLoss,
    "avgk": AvgKLoss,
    "an": AssumeNegativeLoss,
    "epr": ExpectedPositiveLoss,
    "role": OnlineLabelLoss,
    "topk": NoisedTopKLoss,
}


def make_loss(config: Any, num_examples: int | None = None) -> nn.Module:
    """The loss that `config.objective` names, with its hyperparameters read from the config's fields of that name.

    Args:
        config: An `AvgKConfig`.
        num_examples: Number of training images, for a loss that keeps state for each of them.
    """
    loss = LOSSES[config.objective]
    wanted = inspect.signature(loss).parameters
    found = {name: getattr(config, name) for name in wanted if hasattr(config, name)}
    if "num_examples" in wanted:
        if num_examples is None:
            raise ValueError(
                f"objective={config.objective!r} keeps label estimates for every training image: train with"
                " `AvgKTrainer`, or build the loss yourself with `num_examples=`."
            )
        found["num_examples"] = num_examples
    return loss(**found)
