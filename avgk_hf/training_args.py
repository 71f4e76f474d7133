"""`AvgKTrainingArguments`: transformers' training arguments, and the sizes to calibrate for."""

from dataclasses import dataclass, field

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
        """Refuse milestones that could only surprise later."""
        super().__post_init__()
        if self.lr_milestones != sorted(set(self.lr_milestones)) or any(epoch <= 0 for epoch in self.lr_milestones):
            raise ValueError(f"lr_milestones={self.lr_milestones} must be epochs in ascending order, e.g. 150 225.")
        if self.lr_gamma <= 0:
            raise ValueError(f"lr_gamma={self.lr_gamma} must be greater than 0, e.g. 0.1.")
        if self.lr_milestones and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} belongs to lr_scheduler_type, which lr_milestones replace: leave"
                " one of them out."
            )
