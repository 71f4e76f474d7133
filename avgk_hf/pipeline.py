"""`pipeline("average-k-image-classification")`: for each image a list of classes, as many as it needs.

Like the model, this file travels with a saved model as remote code.
"""

from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from transformers import Pipeline
from transformers.image_utils import load_image

from .sets import head_scores, predict_sets, ranked_sets, stored_head, stored_threshold

TASK = "average-k-image-classification"


class AverageKImageClassificationPipeline(Pipeline):
    """Set-valued image classification with any calibrated classifier.

    Call it with one image (path, URL or Pillow image) or several (list, generator, dataset). The answer for an image
    is a list of `{"label", "score"}`, best first, as long as the image needs.

    Args of a call:
        k: Average set size, one of those calibrated; default the model's own.
        lambda_val: Threshold to use instead of the calibrated one.
        min_size: At least this many classes (default 1).
        max_size: At most this many classes (default: no limit).
        timeout: Seconds to wait for an image from the web.

    Example:
        >>> import PIL.Image, avgk_hf.auto
        >>> from transformers import TimmWrapperImageProcessor, pipeline
        >>> from avgk_hf import AvgKForImageClassification
        >>> model = AvgKForImageClassification.from_timm("test_resnet", num_labels=10, k=2)
        >>> model.config.set_calibration({2: 0.0}, record={})
        >>> processor = TimmWrapperImageProcessor(model.config.pretrained_cfg)
        >>> classify = pipeline("average-k-image-classification", model=model, image_processor=processor)
        >>> len(classify(PIL.Image.new("RGB", (64, 64)), max_size=3))
        3
    """

    _load_processor = False
    _load_image_processor = True
    _load_feature_extractor = False
    _load_tokenizer = False

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # an uncalibrated model is refused here, before any image is read
        if "lambda_val" not in self._postprocess_params:
            stored_threshold(self.model.config, self._postprocess_params.get("k"))

    def _sanitize_parameters(
        self,
        k: float | None = None,
        lambda_val: float | None = None,
        min_size: int | None = None,
        max_size: int | None = None,
        timeout: float | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        answer = {"k": k, "lambda_val": lambda_val, "min_size": min_size, "max_size": max_size}
        answer = {name: value for name, value in answer.items() if value is not None}
        return {} if timeout is None else {"timeout": timeout}, {}, answer

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """The sets of one image or of several; a dataset is read from its column `image`."""
        if hasattr(inputs, "column_names") and "image" in inputs.column_names:
            return list(super().__call__((row["image"] for row in inputs), **kwargs))
        return super().__call__(inputs, **kwargs)

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """One image as the model takes it."""
        if not isinstance(image, (np.ndarray, torch.Tensor)):
            image = load_image(image, timeout=timeout)
        return self.image_processor(images=image, return_tensors="pt").to(self.dtype)

    def _forward(self, model_inputs: dict[str, torch.Tensor]) -> Any:
        return self.model(**model_inputs)

    def postprocess(
        self,
        model_outputs: Any,
        k: float | None = None,
        lambda_val: float | None = None,
        min_size: int = 1,
        max_size: int | None = None,
    ) -> list[dict[str, Any]]:
        """The set of one image."""
        config = self.model.config
        if max_size is not None and max_size < min_size:
            raise ValueError(f"max_size={max_size} is below min_size={min_size}: no set can have such a size.")
        threshold = stored_threshold(config, k) if lambda_val is None else lambda_val
        scores = head_scores(
            model_outputs["logits"], model_outputs.get("sccp_logits"), stored_head(config, k), config_score(config)
        )
        classes: Iterable[int] = ranked_sets(scores, predict_sets(scores, threshold, min_size))[0][:max_size]
        return [{"label": config.id2label[j], "score": scores[0, j].item()} for j in classes]


def config_score(config: Any) -> str:
    """What a model's scores are; a classifier that does not say is thresholded by its softmax."""
    return getattr(config, "score", "softmax")
