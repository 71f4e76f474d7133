"""From an image as it is stored to the tensor that the model takes."""

from io import BytesIO
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, Image
from PIL import Image as PILImage
from timm.data.transforms import CenterCropOrPad
from torchvision import transforms as tv
from transformers import TimmWrapperImageProcessor

AUGMENTATIONS = ("none", "timm", "pad_crop_flip", "resize_crop")
PADDING = 4  # pixels on each side, for pad_crop_flip


def open_image(image: Any, mode: str = "RGB", name: str | None = None) -> PILImage.Image:
    """Open a path, bytes, or a stored `{"bytes", "path"}` in the given mode; an unreadable one is refused by name.

    Args:
        image: A path, encoded bytes, a dict with `bytes` and `path`, or an open Pillow image.
        mode: `"RGB"` or `"L"`.
        name: What to call the image in an error.
    """
    if isinstance(image, PILImage.Image):
        return image.convert(mode)
    stored = image if isinstance(image, dict) else {"bytes": image} if isinstance(image, bytes) else {"path": image}
    name = name or str(stored.get("path") or "image")
    try:
        source = BytesIO(stored["bytes"]) if stored.get("bytes") is not None else Path(stored["path"])
        with PILImage.open(source) as opened:
            return opened.convert(mode)
    except FileNotFoundError:
        raise FileNotFoundError(f"{name}: there is no such file.") from None
    except (OSError, SyntaxError, ValueError) as error:
        raise ValueError(f"{name} cannot be read as an image ({error}); replace or remove it.") from error


def _random_crop(evaluation: tv.Compose, flip: bool) -> tv.Compose:
    """The transform of evaluation with a random crop in place of the centre crop."""
    steps: list[Any] = []
    for step in evaluation.transforms:
        if not isinstance(step, (tv.CenterCrop, CenterCropOrPad)):
            steps.append(step)
        elif flip:
            steps += [tv.RandomCrop(step.size, padding=PADDING), tv.RandomHorizontalFlip()]
        else:
            steps.append(tv.RandomCrop(step.size, pad_if_needed=True))
    return tv.Compose(steps)


class ImageTransform:
    """Turns a batch of stored examples into `pixel_values`, `labels` and `index`.

    Args:
        config: An `AvgKConfig`, whose `pretrained_cfg` says what the backbone takes.
        augmentation: `"none"`; `"timm"` for random resized crops and flips as in ImageNet training; `"resize_crop"`
            for the evaluation's resizing and a random crop instead of its centre crop; `"pad_crop_flip"` for the same
            with 4 black pixels added on each side before the crop, and random flips, as is usual for CIFAR.
    """

    def __init__(self, config: Any, augmentation: str = "none") -> None:
        if augmentation not in AUGMENTATIONS:
            raise ValueError(f"augmentation={augmentation!r} is unknown; choose one of {list(AUGMENTATIONS)}.")
        processor = TimmWrapperImageProcessor(config.pretrained_cfg, config.architecture)
        self.transform = processor.train_transforms if augmentation == "timm" else processor.val_transforms
        if augmentation in ("pad_crop_flip", "resize_crop"):
            self.transform = _random_crop(self.transform, flip=augmentation == "pad_crop_flip")
        for step in self.transform.transforms:
            if isinstance(step, tv.Normalize):
                step.inplace = True  # the tensor is new, so another copy of it would be wasted
        self.mode = "L" if config.pretrained_cfg["input_size"][0] == 1 else "RGB"

    def image(self, image: Any, name: str | None = None) -> torch.Tensor:
        """One image as a tensor (C, H, W)."""
        return self.transform(open_image(image, self.mode, name))

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """A batch of examples as `datasets` hands it to `with_transform`."""
        places = batch.get("index", [None] * len(batch["image"]))
        output = {
            "pixel_values": [
                self.image(image, None if isinstance(image, dict) and image.get("path") else f"image {place}")
                for image, place in zip(batch["image"], places, strict=True)
            ]
        }
        if "label" in batch:
            output["labels"] = batch["label"]
        if "index" in batch:
            output["index"] = batch["index"]
        return output


class ProcessorTransform(ImageTransform):
    """The same with the image processor of any other classifier.

    Args:
        processor: What `AutoImageProcessor.from_pretrained` gives.
    """

    def __init__(self, processor: Any) -> None:
        self.transform = lambda image: processor(images=image, return_tensors="pt")["pixel_values"][0]
        self.mode = "RGB"


def prepare(dataset: Dataset, config: Any, augmentation: str = "none") -> Dataset:
    """The dataset as the model takes it: images are opened, resized and normalised when they are read.

    Args:
        dataset: One split of `load_splits`.
        config: The model's config, or an `ImageTransform`.
        augmentation: For training, as in `ImageTransform`.
    """
    for column in ("image", "label"):
        if column not in dataset.column_names:
            raise ValueError(f"the dataset has no column {column!r}, only {dataset.column_names}: use `load_splits`.")
    transform = config if isinstance(config, ImageTransform) else ImageTransform(config, augmentation)
    return dataset.cast_column("image", Image(decode=False)).with_transform(transform)
