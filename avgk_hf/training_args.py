"""`AvgKTrainingArguments`: transformers' training arguments, and the sizes to calibrate for."""

import math
import os
import re
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import TrainingArguments

from .checks import is_number
from .conformal import LEVELS, METHODS, check_level
from .sets import check_k

# what transformers takes as it comes, to fail in the middle: the least value, and whether it must be a whole number
LEAST = {
    **dict.fromkeys(("per_device_train_batch_size", "per_device_eval_batch_size"), (1, True)),
    **dict.fromkeys(("gradient_accumulation_steps", "save_total_limit"), (1, True)),
    **dict.fromkeys(("dataloader_num_workers", "seed", "data_seed"), (0, True)),
    **dict.fromkeys(("num_train_epochs", "learning_rate", "weight_decay"), (0, False)),
    **dict.fromkeys(("max_grad_norm", "warmup_steps"), (0, False)),
}
LARGEST_SEED = 2**32 - 1


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

    calibrate_k: list[float] = field(
        default_factory=list,
        metadata={"help": "Average set sizes to compute thresholds for, besides the model's own k, e.g. 1 2 5 10."},
    )
    calibrate_coverage: list[float] = field(
        default_factory=lambda: list(LEVELS),
        metadata={"help": "Coverage levels to compute conformal thresholds for, e.g. 0.9 0.95 0.99."},
    )
    calibrate_per_class: bool = field(
        default=False, metadata={"help": "Compute the thresholds of these coverage levels for each class too."}
    )
    coverage_method: str = field(
        default="lac",
        metadata={"help": "How the coverage reported on test is reached.", "choices": list(METHODS)},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "Stop after this many evaluations without a better metric_for_best_model."},
    )
    lr_milestones: list[float] = field(
        default_factory=list,
        metadata={"help": "Epochs after which the learning rate is multiplied by lr_gamma, e.g. 150 225."},
    )
    lr_gamma: float = field(default=0.1, metadata={"help": "What lr_milestones multiply the learning rate by."})
    decay_all: bool = field(
        default=False, metadata={"help": "Apply weight decay to biases and normalisation layers too."}
    )
    seeds: int = field(
        default=1, metadata={"help": "Train this often, with seeds `seed`, `seed` + 1, ..., and report the mean."}
    )
    metric_for_best_model: str | None = field(
        default="average_k_accuracy", metadata={"help": "The validation metric that decides on the best checkpoint."}
    )
    greater_is_better: bool | None = field(
        default=True, metadata={"help": "Whether a larger value of `metric_for_best_model` is better."}
    )
    logging_nan_inf_filter: bool = field(
        default=False, metadata={"help": "Leave this off: a loss that is not finite ends the training."}
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Leave this off: images are made from columns the model does not know."}
    )

    def __post_init__(self) -> None:
        """As in the base class, after refusing values that could only fail later.

        Several processes without an accelerator train together, not each for itself.
        """
        if not isinstance(self.calibrate_k, (list, tuple)):
            raise ValueError(f"calibrate_k={self.calibrate_k!r} must be a list of numbers, e.g. `[1, 2, 5]`.")
        for k in self.calibrate_k:
            try:
                check_k(k)
            except ValueError as error:
                raise ValueError(f"calibrate_k={self.calibrate_k!r}: {error}") from None
        if not isinstance(self.calibrate_coverage, (list, tuple)):
            raise ValueError(f"calibrate_coverage={self.calibrate_coverage!r} must be a list, e.g. `[0.9, 0.95]`.")
        for level in self.calibrate_coverage:
            check_level(level, "calibrate_coverage")
        if self.coverage_method not in METHODS:
            raise ValueError(f"coverage_method={self.coverage_method!r} is unknown; choose one of {list(METHODS)}.")
        if self.coverage_method != "lac" and self.calibrate_per_class:
            raise ValueError(f"coverage_method={self.coverage_method!r} has no thresholds per class: use 'lac'.")
        patience = self.early_stopping_patience
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise ValueError(
                f"early_stopping_patience={patience!r} must be a whole number of at least 1, or left out for none."
            )
        if isinstance(self.seeds, bool) or not isinstance(self.seeds, int) or self.seeds < 1:
            raise ValueError(f"seeds={self.seeds!r} must be a whole number of at least 1, e.g. `seeds: 5`.")
        metric = self.metric_for_best_model
        if metric is not None and (not isinstance(metric, str) or not metric):
            raise ValueError(f"metric_for_best_model={metric!r} must name a metric, e.g. 'average_k_accuracy'.")
        for name in ("greater_is_better", "remove_unused_columns"):
            if getattr(self, name) not in (True, False, None):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false.")
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        self._check_ranges()
        if self.hub_token and not re.fullmatch("[!-~]+", str(self.hub_token)):  # the client's error would show it
            raise ValueError("hub_token holds a space or another character that no token has; copy it anew.")
        super().__post_init__()
        epochs = self.lr_milestones
        numbers = isinstance(epochs, (list, tuple)) and all(
            is_number(epoch) and 0 < epoch < math.inf for epoch in epochs
        )
        if not numbers or list(epochs) != sorted(set(epochs)):
            raise ValueError(f"lr_milestones={epochs!r} must be a list of epochs in ascending order, e.g. [150, 225].")
        if not math.isfinite(self.lr_gamma) or self.lr_gamma <= 0:
            raise ValueError(f"lr_gamma={self.lr_gamma} must be a number greater than 0, e.g. 0.1.")
        if self.lr_milestones and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} belongs to lr_scheduler_type, which lr_milestones replace: leave"
                " one of them out."
            )

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: all but the token, because `Trainer` writes its arguments into every checkpoint."""
        return {**self.__dict__, "hub_token": None}

    def _check_ranges(self) -> None:
        for name, (least, whole) in LEAST.items():
            value = getattr(self, name)
            if value is None:
                continue
            if not is_number(value) or not least <= value < math.inf or (whole and value != int(value)):
                kind = "whole number" if whole else "finite number"
                raise ValueError(f"{name}={value!r} must be a {kind} of at least {least}.")
        for name in ("save_steps", "eval_steps", "logging_steps"):
            value = getattr(self, name)
            if value is not None and (not is_number(value) or not 0 < value < math.inf):
                raise ValueError(f"{name}={value!r} must be a number of steps, or a share of them in (0, 1).")
        last = max(self.seed + self.seeds - 1, self.data_seed or 0)
        if last > LARGEST_SEED:
            raise ValueError(f"seed={last} is too large: seed and data_seed may be {LARGEST_SEED} at most.")
        for part in self.optim_args.replace(" ", "").split(",") if isinstance(self.optim_args, str) else ():
            if part.count("=") != 1:
                raise ValueError(f"optim_args={self.optim_args!r} must be `name=value` pairs, e.g. momentum=0.9.")
