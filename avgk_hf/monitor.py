"""Says when the images in use differ from those of the calibration: the mean set size leaves K.

A model that was calibrated for K = 5 and returns 9 classes on average should say so, without labels. Like the
pipeline, this file travels with a saved model as remote code.
"""

import logging
import math
import reprlib
from collections.abc import Iterable, Mapping
from statistics import NormalDist
from typing import Any

import numpy as np
import torch

from .calibration import Calibration
from .checks import check_whole, is_number, plain
from .sets import check_k, k_key

LEAST = 30  # images below which nothing is said about a drift that is not seen

logger = logging.getLogger(__name__)
LARGEST_BET = 0.5  # of what can be bet without the risk of losing everything
STEP = 1.02  # the history keeps a point whenever the number of images grew by this factor


class SetSizeMonitor:
    """The mean set size of a stream of images with a confidence sequence, and one warning when it leaves K.

    The interval holds at every moment at once: if the set sizes X_1, X_2, ... have the mean mu, the chance that mu is
    *ever* outside is at most 1 - confidence, however often one looks. With mu_i and s2_i the mean and variance of the
    sizes before image i (and one more value, K and K^2), E = log(2 / (1 - confidence)), M the largest possible size,
    and bets a_i = min(sqrt(2 E / (s2_i i log(1 + i))), 1 / (2 c_i)),

        lower = [sum a_i mu_i + sum log(1 + a_i (X_i - mu_i)) - E] / sum a_i,    c_i = mu_i,
        upper = [sum a_i mu_i - sum log(1 - a_i (X_i - mu_i)) + E] / sum a_i,    c_i = M - mu_i.

    This is the predictable plug-in empirical Bernstein sequence of Waudby-Smith and Ramdas, *Estimating means of
    bounded random variables by betting* (JRSS B 86, 2024, theorem 2), without the last step of its proof, a bound of
    the logarithm that a few large sets would make very loose. To tell that sets shrank takes about 8 M / (K - mu)
    images; to tell that they grew, M does not matter.

    lambda_val is an estimate from n images, so even on images like those the mean settles only near K. `drifted`
    therefore asks whether the interval is farther from K than `tolerance` K + z s / sqrt(n), z the normal quantile of
    `confidence` and s the standard deviation of the sizes: a false warning has a chance of at most 2 (1 - confidence).

    Images have to come in no particular order, not class after class. To see a change that begins late, begin a new
    monitor every few thousand images: the first ones have more weight. And no drift does not prove that images are
    alike: sets can keep their size and miss more often, which only labels show.

    Args:
        k: The average set size that was calibrated.
        num_labels: L.
        confidence: Of the interval, at all times together.
        tolerance: Relative deviation from K that is no drift.
        num_calibrated: n, the number of images of the calibration; None where it is not known.
        max_size: M, the largest possible size; default L.
        source: What was calibrated on, for the warning.

    Example:
        >>> rng = np.random.default_rng(0)
        >>> monitor = SetSizeMonitor(k=5, num_labels=1000, num_calibrated=2000)
        >>> monitor.update(rng.geometric(1 / 5, 1000))
        >>> monitor.drifted, round(monitor.mean, 2), [round(bound, 1) for bound in monitor.interval]
        (False, 5.11, [4.8, 12.4])
    """

    def __init__(
        self,
        k: float,
        num_labels: int,
        confidence: float = 0.95,
        tolerance: float = 0.05,
        num_calibrated: int | None = None,
        max_size: int | None = None,
        source: str | None = None,
    ) -> None:
        num_labels, num_calibrated, max_size = plain(num_labels), plain(num_calibrated), plain(max_size)
        for name, value in (("num_labels", num_labels), ("num_calibrated", num_calibrated), ("max_size", max_size)):
            if value is not None or name == "num_labels":
                check_whole(name, value, 1)
        self.k = k = check_k(k, num_labels)
        if not is_number(confidence) or not 0 < confidence < 1:
            raise ValueError(f"confidence={confidence!r} must lie strictly between 0 and 1, e.g. `confidence=0.95`.")
        if not is_number(tolerance) or not 0 <= tolerance < math.inf:
            raise ValueError(f"tolerance={tolerance!r} must be a finite number >= 0; 0.05 allows 5% of K.")
        if max_size is not None and not k < max_size <= num_labels:
            raise ValueError(
                f"max_size={max_size} must lie in ({k_key(k)}, {num_labels}]: above K, at most all classes."
            )
        self.num_labels, self.max_size = num_labels, max_size or num_labels
        self.confidence, self.tolerance = confidence, tolerance
        self.num_calibrated, self.source = num_calibrated, source
        self.num_images, self.drifted = 0, False
        self.history: list[tuple[int, float, float, float]] = []
        self._warning: str | None = None
        self._evidence = math.log(2 / (1 - confidence))
        self._total = 0
        self._squares = 0.0  # of the distance of each size from the mean before it
        # for the lower and the upper bound: sum of a_i, of a_i mu_i, and of the logarithms
        self._sums = [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]]

    @classmethod
    def from_config(
        cls, config: Any, k: float | None = None, balance: float | None = None, **kwargs: Any
    ) -> "SetSizeMonitor":
        """A monitor for a calibrated model of any class.

        Args:
            config: The model's config with thresholds.
            k: Average set size, in the calibrated range; default the model's own.
            balance: Of the sets, as in `Question`; default the model's own.
            kwargs: Further arguments of the class, e.g. `tolerance=0.1`.
        """
        config = getattr(config, "config", config)  # of a model
        calibration = Calibration.of(config).at(balance)
        lambda_val, record = calibration.threshold(k), calibration.source
        k = calibration.k if k is None else k
        number, largest = record.get("num_examples"), calibration.num_answers
        if calibration.score == "softmax" and lambda_val * largest > 1:
            # probabilities that sum to 1, up to rounding, and to less where they are balanced
            largest = min(largest, max(math.floor(k) + 1, math.floor((1 + 1e-4) / lambda_val)))
        known = number if isinstance(number, int) and number > 0 else None
        given = {"num_calibrated": known, "max_size": largest, "source": record.get("dataset")}
        return cls(k, config.num_labels, **{**given, **kwargs})

    def __repr__(self) -> str:
        return f"<SetSizeMonitor: {self.message()}>"

    @property
    def mean(self) -> float:
        """The mean set size of the images seen; NaN before the first."""
        return self._total / self.num_images if self.num_images else math.nan

    @property
    def interval(self) -> tuple[float, float]:
        """Lower and upper bound of the mean set size, valid at all times together."""
        if not self.num_images:
            return 0.0, float(self.max_size)
        (bets, means, logs), (upper_bets, upper_means, upper_logs) = self._sums
        lower = (means + logs - self._evidence) / bets
        upper = (upper_means - upper_logs + self._evidence) / upper_bets
        return max(lower, 0.0), min(upper, float(self.max_size))

    @property
    def margin(self) -> float:
        """How far from K the mean may be: the tolerance, and what the calibration cannot tell."""
        if self.num_calibrated is None or not self.num_images:
            return self.tolerance * self.k
        z = NormalDist().inv_cdf((1 + self.confidence) / 2)
        deviation = math.sqrt(self._squares / self.num_images)
        return self.tolerance * self.k + z * deviation / math.sqrt(self.num_calibrated)

    @property
    def enough(self) -> bool:
        """Whether there are 30 images, and sets half as large again as K would have been noticed by now."""
        return self.drifted or (self.num_images >= LEAST and self.mean - self.interval[0] <= self.k / 2)

    def update(self, sizes: Any) -> None:
        """Take in the next images; how they are divided into batches makes no difference.

        Args:
            sizes: The set sizes (b,) of b images, or their sets: a boolean mask (b, L), or one list of classes for
                each image. Sizes are those at the threshold, before a smallest or largest size is imposed.
        """
        for size in self._sizes(sizes):
            self._take(size)

    def watch(self, sizes: np.ndarray) -> dict[str, float]:
        """Take in the sizes (n,) of a dataset in random order, always the same, and say what was found."""
        self.update(np.random.default_rng(0).permutation(sizes))
        low, high = self.interval
        return {"monitored_k": self.k, "set_size_low": low, "set_size_high": high, "drifted": self.drifted}

    def _take(self, size: int) -> None:
        number = self.num_images + 1
        mean = (self.k + self._total) / number
        variance = (self.k**2 + self._squares) / number
        bet = math.sqrt(2 * self._evidence / (variance * number * math.log(1 + number)))
        lower, upper = self._sums
        for sums, scale, gain in ((lower, mean, size - mean), (upper, self.max_size - mean, mean - size)):
            a = min(bet, LARGEST_BET / scale)
            sums[0] += a
            sums[1] += a * mean
            sums[2] += math.log1p(a * gain)
        self.num_images = number
        self._total += size
        self._squares += (size - mean) ** 2
        lower, upper = self.interval
        if not self.history or number >= STEP * self.history[-1][0]:
            self.history.append((number, self.mean, lower, upper))
        if not self.drifted and (lower > self.k + self.margin or upper < self.k - self.margin):
            self.drifted = True
            self._warning = self.message()
            logger.warning(self._warning)

    def message(self) -> str:
        """What was calibrated and what is seen; after K was left, what was seen at that moment, and what to do."""
        if self._warning:
            return self._warning
        lower, upper = self.interval
        where = f" on {self.num_calibrated} images" if self.num_calibrated else ""
        where += f" of {self.source}" if self.source else ""
        number = f"{self.num_images} image{'s' * (self.num_images != 1)}{', when it was noticed,' * self.drifted}"
        seen = (
            f"calibrated{where} for sets of {k_key(self.k)} class{'es' * (self.k != 1)} on average; after {number} the"
            f" mean is {self.mean:.2f} ({100 * self.confidence:g}% interval {lower:.2f} to {upper:.2f})"
        )
        if not self.enough:
            return f"too few images to tell whether these differ from those of the calibration: {seen}."
        if not self.drifted:
            left = "" if lower <= self.k <= upper else ", which is within what the calibration leaves open"
            return f"no drift so far: {seen}{left}."
        return (
            f"drift: {seen}. These images differ from those of the calibration, so K and the measured accuracies do"
            " not hold for them: calibrate on images like these with `avgk calibrate MODEL DATASET`."
        )

    def _sizes(self, sizes: Any) -> list[int]:
        """Set sizes as whole numbers; anything else is refused before any of it is counted."""
        values = sizes.detach().cpu().numpy() if isinstance(sizes, torch.Tensor) else sizes
        if isinstance(values, Iterable) and not isinstance(values, (np.ndarray, str, bytes, Mapping)):
            values = list(values)
            lists = all(isinstance(one, (list, tuple, set, frozenset)) for one in values)
            if lists and not any(isinstance(j, bool) for one in values for j in one):  # that would be a mask
                values = np.array([len(one) for one in values], int)
        try:
            values = np.asarray(values)
        except ValueError:  # lists of different lengths
            values = np.empty(())
        if values.dtype == bool and values.shape[1:] == (self.num_labels,):
            values = values.sum(1)
        if values.ndim != 1 or (len(values) and values.dtype.kind not in "iu"):
            raise ValueError(
                f"sizes={reprlib.repr(sizes)}: expected whole numbers (images,), e.g. `[3]`, a boolean mask (images,"
                f" {self.num_labels}), or one list of classes for each image."
            )
        found = values.tolist()
        wrong = [size for size in found if not 0 <= size <= self.max_size]
        if wrong:
            raise ValueError(
                f"a set of {wrong[0]} classes: sizes lie in [0, {self.max_size}]. Is it the monitor of the same model?"
            )
        return found
