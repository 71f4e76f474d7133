"""The training objectives: `loss(outputs, labels, index=None) -> Tensor`, one file and one line of `LOSSES` each."""

from typing import Any

from .an import AssumeNegativeLoss
from .avgk import AvgKLoss
from .base import Hyperparameter, Loss  # noqa: F401  (for a loss from outside)
from .ce import CrossEntropyLoss
from .epr import ExpectedPositiveLoss
from .role import OnlineLabelLoss
from .topk import NoisedTopKLoss

LOSSES: dict[str, type[Loss]] = {
    "ce": CrossEntropyLoss,
    "avgk": AvgKLoss,
    "an": AssumeNegativeLoss,
    "epr": ExpectedPositiveLoss,
    "role": OnlineLabelLoss,
    "topk": NoisedTopKLoss,
}


def every_hyperparameter() -> set[str]:
    """The names of the hyperparameters of all losses."""
    return {name for loss in LOSSES.values() for name in loss.hyperparameters}


def make_loss(config: Any, num_examples: int | None = None) -> Loss:
    """The loss that `config.objective` names, with the config's hyperparameters.

    Args:
        config: An `AvgKConfig`.
        num_examples: Number of training images, for a loss that keeps state for each of them.
    """
    if config.objective not in LOSSES:  # which remote code does not look up
        raise ValueError(f"objective={config.objective!r} is unknown; choose one of {list(LOSSES)}.")
    loss = LOSSES[config.objective]
    needed = {"k": config.k} if loss.needs_k else {}
    if loss.per_image:
        if num_examples is None:
            raise ValueError(
                f"objective={config.objective!r} keeps state for every training image: train with `AvgKTrainer`, or"
                " build the loss yourself with `num_examples=`."
            )
        needed |= {"num_examples": num_examples, "num_labels": config.num_labels}
    return loss(**needed, **config.hyperparameters)
