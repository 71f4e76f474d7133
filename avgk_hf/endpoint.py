"""A calibrated model behind HTTP, as Hugging Face Inference Endpoints serve one: a folder with `handler.py`.

    avgk export MODEL --endpoint DIR

A request is `{"inputs": ..., "parameters": {...}}`: one image or a list of them, each as bytes, base64 or a Pillow
image, and what `Question` takes. The answer is `{"sets": [...], "meta": {...}}`, a set for each image. Requests are
strangers': nothing that they name is fetched or opened, and what is decoded is bounded.
"""

import base64
import logging
import math
import threading
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from PIL import Image

from .calibration import Calibration
from .classifiers import best_device, forward, load_classifier, transform_for
from .data.classes import nearest
from .hub import PACKAGE, PUSHED, check_new, published, requirements, write_whole
from .images import known_formats
from .monitor import SetSizeMonitor
from .questions import Question
from .scores import head_logits

logger = logging.getLogger(__name__)
PARAMETERS = [field.name for field in fields(Question)]
MOST_IMAGES = 64  # of a request
MOST_BYTES, MOST_PIXELS = 25 * 2**20, 25_000_000  # of an image; decoding takes up to 16 bytes for each pixel
AT_ONCE = 4  # images that are decoded at the same time, whatever the number of requests
WATCHED = 10_000  # images after which a new monitor begins, because the first ones have more weight than later ones
MOST_TEXT = 400  # letters of a message
BREAKS = dict.fromkeys(map(ord, " \t\r\n"))  # in base64 that was written in lines
TEXTS = PACKAGE / "app" / "templates"


class EndpointHandler:
    """Answers requests; any number of threads may call it.

    Args:
        path: The folder that `write_endpoint` wrote, or that of a calibrated model.
    """

    def __init__(self, path: str = "") -> None:
        inside = Path(path, "model")
        self.model = load_classifier(str(inside if inside.is_dir() else path)).to(best_device()).eval()
        self.transform = transform_for(self.model)
        self.calibration = Calibration.of(self.model.config)
        self.calibration.answer(Question())  # a model that cannot answer is refused now
        self.monitor, self.before = SetSizeMonitor.from_config(self.model.config), None
        self._decoding = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()  # of the model, of what the calibration looks up, and of the monitor

    def __call__(self, data: Any) -> dict[str, Any]:
        """The sets that a request asks for; the ValueError of one that cannot be answered is for its sender."""
        try:
            images, question = _request(data)
            with self._lock:
                calibration = self.calibration.at(question.balance)
                answer = calibration.answer(question)
            tensors = []
            for name, image in images:
                with self._decoding:
                    tensors.append(self.transform.image(image, name, MOST_PIXELS))
            alike = all(tensor.shape == tensors[0].shape for tensor in tensors)
            with self._lock, torch.no_grad():
                sets = []
                for pixels in [torch.stack(tensors)] if alike else [tensor[None] for tensor in tensors]:
                    logits = head_logits(forward(self.model, pixels))
                    scores = calibration.scores(*logits, answer.head).cpu()  # (b, L)
                    self._watch(question, scores, answer.lambda_val)
                    sets += [self._named(*each) for each in zip(scores, answer.classes(scores), strict=True)]
                meta = {"asked": _asked(question, calibration), "monitor": _seen(self.monitor, self.before)}
        except ValueError as error:
            text = str(error)
            raise ValueError(text if len(text) <= MOST_TEXT else f"{text[:MOST_TEXT]}...") from None
        except Exception:  # of torch or of this code: its message may name what is the server's
            logger.exception("a request could not be answered")
            raise RuntimeError("the request could not be answered; the server's log says why.") from None
        return {"sets": sets, "meta": meta}

    def _named(self, scores: torch.Tensor, classes: list[int]) -> list[dict[str, Any]]:
        return [{"label": self.model.config.id2label[j], "score": scores[j].item()} for j in classes]

    def _watch(self, question: Question, scores: torch.Tensor, lambda_val: float | None) -> None:
        """Count the sizes of sets of the model's own K and balance, without a smallest or largest size."""
        own = question.by_size and question.k in (None, self.monitor.k)
        if not own or question.balance not in (None, self.calibration.balance):
            return
        if self.monitor.num_images >= WATCHED:
            self.before = _seen(self.monitor, None)
            self.monitor = SetSizeMonitor.from_config(self.model.config)
        self.monitor.update((scores >= lambda_val).sum(1))


def _request(data: Any) -> tuple[list[tuple[str, Any]], Question]:
    """The images of a request, each with what to call it, and its question; anything else is refused."""
    if not isinstance(data, Mapping) or "inputs" not in data:
        raise ValueError('a request is {"inputs": image or list of images, "parameters": {...}}.')
    _refuse_unknown("the request", data, ("inputs", "parameters"))
    given = {} if data.get("parameters") is None else data["parameters"]
    if not isinstance(given, Mapping):
        raise ValueError('parameters must be a mapping, e.g. {"k": 2}.')
    _refuse_unknown("parameters", given, PARAMETERS)
    asked = {name: _number(value) for name, value in given.items() if value is not None}
    for name, value in asked.items():
        if isinstance(value, float) and not math.isfinite(value):
            raise ValueError(f"parameters has {name}={value}, which is no finite number.")
    question, inputs = Question(**{"min_size": 1, **asked}), data["inputs"]
    if not isinstance(inputs, (list, tuple)):
        return [("inputs", _image("inputs", inputs))], question
    if not 1 <= len(inputs) <= MOST_IMAGES:
        raise ValueError(f"inputs holds {len(inputs)} images: send 1 to {MOST_IMAGES} at once.")
    return [(name := f"inputs[{i}]", _image(name, value)) for i, value in enumerate(inputs)], question


def _refuse_unknown(where: str, given: Mapping[Any, Any], known: list[str] | tuple[str, ...]) -> None:
    for name in given:
        if name not in known:
            near = nearest(str(name)[:50], known)
            hint = f"; did you mean {near!r}?" if near else "."
            raise ValueError(f"{where} has {str(name)[:50]!r}, which is unknown: it takes {', '.join(known)}{hint}")


def _number(value: Any) -> Any:
    """A number that came as text, behind a `?` in the address; anything else as it is, for `Question` to look at."""
    try:
        number = float(value) if isinstance(value, str) and len(value) < 40 else None
    except ValueError:
        number = None
    return value if number is None else int(number) if number.is_integer() else number


def _image(name: str, value: Any) -> bytes | Image.Image:
    """The bytes of an image, or what the server opened; text is base64, never a path or an address."""
    if isinstance(value, Image.Image):
        width, height = value.size
        if width * height > MOST_PIXELS or value.format not in (None, "MPO", *known_formats()):
            raise ValueError(
                f"{name}: {width} x {height} pixels, the limit is {MOST_PIXELS}, or a format that is none."
            )
        return value
    if isinstance(value, str) and len(value) <= 2 * MOST_BYTES:
        text = value.partition(",")[2] if value.startswith("data:image/") else value
        try:
            value = base64.b64decode(text.translate(BREAKS), validate=True)
        except ValueError:
            raise ValueError(
                f"{name} is text and no base64; addresses are not fetched and paths not opened: send the image itself."
            ) from None
    if not isinstance(value, (bytes, bytearray, str)):
        raise ValueError(f"{name} of type {type(value).__name__} is no image: send its bytes, or these as base64.")
    if len(value) > MOST_BYTES:
        raise ValueError(f"{name} is larger than {MOST_BYTES} bytes, the most for an image: send a smaller one.")
    return bytes(value)


def _asked(question: Question, calibration: Calibration) -> dict[str, Any]:
    """The question with what was not said: a size, if nothing else, and the balance."""
    found = {name: value for name, value in vars(question).items() if value is not None and value is not False}
    found |= {"k": calibration.k} if question.by_size and question.k is None else {}
    if question.coverage is None:
        del found["method"]
    return {**found, "balance": calibration.balance}


def _seen(monitor: SetSizeMonitor, before: dict[str, Any] | None) -> dict[str, Any]:
    """What a monitor has seen, as plain JSON, and the one before it."""
    number = monitor.num_images
    found = {"k": monitor.k, "num_images": number, "mean_set_size": monitor.mean if number else None}
    found |= {"interval": list(monitor.interval), "drifted": monitor.drifted}
    found |= {"message": monitor.message()} if monitor.drifted else {}
    return found | ({} if before is None else {"before": before})


def write_endpoint(name: str, folder: str | Path) -> str:
    """Write a folder for an endpoint: handler.py, requirements.txt, README.md, the package, and the model in model/.

    Not beside handler.py, whose folder Python searches first: the code that a model carries has names of Python's own.

    Args:
        name: Folder or Hub id of a calibrated model.
        folder: Where to write; must be new or empty.

    Returns:
        How to upload it.
    """
    folder, needs = check_new(folder, "--endpoint"), requirements()
    Calibration.of(load_classifier(name).config).answer(Question())
    model = name if Path(name).is_dir() else snapshot_download(name, allow_patterns=list(PUSHED))
    sources = {"handler.py": "endpoint_handler.txt", "README.md": "endpoint_readme.md"}
    texts = {file: (TEXTS / source).read_text(encoding="utf-8") for file, source in sources.items()}
    texts["requirements.txt"] = "\n".join(needs)
    write_whole(folder, texts, {f"model/{file}": path for file, path in published(model).items()})
    return (TEXTS / "endpoint_push.txt").read_text(encoding="utf-8").strip().format(folder=folder, path=str(folder))
