"""`AvgKTrainingArguments`: transformers' training arguments, and the sizes to calibrate for."""

from dataclasses import dataclass, field

from transformers import TrainingArguments

from .sets import check_k


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
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Leave this off: images are made from columns the model does not know."}
    )
    batch_eval_metrics: bool = field(
        default=True, metadata={"help": "Leave this on: evaluation then needs memory for K n scores, not for n L."}
    )
    include_for_metrics: list[str] = field(
        default_factory=lambda: ["loss"], metadata={"help": "Leave as it is: the evaluation loss is averaged from it."}
    )

    def __post_init__(self) -> None:
        """As in the base class, after refusing values that could only fail later."""
        if not isinstance(self.calibrate_k, (list, tuple)):
            raise ValueError(f"calibrate_k={self.calibrate_k!r} must be a list of numbers, e.g. `[1, 2, 5]`.")
        for k in self.calibrate_k:
            try:
                check_k(k)
            except ValueError as error:
                raise ValueError(f"calibrate_k={self.calibrate_k!r}: {error}") from None
        patience = self.early_stopping_patience
        if patience is not None and (isinstance(patience, bool) or not isinstance(patience, int) or patience < 1):
            raise ValueError(
                f"early_stopping_patience={patience!r} must be a whole number of at least 1, or left out for none."
            )
        metric = self.metric_for_best_model
        if metric is not None and (not isinstance(metric, str) or not metric):
            raise ValueError(f"metric_for_best_model={metric!r} must name a metric, e.g. 'average_k_accuracy'.")
        for name in ("greater_is_better", "remove_unused_columns"):
            if getattr(self, name) not in (True, False, None):
                raise ValueError(f"{name}={getattr(self, name)!r} must be true or false.")
        if self.batch_eval_metrics is not True:
            raise ValueError(f"batch_eval_metrics={self.batch_eval_metrics!r} must stay true: leave the field out.")
        if "loss" not in (self.include_for_metrics or ()):
            raise ValueError(
                f"include_for_metrics={self.include_for_metrics!r} must hold 'loss': leave the field out, or add it."
            )
        super().__post_init__()
