"""Compute the thresholds of any image classifier on a dataset, or evaluate it with those it has."""

import datetime
import tempfile
from collections.abc import Iterable
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Image
from huggingface_hub.utils import tqdm
from transformers import PreTrainedModel, default_data_collator

from .classifiers import model_scores, transform_for
from .conformal import (
    LEVELS,
    answer,
    check_level,
    enough_images,
    level_key,
    question_name,
    recorded_levels,
    stored_coverage,
)
from .data import align_labels, prepare, skip_bad_images
from .data.datasets import ON_BAD_IMAGE
from .modeling import AvgKForImageClassification
from .monitor import SetSizeMonitor
from .pipeline import config_score
from .set_statistics import SetStatistics
from .sets import check_k, k_key, predict_sets, stored_head, stored_threshold
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments

# what the Trainer says besides about its own work
TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def calibrate(
    model: PreTrainedModel, dataset: Dataset, k: Iterable[float], dataset_name: str | None = None, **kwargs: Any
) -> dict[str, float]:
    """Compute lambda_val for every `k`, and what answers by coverage, in one pass, and store it in the model's config.

    The model may be any image classifier of transformers; its class and weights stay what they are. Afterwards the set
    pipeline, `avgk predict` and `avgk evaluate` take it.

    Args:
        model: The classifier.
        dataset: Validation images, one split of `load_splits`.
        k: Average set sizes, each in [1, L).
        dataset_name: For the calibration record.
        kwargs: As in `evaluate`.

    Returns:
        The metrics on these images.
    """
    return evaluate(model, dataset, k, calibrate=True, dataset_name=dataset_name, **kwargs)


def evaluate(
    model: PreTrainedModel,
    dataset: Dataset,
    k: Iterable[float] = (),
    calibrate: bool = False,
    batch_size: int = 64,
    num_workers: int = 0,
    dataset_name: str | None = None,
    on_bad_image: str = "error",
    coverage: Iterable[float] | None = None,
    method: str = "lac",
    per_class: bool = False,
    monitor: SetSizeMonitor | None = None,
) -> dict[str, float]:
    """Evaluate a classifier on one split of `load_splits`, in one streaming pass.

    Of images without labels only the set sizes are known: `mean_set_size`, that of the monitor's K (default: the
    first of `k`, or the model's own), and for others of `k` `mean_set_size@<K>`.

    Args:
        model: The model; with `calibrate` its config receives the thresholds.
        dataset: The split; its classes are matched to the model's by name.
        k: Average set sizes besides the model's own, in the calibrated range; default: all that are calibrated.
        calibrate: Compute the thresholds from this split, instead of using those in the config.
        batch_size: Images per forward pass.
        num_workers: Processes that read images.
        dataset_name: For the calibration record.
        on_bad_image: `"error"` refuses an image that cannot be read, `"skip"` leaves it out and counts it.
        coverage: Coverage levels to calibrate (default: 0.9, 0.95 and 0.99, as far as there are images enough), or to
            report (default: all that are recorded).
        method: How the coverage that is reported is reached, as in `conformal.answer`.
        per_class: Whether to calibrate the thresholds of each class too, or to answer with them.
        monitor: Takes in the set sizes of its K, in random order, because folders are read class by class. Not for
            calibrating, where the sizes are K by construction.

    Returns:
        The metrics, as `AvgKTrainer.evaluate` names them, without prefix; with `on_bad_image="skip"` also the number
        of images `skipped`.
    """
    for option, value, least in (("batch_size", batch_size, 1), ("num_workers", num_workers, 0)):
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise ValueError(f"{option}={value!r} must be a whole number of at least {least}.")
    if on_bad_image not in ON_BAD_IMAGE:
        raise ValueError(f"on_bad_image={on_bad_image!r} is unknown; choose one of {list(ON_BAD_IMAGE)}.")
    if calibrate and monitor is not None:
        raise ValueError("a monitor compares other images with those of the calibration: evaluate with it afterwards.")
    labelled, k = "label" in dataset.column_names, list(k)
    if not labelled and calibrate:
        raise ValueError("the images have no labels: calibrate on labelled ones, split/<class>/image.jpg.")
    if not labelled and (coverage is not None or per_class or method != "lac"):
        raise ValueError("the images have no labels, so no coverage can be measured on them: ask for sizes only (k).")
    skipped = {}
    if on_bad_image == "skip":  # before anything is computed, because the threshold depends on the number of images
        dataset, number = skip_bad_images(dataset, str(dataset.split or dataset_name or "the dataset"), num_workers)
        skipped = {"skipped": number}
    if not labelled:
        monitor = monitor or SetSizeMonitor.from_config(model.config, *k[:1])
        return {**_evaluate_unlabelled(model, dataset, k, batch_size, num_workers, monitor), **skipped}
    dataset = align_labels(dataset, model.config)
    ks = k or [float(key) for key in getattr(model.config, "thresholds", None) or {}]
    if monitor is not None and monitor.k not in ks:
        ks = [*ks, monitor.k]
    for size in () if calibrate else ks or [None]:
        stored_threshold(model.config, size)  # refuses one that is not calibrated
    levels = _levels(model, coverage, calibrate, len(dataset), method, per_class)
    if not isinstance(model, AvgKForImageClassification):
        how = {"method": method, "per_class": per_class, "monitor": monitor}
        metrics = _evaluate_foreign(
            model, dataset, ks, calibrate, batch_size, num_workers, dataset_name, levels, **how
        )
        return {**metrics, **skipped}
    with tempfile.TemporaryDirectory() as folder:
        args = AvgKTrainingArguments(
            output_dir=folder,
            calibrate_k=ks,
            calibrate_coverage=levels,
            calibrate_per_class=per_class,
            coverage_method=method,
            per_device_eval_batch_size=batch_size,
            dataloader_num_workers=num_workers,
            dataloader_pin_memory=False,
            report_to="none",
        )
        trainer = AvgKTrainer(
            model=model, args=args, eval_dataset=prepare(dataset, model.config), dataset_name=dataset_name
        )
        metrics = trainer.evaluate(calibrate=calibrate)
        seen = {} if monitor is None else watch(monitor, trainer.statistics(monitor.k).set_sizes(monitor.k))
    metrics = {name.removeprefix("eval_"): value for name, value in metrics.items()}
    return {**{name: value for name, value in metrics.items() if name not in TIMES}, **seen, **skipped}


def watch(monitor: SetSizeMonitor, sizes: np.ndarray) -> dict[str, float]:
    """Show a monitor the set sizes (n,) of a dataset in random order, always the same, and return what it says."""
    monitor.update(np.random.default_rng(0).permutation(sizes))
    low, high = monitor.interval
    return {"monitored_k": monitor.k, "set_size_low": low, "set_size_high": high, "drifted": monitor.drifted}


def _evaluate_unlabelled(
    model: PreTrainedModel,
    dataset: Dataset,
    ks: list[float],
    batch_size: int,
    num_workers: int,
    monitor: SetSizeMonitor,
) -> dict[str, float]:
    """`evaluate` for images without labels."""
    lambdas = {k: stored_threshold(model.config, k) for k in dict.fromkeys([monitor.k, *ks])}
    images = dataset.cast_column("image", Image(decode=False)).with_transform(transform_for(model))
    loader = torch.utils.data.DataLoader(images, batch_size, collate_fn=default_data_collator, num_workers=num_workers)
    sizes = {k: [] for k in lambdas}
    for batch in tqdm(loader, desc="evaluate", unit="batch"):
        scores = {}  # of every head that answers
        for k, lambda_val in lambdas.items():
            head = stored_head(model.config, k)
            if head not in scores:
                scores[head] = model_scores(model, batch["pixel_values"], k)
            sizes[k].append(predict_sets(scores[head], lambda_val).sum(1).cpu().numpy())
    found = {k: np.concatenate(batches) for k, batches in sizes.items()}
    own = found.pop(monitor.k)
    others = {f"mean_set_size@{k_key(k)}": float(of_k.mean()) for k, of_k in found.items()}
    return {"num_images": len(own), "mean_set_size": float(own.mean()), **others, **watch(monitor, own)}


def _levels(
    model: PreTrainedModel,
    coverage: Iterable[float] | None,
    calibrate: bool,
    num_examples: int,
    method: str,
    per_class: bool,
) -> list[float]:
    """The coverage levels to calibrate or to report; one that was asked for and cannot be had is refused."""
    if calibrate:
        levels = [check_level(level) for level in (LEVELS if coverage is None else coverage)]
        for level in levels if coverage is not None else ():
            if num_examples < enough_images(level):
                raise ValueError(
                    f"coverage={level_key(level)} cannot be calibrated on {num_examples} image(s): it takes"
                    f" {enough_images(level)} at least. Use more validation images or a lower coverage."
                )
        return [level for level in levels if num_examples >= enough_images(level)]
    levels = list(coverage) if coverage is not None else recorded_levels(model.config, method, per_class)
    if coverage is None and not levels and (per_class or method != "lac"):
        levels = [LEVELS[0]]  # to be refused with what is missing
    for level in levels:
        stored_coverage(model.config, level, method, per_class)
    return levels


def _evaluate_foreign(
    model: PreTrainedModel,
    dataset: Dataset,
    ks: list[float],
    calibrate: bool,
    batch_size: int,
    num_workers: int,
    dataset_name: str | None,
    levels: list[float],
    method: str,
    per_class: bool,
    monitor: SetSizeMonitor | None,
) -> dict[str, float]:
    """`evaluate` for a classifier of another class, whose config may hold thresholds all the same."""
    config = model.config
    if not ks:
        raise ValueError("name the average set sizes to calibrate for, e.g. `k=[1, 2, 5]`.")
    for k in ks:
        check_k(k, config.num_labels)
    thresholds = None if calibrate else {k: stored_threshold(config, k) for k in ks}
    how = {"method": method, "per_class": per_class}
    questions = {
        question_name(level, **how): partial(answer, config=config, coverage=level, **how)
        for level in levels
        if not calibrate
    }
    mass = calibrate and bool(levels) and config_score(config) == "softmax"
    statistics = SetStatistics(ks, len(dataset), thresholds, mass=mass, questions=questions)
    loader = torch.utils.data.DataLoader(
        prepare(dataset, transform_for(model)), batch_size, collate_fn=default_data_collator, num_workers=num_workers
    )
    for number, batch in enumerate(tqdm(loader, desc="calibrate" if calibrate else "evaluate", unit="batch")):
        try:
            scores = model_scores(model, batch["pixel_values"])
        except ValueError as error:
            raise ValueError(f"batch {number} of the evaluation: {error}") from error
        statistics.update(scores, batch["labels"].to(scores.device))
    results = statistics.compute()
    if calibrate:
        config.score = config_score(config)
        config.thresholds = {k_key(k): result["lambda_val"] for k, result in sorted(results.items())}
        config.calibration = {
            "num_examples": len(dataset),
            "dataset": dataset_name,
            "split": str(dataset.split or "validation"),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "curve": statistics.curve(),
        }
        config.coverage = statistics.coverage(levels, per_class, min(ks))
    metrics = {"top1_accuracy": results[ks[0]]["top1_accuracy"]}
    for k, result in results.items():
        metrics.update({f"{name}@{k_key(k)}": v for name, v in result.items() if name != "top1_accuracy"})
    seen = {} if monitor is None else watch(monitor, statistics.set_sizes(monitor.k))
    return {**metrics, **statistics.coverage_metrics(), **seen}
