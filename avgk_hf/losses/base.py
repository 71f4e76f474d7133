"""What a loss states about itself, so that nobody else needs to know it by its name."""

import difflib
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from torch import nn

from ..checks import is_number
from ..sets import check_k


@dataclass(frozen=True)
class Hyperparameter:
    """A number in a range, or one of several words, that a loss is trained with.

    Args:
        default: Its value where none is given.
        help: One sentence.
        least: The least number allowed.
        most: The largest number allowed; an infinite one is not.
        choices: The words allowed, for one that is no number.
    """

    default: float | str
    help: str
    least: float = 0.0
    most: float = math.inf
    choices: tuple[str, ...] | None = None

    def check(self, name: str, value: Any) -> Any:
        """Return a value that is allowed, and refuse any other by the name.

        >>> Hyperparameter(1.0, "Weight.").check("alpha", 0.3)
        0.3
        """
        if self.choices:
            if value not in self.choices:
                raise ValueError(f"{name}={value!r} is unknown; choose one of {list(self.choices)}.")
        elif not is_number(value) or not self.least <= value <= self.most or math.isinf(value):
            allowed = f">= {self.least:g}" if math.isinf(self.most) else f"in [{self.least:g}, {self.most:g}]"
            raise ValueError(f"{name}={value!r} must be a finite number {allowed}, e.g. {self.default}.")
        return value


class Loss(nn.Module):
    """A training objective: `loss(outputs, labels, index=None) -> Tensor`. A subclass states what differs from here.

    Its hyperparameters and, where it needs it, `k` become attributes. Parameters and buffers of a loss are trained
    with the model and saved in checkpoints, but are no part of the saved model.

    Args:
        k: Average set size.
        hyperparameters: Values of those that are not to be the default, by name.
    """

    sentence: ClassVar[str]  # for the model card: how a model was trained
    hyperparameters: ClassVar[Mapping[str, Hyperparameter]] = {}
    two_heads: ClassVar[bool] = False  # whether it trains the SCCP head besides the ML head
    needs_k: ClassVar[bool] = True  # or else one training serves every K
    has_state: ClassVar[bool] = False  # whether it has parameters or buffers, which a checkpoint then holds
    per_image: ClassVar[bool] = False  # whether it is made with `num_examples` and `num_labels` of the training set
    learning_rate_factor: float = 1.0  # learning rate of its parameters relative to that of the model

    def __init__(self, k: float | None = None, **hyperparameters: Any) -> None:
        super().__init__()
        if self.needs_k:
            self.k = check_k(k)
        elif k is not None:
            raise ValueError(f"k={k!r}: {type(self).__name__} does not depend on k; leave it out.")
        for name, value in self.complete(hyperparameters).items():
            setattr(self, name, value)

    @classmethod
    def complete(cls, given: Mapping[str, Any], place: str = "{}") -> dict[str, Any]:
        """All hyperparameters of the loss: those given, checked, and the defaults of the others.

        Args:
            given: Values by name.
            place: How an error writes a name.
        """
        for name in given:
            if name not in cls.hyperparameters:
                near = difflib.get_close_matches(str(name).lower(), cls.hyperparameters, n=1)
                hint = f"Did you mean {near[0]!r}?" if near else f"It has {', '.join(cls.hyperparameters) or 'none'}."
                raise ValueError(f"{place.format(name)} is no hyperparameter of {cls.__name__}. {hint}")
        return {
            name: item.check(place.format(name), given.get(name, item.default))
            for name, item in cls.hyperparameters.items()
        }

    @classmethod
    def memory(cls, num_examples: int, num_labels: int, optimizer_states: int) -> int:
        """Bytes that the state of a `per_image` loss takes, with its gradient and the optimizer's states."""
        return 0
