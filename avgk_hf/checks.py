"""Refusing a wrong value with its name, the reason and what to give instead.

Like the model, this file travels with a saved model as remote code.
"""

import math
from collections.abc import Iterable
from typing import Any


def is_number(value: Any) -> bool:
    """Whether a value is an int or float that is not NaN; a truth value or an int that no float can hold is none."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023


def check_whole(name: str, value: Any, least: int = 0, hint: str = "") -> int:
    """Return a whole number of at least `least`, and refuse anything else.

    Args:
        name: What the user calls it.
        value: What was given.
        least: The smallest that is allowed.
        hint: Follows in the message, e.g. `", or left out for none"`.

    Example:
        >>> check_whole("batch_size", 0, 1)
        Traceback (most recent call last):
        ...
        ValueError: batch_size=0 must be a whole number of at least 1.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{name}={value!r} must be a whole number of at least {least}{hint}.")
    return value


def check_choice(name: str, value: Any, choices: Iterable[str]) -> str:
    """Return one of the choices, and refuse anything else.

    Example:
        >>> check_choice("score", "cosine", ["softmax", "sigmoid"])
        Traceback (most recent call last):
        ...
        ValueError: score='cosine' is unknown; choose one of ['softmax', 'sigmoid'].
    """
    choices = list(choices)
    if value not in choices:
        raise ValueError(f"{name}={value!r} is unknown; choose one of {choices}.")
    return value


def reason_of(error: BaseException) -> str:
    """The message of an error on one line; the name of its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
