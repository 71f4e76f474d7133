"""Refusing a wrong value with its name, the reason and what to give instead.

Like the model, this file travels with a saved model as remote code.
"""

import json
import math
from collections.abc import Iterable, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import numpy as np
from huggingface_hub.errors import HFValidationError
from huggingface_hub.utils import validate_repo_id

MOST_NESTED = 20  # mappings and lists inside each other in a JSON file
LIKE = 0.8  # how much of two names is the same where one is nearly the other


def plain(value: Any) -> Any:
    """A single number of numpy or torch as one of Python, in the digits that it shows; anything else as it is.

    >>> import numpy as np
    >>> plain(np.float32(0.1)), plain(np.int64(2)), plain(0.1)
    (0.1, 2, 0.1)
    """
    if getattr(value, "ndim", None) != 0:
        return value
    number = value.item()
    # float32's 0.1 is 0.10000000149 in Python, which is another K and another coverage
    return float(str(np.float32(number))) if isinstance(number, float) and value.itemsize < 8 else number


def is_number(value: Any) -> bool:
    """Whether a value is an int or float that is not NaN; a truth value or an int that no float can hold is none."""
    if isinstance(value, float):
        return not math.isnan(value)
    return isinstance(value, int) and not isinstance(value, bool) and abs(value) < 2**1023


def k_key(k: float) -> str:
    """The name under which the threshold of `k` is stored.

    >>> k_key(5), k_key(5.0), k_key(1.5)
    ('5', '5', '1.5')
    """
    k = float(plain(k))
    return str(int(k)) if k.is_integer() else str(k)


def check_k(k: float, num_labels: int | None = None) -> float:
    """Return `k`, a plain number, if it is a usable average set size, finite and in [1, L), and raise otherwise."""
    k = plain(k)
    below = math.inf if num_labels is None else num_labels
    if not is_number(k) or not 1 <= k < below:
        wanted = "from 1 to below the number of classes"
        wanted = (
            f"a number {wanted}" if num_labels is None else f"a number in [1, {num_labels}) for {num_labels} classes"
        )
        remedy = f"Set it to e.g. `k={min(2, below - 1)}`." if below > 1 else "One class makes no sets: give more."
        shown = k_key(k) if is_number(k) and math.isfinite(k) else repr(k)
        raise ValueError(f"k={shown} must be {wanted}: the average number of classes in a set. {remedy}")
    return k


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


def check_ids(name: str, ids: Any, number: int) -> list[int] | None:
    """Return some of the ids in [0, number), ascending, or None, and refuse anything else.

    Example:
        >>> check_ids("classes", [0, 7], 6)
        Traceback (most recent call last):
        ...
        ValueError: classes must list ids below 6 in ascending order: calibrate again with `avgk calibrate`.
    """
    whole = isinstance(ids, list) and all(type(i) is int and 0 <= i < number for i in ids)
    if ids is not None and not (whole and ids and ids == sorted(set(ids))):
        raise ValueError(
            f"{name} must list ids below {number} in ascending order: calibrate again with `avgk calibrate`."
        )
    return ids


def check_counts(name: str, counts: Any, number: int) -> list[int] | None:
    """Return a whole number >= 0 for each of `number` classes, or None, and refuse anything else.

    Example:
        >>> check_counts("config.train_counts", [3, 1], 3)
        Traceback (most recent call last):
        ...
        ValueError: config.train_counts has 2 values for 3 classes.
    """
    if counts is None:
        return None
    if not isinstance(counts, list) or not all(type(count) is int and count >= 0 for count in counts):
        raise ValueError(f"{name}={str(counts)[:80]} must hold whole numbers >= 0.")
    if len(counts) != number:
        raise ValueError(f"{name} has {len(counts)} values for {number} classes.")
    return counts


def is_hub_id(name: Any) -> bool:
    """Whether a name can be that of a model or dataset on the Hub: `user/name`.

    >>> is_hub_id("timm/resnet18.a1_in1k"), is_hub_id("glyphs"), is_hub_id("../runs/plants")
    (True, False, False)
    """
    try:
        validate_repo_id(name)
    except HFValidationError:
        return False
    return isinstance(name, str) and "/" in name


def same_labels(one: Mapping[Any, str], other: Mapping[Any, str]) -> bool:
    """Whether two `id2label` name the same classes: to these names thresholds and counts belong.

    Example:
        >>> same_labels({"0": "oak", "1": "elm"}, {0: "oak", 1: "elm"}), same_labels({0: "oak"}, {0: "elm"})
        (True, False)
    """
    return {int(i): label for i, label in one.items()} == {int(i): label for i, label in other.items()}


def read_json(path: Path) -> dict[str, Any]:
    """What a JSON file maps; a missing or damaged one is refused with its name."""
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise FileNotFoundError(f"{path} is missing.") from None
    except ValueError as error:
        raise ValueError(f"{path} is not valid JSON ({error}): it is cut off or damaged.") from None
    except RecursionError:
        raise ValueError(f"{path} nests more than {MOST_NESTED} mappings or lists: it is damaged.") from None
    if not isinstance(content, dict):
        raise ValueError(f"{path} must hold a mapping, but holds {type(content).__name__}.")
    check_nesting(content, path)
    return content


def model_folder(name: str) -> Path | None:
    """The folder of a model that is named, or None for one on the Hub; what can be neither is refused."""
    folder = Path(name)
    if folder.is_dir():
        return folder
    if folder.is_file():
        raise NotADirectoryError(f"{name!r} is a file; name the folder of a saved model.")
    own = Path("runs") / name  # where recipes of `avgk init` put it
    near = str(own) if (own / "config.json").is_file() else near_folder(name)
    if near is not None:
        raise FileNotFoundError(f"there is no model folder {name!r}; did you mean {near!r}?")
    if folder.is_absolute() or name.startswith((".", "~", "runs/")) or name.count("/") > 1:
        remedy = "train one first (`avgk train RECIPE`), or check the name"
        raise FileNotFoundError(f"there is no model folder {name!r}: {remedy}.")
    return None


def title_of(name: str) -> str:
    """What to call a model or a dataset: its folder, or its id on the Hub."""
    return Path(name).resolve().name if Path(name).is_dir() else name


def read_config(folder: Path) -> dict[str, Any]:
    """What the config.json of a saved model maps."""
    if not (folder / "config.json").is_file():
        inside = sorted(path.parent for path in folder.glob("*/config.json"))
        remedy = (
            f"did you mean '{inside[0]}'?" if inside else "name that of a trained or saved model, e.g. runs/plants."
        )
        if inside and all(path.name.startswith("checkpoint-") for path in inside):
            last = max(inside, key=lambda path: (len(path.name), path.name))
            remedy = (
                "its training is not finished; if it was stopped, `avgk train RECIPE --resume_from_checkpoint last`"
                f" goes on. The last that was saved is {str(last)!r}."
            )
        raise FileNotFoundError(f"{folder} is no model, it holds no config.json: {remedy}")
    return read_json(folder / "config.json")


def check_calibrated(
    k: float, known: Iterable[float], num_labels: int | None = None, others: Iterable[float] = ()
) -> None:
    """Refuse an average set size outside of those that a model was calibrated for.

    Args:
        k: The size.
        known: Those.
        num_labels: Classes of the model, where they are known.
        others: What else is asked for.
    """
    known = sorted(known)
    if k not in known and not known[0] < k < known[-1]:
        sizes = " ".join(map(k_key, sorted({*known, k, *(other for other in others if not other < 1)})))
        more = f", or calibrate again with `avgk calibrate MODEL DATASET --k {sizes}`"
        if num_labels is not None and k >= num_labels:
            more = f": there are {num_labels} classes in all"
        between = f", and for what lies in between. Ask for one in [{k_key(known[0])}, {k_key(known[-1])}]"
        between = between if len(known) > 1 else " only. Ask for that"
        raise ValueError(
            f"no threshold is stored for k={k_key(k)}; this model is calibrated for k in"
            f" {', '.join(map(k_key, known))}{between}{more}."
        )


def check_dataset(name: str) -> None:
    """Refuse the path of a dataset where there is none; another name may be that of one on the Hub."""
    if not Path(name).exists() and name.startswith((".", "/", "~")):
        raise FileNotFoundError(f"dataset={name!r}: there is no such folder.")
    if (near := near_folder(name)) is not None:
        raise FileNotFoundError(f"dataset={name!r}: there is no such folder; did you mean {near!r}?")
    if leads_inside(name) and not Path(name).exists():
        folder = Path(name).parent
        inside = sorted(path.name for path in folder.iterdir() if path.is_dir() and path.name[0] != ".")
        only = f"only {', '.join(inside[:5])}{' ...' * (len(inside) > 5)}" if inside else "and no other folder"
        raise FileNotFoundError(f"dataset={name!r}: {folder} holds no {Path(name).name}, {only}.")


def leads_inside(name: str) -> bool:
    """Whether a path leads into a folder that is here, so that it names nothing on the Hub."""
    return len(Path(name).parts) > 1 and Path(name).parent.is_dir()


def near_folder(name: str, file: bool = False) -> str | None:
    """A folder, or a file, here whose name is nearly that of one that is not there, None where there is none.

    Names of the Hub are nearly never like those of folders here, and to look there takes a minute without a network.
    """
    path = Path(name)
    if path.exists() or not path.parent.is_dir():
        return None
    try:
        names = [each.name for each in path.parent.iterdir() if (each.is_file() if file else each.is_dir())]
    except OSError:  # may not be read
        return None
    return next((str(path.parent / near) for near in get_close_matches(path.name, names, 1, LIKE)), None)


def check_nesting(content: dict[str, Any], path: str | Path) -> None:
    """Refuse what is nested deeper than anything that is written here: copying and checking it would not end well."""
    level: list[Any] = [content]
    for _ in range(MOST_NESTED):
        inside = (item.values() if isinstance(item, dict) else item for item in level)
        level = [item for items in inside for item in items if isinstance(item, (dict, list))]
    if level:
        raise ValueError(f"{path} nests more than {MOST_NESTED} mappings or lists: it is damaged.")


def reason_of(error: BaseException) -> str:
    """The message of an error on one line; the name of its class where it has none."""
    return " ".join(str(error).split()) or type(error).__name__
