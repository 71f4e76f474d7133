"""`AvgKTrainingArguments`: transformers' training arguments, and the sizes to calibrate for."""

import math
import os
import re
from dataclasses import dataclass, fields
from typing import Any

import torch
from transformers import TrainingArguments
from transformers.hf_argparser import HfArg

from .checks import check_choice, check_whole, is_number
from .conformal import LEVELS, METHODS, check_level
from .sets import check_k

LARGEST_SEED = 2**32 - 1
# what transformers takes as it comes, to fail in the middle: fields by the least whole number that they take
LEAST = {
    0: ("dataloader_num_workers", "seed", "data_seed"),
    1: (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("save_total_limit", "early_stopping_patience", "seeds"),
    ),
}


def _positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _ascending(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_positive, value)) and list(value) == sorted(set(value))


def _pairs(value: Any) -> bool:
    return all(part.count("=") == 1 for part in str(value).split(","))


RULES = (  # further fields, what their values must be, and whether one is
    (
        ("num_train_epochs", "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"),
        "a finite number of at least 0",
        lambda value: is_number(value) and 0 <= value < math.inf,
    ),
    (("save_steps", "eval_steps", "logging_steps"), "a number of steps, or a share of them in (0, 1)", _positive),
    (("greater_is_better", "remove_unused_columns"), "true or false", lambda value: value in (True, False)),
    (("calibrate_k",), "a list of numbers, e.g. `[1, 2, 5]`", lambda value: isinstance(value, (list, tuple))),
    (("calibrate_coverage",), "a list, e.g. `[0.9, 0.95]`", lambda value: isinstance(value, (list, tuple))),
    (("lr_gamma",), "a number greater than 0, e.g. 0.1", _positive),
    (("lr_milestones",), "a list of epochs in ascending order, e.g. [150, 225]", _ascending),
    (("metric_for_best_model",), "a metric's name, e.g. 'loss'", lambda value: isinstance(value, str) and value),
    (("optim_args",), "`name=value` pairs, e.g. momentum=0.9", _pairs),
)


@dataclass
class AvgKTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults that average-K training needs.

    The best checkpoint is the one with the highest validation average-K accuracy, evaluation keeps no score matrix,
    and dataset columns are left to the transform.

    Args:
        calibrate_k: Average set sizes to compute thresholds for in every evaluation; the model's own `k` is always
            among them.
        calibrate_coverage: Coverage levels to compute conformal thresholds for in every evaluation, and to report on
            other data; a level that takes more validation images than there are is left out. Empty for none.
        calibrate_per_class: Whether to compute the thresholds of each class too, and to answer with them.
        coverage_method: How the coverage that is reported on other data is reached: `"lac"`, `"aps"` or `"raps"`.
        early_stopping_patience: Evaluations without improvement after which `avgk train` stops.
        seeds: How often `avgk train` trains, with seeds `seed`, `seed` + 1, ..., each in a folder of its own.
        lr_milestones: Epochs after which the learning rate is multiplied by `lr_gamma`, instead of the schedule that
            `lr_scheduler_type` names.
        lr_gamma: The factor.
        decay_all: Whether weight decay acts on every parameter, as in plain `torch.optim.SGD`. By default biases and
            most normalisation layers are left out, as in `Trainer`.
    """

    calibrate_k: list[float] = HfArg(
        default_factory=list, help="Average set sizes to compute thresholds for, besides the model's k, e.g. 1 2 5."
    )
    calibrate_coverage: list[float] = HfArg(
        default_factory=lambda: list(LEVELS), help="Coverage levels to compute thresholds for, e.g. 0.9 0.95 0.99."
    )
    calibrate_per_class: bool = HfArg(default=False, help="Compute the thresholds of coverage for each class too.")
    coverage_method: str = HfArg(
        default="lac", help="How the coverage reported on test is reached.", metadata={"choices": list(METHODS)}
    )
    early_stopping_patience: int | None = HfArg(
        default=None, help="Stop after this many evaluations without a better one."
    )
    lr_milestones: list[float] = HfArg(
        default_factory=list, help="Epochs after which the learning rate is multiplied by lr_gamma, e.g. 150 225."
    )
    lr_gamma: float = HfArg(default=0.1, help="What lr_milestones multiply the learning rate by.")
    decay_all: bool = HfArg(default=False, help="Apply weight decay to biases and normalisation layers too.")
    seeds: int = HfArg(default=1, help="Train this often, with seeds `seed`, `seed` + 1, ..., and report the mean.")
    metric_for_best_model: str | None = "average_k_accuracy"
    greater_is_better: bool | None = True
    logging_nan_inf_filter: bool = False  # a loss that is not finite ends the training
    remove_unused_columns: bool = False  # images are made from columns that the model does not know

    def __post_init__(self) -> None:
        """As in the base class, after refusing values that could only fail later.

        Several processes without an accelerator train together, not each for itself.
        """
        self._check()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
        if self.lr_milestones and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} belongs to lr_scheduler_type, which lr_milestones replace: leave"
                " one of them out."
            )

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: all but the token, because `Trainer` writes its arguments into every checkpoint."""
        return {**self.__dict__, "hub_token": None}

    def _check(self) -> None:
        may_be_none = {item.name for item in fields(TrainingArguments) if item.default is None}
        may_be_none.add("early_stopping_patience")
        given = {name: value for name, value in vars(self).items() if value is not None or name not in may_be_none}
        for least, names in LEAST.items():
            for name in names:
                if name in given:
                    check_whole(name, given[name], least, ", or left out" if name in may_be_none else "")
        for names, allowed, is_allowed in RULES:
            for name in names:
                if name in given and not is_allowed(given[name]):
                    raise ValueError(f"{name}={given[name]!r} must be {allowed}.")
        try:
            self.calibrate_k = [check_k(k) for k in self.calibrate_k]
        except ValueError as error:
            raise ValueError(f"calibrate_k={self.calibrate_k!r}: {error}") from None
        self.calibrate_coverage = [check_level(level, "calibrate_coverage") for level in self.calibrate_coverage]
        check_choice("coverage_method", self.coverage_method, METHODS)
        if self.coverage_method != "lac" and self.calibrate_per_class:
            raise ValueError(f"coverage_method={self.coverage_method!r} has no thresholds per class: use 'lac'.")
        last = max(self.seed + self.seeds - 1, self.data_seed or 0)
        if last > LARGEST_SEED:
            raise ValueError(f"seed={last} is too large: seed and data_seed may be {LARGEST_SEED} at most.")
        if self.hub_token and not re.fullmatch("[!-~]+", str(self.hub_token)):  # the client's error would show it
            raise ValueError("hub_token holds a space or another character that no token has; copy it anew.")
