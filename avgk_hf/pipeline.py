"""`pipeline("average-k-image-classification")`: for each image a list of classes, as many as it needs.

Like the model, this file travels with a saved model as remote code.
"""

import base64
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import torch
from transformers import Pipeline

from .backbones import MOST_SIDE, known_cfg
from .conformal import answer, check_request
from .images import open_image
from .monitor import SetSizeMonitor
from .sets import head_scores, predict_sets, ranked_sets, stored_head, stored_threshold

TASK = "average-k-image-classification"
SIDES = ("height", "width", "shortest_edge", "longest_edge")  # names of transformers' image processors


class AverageKImageClassificationPipeline(Pipeline):
    """Set-valued image classification with any calibrated classifier.

    Call it with one image (path, URL or Pillow image) or several (list, generator, dataset). The answer for an image
    is a list of `{"label", "score"}`, best first, as long as the image needs.

    `monitor`, a `SetSizeMonitor`, follows the set sizes of the K that the pipeline was made for, and warns once when
    their mean leaves K; answers to other questions are not counted. `monitor=False` leaves it out.

    Args of a call, of the first four one at most; those of a call take the place of those of the pipeline:
        k: Average set size, in the calibrated range; default the model's own.
        coverage: Share of images whose set is to hold the true class, one of those calibrated.
        cumulative: The fewest best classes whose probabilities sum to this.
        lambda_val: Threshold to use instead of the calibrated one.
        method: How coverage is reached: `"lac"` (default), `"aps"` or `"raps"`.
        per_class: Reach the coverage in every class (in those with few validation images: on average over them).
        min_size: At least this many classes (default 1).
        max_size: At most this many classes (default: no limit).
        timeout: Seconds to wait for an image from the web.

    Example:
        >>> import PIL.Image
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

    def __init__(self, *args: Any, monitor: bool = True, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        check_processor(self.image_processor)
        # a question that the model cannot answer is refused here, before any image is read
        check_request(self.model.config, **{"min_size": 1, **self._postprocess_params})
        self.monitor: SetSizeMonitor | None = None
        if monitor and _by_size(self._postprocess_params):
            self.monitor = SetSizeMonitor.from_config(self.model.config, self._postprocess_params.get("k"))

    def _sanitize_parameters(
        self,
        k: float | None = None,
        lambda_val: float | None = None,
        min_size: int | None = None,
        max_size: int | None = None,
        timeout: float | None = None,
        coverage: float | None = None,
        cumulative: float | None = None,
        method: str | None = None,
        per_class: bool | None = None,
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        question = {"k": k, "coverage": coverage, "cumulative": cumulative, "lambda_val": lambda_val}
        if all(value is None for value in question.values()):
            question = {}
        elif coverage is None:  # another question than the pipeline's own takes its place, with what belongs to it
            question |= {"method": "lac", "per_class": False}
        if method is not None or per_class is not None:  # so does another way to reach a coverage
            method, per_class = method or "lac", bool(per_class)
        details = {"method": method, "per_class": per_class, "min_size": min_size, "max_size": max_size}
        details = {name: value for name, value in details.items() if value is not None}
        return {} if timeout is None else {"timeout": timeout}, {}, {**question, **details}

    def __call__(self, inputs: Any, **kwargs: Any) -> Any:
        """The sets of one image or of several; a dataset is read from its column `image`."""
        if hasattr(inputs, "column_names") and "image" in inputs.column_names:
            return list(super().__call__((row["image"] for row in inputs), **kwargs))
        return super().__call__(inputs, **kwargs)

    def preprocess(self, image: Any, timeout: float | None = None) -> dict[str, torch.Tensor]:
        """One image as the model takes it."""
        if not isinstance(image, (np.ndarray, torch.Tensor)):
            channels = (getattr(self.model.config, "pretrained_cfg", None) or {}).get("input_size", [3])[0]
            image = open_image(
                _fetch(image, timeout) if isinstance(image, str) else image, "L" if channels == 1 else "RGB"
            )
        return self.image_processor(images=image, return_tensors="pt").to(self.dtype)

    def _forward(self, model_inputs: dict[str, torch.Tensor]) -> Any:
        return self.model(**model_inputs)

    def postprocess(
        self, model_outputs: Any, k: float | None = None, min_size: int = 1, **question: Any
    ) -> list[dict[str, Any]]:
        """The set of one image."""
        config = self.model.config
        scores = head_scores(
            model_outputs["logits"], model_outputs.get("sccp_logits"), stored_head(config, k), config_score(config)
        )
        classes = ranked_sets(scores, answer(scores, config, k=k, min_size=min_size, **question))[0]
        if self.monitor is not None and _by_size(question) and k in (None, self.monitor.k):
            # K was calibrated without a smallest or largest size
            self.monitor.update(predict_sets(scores, stored_threshold(config, k)))
        return [{"label": config.id2label[j], "score": scores[0, j].item()} for j in classes]


def _by_size(question: dict[str, Any]) -> bool:
    return all(question.get(name) is None for name in ("coverage", "cumulative", "lambda_val"))


def _fetch(source: str, timeout: float | None) -> str | bytes | dict[str, Any]:
    """What `open_image` takes of a path, of base64, or of what is behind a URL."""
    short = source if len(source) <= 100 else source[:100] + "..."
    if source.startswith(("http://", "https://")):
        try:
            answered = httpx.get(source, timeout=timeout, follow_redirects=True).raise_for_status()
            return {"bytes": answered.content, "path": short}
        except Exception as error:  # of the network, or of an address that is none
            reason = " ".join(str(error).split())
            raise OSError(f"{short} cannot be loaded as an image ({reason}); check the address.") from error
    try:
        is_file = Path(source).is_file()
    except (OSError, ValueError):  # too long for a name, or with a NUL
        is_file = False
    if is_file:
        return source
    try:
        return base64.b64decode(source.split(",")[-1] if source.startswith("data:image/") else source, validate=True)
    except ValueError:
        raise FileNotFoundError(f"{short}: there is no such file; give a path, a URL, or base64.") from None


def check_processor(processor: Any) -> None:
    """Refuse an image processor that would make images of enormous size; its settings come with the model."""
    settings = processor.to_dict()
    known_cfg(settings.get("data_config") or {})  # timm's
    for name in ("size", "crop_size", "pad_size"):
        size = settings.get(name)
        sides = [size.get(side) for side in SIDES] if isinstance(size, dict) else [size]
        if any(isinstance(side, (int, float)) and not 0 <= side <= MOST_SIDE for side in sides):
            raise ValueError(
                f"the image processor has {name}={size}, but an image may have at most {MOST_SIDE} pixels a side."
            )


def config_score(config: Any) -> str:
    """What a model's scores are; a classifier that does not say is thresholded by its softmax."""
    return getattr(config, "score", "softmax")
