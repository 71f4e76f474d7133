"""What results.json holds: how a model was trained, and what was measured since."""

import json
from importlib.metadata import version
from pathlib import Path
from typing import Any

from . import __version__
from .calibration import Calibration
from .checks import read_json
from .configuration import AvgKConfig
from .files import write_text
from .sets import k_key

RESULTS = "results.json"
CALIBRATED_ONLY = "a model that was calibrated and not trained, or saved by `save_pretrained`, has none"
# the training arguments that the weights depend on, besides the seed
TRAINED = ("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
TRAINED += ("optim", "optim_args", "learning_rate", "lr_scheduler_type", "lr_milestones", "lr_gamma", "warmup_steps")
TRAINED += ("weight_decay", "decay_all", "max_grad_norm", "bf16", "fp16", "early_stopping_patience")
TRAINED += ("ema_decay", "metric_for_best_model", "balance")  # the last two choose the best checkpoint


def run_results(config: AvgKConfig, args: Any, card: Any, dataset: str | None, frozen: bool = False) -> dict[str, Any]:
    """What results.json holds: how a model was trained, and the metrics that the callback has kept of it.

    Args:
        config: Of the model, calibrated.
        args: Training arguments.
        card: The callback of the trainer.
        dataset: Name of the data.
        frozen: Whether the heads alone learnt.
    """
    packages = {name: version(name) for name in ("torch", "timm", "transformers")}
    shown = {
        "backbone": config.architecture + ", frozen: only the heads learn" * frozen,
        "input": " x ".join(map(str, config.pretrained_cfg["input_size"])),
        "objective": config.objective,
        "k": k_key(config.k),
        **config.hyperparameters,
        "score / head": f"{config.score} / {config.head}",
        **({} if config.test_time_augmentation == "none" else {"test time": config.test_time_augmentation}),
        "epochs": f"{args.num_train_epochs:g}",
        "batch size": args.train_batch_size * args.gradient_accumulation_steps * args.world_size,
        "optimizer": ", ".join(filter(None, [getattr(args.optim, "value", args.optim), args.optim_args])),
        "learning rate": args.learning_rate,
        "weight decay": args.weight_decay,
        "seed": args.seed,
    }
    return {
        "dataset": dataset,
        "data": {},
        "objective": config.objective,
        "k": config.k,
        "seed": args.seed,
        "hyperparameters": shown,  # by the card
        "recipe": {name: getattr(args, name) for name in TRAINED},
        "versions": {"avgk_hf": __version__, **packages},
        **{split: metrics for split, metrics in card.results(config).items() if split in ("validation", "test")},
        **({"set_sizes": card.set_sizes} if card.set_sizes else {}),
    }


def read_results(folder: Path, *further: str) -> dict[str, Any]:
    """What `avgk train` wrote to results.json; a damaged one is refused with the name of the file and the field."""
    path = folder / RESULTS
    results = read_json(path)
    for name in ("dataset", "hyperparameters", "validation", *further):
        if name not in results:
            raise ValueError(f"{path} has no field {name!r}; write it anew with `avgk train`.")
        if name != "dataset" and not isinstance(results[name], dict):
            raise ValueError(f"{path}: the field {name!r} must be a mapping, not {results[name]!r}.")
    for split in ("validation", "test"):
        for name, value in results.get(split, {}).items():
            if value is not None and not isinstance(value, int | float):
                raise ValueError(f"{path}: {split}.{name}={value!r} must be a number.")
    return results


def of_other_thresholds(config: Any, results: dict[str, dict[str, float]]) -> bool:
    """Whether metrics, by split, were measured with other thresholds than the model has now."""
    calibration = Calibration.of(config)
    own = calibration.threshold() if calibration.ks else None
    return any(metrics.get("lambda_val", own) != own for metrics in results.values())


def renew_results(folder: Path, dataset: str, split: str, metrics: dict[str, float], sizes: Any = None) -> bool:
    """Put what was measured now in the place of what results.json holds, where that is about the same images.

    Args:
        folder: Of the model.
        dataset: Its data, without their folder.
        split: `"validation"` or `"test"`; of another nothing is recorded.
        metrics: As `evaluation.evaluate` gives them.
        sizes: `set_sizes` of test images.

    Returns:
        Whether anything was renewed.
    """
    results = read_results(folder) if (folder / RESULTS).is_file() else {}
    if (
        split not in results
        or "average_k_accuracy" not in metrics
        or Path(str(results.get("dataset"))).name != Path(dataset).name
    ):
        return False
    about = ("monitored_k", "set_size_low", "set_size_high", "drifted", "num_images", "skipped")
    results[split] = {name: value for name, value in metrics.items() if name not in about}
    results |= {"set_sizes": sizes} if sizes and split == "test" else {}
    write_text(folder / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
    return True
