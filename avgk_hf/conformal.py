"""From a question to sets: by average size, by coverage, by cumulative probability, and within bounds for each image.

Coverage comes from split conformal prediction. Calibration image i has a nonconformity e_i; of n of them

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

All of it supposes that nothing was chosen on the n images. The best of several checkpoints, or of the heads
(`head="auto"`), is a choice; for the exact guarantee calibrate on images that were not used for one.

Like the model, this file travels with a saved model as remote code.

Example:
    >>> from types import SimpleNamespace
    >>> scores = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])  # a clear image and an ambiguous one
    >>> config = SimpleNamespace(num_labels=3, thresholds={"1": 0.5, "2": 0.22}, coverage={"lac": {"0.9": 0.3}})
    >>> answer(scores, config, k=2).sum(1).tolist()
    [1, 3]
    >>> answer(scores, config, coverage=0.9).sum(1).tolist()
    [1, 2]
    >>> answer(scores, config, cumulative=0.75, max_size=2).sum(1).tolist()
    [2, 2]
"""

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from fractions import Fraction
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import is_number
from .sets import (
    predict_sets,
    ranked_mass,
    recorded_head,
    stored_head,
    stored_threshold,
    within_bounds,
)

METHODS = ("lac", "aps", "raps")
LEVELS = (0.9, 0.95, 0.99)
PENALTY = 0.01
AGAIN = "Take the field out of config.json and calibrate again: `avgk calibrate MODEL DATASET --coverage 0.9`."


def check_level(level: Any, name: str = "coverage") -> float:
    """Return a coverage level if it is a number strictly between 0 and 1, and raise otherwise."""
    if not is_number(level) or not 0 < level < 1:
        raise ValueError(
            f"{name}={level!r} must be a number between 0 and 1, the share of images whose set holds the true class."
            " Set it to e.g. 0.95."
        )
    return float(level)


def level_key(level: float) -> str:
    """The name under which the thresholds of a coverage level are stored.

    >>> level_key(0.95), level_key(0.5)
    ('0.95', '0.5')
    """
    return str(float(level))


def question_name(level: float, method: str = "lac", per_class: bool = False) -> str:
    """What a coverage that was measured is called in metrics: the level, and how it was reached.

    >>> question_name(0.9), question_name(0.9, "aps"), question_name(0.9, per_class=True)
    ('0.9', 'aps_0.9', 'per_class_0.9')
    """
    return ("per_class_" if per_class else f"{method}_" * (method != "lac")) + level_key(level)


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


def conformal_quantile(values: np.ndarray, level: float) -> float:
    """The quantile q of nonconformities (n,): the ceil((n + 1) c)-th smallest; refused where there are too few.

    >>> conformal_quantile(np.arange(1, 20), 0.9)
    18.0
    """
    rank = conformal_rank(level, len(values))
    if rank > len(values):
        raise ValueError(
            f"coverage={level_key(level)} cannot be calibrated on {len(values)} image(s): it takes"
            f" {enough_images(level)} at least. Use more validation images or a lower coverage."
        )
    return float(np.partition(values, rank - 1)[rank - 1])


def coverage_record(
    true: np.ndarray,
    levels: Iterable[float],
    mass: np.ndarray | None = None,
    ranks: np.ndarray | None = None,
    labels: np.ndarray | None = None,
    num_labels: int = 0,
    k_reg: int = 1,
    penalty: float = PENALTY,
) -> dict[str, Any]:
    """What a config keeps of n calibration images to answer by coverage: plain numbers, one for a level and method.

    Args:
        true: Score of the true class of each image, (n,).
        levels: Coverage levels; those that take more than n images are left out.
        mass: Sum of the scores that are better than the true one, (n,), for APS and RAPS; None records LAC only.
        ranks: Position of the true class, from 0, (n,); with `mass`.
        labels: True classes, (n,), to record LAC thresholds of each class too; None for none.
        num_labels: L; with `labels`.
        k_reg: Classes that RAPS leaves without penalty. It must not be chosen on these images.
        penalty: What RAPS adds for every further class.

    Returns:
        `num_examples`; for each method {level: threshold}, for RAPS with `k_reg` and `penalty`. Per class
        `class_counts` (L,) and `per_class` {level: record}: `own` {class id: threshold} for the classes with images
        enough; `pooled`, the threshold of all others; and `pooled_from`, whose images that one is from, the `"rare"`
        classes' or `"all"`. Empty where no level can be recorded.

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
    record["lac"] = {level_key(level): -conformal_quantile(-true, level) for level in levels}
    if mass is not None:
        record["aps"] = {level_key(level): conformal_quantile(mass, level) for level in levels}
        regularised = mass + penalty * np.maximum(0, ranks + 1 - k_reg)
        record["raps"] = {level_key(level): conformal_quantile(regularised, level) for level in levels}
        record |= {"k_reg": k_reg, "penalty": penalty}
    if labels is not None:
        counts = np.bincount(labels, minlength=num_labels)
        record["class_counts"] = counts.tolist()
        record["per_class"] = {}
        for level in levels:
            few = counts < enough_images(level)
            rare = true[few[labels]]  # the threshold of all images would leave rare classes uncovered
            enough = len(rare) >= enough_images(level)
            record["per_class"][level_key(level)] = {
                "own": {str(j): -conformal_quantile(-true[labels == j], level) for j in (~few).nonzero()[0]},
                "pooled": -conformal_quantile(-(rare if enough else true), level),
                "pooled_from": "rare" if enough else "all",
            }
    return record


def describe(record: Mapping[str, Any]) -> dict[str, str]:
    """The coverage levels that a record can answer, and how, in words.

    >>> own = {"own": {"0": 0.3, "2": 0.2}, "pooled": 0.1, "pooled_from": "all"}
    >>> describe({"lac": {"0.5": 0.3}, "class_counts": [9, 0, 5], "per_class": {"0.5": own}})
    {'0.5': 'lac, per class (1 of 3 with too few images share the threshold of all)'}
    """
    found = {}
    for level in record.get("lac", {}):
        parts = [method for method in METHODS if level in record.get(method, {})]
        if level in record.get("per_class", {}):
            part, classes = record["per_class"][level], len(record["class_counts"])
            few = classes - len(part["own"])
            source = "one threshold" if part["pooled_from"] == "rare" else "the threshold of all"
            parts.append("per class" + (f" ({few} of {classes} with too few images share {source})" if few else ""))
        found[level] = ", ".join(parts)
    return found


def check_coverage(record: Any, num_labels: int, kind: str) -> None:
    """Refuse a config's `coverage` that was edited or damaged, with the name of the part.

    Args:
        record: What the config holds.
        num_labels: L.
        kind: The scores that are thresholded, as in `sets.score`.

    Example:
        >>> check_coverage({"lac": {"0.9": 7}}, num_labels=10, kind="softmax")  # doctest: +ELLIPSIS
        Traceback (most recent call last):
        ...
        ValueError: config.coverage['lac']['0.9']=7 is no probability, and score='softmax' gives probabilities. ...
    """
    if not isinstance(record, Mapping):
        raise ValueError(f"config.coverage={record!r} must be a mapping, e.g. `{{'lac': {{'0.9': 0.1}}}}`. {AGAIN}")

    def refuse(place: str, value: Any, reason: str) -> None:
        raise ValueError(f"config.coverage{place}={value!r} {reason}. {AGAIN}")

    def check_number(place: str, value: Any, probability: bool) -> None:
        if not is_number(value) or math.isinf(value):
            refuse(place, value, "is not a finite number")
        if probability and not 0 <= value <= 1:
            refuse(place, value, f"is no probability, and score={kind!r} gives probabilities")

    numbers = {"num_examples": int, "k_reg": int, "penalty": (int, float)}
    for name, part in record.items():
        place = f"[{name!r}]"
        if name in numbers:
            check_number(place, part, probability=False)
            if part < 0 or not isinstance(part, numbers[name]) or (name == "k_reg" and part > num_labels):
                refuse(place, part, "must be a number >= 0, and whole but for the penalty; k_reg at most the classes")
        elif name == "class_counts":
            whole = isinstance(part, list) and all(type(count) is int and count >= 0 for count in part)
            if not whole or len(part) != num_labels:
                raise ValueError(f"config.coverage{place} must hold {num_labels} whole numbers >= 0. {AGAIN}")
        elif name not in (*METHODS, "per_class"):
            raise ValueError(f"config.coverage has the unknown key {name!r}. {AGAIN}")
        elif not isinstance(part, Mapping):
            refuse(place, part, "must map coverage levels to thresholds")
        else:
            for key, value in part.items():
                try:
                    check_level(float(key) if isinstance(key, str) else None)
                except ValueError:
                    reason = f"config.coverage{place} has the key {key!r}, which is no coverage level"
                    raise ValueError(f"{reason}. {AGAIN}") from None
                inner = f"{place}[{key!r}]"
                if name != "per_class":
                    check_number(inner, value, name == "lac" and kind != "logit")
                    continue
                if not isinstance(value, Mapping) or set(value) != {"own", "pooled", "pooled_from"}:
                    refuse(inner, value, "must hold 'own', 'pooled' and 'pooled_from'")
                check_number(f"{inner}['pooled']", value["pooled"], kind != "logit")
                if value["pooled_from"] not in ("rare", "all"):
                    refuse(f"{inner}['pooled_from']", value["pooled_from"], "must be 'rare' or 'all'")
                if not isinstance(value["own"], Mapping):
                    refuse(f"{inner}['own']", value["own"], "must map class ids to thresholds")
                for j, threshold in value["own"].items():
                    if not (isinstance(j, str) and j.isdecimal() and int(j) < num_labels):
                        refuse(f"{inner}['own']", {j: threshold}, "has a key that is no class")
                    check_number(f"{inner}['own'][{j!r}]", threshold, kind != "logit")
    for name, needed in (("raps", {"k_reg", "penalty"}), ("per_class", {"class_counts"})):
        if name in record and not needed <= set(record):
            raise ValueError(f"config.coverage has {name!r} without {' and '.join(sorted(needed))}. {AGAIN}")


def stored_coverage(config: Any, coverage: float, method: str = "lac", per_class: bool = False) -> float | list[float]:
    """The threshold of a coverage level that a calibration wrote to a model's config; a list (L,) per class.

    Any classifier can hold thresholds, so this reads the config of any class.
    """
    level = level_key(check_level(coverage))
    if method not in METHODS:
        raise ValueError(f"method={method!r} is unknown; choose one of {list(METHODS)}.")
    if per_class and method != "lac":
        raise ValueError(f"method={method!r} has no thresholds per class: use method='lac', or leave per_class out.")
    record, kind = getattr(config, "coverage", None) or {}, getattr(config, "score", "softmax")
    again = f"calibrate with `avgk calibrate MODEL DATASET --coverage {level}{' --per-class' * per_class}`"
    if not record:
        raise ValueError(f"this model is not calibrated for any coverage: {again}.")
    asked = "per_class" if per_class else method
    if isinstance(record, Mapping):  # the part that is asked for, because this is done for every image
        record = {name: part for name, part in record.items() if name == asked or not isinstance(part, Mapping)}
        known = list(record.get(asked) or {})
        if level in known:
            record[asked] = {level: record[asked][level]}
    check_coverage(record, config.num_labels, kind)  # only our own config does by itself
    if method != "lac" and kind != "softmax":
        raise ValueError(f"method={method!r} sums probabilities, and score={kind!r} does not sum to 1: use 'lac'.")
    head, answers = recorded_head(config), stored_head(config)
    if head != answers:
        raise ValueError(f"the coverage was calibrated for head={head!r}, and now {answers!r} answers: {again}.")
    found = record.get(asked) or {}
    if level not in found:
        what = "per class" if per_class else f"with method={method!r}"
        only = f", only {', '.join(sorted(known, key=float))}: ask for one of these, or" if known else ":"
        raise ValueError(
            f"coverage={level} is not recorded {what}{only} {again}. It takes {enough_images(coverage)} validation"
            " images at least."
        )
    if not per_class:
        return found[level]
    own = found[level]["own"]
    return [own.get(str(j), found[level]["pooled"]) for j in range(config.num_labels)]


def recorded_levels(config: Any, method: str = "lac", per_class: bool = False) -> list[float]:
    """The coverage levels that can be asked for, ascending; none where another head answers than was calibrated.

    >>> from types import SimpleNamespace
    >>> recorded_levels(SimpleNamespace(num_labels=3, coverage={"lac": {"0.95": 0.1, "0.9": 0.2}}))
    [0.9, 0.95]
    """
    record = getattr(config, "coverage", None)
    part = record.get("per_class" if per_class else method) if isinstance(record, Mapping) else None
    found = []
    for level in part or ():
        with suppress(ValueError):
            stored_coverage(config, float(level), method, per_class)
            found.append(float(level))
    return sorted(found)


def check_request(
    config: Any,
    k: float | None = None,
    coverage: float | None = None,
    method: str = "lac",
    per_class: bool = False,
    cumulative: float | None = None,
    lambda_val: float | None = None,
    min_size: int = 0,
    max_size: int | None = None,
) -> tuple[str, Any]:
    """Refuse a question that the config cannot answer, before any image is read; the arguments are those of `answer`.

    Returns:
        How to answer: `"scores"` with a threshold, or one for each class; `"aps"`, `"raps"` or `"cumulative"` with the
        largest sum.
    """
    asked = {"k": k, "coverage": coverage, "cumulative": cumulative, "lambda_val": lambda_val}
    asked = [f"{name}={value!r}" for name, value in asked.items() if value is not None]
    if len(asked) > 1:
        raise ValueError(f"{' and '.join(asked)} are different questions: ask one of them.")
    for name, size in (("min_size", min_size), ("max_size", max_size)):
        if size is not None and (isinstance(size, bool) or not isinstance(size, int) or size < 0):
            raise ValueError(f"{name}={size!r} must be a whole number of classes, e.g. `{name}=3`.")
    if min_size > config.num_labels:
        raise ValueError(f"min_size={min_size} must be a whole number in [0, {config.num_labels}], the classes.")
    if max_size is not None and max_size < min_size:
        raise ValueError(f"max_size={max_size} is below min_size={min_size}: no set can have such a size.")
    if coverage is not None:
        threshold = stored_coverage(config, coverage, method, per_class)
        return ("scores" if method == "lac" else method), threshold
    if per_class or method != "lac":
        given = f"method={method!r}" if method != "lac" else "per_class"
        raise ValueError(f"{given} says how a coverage is reached: give one too, e.g. `coverage=0.95`.")
    if cumulative is not None:
        if not is_number(cumulative) or not 0 < cumulative <= 1:
            raise ValueError(f"cumulative={cumulative!r} must be a probability in (0, 1], e.g. 0.9.")
        kind = getattr(config, "score", "softmax")
        if kind != "softmax":
            raise ValueError(f"cumulative={cumulative!r} sums probabilities, and score={kind!r} does not sum to 1.")
        return "cumulative", cumulative
    if lambda_val is not None:
        if not is_number(lambda_val):
            raise ValueError(f"lambda_val={lambda_val!r} is not a number, e.g. `lambda_val=0.1`.")
        return "scores", lambda_val
    return "scores", stored_threshold(config, k)


def answer(
    scores: Tensor,
    config: Any,
    k: float | None = None,
    coverage: float | None = None,
    method: str = "lac",
    per_class: bool = False,
    cumulative: float | None = None,
    lambda_val: float | None = None,
    min_size: int = 0,
    max_size: int | None = None,
) -> Tensor:
    """The predicted sets as a boolean mask (b, L), for one question of four; model, pipeline and commands ask here.

    Args:
        scores: Scores (b, L) of the head that answers (`sets.stored_head`).
        config: The config of a calibrated classifier of any class.
        k: Average set size, in the range that was calibrated. With no question at all: the model's own.
        coverage: Share of images whose set is to hold the true class, one of the levels that were calibrated.
        method: How coverage is reached: `"lac"` (smallest sets), `"aps"` or `"raps"` (sizes that follow the
            difficulty of the image).
        per_class: Reach the coverage in every class, with `"lac"`; in the pooled classes, on average over them.
        cumulative: The fewest best classes whose probabilities sum to this at least.
        lambda_val: A threshold.
        min_size: At least this many classes for each image, the best ones; 0 allows empty sets.
        max_size: At most this many classes for each image, the best of the set. It voids a coverage.

    Example:
        >>> from types import SimpleNamespace
        >>> config = SimpleNamespace(num_labels=4, coverage={"lac": {"0.9": 0.3}, "aps": {"0.9": 0.8}})
        >>> scores = torch.tensor([[0.1, 0.4, 0.3, 0.2]])
        >>> [answer(scores, config, coverage=0.9, method=method)[0].tolist() for method in ("lac", "aps")]
        [[False, True, True, False], [False, True, True, True]]
        >>> answer(scores, config, cumulative=0.8)[0].tolist()
        [False, True, True, True]
    """
    rule, value = check_request(config, k, coverage, method, per_class, cumulative, lambda_val, min_size, max_size)
    if rule == "scores":
        sets = predict_sets(scores, value)
    else:
        order, mass = ranked_mass(scores)  # (b, L), best first
        if rule == "cumulative":
            inside = mass < value
        elif rule == "raps":
            position = torch.arange(1, mass.shape[1] + 1, device=mass.device, dtype=mass.dtype)
            record = config.coverage
            inside = mass + record["penalty"] * (position - record["k_reg"]).clamp(min=0) <= value
        else:
            inside = mass <= value
        sets = torch.zeros_like(inside).scatter_(1, order, inside)
    most = None if max_size is None else min(max_size, scores.shape[1])  # a tensor takes no larger whole number
    return within_bounds(scores, sets, min_size, most)
