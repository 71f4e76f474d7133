"""`AvgKTrainingArguments`: transformers' training arguments, and the sizes to calibrate for."""

import os
from dataclasses import dataclass, field

import torch
from transformers import TrainingArguments


@dataclass
class AvgKTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults that average-K training needs.

    The best checkpoint is the one with the highest validation average-K accuracy, evaluation keeps no score matrix,
    and dataset columns are left to the transform.

    Args:
        calibrate_k: Average set sizes to compute thresholds for in every evaluation; the model's own `k` is always
            among them.
        early_stopping_patience: Evaluations without improvement after which `avgk train` stops.
    """

    calibrate_k: list[float] = field(
        default_factory=list,
        metadata={"help": "Average set sizes to compute thresholds for, besides the model's own k, e.g. 1 2 5 10."},
    )
    early_stopping_patience: int | None = field(
        default=None,
        metadata={"help": "Stop after this many evaluations without a better metric_for_best_model."},
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
        """As in the base class; several processes without an accelerator train together, not each for itself."""
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        super().__post_init__()
