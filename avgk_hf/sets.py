"""From scores to sets: the threshold lambda_val, and the sets it gives.

The mathematics of set prediction is defined here and nowhere else; model, trainer, metric and commands call it.
For n images and L classes with scores P (n x L), Algorithm 1 of the paper puts

    lambda_val = 1/2 (P_[round(K n)] + P_[round(K n) + 1]),    P_[i] the i-th largest of the n L scores,

and the set of image i is {j : P_ij >= lambda_val}: K classes on average, more where the image is ambiguous.

Example:
    >>> import torch
    >>> scores = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.4, 0.1]])  # (n=2, L=3): a clear image and an ambiguous one
    >>> lambda_val = average_k_threshold(scores, k=1.5)
    >>> round(lambda_val, 6)
    0.25
    >>> ranked_sets(scores, predict_sets(scores, lambda_val))
    [[0], [0, 1]]
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import check_k, is_number, k_key, plain
from .scores import wide


def score_matrix(scores: Any) -> Tensor:
    """Scores as a tensor, after refusing what is no (images, classes) matrix of real numbers."""
    try:
        scores = torch.as_tensor(scores)
    except (TypeError, ValueError, RuntimeError, OverflowError) as error:
        reason = str(error).splitlines()[0]
        raise ValueError(
            f"scores of type {type(scores).__name__} are no matrix of numbers ({reason}): give a tensor or an array of"
            " shape (images, classes)."
        ) from None
    if scores.is_complex() or scores.dtype == torch.bool:
        raise ValueError(f"scores of type {scores.dtype}: expected real numbers; convert them with `scores.float()`.")
    if scores.ndim != 2:
        raise ValueError(
            f"scores of shape {tuple(scores.shape)}: expected (images, classes); write `scores[None]` for one image."
        )
    return scores


def metric_name(name: str, k: float, own_k: float | None) -> str:
    """What a metric of `k` is called: of every K but the model's own with that K behind it.

    >>> metric_name("lambda_val", 5, own_k=5), metric_name("lambda_val", 1.5, own_k=5)
    ('lambda_val', 'lambda_val@1.5')
    """
    return name if k == own_k else f"{name}@{k_key(k)}"


class AverageKThreshold:
    """The exact lambda_val of several K from one pass over the scores, in O(K n) memory.

    At most 2 (round(K_max n) + 1) values are held at any time: whatever is not above the smallest value that can
    still matter is dropped on arrival. Any batch sizes and any order give the same, bit for bit, as sorting all n L
    scores. CPU scores are read in place through numpy; scores on an accelerator stay there.

    Args:
        ks: Average set sizes, each in [1, L). Fractions are fine.
        num_examples: n, the number of images that will be seen in total. It has to be known before the first batch.

    Example:
        >>> scores = torch.rand(100, 10, generator=torch.Generator().manual_seed(0))
        >>> stream = AverageKThreshold(ks=[1, 2.5], num_examples=100)
        >>> for batch in scores.split(32):
        ...     stream.update(batch)
        >>> stream.compute() == {k: average_k_threshold(scores, k) for k in (1, 2.5)}
        True
    """

    def __init__(self, ks: Iterable[float], num_examples: int) -> None:
        self.ks = [check_k(k) for k in ks]
        if not self.ks:
            raise ValueError("ks is empty: give at least one average set size, e.g. `ks=[5]`.")
        if isinstance(num_examples, bool) or not isinstance(num_examples, (int, np.integer)) or num_examples < 1:
            raise ValueError(
                f"num_examples={num_examples!r}: a threshold needs at least one image to calibrate on: give a"
                " whole number."
            )
        self.num_examples = num_examples
        self.num_seen = 0
        self.num_labels: int | None = None
        self._num_needed = round(max(self.ks) * num_examples) + 1
        self._held: np.ndarray | Tensor | None = None  # (2 x needed,), of which the first _num_held are in use
        self._num_held = 0
        self._bound = -math.inf  # all values above it are held; of those equal to it, _num_ties are not
        self._num_ties = 0

    def update(self, scores: Tensor | np.ndarray) -> None:
        """Take in the scores (b, L) of the next b images."""
        scores = score_matrix(scores)
        batch, num_labels = scores.shape
        if self.num_labels is None:
            for k in self.ks:
                check_k(k, num_labels)
        elif num_labels != self.num_labels:
            raise ValueError(f"scores for {num_labels} classes after scores for {self.num_labels}.")
        if self.num_seen + batch > self.num_examples:
            raise ValueError(f"more than the announced num_examples={self.num_examples} images were given.")
        flat = scores.detach().reshape(-1).float()
        values = flat.numpy() if flat.device.type == "cpu" else flat
        if math.isnan(float(values.dot(values))):  # NaN if any value is, and faster than a maximum
            raise ValueError(
                f"NaN among the scores of images {self.num_seen} to {self.num_seen + batch - 1}: there is no"
                " threshold. Check the logits: a lower learning rate or float32 usually cures it."
            )
        self.num_labels, self.num_seen = num_labels, self.num_seen + batch  # a batch that is refused does not count
        if batch:
            self._take(values)

    def survivors(self, device: torch.device | str = "cpu") -> Tensor:
        """The scores (h,), no more than K n + 1, that the thresholds can need: what another process has to `merge`."""
        if self._held is None:
            return torch.empty(0, device=device)
        if self._num_held > self._num_needed:
            self._compact()
        return torch.as_tensor(self._held[: self._num_held]).to(device)

    def facts(self) -> tuple[int, int, float, int]:
        """What `merge` needs besides the survivors: images seen, classes, bound, and ties dropped at the bound."""
        return self.num_seen, self.num_labels or 0, self._bound, self._num_ties

    def merge(self, survivors: Tensor, num_seen: float, num_labels: float, bound: float, num_ties: float) -> None:
        """Take in what another stream, for the same `ks` and `num_examples`, made of its share of the images.

        Args:
            survivors: What `survivors()` of the other gives, (h,).
            num_seen: What `facts()` of the other gives, as the following.
            num_labels: Number of classes.
            bound: The other's bound: all its scores above are among the survivors.
            num_ties: How many equal to it are not.

        Example:
            >>> scores = torch.rand(100, 10, generator=torch.Generator().manual_seed(0))
            >>> total, parts = AverageKThreshold([2], 100), [AverageKThreshold([2], 100) for _ in range(2)]
            >>> for part, share in zip(parts, scores.split(70)):
            ...     part.update(share)
            ...     total.merge(part.survivors(), *part.facts())
            >>> total.compute()[2] == average_k_threshold(scores, 2)
            True
        """
        if not num_seen:
            return
        self.num_seen += int(num_seen)
        self.num_labels = int(num_labels)
        self._take(survivors.numpy() if survivors.device.type == "cpu" else survivors)
        # as many scores as any K can need are at least as large as either bound, so the larger one holds for both
        if bound > self._bound:
            self._bound, self._num_ties = bound, 0
        if bound == self._bound and bound > -math.inf:
            self._num_ties += int(num_ties)

    def _take(self, values: np.ndarray | Tensor) -> None:
        if self._held is None:
            size = min(2 * self._num_needed, self.num_examples * self.num_labels)
            self._held = np.empty(size, np.float32) if isinstance(values, np.ndarray) else values.new_empty(size)
        if self._bound > -math.inf:
            values = self._above_bound(values)
        while len(values):
            part = values[: len(self._held) - self._num_held]
            self._held[self._num_held : self._num_held + len(part)] = part
            self._num_held += len(part)
            values = values[len(part) :]
            if self._num_held == len(self._held) and len(values):
                self._compact()
                values = self._above_bound(values)

    def _above_bound(self, values: np.ndarray | Tensor) -> np.ndarray | Tensor:
        """The values above the bound, compared strictly: enough values equal to it are held already."""
        if isinstance(values, np.ndarray):
            values = values.compress(values >= self._bound)
        else:
            values = values[values >= self._bound]
        above = values[values > self._bound]
        self._num_ties += len(values) - len(above)
        return above

    def _compact(self) -> None:
        """Keep the largest values that any K can need, and raise the bound to the smallest of them."""
        needed, held = self._num_needed, self._held[: self._num_held]
        if isinstance(held, np.ndarray):
            held.partition(len(held) - needed)  # ascending: the largest are at the end
            dropped, kept = held[:-needed], held[-needed:]
            bound = float(kept[0])
        else:
            ordered = held.sort(descending=True).values
            kept, dropped = ordered[:needed], ordered[needed:]
            bound = float(kept[-1])
        if bound > self._bound:
            self._num_ties = 0
        self._bound = bound
        self._num_ties += int((dropped == bound).sum())
        self._held[:needed] = kept
        self._num_held = needed

    def compute(self) -> dict[float, float]:
        """The thresholds {K: lambda_val}, each a Python float that is exact in float32."""
        return {k: lambda_val for k, (lambda_val, _) in self.points(self.ks).items()}

    def mean_set_sizes(self) -> dict[float, float]:
        """The mean size {K: size} of the sets on the images seen; above K only where scores tie at lambda_val."""
        return {k: size for k, (_, size) in self.points(self.ks).items()}

    def points(self, ks: Iterable[float]) -> dict[float, tuple[float, float]]:
        """{K: (lambda_val, mean set size)} of any K up to the largest of `self.ks`, at no further cost."""
        if self.num_seen != self.num_examples:
            raise ValueError(
                f"{self.num_seen} images were given, but num_examples={self.num_examples} were announced: the"
                " threshold depends on that number. Announce the number of images you calibrate on."
            )
        ordered = self.survivors().numpy()
        ordered.sort()  # in place: a copy would take as much as all that is held
        ordered = ordered[::-1]  # largest first
        result = {}
        for k in ks:
            rank = round(k * self.num_examples)
            if rank + 1 > len(ordered):
                raise ValueError(
                    f"k={k_key(k)} cannot be calibrated on {self.num_examples} image(s) with {self.num_labels}"
                    f" classes: it needs {rank + 1} scores and there are {self.num_examples * self.num_labels}. Use"
                    " more validation images or a smaller k."
                )
            with np.errstate(invalid="ignore", over="ignore"):  # what comes of infinite scores is refused below
                lambda_val = float(np.float32(0.5) * (ordered[rank - 1] + ordered[rank]))
            if not math.isfinite(lambda_val):
                raise ValueError(
                    f"the threshold for k={k_key(k)} would be {lambda_val}, between the scores {ordered[rank - 1]} and"
                    f" {ordered[rank]}: too many scores are infinite. Check the model's logits, or use a smaller k."
                )
            at_least = len(ordered) - int(np.searchsorted(ordered[::-1], np.float32(lambda_val), side="left"))
            if lambda_val == self._bound:
                at_least += self._num_ties
            result[k] = (lambda_val, at_least / self.num_examples)
        return result


def average_k_threshold(scores: Tensor | np.ndarray, k: float) -> float:
    """lambda_val of Algorithm 1 for scores (n, L): the threshold that gives sets of average size `k`.

    Args:
        scores: One row per validation image, read as float32.
        k: The average set size, in [1, L).

    Example:
        >>> average_k_threshold(torch.tensor([[4.0, 3.0, 2.0, 1.0]]), k=2)
        2.5
    """
    scores = score_matrix(scores)
    if len(scores) == 0:
        raise ValueError("scores are empty: a threshold needs at least one image to calibrate on.")
    stream = AverageKThreshold([k], num_examples=len(scores))
    stream.update(scores)
    return stream.compute()[stream.ks[0]]


def interpolated_threshold(thresholds: Mapping[float, float], k: float, probabilities: bool) -> float:
    """lambda_val between the nearest recorded K; the formula is in `Calibration.threshold`."""
    if k in thresholds:
        return thresholds[k]
    below, above = max(size for size in thresholds if size < k), min(size for size in thresholds if size > k)
    high, low = thresholds[below], thresholds[above]
    t = math.log(k / below) / math.log(above / below)
    if not probabilities or min(low, high) <= 0:  # the logarithm of 0 would end all interpolation
        return (1 - t) * high + t * low
    return math.exp((1 - t) * math.log(high) + t * math.log(low))


def predict_sets(scores: Tensor | np.ndarray, lambda_val: float, min_size: int = 0) -> Tensor:
    """The predicted sets {j : score_j >= lambda_val} as a boolean mask (n, L).

    Args:
        scores: (n, L), read as float32.
        lambda_val: The threshold from validation.
        min_size: At least this many classes for each image, the best ones; 0 allows empty sets.

    Example:
        >>> predict_sets(torch.tensor([[0.7, 0.3], [0.4, 0.35]]), lambda_val=0.5, min_size=1)
        tensor([[ True, False],
                [ True, False]])
    """
    scores, lambda_val, min_size = score_matrix(scores).float(), plain(lambda_val), plain(min_size)
    if not is_number(lambda_val):
        raise ValueError(f"lambda_val={lambda_val!r} is not a number; take it from `average_k_threshold(scores, k)`.")
    if isinstance(min_size, bool) or not isinstance(min_size, int) or not 0 <= min_size <= scores.shape[1]:
        raise ValueError(
            f"min_size={min_size!r} must be a whole number in [0, {scores.shape[1]}], the number of classes."
        )
    if scores.isnan().any():
        row = scores.isnan().any(1).nonzero()[0].item()
        raise ValueError(f"NaN among the scores of image {row}: NaN is in no set. Check the logits of the model.")
    sets = scores >= lambda_val
    few = (sets.sum(1) < min_size).nonzero()[:, 0]  # sorting takes far longer than all the rest
    best = scores[few].argsort(dim=1, descending=True, stable=True)[:, :min_size]
    return sets.index_copy(0, few, torch.zeros_like(sets[few]).scatter_(1, best, True))


def ranked_sets(scores: Tensor, sets: Tensor) -> list[list[int]]:
    """The classes of each set, best first, from scores (n, L) and a mask (n, L)."""
    rows, masks = scores.cpu().numpy(), sets.cpu().numpy()
    return [best_first(row, np.flatnonzero(mask)).tolist() for row, mask in zip(rows, masks, strict=True)]


def best_first(row: np.ndarray, classes: np.ndarray) -> np.ndarray:
    """Classes (m,) in the order of their scores in `row` (L,); equal scores in the order of their ids."""
    return classes[(-row[classes]).argsort(kind="stable")]


def ranked_mass(scores: Tensor) -> tuple[Tensor, Tensor]:
    """The classes (n, L) of each image, best first, and the sum of the scores before each of them, (n, L).

    Sums are taken in double precision, where those that are close to 1 can still be told apart. Equal scores are
    ordered by class id.

    Example:
        >>> order, mass = ranked_mass(torch.tensor([[0.25, 0.5, 0.25]]))
        >>> order.tolist(), mass.tolist()
        ([[1, 0, 2]], [[0.0, 0.5, 0.75]])
    """
    ordered, order = scores.sort(dim=-1, descending=True, stable=True)
    mass = ordered.to(wide(scores.device)).cumsum(-1)
    return order, torch.cat([torch.zeros_like(mass[..., :1]), mass[..., :-1]], -1)
