"""What a loss states about itself, so that nobody else needs to know it by its name, and what is refused for all."""

import difflib
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from ..checks import check_choice, is_number, plain
from ..scores import head_logits
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
            return check_choice(name, value, self.choices)
        value = plain(value)
        if not is_number(value) or not self.least <= value <= self.most or math.isinf(value):
            allowed = f">= {self.least:g}" if math.isinf(self.most) else f"in [{self.least:g}, {self.most:g}]"
            raise ValueError(f"{name}={value!r} must be a finite number {allowed}, e.g. {self.default}.")
        return value


class Loss(nn.Module):
    """A training objective. A subclass states what differs from here, and its formula as `compute(logits, labels)`.

    What `compute` gets was checked, and `sccp_logits` or `index` come with it where the class asks for them. The
    hyperparameters and, where it is needed, `k` become attributes. Parameters and buffers of a loss are trained with
    the model and saved in checkpoints, but are no part of the saved model.

    Args:
        k: Average set size, in [1, L), fractions allowed.
        hyperparameters: Values of those that are not to be the default, by name.

    Inputs:
        - outputs: `.logits` (B, L), or `.ml_logits` where another head answers, and `.sccp_logits` (B, L) for a loss
          with `two_heads`
        - labels: (B,), each in [0, L)
        - index: (B,), the positions of the images in the training set, for a loss with `per_image`
    """

    sentence: ClassVar[str]  # for the model card: how a model was trained
    hyperparameters: ClassVar[Mapping[str, Hyperparameter]] = {}
    two_heads: ClassVar[bool] = False  # whether it trains the SCCP head besides the ML head
    needs_k: ClassVar[bool] = True  # or else one training serves every K
    has_state: ClassVar[bool] = False  # whether it has parameters or buffers, which a checkpoint then holds
    per_image: ClassVar[bool] = False  # whether it is made with `num_examples` and `num_labels` of the training set
    learning_rate_factor: float = 1.0  # learning rate of its parameters relative to that of the model
    compute: Callable[..., Tensor]  # the scalar loss

    def __init__(self, k: float | None = None, **hyperparameters: Any) -> None:
        super().__init__()
        if self.needs_k:
            self.k = check_k(k)
        elif k is not None:
            raise ValueError(f"k={k!r}: {type(self).__name__} does not depend on k; leave it out.")
        for name, value in self.complete(hyperparameters).items():
            setattr(self, name, value)

    def forward(self, outputs: Any, labels: Tensor, index: Tensor | None = None, **further: Any) -> Tensor:
        """Return the scalar loss, computed in float32 at least, whatever the precision of the logits."""
        logits, second = head_logits(outputs)
        check_labels(labels, logits)
        if self.needs_k:
            check_k(self.k, logits.shape[1])
        if self.two_heads:
            if second is None or second.shape != logits.shape:
                raise ValueError(
                    f"sccp_logits of {_kind(second)} beside logits of {_kind(logits)}: {type(self).__name__}"
                    " needs the scores of two heads for the same classes. Build the model for this objective."
                )
            further["sccp_logits"] = _widen(second)
        if self.per_image:
            further["index"] = index
        return self.compute(_widen(logits), labels, **further)

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
        """Bytes of a `per_image` loss: a parameter for each image and class, its gradient, the optimizer's states."""
        return num_examples * num_labels * 4 * (2 + optimizer_states) if cls.per_image else 0


def check_labels(labels: Tensor, logits: Tensor) -> None:
    """Refuse labels that are not one class id in [0, L) per image, and logits that are no (B, L) matrix.

    NaN and infinite logits pass: they show in the loss, and mixed precision in float16 relies on seeing them there.
    On an accelerator the range is asserted asynchronously, so that no training step waits for it.
    """
    if not isinstance(logits, Tensor) or logits.ndim != 2 or not logits.is_floating_point() or 0 in logits.shape:
        raise ValueError(
            f"logits of {_kind(logits)}: expected a floating point tensor (images, classes), neither of them 0."
        )
    batch, num_labels = logits.shape
    if not isinstance(labels, Tensor) or labels.shape != (batch,) or labels.dtype != torch.int64:
        raise ValueError(
            f"labels of {_kind(labels)} for {batch} images: expected one class id per image, a tensor of int64, e.g."
            " `labels.long()`. Mixed labels (mixup, cutmix) do not fit this loss; switch them off."
        )
    lowest, highest = labels.aminmax()
    message = f"a label lies outside [0, {num_labels}), the {num_labels} classes of the model"
    if (labels.device.type != "cpu" and torch.is_grad_enabled()) or torch.compiler.is_compiling():
        torch._assert_async((lowest >= 0) & (highest < num_labels), message)
    elif lowest.item() < 0 or highest.item() >= num_labels:
        wrong = labels[(labels < 0) | (labels >= num_labels)][0].item()
        remedy = "Check the label column, or build the model with more classes."
        if wrong < 0:
            remedy = "A negative label stands for none: leave such images out, or all labels where sizes are enough."
        raise ValueError(f"{message}: {wrong}. {remedy}")


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"shape {tuple(value.shape)} and type {value.dtype}" if is_tensor else f"type {type(value).__name__}"


def _widen(logits: Tensor) -> Tensor:
    """Logits in float32, or as they are if already float64."""
    return logits if logits.dtype == torch.float64 else logits.float()
