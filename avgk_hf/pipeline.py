"""`pipeline("average-k-image-classification")`: for each image a list of classes, as many as it needs.

Like the model, this file travels with a saved model as remote code.
"""

import base64
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import numpy as np
import torch
from transformers import Pipeline

from .backbones import MOST_SIDE, known_cfg
from .calibration import Calibration
from .details import load_details
from .images import open_image
from .monitor import SetSizeMonitor
from .questions import Question
from .scores import head_logits

TASK = "average-k-image-classification"
SIDES = ("height", "width", "shortest_edge", "longest_edge")  # names of transformers' image processors


class AverageKImageClassificationPipeline(Pipeline):
    """Set-valued image classification with any calibrated classifier.

    Call it with one image (path, URL or Pillow image) or several (list, generator, dataset). The answer for an image
    is a list of `{"label", "score"}`, best first, as long as the image needs.

    `monitor`, a `SetSizeMonitor`, follows the set sizes of the K that the pipeline was made for, and warns once when
    their mean leaves K; answers to other questions are not counted. `monitor=False` leaves it out.

    A call, and the pipeline itself, takes what `Question` takes: `k`, `coverage` with `method` and `per_class`,
    `cumulative`, `lambda_val`, `min_size` (default 1), `max_size` and `balance`; what a call asks takes the place of
    what the pipeline was made for. The scores of an answer are those that are thresholded, with a balance the
    balanced ones. `timeout` are seconds to wait for an image from the web.

    Example:
        >>> import PIL.Image
        >>> from transformers import TimmWrapperImageProcessor, pipeline
        >>> from avgk_hf import AvgKForImageClassification
        >>> from avgk_hf.calibration import Calibration
        >>> model = AvgKForImageClassification.from_timm("test_resnet", num_labels=10, k=2)
        >>> _ = Calibration.store(model.config, {2: 0.0})
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
        config, name = self.model.config, self.model.name_or_path
        if name and getattr(config, "thresholds", None):
            load_details(config, name)  # classes of other packages do not
        # a question that the model cannot answer is refused here, before any image is read
        self.question: Question = self._postprocess_params["question"]
        Calibration.of(config).answer(self.question)
        self.monitor: SetSizeMonitor | None = None
        if monitor and self.question.by_size:
            self.monitor = SetSizeMonitor.from_config(config, self.question.k, self.question.balance)

    def _sanitize_parameters(
        self, timeout: float | None = None, **asked: Any
    ) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
        asked = {name: value for name, value in asked.items() if value is not None}
        kept = vars(getattr(self, "question", None) or Question(min_size=1))
        if {"k", "coverage", "cumulative", "lambda_val"} & set(asked):  # another question takes the place of the own
            kept = {name: kept[name] for name in ("min_size", "max_size", "method", "per_class", "balance")}
        if {"method", "per_class"} & set(asked) or (kept.get("coverage", asked.get("coverage")) is None):
            kept = {name: value for name, value in kept.items() if name not in ("method", "per_class")}
        return {} if timeout is None else {"timeout": timeout}, {}, {"question": Question.of(**{**kept, **asked})}

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

    def postprocess(self, model_outputs: Any, question: Question) -> list[dict[str, Any]]:
        """The set of one image."""
        config = self.model.config
        calibration = Calibration.of(config).at(question.balance)
        answer = calibration.answer(question)
        scores = calibration.scores(*head_logits(model_outputs), answer.head)
        classes = answer.classes(scores)[0]
        same = self.monitor is not None and question.k in (None, self.monitor.k)
        if same and question.by_size and question.balance == self.question.balance:
            # K was calibrated without a smallest or largest size
            self.monitor.update([int((scores >= answer.lambda_val).sum())])
        return [{"label": config.id2label[j], "score": scores[0, j].item()} for j in classes]


def _fetch(source: str, timeout: float | None) -> str | bytes | dict[str, Any]:
    """What `open_image` takes of a path, of base64, or of what is behind a URL."""
    short = source if len(source) <= 100 else source[:100] + "..."
    if source.startswith(("http://", "https://")):
        try:
            request = Request(source, headers={"User-Agent": "avgk_hf"})
            with urlopen(request, timeout=timeout) as answer:
                return {"bytes": answer.read(), "path": short}
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
