"""`AvgKConfig`: everything that makes a saved folder a set-valued classifier, thresholds included."""

import math
from dataclasses import field
from typing import Any

from huggingface_hub.dataclasses import strict
from transformers import PreTrainedConfig

from .sets import SCORES, check_k, k_key

OBJECTIVES = ("ce", "avgk")
HEADS = ("ml", "sccp", "mean")


@strict
class AvgKConfig(PreTrainedConfig):
    """Configuration of `AvgKForImageClassification`.

    Args:
        architecture: Name of a timm model.
        model_args: Further keyword arguments of `timm.create_model`, e.g. `{"in_chans": 1}`.
        pretrained_cfg: timm's description of the input (size, mean, std, ...), read by the image processor.
        objective: The training loss, a key of `avgk_hf.losses.LOSSES`.
        k: The average set size asked for in training, and the default in prediction. In [1, L).
        alpha: Weight of the pseudo-labels in the AVG-K loss.
        score: What is thresholded: `"softmax"`, `"sigmoid"` or `"logit"`.
        head: Which logits are thresholded: `"ml"`, `"sccp"` or `"mean"`.
        sccp_head: Whether the model has the SCCP head besides the ML head.
        thresholds: {K: lambda_val} from validation; K as text, lambda_val a plain float.
        calibration: Where the thresholds come from: number of images, split, dataset, date, training step.
        train_counts: Training images of each class, for the few / medium / many shot means.

    Example:
        >>> config = AvgKConfig(architecture="test_resnet", num_labels=10, k=2, thresholds={"2": 0.125})
        >>> config.threshold(2)
        0.125
    """

    model_type = "avgk"

    architecture: str = "resnet18"
    model_args: dict[str, Any] = field(default_factory=dict)
    pretrained_cfg: dict[str, Any] = field(default_factory=dict)
    image_processor_type: str = "TimmWrapperImageProcessor"
    objective: str = "avgk"
    k: float | int = 5
    alpha: float | int = 1.0
    score: str = "softmax"
    head: str = "ml"
    sccp_head: bool = True
    thresholds: dict[str, float | int] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None
    train_counts: list[int] | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse a field that could only fail later, by its name."""
        super().__post_init__(**kwargs)
        for name, allowed in (("objective", OBJECTIVES), ("score", tuple(SCORES)), ("head", HEADS)):
            if getattr(self, name) not in allowed:
                raise ValueError(f"config.{name}={getattr(self, name)!r} is unknown; choose one of {list(allowed)}.")
        if not math.isfinite(self.alpha) or self.alpha < 0:
            raise ValueError(f"config.alpha={self.alpha!r} must be a finite number >= 0, e.g. 1.0.")
        if self.train_counts is not None and len(self.train_counts) != self.num_labels:
            raise ValueError(f"config.train_counts has {len(self.train_counts)} values for {self.num_labels} classes.")
        for key, lambda_val in self.thresholds.items():
            try:
                check_k(float(key), self.num_labels)
            except ValueError as error:
                raise ValueError(f"config.thresholds has the key {key!r}: {error}") from None
            if isinstance(lambda_val, bool) or not math.isfinite(lambda_val):
                raise ValueError(
                    f"config.thresholds[{key!r}]={lambda_val!r} is not a finite number. Calibrate the model again with"
                    " `trainer.evaluate()`."
                )

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "AvgKConfig":
        """As in the base class; thresholds of another number of classes are dropped with the old head."""
        stored = len(config_dict.get("id2label") or {})
        wanted = len(kwargs["id2label"]) if "id2label" in kwargs else kwargs.get("num_labels", stored)
        if stored and wanted != stored:
            stale = ("thresholds", "calibration", "train_counts")
            config_dict = {name: value for name, value in config_dict.items() if name not in stale}
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json: also those defaults that other readers of the file depend on."""
        stated = ("architecture", "pretrained_cfg", "image_processor_type", "objective", "k", "score", "head")
        output = super().to_diff_dict()
        return {**output, **{name: getattr(self, name) for name in (*stated, "sccp_head", "thresholds")}}

    def threshold(self, k: float | None = None) -> float:
        """lambda_val of `k` (default: `self.k`); refuses where none was calibrated."""
        k = check_k(self.k if k is None else k, self.num_labels)
        if not self.thresholds:
            raise ValueError(
                "this model has no thresholds, so it cannot predict sets: calibrate it on validation images with"
                " `trainer.evaluate()`, or with `avgk calibrate MODEL DATASET`."
            )
        if k_key(k) not in self.thresholds:
            raise ValueError(
                f"no threshold is stored for k={k_key(k)}; this model is calibrated for k in"
                f" {', '.join(self.thresholds)}. Ask for one of these, or calibrate again with"
                f" `avgk calibrate MODEL DATASET --k {k_key(k)}`."
            )
        return float(self.thresholds[k_key(k)])

    def set_calibration(self, thresholds: dict[float, float], record: dict[str, Any]) -> None:
        """Store the thresholds {K: lambda_val} and where they come from."""
        self.thresholds = {k_key(k): float(lambda_val) for k, lambda_val in sorted(thresholds.items())}
        self.calibration = record

    def clear_calibration(self) -> None:
        """Forget the thresholds, because the weights or the classes they belong to have changed."""
        self.thresholds = {}
        self.calibration = None
