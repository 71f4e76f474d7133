"""Sets that hold the true class as often as asked: split conformal prediction.

Calibration image i has a nonconformity e_i; of n of them

    q = e_(r),    r = ceil((n + 1) c),    e_(r) the r-th smallest,

and the set of a new image holds every class whose nonconformity is at most q. If the new image and the n are
exchangeable, its set holds the true class with probability c at least, and (no ties) c + 1 / (n + 1) at most. With p_j
the scores of an image, best first, and y the position of the class in question:

    LAC    e = -p_y, so that the set is {j : p_j >= -q}, a threshold like lambda_val
    APS    e = p_1 + ... + p_(y-1), what stands before the class
    RAPS   e = p_1 + ... + p_(y-1) + penalty max(0, y - k_reg)

APS and RAPS are deterministic: the last class of a set is the one that goes beyond q, nothing is drawn at random, and
no set is empty. (With the class itself in its sum, the clearest images get empty sets and the others far larger ones.)
Every image whose true class is the best has e = 0, so that ties are the rule and the coverage of an accurate model may
be far above c. They need scores that sum to 1, so `score="softmax"`. LAC per class takes q from the images of each
class, and so holds for every class; classes with too few images, r > n, share the q of all their images (pooled), or
of all images where these are too few: for them it holds on average.

**Rare classes.** Per class the sets are large, because rare classes have high q. Two ways lie between, both of Ding,
Fermanian and Salmon, *Conformal Prediction for Long-Tailed Classification* (2025). Prevalence-adjusted LAC is LAC of
balanced scores with balance 1, e = -p_y / pi_y (`scores.balance_weights`): with true probabilities no other sets of
its average size have a better mean over classes, and its guarantee is that of LAC. And thresholds between q of all
images and q_y per class,

    w q_y + (1 - w) q,    w in [0, 1],

give sets that hold the true class with probability 1 - 2 (1 - c) at least: what is missed is missed by q or by q_y.

All of it supposes that nothing was chosen on the n images. The best of several checkpoints, or of the heads
(`head="auto"`), is a choice; for the exact guarantee calibrate on images that were not used for one.

A further method is one class with its formula and one line in `METHODS`. Like the model, this file travels with a
saved model as remote code.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from fractions import Fraction
from typing import Any, ClassVar

import numpy as np

from .checks import is_number, plain

LEVELS = (0.9, 0.95, 0.99)
AGAIN = "Calibrate again: `avgk calibrate MODEL DATASET --coverage 0.9`."


class LAC:
    """Least ambiguous classes: the smallest sets on average. What is recorded is -q, a threshold like lambda_val."""

    sign = -1  # what is recorded is sign * q
    sums = False  # whether it needs the sums before the classes, and so scores that sum to 1
    settings: ClassVar[dict[str, Any]] = {}  # recorded beside the thresholds, with their types

    @staticmethod
    def choose(k: float) -> dict[str, float]:
        """The settings for a model with this average set size; they must not depend on the calibration images."""
        return {}

    @staticmethod
    def nonconformity(scores: Any, before: Any, position: Any, settings: Mapping[str, float]) -> Any:
        """E of classes with these scores, sums before them and positions (from 1), arrays of one shape."""
        return -scores


class APS(LAC):
    """Adaptive prediction sets: sizes that follow the difficulty of the image."""

    sign, sums = 1, True

    @staticmethod
    def nonconformity(scores: Any, before: Any, position: Any, settings: Mapping[str, float]) -> Any:
        """As in `LAC`."""
        return before


class RAPS(APS):
    """APS with a penalty for every class after the first `k_reg`, against very large sets."""

    settings: ClassVar[dict[str, Any]] = {"k_reg": int, "penalty": (int, float)}

    @staticmethod
    def choose(k: float) -> dict[str, float]:
        """As in `LAC`: no penalty for as many classes as the model returns on average."""
        return {"k_reg": round(k), "penalty": 0.01}

    @staticmethod
    def nonconformity(scores: Any, before: Any, position: Any, settings: Mapping[str, float]) -> Any:
        """As in `LAC`."""
        beyond = position - settings["k_reg"]
        return before + settings["penalty"] * (beyond * (beyond > 0))


METHODS: dict[str, type[LAC]] = {"lac": LAC, "aps": APS, "raps": RAPS}


def check_level(level: Any, name: str = "coverage") -> float:
    """Return a coverage level if it is a number strictly between 0 and 1, and raise otherwise."""
    level = plain(level)
    if not is_number(level) or not 0 < level < 1:
        percent = is_number(level) and 1 < level < 100
        remedy = f"; did you mean {level / 100:g}?" if percent else ". Set it to e.g. 0.95."
        text = f"{name}={level!r} must be a number between 0 and 1, the share of images whose set holds the true class"
        raise ValueError(text + remedy)
    return float(level)


def level_key(level: float) -> str:
    """The name under which the thresholds of a coverage level are stored.

    >>> level_key(0.95), level_key(0.5)
    ('0.95', '0.5')
    """
    return str(float(plain(level)))


def question_name(level: float, method: str = "lac", per_class: bool | float = False) -> str:
    """What a coverage that was measured is called in metrics: the level, and how it was reached.

    >>> question_name(0.9), question_name(0.9, "aps"), question_name(0.9, per_class=True)
    ('0.9', 'aps_0.9', 'per_class_0.9')
    >>> question_name(0.9, per_class=0.5)
    'per_class_0.5_0.9'
    """
    weight = "" if per_class in (True, False) else f"{per_class:g}_"
    return (f"per_class_{weight}" if per_class else f"{method}_" * (method != "lac")) + level_key(level)


def conformal_rank(level: float, num_examples: int) -> int:
    """The rank r = ceil((n + 1) c), in decimal fractions, because 0.9 is none in binary.

    >>> conformal_rank(0.9, 9), conformal_rank(0.9, 8)
    (9, 9)
    """
    return math.ceil((num_examples + 1) * Fraction(str(float(level))))


def enough_images(level: float) -> int:
    """The smallest n that a coverage level can be calibrated on, that is with r <= n.

    >>> enough_images(0.9), enough_images(0.95), enough_images(0.99)
    (9, 19, 99)
    """
    return math.ceil(1 / (1 - Fraction(str(float(level))))) - 1


def check_enough(level: float, num_examples: int) -> float:
    """Return a coverage level that the images are enough for, and refuse any other."""
    if num_examples < enough_images(level):
        raise ValueError(
            f"coverage={level_key(level)} cannot be calibrated on {num_examples} image(s): it takes"
            f" {enough_images(level)} at least. Use more validation images or a lower coverage."
        )
    return level


def conformal_quantile(values: np.ndarray, level: float) -> float:
    """The quantile q of nonconformities (n,): the ceil((n + 1) c)-th smallest; refused where there are too few.

    >>> conformal_quantile(np.arange(1, 20), 0.9)
    18.0
    """
    check_enough(level, len(values))
    rank = conformal_rank(level, len(values))
    return float(np.partition(values, rank - 1)[rank - 1])


def coverage_record(
    true: np.ndarray,
    levels: Iterable[float],
    mass: np.ndarray | None = None,
    ranks: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    num_labels: int = 0,
    k: float = 1,
    **settings: float,
) -> dict[str, Any]:
    """What a calibration keeps of n images to answer by coverage: plain numbers, one for a level and method.

    Args:
        true: Score of the true class of each image, (n,).
        levels: Coverage levels; those that take more than n images are left out.
        mass: Sum of the scores that are better than the true one, (n,); None leaves out the methods that need it.
        ranks: Position of the true class, from 0, (n,); with `mass`.
        labels: True classes, (n,), to record LAC thresholds of each class too; None for none.
        num_labels: L; with `labels`.
        k: The model's own average set size, from which the settings of the methods follow.
        settings: Settings in place of those, e.g. `penalty=0.1`.

    Returns:
        `num_examples`; for each method {level: threshold}, and its settings. Per class `class_counts` (L,) and
        `per_class` {level: record}: `own` {class id: threshold} for the classes with images enough; `pooled`, the
        threshold of all others; and `pooled_from`, whose images that one is from, the `"rare"` classes' or `"all"`.
        Empty where no level can be recorded.

    Example:
        >>> coverage_record(np.arange(1, 11) / 16, [0.5, 0.8, 0.99])
        {'num_examples': 10, 'lac': {'0.5': 0.3125, '0.8': 0.125}}
        >>> labels = np.array([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
        >>> coverage_record(np.arange(1, 11) / 16, [0.75], labels=labels, num_labels=3)["per_class"]
        {'0.75': {'own': {'0': 0.0625, '1': 0.25}, 'pooled': 0.125, 'pooled_from': 'all'}}
    """
    levels = sorted({level for level in map(check_level, levels) if enough_images(level) <= len(true)})
    if not levels:
        return {}
    record: dict[str, Any] = {"num_examples": len(true)}
    for name, method in METHODS.items():
        if method.sums and mass is None:
            continue
        record |= {setting: settings.get(setting, value) for setting, value in method.choose(k).items()}
        values = method.nonconformity(true, mass, None if ranks is None else ranks + 1, record)
        record[name] = {level_key(level): method.sign * conformal_quantile(values, level) for level in levels}
    if labels is not None:
        counts = np.bincount(labels, minlength=num_labels)
        record["class_counts"] = counts.tolist()
        record["per_class"] = {level_key(level): _per_class(true, labels, counts, level) for level in levels}
    return record


def _per_class(true: np.ndarray, labels: np.ndarray, counts: np.ndarray, level: float) -> dict[str, Any]:
    few = counts < enough_images(level)
    rare = true[few[labels]]  # the threshold of all images would leave rare classes uncovered
    enough = len(rare) >= enough_images(level)
    return {
        "own": {str(j): -conformal_quantile(-true[labels == j], level) for j in (~few).nonzero()[0]},
        "pooled": -conformal_quantile(-(rare if enough else true), level),
        "pooled_from": "rare" if enough else "all",
    }


def describe_coverage(record: Mapping[str, Any]) -> dict[str, str]:
    """The coverage levels that a record can answer, and how, in words.

    >>> own = {"own": {"0": 0.3, "2": 0.2}, "pooled": 0.1, "pooled_from": "all"}
    >>> describe_coverage({"lac": {"0.5": 0.3}, "class_counts": [9, 0, 5], "per_class": {"0.5": own}})
    {'0.5': 'lac, per class (1 of 3 with too few images share the threshold of all)'}
    """
    found = {}
    for level in record.get("lac", {}):
        parts = [method for method in METHODS if level in record.get(method, {})]
        if level in record.get("per_class", {}):
            part, classes = record["per_class"][level], len(record["class_counts"])
            few = classes - len(part["own"])
            source = "one threshold" if part["pooled_from"] == "rare" else "the threshold of all"
            share = f" ({few} of {classes} with too few images share {source})" if few else ""
            parts += [f"per class{share}"] if part["own"] else ["not per class (none has images enough)"]
        found[level] = ", ".join(parts)
    return found


def check_coverage(record: Any, num_labels: int, probabilities: bool) -> None:
    """Refuse a record that was edited or damaged, with the name of the part.

    Args:
        record: What `coverage_record` returned, perhaps long ago.
        num_labels: L.
        probabilities: Whether the scores that are thresholded are probabilities.

    Example:
        >>> check_coverage({"lac": {"0.9": 7}}, num_labels=10, probabilities=True)  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: calibration.coverage['lac']['0.9']=7 is no probability, and the scores are. Calibrate again: ...
    """
    settings = {name: kind for method in METHODS.values() for name, kind in method.settings.items()}
    number = {"num_examples": int, **settings}
    _expect(isinstance(record, Mapping), "", record, "must be a mapping")
    for name, part in record.items():
        place = f"[{name!r}]"
        if name in number:
            good = _is_finite(part) and isinstance(part, number[name]) and part >= 0
            good = good and (name != "k_reg" or part <= num_labels)
            _expect(good, place, part, "must be a finite number >= 0, whole but for the penalty, k_reg at most L")
        elif name == "class_counts":
            whole = isinstance(part, list) and all(type(count) is int and count >= 0 for count in part)
            _expect(whole and len(part) == num_labels, place, "...", f"must hold {num_labels} whole numbers >= 0")
        elif name == "per_class":
            _check_levels(part, place, lambda place, value: _check_per_class(place, value, num_labels, probabilities))
        else:
            _expect(name in METHODS, place, "...", "is unknown")
            bounded = probabilities and METHODS[name].sign < 0
            _check_levels(part, place, lambda place, value, bounded=bounded: _check_number(place, value, bounded))
            missing = [setting for setting in METHODS[name].settings if setting not in record]
            _expect(not missing, place, "...", f"is without {' and '.join(missing)}")
    _expect("per_class" not in record or "class_counts" in record, "['per_class']", "...", "is without class_counts")


def _expect(good: bool, place: str, value: Any, reason: str) -> None:
    if not good:
        value = "" if value == "..." else f"={value!r}"
        raise ValueError(f"calibration.coverage{place}{value} {reason}. {AGAIN}")


def _is_finite(value: Any) -> bool:
    return is_number(value) and not math.isinf(value)


def _check_levels(part: Any, place: str, check: Callable[[str, Any], None]) -> None:
    _expect(isinstance(part, Mapping), place, part, "must map coverage levels to thresholds")
    for key, value in part.items():
        try:
            check_level(float(key) if isinstance(key, str) else None)
        except ValueError:
            _expect(False, place, "...", f"has the key {key!r}, which is no coverage level")
        check(f"{place}[{key!r}]", value)


def _check_number(place: str, value: Any, probability: bool) -> None:
    _expect(_is_finite(value), place, value, "is not a finite number")
    _expect(not probability or 0 <= value <= 1, place, value, "is no probability, and the scores are")


def _check_per_class(place: str, part: Any, num_labels: int, probabilities: bool) -> None:
    names = {"own", "pooled", "pooled_from"}
    _expect(isinstance(part, Mapping) and set(part) == names, place, part, f"must hold {sorted(names)}")
    _check_number(f"{place}['pooled']", part["pooled"], probabilities)
    _expect(
        part["pooled_from"] in ("rare", "all"), f"{place}['pooled_from']", part["pooled_from"], "is not rare or all"
    )
    place = f"{place}['own']"
    _expect(isinstance(part["own"], Mapping), place, part["own"], "must map class ids to thresholds")
    for j, threshold in part["own"].items():
        is_class = isinstance(j, str) and j.isdecimal() and int(j) < num_labels
        _expect(is_class, place, {j: threshold}, "has a key that is no class")
        _check_number(f"{place}[{j!r}]", threshold, probabilities)
