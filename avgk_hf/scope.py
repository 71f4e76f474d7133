"""What an evaluation is about: which set sizes, coverage levels and thresholds; what cannot be asked is refused."""

from collections.abc import Iterable
from typing import Any

from .calibration import Calibration
from .checks import plain
from .conformal import LEVELS, check_enough, check_level, enough_images
from .questions import Question
from .sets import check_k, k_key


def check_asked(labelled: bool, calibrate: bool, monitored: bool, by_coverage: bool) -> None:
    """Refuse what cannot be asked of one evaluation."""
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
        raise ValueError("name the average set sizes to calibrate for, e.g. `k=[1, 2, 5]`.")
    for size in ks or [None]:
        if not calibrate:
            calibration.threshold(size)  # refuses one that is not calibrated
        check_k(size, number)
    return list({k_key(size): size for size in ks}.values())


def evaluated_levels(
    config: Any, coverage: Iterable[float] | None, calibrate: bool, num_examples: int, method: str, per_class: bool
) -> list[float]:
    """The coverage levels to calibrate or to report; one that was asked for and cannot be had is refused."""
    if calibrate and coverage is None:
        return [level for level in LEVELS if num_examples >= enough_images(level)]
    if calibrate:
        return [check_enough(check_level(level), num_examples) for level in coverage]
    calibration = Calibration.of(config)
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


def choices(before: Calibration, source: dict[str, Any], chooses_head: bool) -> dict[str, Any]:
    """What a new calibration records about choices: which were made on its images, and where the checkpoint's was.

    Args:
        before: The calibration before, which knows on which images the checkpoint was chosen.
        source: What the new one says about its images: `dataset`, `split` and, after a training, `selection`.
        chooses_head: Whether the head is chosen on the same images.
    """
    selection = source.get("selection") or before.source.get("selection")
    same = selection is not None and selection == f"{source.get('dataset')} {source.get('split')}"
    found = {"chosen": ["checkpoint"] * same + ["head"] * chooses_head, "selection": selection}
    return {name: value for name, value in found.items() if value}


def promise(calibration: Calibration) -> str | None:
    """One line where a coverage of this calibration holds only approximately; None where it holds, or is not known."""
    recorded = calibration.source.get("chosen")
    chosen = [name for name in ("checkpoint", "head") if isinstance(recorded, list) and name in recorded]
    if not calibration.coverage or not chosen:
        return None
    verb = "were" if len(chosen) > 1 else "was"
    return (
        f"coverage is approximate: the {' and the '.join(chosen)} {verb} chosen on the images of the calibration;"
        " `calibration_split: auto` in a recipe keeps some aside, `avgk calibrate --keep-heads` takes others."
    )
