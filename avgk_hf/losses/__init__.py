"""The training objectives: `loss(outputs, labels, index=None) -> Tensor`, one file and one line of `LOSSES` each.

Sections are those of Garcin et al., "A two-head loss function for deep Average-K classification"; "Cole et al." is
"Multi-Label Learning from Single Positive Labels" (2021).
"""

from typing import Any

from ..checks import check_choice
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
    kind = LOSSES[check_choice("objective", config.objective, LOSSES)]
    needed = {"k": config.k} if kind.needs_k else {}
    if kind.per_image:
        if num_examples is None:
            raise ValueError(
                f"objective={config.objective!r} keeps state for every training image: train with `AvgKTrainer`, or"
                " build the loss yourself with `num_examples=`."
            )
        needed |= {"num_examples": num_examples, "num_labels": config.num_labels}
    loss = kind(**needed, **config.hyperparameters)
    if loss.state_dict() and not loss.has_state:  # nobody would miss it in a checkpoint
        raise ValueError(f"{kind.__name__} has parameters or buffers: state `has_state = True` in its class.")
    return loss
