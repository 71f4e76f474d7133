"""What a calibration stores, checked: strangers edit such files, and disks damage them.

Like the model, this file travels with a saved model as remote code.
"""

import math
from collections.abc import Mapping
from typing import Any

from .checks import is_number, plain
from .scores import HEADS, PROBABILITIES
from .sets import check_k, k_key

FILE = "calibration.json"
AUGMENTATION = "test_time_augmentation"  # a field of a config on which scores depend
PARTS = ("thresholds", "heads", "head", "head_thresholds", "coverage", "curve")  # of one balance
MOST_BALANCES = 20  # of a calibration
LEAST_PREVALENCE = 1e-12  # of a class, so that no weight vanishes in float32
AGAIN = "calibrate again with `avgk calibrate MODEL DATASET`."


def check_balance(balance: Any, name: str = "balance") -> float:
    """Return a balance if it is a number in [0, 1], and refuse anything else.

    Example:
        >>> check_balance(2)
        Traceback (most recent call last):
        ...
        ValueError: balance=2 must be a number in [0, 1]: 0 counts every image alike, 1 every class.
    """
    balance = plain(balance)
    if not is_number(balance) or not 0 <= balance <= 1:
        raise ValueError(f"{name}={balance!r} must be a number in [0, 1]: 0 counts every image alike, 1 every class.")
    return float(balance)


def check_views(source: Mapping[str, Any], now: str) -> None:
    """Refuse thresholds of other scores than the model gives since its config was changed.

    Args:
        source: Where the thresholds come from.
        now: The model's test-time augmentation.
    """
    before = source.get(AUGMENTATION, "none")
    if before != now:
        raise ValueError(f"config.{AUGMENTATION}={now!r}, and the thresholds are of {before!r}: {AGAIN}")


def checked_thresholds(thresholds: Any, name: str, num_labels: int, score: str) -> dict[float, float]:
    """Thresholds {K as text: lambda_val} that were not edited or damaged, by number.

    Args:
        thresholds: As they were stored.
        name: Where.
        num_labels: The classes that sets may hold.
        score: What is thresholded.
    """
    if not isinstance(thresholds, Mapping):
        raise ValueError(f"{name}={thresholds!r} must map K to lambda_val, e.g. `{{'2': 0.1}}`.")
    found = {}
    for key, lambda_val in thresholds.items():
        try:
            found[check_k(float(key), num_labels)] = lambda_val
        except (ValueError, TypeError) as error:
            raise ValueError(f"{name} has the key {key!r}: {error}") from None
        if not is_number(lambda_val) or math.isinf(lambda_val):
            reason = "is not a finite number"
        elif score in PROBABILITIES and not 0 <= lambda_val <= 1:
            reason = f"is no probability, and score={score!r} gives probabilities"
        else:
            continue
        raise ValueError(
            f"{name}[{key!r}]={lambda_val!r} {reason}. Take the field out of"
            f" {'config.json' if name.startswith('config') else FILE} and calibrate again: `avgk calibrate MODEL"
            " DATASET`."
        )
    return found


def checked_head_thresholds(stored: Any, name: str, num_labels: int, score: str) -> dict[str, dict[float, float]]:
    """{head: thresholds}, each as in `checked_thresholds`."""
    if not isinstance(stored, Mapping):
        raise ValueError(f"{name}={stored!r} must map heads to thresholds.")
    for head in set(stored) - set(HEADS):
        raise ValueError(f"{name} has the key {head!r}; choose among {list(HEADS)}.")
    return {head: checked_thresholds(part, f"{name}[{head!r}]", num_labels, score) for head, part in stored.items()}


def check_curve(curve: Any, name: str, num_labels: int, score: str) -> None:
    """Refuse a trade-off curve that is none, as `SetStatistics.curve` makes it."""
    try:
        rows = {k_key(row[0]): row[1] for row in curve}
        if not all(len(row) == 5 and all(map(is_number, row)) for row in curve):
            raise ValueError
    except (TypeError, ValueError, IndexError, KeyError, OverflowError):
        raise ValueError(f"{name} is damaged: calibrate again with `avgk calibrate`.") from None
    checked_thresholds(rows, name, num_labels, score)


def checked_balances(stored: Any, prevalence: Any, num_labels: int, score: str) -> dict[float, Mapping[str, Any]]:
    """The parts of a calibration for each balance but 0; what is in a part is checked as it is for balance 0.

    Args:
        stored: {balance as text: part}.
        prevalence: Of the classes, (L,), without which there is no balance.
        num_labels: L.
        score: What is thresholded.
    """
    name, found = "calibration.balances", {}
    if not isinstance(stored, Mapping) or len(stored) > MOST_BALANCES:
        raise ValueError(f"{name} must map at most {MOST_BALANCES} balances to what was calibrated: {AGAIN}")
    if prevalence is not None or stored:
        whole = isinstance(prevalence, list) and len(prevalence) == num_labels
        if not whole or not all(is_number(share) and LEAST_PREVALENCE <= share <= 1 for share in prevalence):
            raise ValueError(
                f"calibration.prevalence must hold {num_labels} numbers in [{LEAST_PREVALENCE}, 1]: {AGAIN}"
            )
    for key, part in stored.items():
        try:
            balance = check_balance(float(key), name)
        except (TypeError, ValueError):
            balance = 0.0
        if not balance or score not in PROBABILITIES:
            raise ValueError(f"{name} has the key {key!r}, which is no balance in (0, 1] of score={score!r}: {AGAIN}")
        unknown = set(part) - set(PARTS) if isinstance(part, Mapping) else {"no mapping"}
        if unknown or not part.get("thresholds"):
            raise ValueError(f"{name}[{key!r}] must hold thresholds and no other than {PARTS}: {AGAIN}")
        if part.get("head") not in (None, *HEADS) or not isinstance(part.get("heads") or {}, Mapping):
            raise ValueError(f"{name}[{key!r}]: `head` and `heads` must be heads, among {list(HEADS)}: {AGAIN}")
        found[balance] = part
    return found


def check_tradeoff(rows: Any) -> None:
    """Refuse rows of balances that are none, as `Evaluation.tradeoff` makes them."""
    good = isinstance(rows, list) and all(isinstance(row, list) and len(row) == 6 for row in rows)
    if not good or not all(
        is_number(value) or (value is None and i == 4) for row in rows for i, value in enumerate(row)
    ):
        raise ValueError(f"calibration.tradeoff is damaged: {AGAIN}")
