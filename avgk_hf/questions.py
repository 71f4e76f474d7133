"""`Question`, what a caller asks for every image, and `Answer`, how it is answered once everything is looked up.

Like the model, this file travels with a saved model as remote code.
"""

from collections.abc import Callable
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import check_choice, is_number, plain
from .conformal import METHODS, check_level
from .records import check_balance
from .scores import normalised
from .sets import best_first, check_k

OTHERWISE = {"threshold": "lambda_val", "top_k": "k", "topk": "k", "confidence": "coverage"}  # what others call it
LARGE = 0.01  # a probability that few classes reach: sorting all of them takes longest, and these are usually enough


@dataclass(frozen=True)
class Question:
    """What is asked for every image: one of the first four at most (none: the model's own K), within bounds.

    Args:
        k: Average set size, in the range that was calibrated.
        coverage: Share of images whose set is to hold the true class, one of the levels that were calibrated.
        cumulative: The fewest best classes whose probabilities sum to this at least.
        lambda_val: A threshold.
        method: How coverage is reached: `"lac"` (smallest sets), `"aps"` or `"raps"` (sizes that follow the difficulty
            of the image).
        per_class: Reach the coverage in every class, with `"lac"`; in classes with few images, on average over them. A
            weight between 0 and 1 takes thresholds between that of all images and those per class.
        min_size: At least this many classes for each image, the best ones; 0 allows empty sets.
        max_size: At most this many classes for each image, the best of the set. It voids a coverage.
        balance: From 0, every image counts alike, to 1, every class does; one of those that were calibrated. Default:
            the model's own.
    """

    k: float | None = None
    coverage: float | None = None
    cumulative: float | None = None
    lambda_val: float | None = None
    method: str = "lac"
    per_class: bool | float = False
    min_size: int = 0
    max_size: int | None = None
    balance: float | None = None

    def __post_init__(self) -> None:
        asked = ("k", "coverage", "cumulative", "lambda_val")
        for name in (*asked, "min_size", "max_size", "per_class", "balance"):
            object.__setattr__(self, name, plain(getattr(self, name)))
        asked = [f"{name}={getattr(self, name)!r}" for name in asked if getattr(self, name) is not None]
        if len(asked) > 1:
            raise ValueError(f"{' and '.join(asked)} are different questions: ask one of them.")
        for name in ("min_size", "max_size"):
            size = getattr(self, name)
            if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
                raise ValueError(f"{name}={size!r} must be a whole number of classes, e.g. `{name}=3`.")
        if self.max_size is not None and self.max_size < self.min_size:
            raise ValueError(
                f"max_size={self.max_size} is below min_size={self.min_size}: no set can have such a size."
            )
        if self.k is not None:
            check_k(self.k)
        if self.balance is not None:
            check_balance(self.balance)
        if self.per_class not in (True, False) and not (is_number(self.per_class) and 0 < self.per_class < 1):
            raise ValueError(f"per_class={self.per_class!r} must be true, false, or a weight in (0, 1), e.g. 0.5.")
        check_choice("method", self.method, METHODS)
        if self.per_class and self.method != "lac" and self.coverage is not None:
            raise ValueError(
                f"method={self.method!r} has no thresholds per class: use method='lac', or leave per_class out."
            )
        if self.coverage is not None:
            check_level(self.coverage)
        elif self.per_class or self.method != "lac":
            given = f"method={self.method!r}" if self.method != "lac" else "per_class"
            raise ValueError(f"{given} says how a coverage is reached: give one too, e.g. `coverage=0.95`.")
        if self.cumulative is not None and not (is_number(self.cumulative) and 0 < self.cumulative <= 1):
            raise ValueError(f"cumulative={self.cumulative!r} must be a probability in (0, 1], e.g. 0.9.")
        if self.lambda_val is not None and not is_number(self.lambda_val):
            raise ValueError(f"lambda_val={self.lambda_val!r} is not a number, e.g. `lambda_val=0.1`.")

    @classmethod
    def of(cls, **asked: Any) -> "Question":
        """The question, after refusing a name that is none of its fields."""
        for name in set(asked) - set(cls.__dataclass_fields__):
            near = [OTHERWISE[name]] if name in OTHERWISE else None
            near = near or get_close_matches(name.lower(), cls.__dataclass_fields__, 1, 0.5)
            hint = f"; did you mean {near[0]!r}?" if near else f", only {', '.join(cls.__dataclass_fields__)}."
            raise ValueError(f"a set cannot be asked for by {name!r}{hint}")
        return cls(**asked)

    @property
    def by_size(self) -> bool:
        """Whether sets of an average size are asked for."""
        return self.coverage is None and self.cumulative is None and self.lambda_val is None


@dataclass(frozen=True)
class Answer:
    """How a calibration answers one question: everything is looked up and checked, only scores are missing.

    Args:
        head: The head whose scores are to be given.
        inside: Whether classes are in the set, from their scores, the sums before them and their positions.
        most: The largest sum before a class of a set, for rules by sums; None for those that compare scores only.
        min_size: As in `Question`.
        max_size: As in `Question`.
        lambda_val: The threshold, where one threshold decides.
        normalise: Whether scores are balanced, and have to be made sum to 1 for a rule by sums.
    """

    head: str
    inside: Callable[[Any, Any, Any], Any]
    most: float | None = None
    min_size: int = 0
    max_size: int | None = None
    lambda_val: float | None = None
    normalise: bool = False

    def classes(self, scores: Tensor) -> list[list[int]]:
        """The set of each image of scores (n, L): class ids, best first."""
        return [self._of_image(row).tolist() for row in scores.detach().cpu().numpy()]

    def sets(self, scores: Tensor) -> Tensor:
        """The same as a boolean mask (n, L)."""
        mask = np.zeros(scores.shape, bool)
        for row, classes in zip(mask, self.classes(scores), strict=True):
            row[classes] = True
        return torch.from_numpy(mask).to(scores.device)

    def _of_image(self, row: np.ndarray) -> np.ndarray:
        if self.most is None:
            found = best_first(row, self.inside(row, None, None).nonzero()[0])
        else:
            found = self._by_sums(row)
        if len(found) < self.min_size:  # members come first: thresholds per class may leave out better ones
            others = np.setdiff1d(np.arange(len(row)), found, assume_unique=True)
            found = np.concatenate([found, best_first(row, others)[: self.min_size - len(found)]])
        return found if self.max_size is None else found[: self.max_size]

    def _by_sums(self, row: np.ndarray) -> np.ndarray:
        row = normalised(row) if self.normalise else row
        few = (row > LARGE).nonzero()[0]
        best = sorted(zip((-row[few]).tolist(), few.tolist(), strict=True))  # equal scores in the order of their ids
        before, found = 0.0, []
        for position, (negative, class_id) in enumerate(best, 1):
            if self.inside(-negative, before, position):
                found.append(class_id)
            before -= negative
            if before > self.most or len(found) == self.max_size:  # and so it is for all that follow
                return np.array(found, int)
        order = best_first(row, (row > -np.inf).nonzero()[0])  # -inf: a class that is left out
        sums = np.concatenate([[0.0], row[order].cumsum(dtype=np.float64)[:-1]])
        return order[self.inside(row[order], sums, np.arange(1, len(order) + 1))]


def at_least(lambda_val: Any, scores: Any, before: Any, position: Any) -> Any:
    """The rule of a threshold, or of one for each class."""
    return scores >= lambda_val
