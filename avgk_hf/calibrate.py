"""Compute the thresholds of any image classifier on a dataset, or evaluate it with those it has."""

import datetime
import inspect
import json
import tempfile
from collections.abc import Iterable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import timm
import torch
from datasets import Dataset, Image
from huggingface_hub.utils import tqdm
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    TimmWrapperConfig,
    default_data_collator,
)

from . import auto  # noqa: F401  (makes the Auto classes know the model)
from .backbones import bounded, check_architecture, check_model_args, known_cfg
from .configuration import AvgKConfig, check_dtype, check_labels, check_nesting, read_json
from .conformal import (
    LEVELS,
    answer,
    check_coverage,
    check_level,
    enough_images,
    level_key,
    question_name,
    recorded_levels,
    stored_coverage,
)
from .data import align_labels, prepare, skip_bad_images
from .data.datasets import ON_BAD_IMAGE
from .data.transforms import ImageTransform, ProcessorTransform
from .files import new_file, replacing, write_text
from .modeling import AvgKForImageClassification, check_folder, refuse_adapter
from .monitor import SetSizeMonitor
from .pipeline import check_processor, config_score
from .set_statistics import SetStatistics
from .sets import check_k, check_thresholds, k_key, predict_sets, score, stored_head, stored_threshold
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments

# what calibrating adds to the config of a classifier of another class
CALIBRATED = ("thresholds", "heads", "head_thresholds", "coverage", "calibration", "score")
# names in a config.json besides the fields of its class that mean something: labels, and timm's own
LABELS = ("model_type", "num_labels", "num_classes", "label_names", "torch_dtype", "pretrained_cfg")
# what the Trainer says besides about its own work
TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time", "epoch")


def load_classifier(name: str) -> PreTrainedModel:
    """An image classifier of any class: a saved folder, a Hub id, or a timm name whose weights are on the Hub."""
    folder = Path(name)
    if folder.is_dir():
        check_folder(folder)
    else:
        if folder.is_absolute() or name.startswith(".") or name.count("/") > 1:
            raise FileNotFoundError(f"there is no model folder {name!r}.")
        if "/" not in name:
            name = _timm_repo(name)
    try:
        config = load_config(name)
        model = AutoModelForImageClassification.from_pretrained(
            name, config=config, use_safetensors=True, trust_remote_code=False
        ).eval()
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} cannot be read ({error}); copy or download them again.") from error
    config = model.config
    try:  # configs of other classes do not look at them
        check_thresholds(getattr(config, "thresholds", None) or {}, config.num_labels, config_score(config))
        check_coverage(getattr(config, "coverage", None) or {}, config.num_labels, config_score(config))
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None
    return model


def load_config(name: str) -> PreTrainedConfig:
    """The config of a stranger's classifier, of which only what describes the model is taken, within bounds.

    transformers acts on other names that it may hold: which code computes attention, which file holds the weights, how
    they are packed.
    """
    refuse_adapter(name)
    try:
        stored, _ = PreTrainedConfig.get_config_dict(name)
    except RecursionError:
        raise ValueError(f"the config.json of {name} is nested too deep: it is damaged.") from None
    check_nesting(stored, f"the config.json of {name}")
    check_labels(stored)
    if not isinstance(stored.get("model_type"), (str, type(None))):
        raise ValueError(f"the config.json of {name} has model_type={stored['model_type']!r}, which is no name.")
    for dtype in ("dtype", "torch_dtype"):
        check_dtype(stored.get(dtype))
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if isinstance(config, AvgKConfig):
        return config
    if isinstance(config, TimmWrapperConfig):
        given = config.model_args or {}
        stored["model_args"] = {name: given[name] for name in given if name != "num_classes"}  # which labels say too
        check_architecture(config.architecture)
        check_model_args(stored["model_args"])
        known_cfg(stored.get("pretrained_cfg") or {})
    known = {*inspect.signature(type(config)).parameters, *CALIBRATED, *LABELS}
    stored = {field: value for field, value in stored.items() if field in known}
    config = type(config).from_dict(stored, name_or_path=name)
    config._attn_implementation = config._experts_implementation = None  # of parts of the config, too
    with torch.device("meta"), bounded(name):  # a trial that takes no memory
        AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    return config


def _timm_repo(name: str) -> str:
    """The Hub id of the weights that timm would load for a model name."""
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name.split(".")[0]) else None
    if cfg is None or not cfg.hf_hub_id:
        raise ValueError(f"{name!r} is neither a folder, a Hub id, nor a timm model with weights on the Hub.")
    return cfg.hf_hub_id


def transform_for(model: PreTrainedModel) -> ImageTransform | ProcessorTransform:
    """How images become this model's input."""
    if isinstance(model, AvgKForImageClassification):
        return ImageTransform(model.config)
    return ProcessorTransform(image_processor(model))


def image_processor(model: PreTrainedModel) -> Any:
    """The image processor that was saved with a classifier of another class."""
    if not model.name_or_path:
        raise ValueError(
            "this model was not loaded from anywhere, so its preprocessing is not known: save it with its image"
            " processor and load it with `load_classifier(folder)`."
        )
    processor = AutoImageProcessor.from_pretrained(model.name_or_path, trust_remote_code=False)
    check_processor(processor)
    return processor


def model_scores(model: PreTrainedModel, pixel_values: Tensor, k: float | None = None) -> Tensor:
    """The scores (B, L) of any classifier that are compared with lambda_val."""
    if isinstance(model, AvgKForImageClassification):
        return model.scores(pixel_values, k)
    with torch.no_grad():
        logits = model.eval()(pixel_values.to(model.device, model.dtype)).logits
    return score(logits, config_score(model.config))


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


def save_classifier(model: PreTrainedModel, folder: str | Path, metrics: dict[str, float]) -> None:
    """Save a calibrated classifier of any class with its image processor and a card."""
    from .model_card import render_card

    folder = Path(folder)
    with replacing(folder) as new:
        if not isinstance(model, AvgKForImageClassification):
            image_processor(model).save_pretrained(new)
        model.save_pretrained(new)
    dataset = (model.config.calibration or {}).get("dataset")
    card = render_card(folder.name, model.config, {"validation": metrics}, {}, dataset, calibrated_only=True)
    with new_file(folder / "README.md") as new:
        card.save(new)


def write_thresholds(model: PreTrainedModel, folder: str | Path) -> None:
    """Store the thresholds of a calibrated model in the config.json of the folder it was loaded from."""
    path = Path(folder) / "config.json"
    found = {name: getattr(model.config, name) for name in CALIBRATED if hasattr(model.config, name)}
    config = {**read_json(path), **found}
    write_text(path, json.dumps(config, indent=2, sort_keys=True, ensure_ascii=False) + "\n")
