"""What an evaluation is about: set sizes, coverage levels, thresholds, balances; what cannot be asked is refused."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from typing import Any

from .calibration import Calibration
from .checks import check_choice, is_number, plain
from .conformal import LEVELS, check_enough, check_level, enough_images
from .questions import Question
from .records import LEAST_PREVALENCE, check_balance
from .scores import PROBABILITIES, smoothed_prevalence
from .sets import check_k, k_key

RECORDED = (0.0, 0.5, 1.0)  # the balances that are calibrated besides the model's own
GRID = (0.0, 0.25, 0.5, 0.75, 1.0)  # those whose trade-off is shown, and among which "auto" chooses
LEAST_ASIDE = 500  # images of each half, where `calibration_split: auto` divides validation
BALANCING = ("prevalence", "give_up", "select_by")  # how a balance is calibrated
SELECT_BY = {"micro": "average_k_accuracy", "macro": "macro_accuracy"}  # what is to be high on validation


@dataclass(frozen=True)
class Balancing:
    """Which balances a calibration computes, and which of them answers.

    Args:
        own: The model's own balance, or `"auto"`: the largest of `GRID` that costs at most `give_up` percentage points
            of the average-K accuracy on these images, at the model's own K.
        prevalence: Of the classes, (L,); None where it is not known, and then there is no balance but 0.
        prevalence_from: `"train"`, `"given"` or `"estimated"`.
        give_up: As above.
        select_by: What the best head is best in: `"micro"`, the share of all images, or `"macro"`, the mean over
            classes.
    """

    own: float | str = 0.0
    prevalence: Sequence[float] | None = None
    prevalence_from: str | None = None
    give_up: float = 0.5
    select_by: str = "micro"

    def __post_init__(self) -> None:
        if self.own != "auto":
            object.__setattr__(self, "own", check_balance(self.own))
        check_choice("select_by", self.select_by, SELECT_BY)
        if not is_number(self.give_up) or not 0 <= self.give_up <= 100:
            raise ValueError(f"give_up={self.give_up!r} must be percentage points in [0, 100], e.g. 0.5.")
        if self.own and self.prevalence is None:
            raise ValueError(
                f"balance={self.own} needs to know how frequent the classes are, and this model has no record of its"
                " training images: name them with --prevalence DATASET (`prevalence=`)."
            )

    @classmethod
    def of(cls, config: Any, own: float | str = 0.0, prevalence: Any = None, **further: Any) -> "Balancing":
        """That of a model: the prevalence is what is given, or that of the training images in its config."""
        score, counts = getattr(config, "score", "softmax"), getattr(config, "train_counts", None)
        if score not in PROBABILITIES:
            if own or prevalence is not None:
                raise ValueError(f"balance={own} is for probabilities, and score={score!r} gives none.")
            return cls(**further)
        source = None
        if prevalence is not None:
            prevalence, source = given_prevalence(prevalence, len(config.id2label)), "given"
        elif counts:
            prevalence, source = smoothed_prevalence(counts), "train"
        further = {"prevalence_from": source, **further}
        return cls(own, prevalence, **further)

    @property
    def recorded(self) -> list[float]:
        """The balances to be stored, if `"auto"` is settled."""
        return [0.0] if self.prevalence is None else sorted({*RECORDED, self.own} - {"auto"})

    @property
    def all(self) -> list[float]:
        """The balances to be computed."""
        return [0.0] if self.prevalence is None else sorted({*GRID, *self.recorded})

    def whole(self, balance: float) -> bool:
        """Whether a balance may be stored, and so needs all that answers by coverage too."""
        return self.own == "auto" or balance in self.recorded


def given_prevalence(prevalence: Any, num_labels: int) -> list[float]:
    """Numbers or shares of images of each class as shares (L,), all of them above 0; anything else is refused.

    >>> given_prevalence([3, 1], 2)
    [0.75, 0.25]
    """
    values = [plain(value) for value in prevalence]
    if len(values) != num_labels or not all(is_number(value) and 0 < value < math.inf for value in values):
        raise ValueError(f"prevalence must hold {num_labels} numbers above 0, one for each class, e.g. counts plus 1.")
    total = math.fsum(values)
    return [max(value / total, LEAST_PREVALENCE) for value in values]


def check_asked(
    labelled: bool, calibrate: bool, monitored: bool, by_coverage: bool, balancing: Iterable[str] = ()
) -> None:
    """Refuse what cannot be asked of one evaluation."""
    for name in (name for name in balancing if name not in BALANCING):
        near = get_close_matches(name, (*BALANCING, "coverage", "balance", "method", "labels", "per_class", "k"), 1)
        raise TypeError(f"there is no argument {name!r}{f'; did you mean {near[0]!r}?' if near else ''}")
    for name in () if calibrate else balancing:
        raise ValueError(f"{name} says how to calibrate: leave it out of an evaluation.")
    if calibrate and monitored:
        raise ValueError("a monitor compares other images with those of the calibration: evaluate with it afterwards.")
    if calibrate and not labelled:
        raise ValueError("the images have no labels: calibrate on labelled ones, split/<class>/image.jpg.")
    if by_coverage and not labelled:
        raise ValueError("the images have no labels, so no coverage can be measured on them: ask for sizes only (k).")


def evaluated_sizes(
    config: Any, k: list[float], calibrate: bool, labelled: bool, watched: float | None, number: int
) -> list[float]:
    """The average set sizes of an evaluation: the model's own, those asked for or all recorded, the monitor's."""
    calibration = Calibration.of(config)
    ks = list(map(plain, k)) or (calibration.ks if labelled else [])
    if hasattr(config, "k") and labelled:
        ks = [config.k, *ks]
    if watched is not None:
        ks = [*ks, watched]
    if not ks and calibrate:
        raise ValueError("name the average set sizes to calibrate for, `--k 1 2 5` (`k=[1, 2, 5]`).")
    for size in ks or [None]:
        if not calibrate:
            calibration.threshold(size)  # refuses one that is not calibrated
        check_k(size, number)
    return list({k_key(size): size for size in ks}.values())


def evaluated_levels(
    config: Any,
    coverage: Iterable[float] | None,
    calibrate: bool,
    num_examples: int,
    method: str,
    per_class: bool | float,
    balance: float | None = None,
) -> list[float]:
    """The coverage levels to calibrate or to report; one that was asked for and cannot be had is refused."""
    if calibrate and coverage is None:
        return [level for level in LEVELS if num_examples >= enough_images(level)]
    if calibrate:
        return [check_enough(check_level(level), num_examples) for level in coverage]
    calibration = Calibration.of(config).at(balance)
    found = list(map(plain, coverage)) if coverage is not None else calibration.levels(method, per_class)
    if coverage is None and not found and (per_class or method != "lac"):
        found = [LEVELS[0]]  # to be refused with what is missing
    for level in found:
        calibration.answer(Question(coverage=level, method=method, per_class=per_class))
    return found


def stored_thresholds(
    calibration: Calibration, heads: Iterable[str], ks: Iterable[float]
) -> dict[str, dict[float, float]]:
    """The thresholds of every head for the K that it was calibrated for; the head that answers must have them all."""
    found = {calibration.head(k): {} for k in ks}
    for head in heads:
        known = calibration.thresholds.get(head) or {}
        for k in ks:
            if calibration.head(k) == head or (known and min(known) <= k <= max(known)):
                found.setdefault(head, {})[k] = calibration.head_threshold(head, k)
    return {head: found[head] for head in heads if head in found}


def choices(before: Calibration, source: dict[str, Any], made: list[str]) -> dict[str, Any]:
    """What a new calibration records about choices: which were made on its images, and where the checkpoint's was.

    Args:
        before: The calibration before, which knows on which images the checkpoint was chosen.
        source: What the new one says about its images: `dataset`, `split` and, after a training, `selection` and
            `taken`, which and how many of the training images were taken for validation.
        made: What else is chosen on the same images: head, balance.
    """
    selection = source.get("selection") or before.source.get("selection")
    same = selection is not None and selection == f"{source.get('dataset')} {source.get('split')}"
    taken = source.get("taken") or before.source.get("taken")
    found = {"chosen": ["checkpoint"] * same + made, "selection": selection, "taken": taken}
    return {name: value for name, value in found.items() if value}


def taken_in_training(calibration: Calibration) -> tuple[str | None, dict[str, int]]:
    """The dataset from whose training images a training took some of each class, and the arguments to take them."""
    found = calibration.source.get("taken")
    found = found if isinstance(found, dict) else {}
    names = {"per_class": "validation", "test_per_class": "test", "seed": "seed"}
    how = {argument: found[name] for name, argument in names.items() if name in found}
    known = all(type(value) is int and value >= (name != "seed") for name, value in how.items())  # of a stranger
    return (found.get("dataset"), how) if known and "seed" in how and len(how) > 1 else (None, {})


def promise(calibration: Calibration) -> str | None:
    """One line where what this calibration promises holds only approximately; None where it holds, or is not known."""
    source = calibration.source
    if source.get("split") == "train" and source.get("selection") != f"{source.get('dataset')} train":
        return (
            "the thresholds come from images called train: if the model has learnt from these, sets of others are too"
            " small and hold the true class less often than promised. `avgk calibrate` takes other images."
        )
    recorded = source.get("chosen")
    chosen = [name for name in ("checkpoint", "head", "balance") if isinstance(recorded, list) and name in recorded]
    if not calibration.coverage or not chosen:
        return None
    verb = "were" if len(chosen) > 1 else "was"
    return (
        f"coverage is approximate: the {' and the '.join(chosen)} {verb} chosen on the images of the calibration,"
        " so that somewhat fewer sets than asked for may hold the true class. `calibration_split: auto` keeps images"
        f" aside from {2 * LEAST_ASIDE:,} validation images on (these are"
        f" {source.get('num_examples', 'fewer')}), and `avgk calibrate --keep-heads` computes them on other images."
    )
