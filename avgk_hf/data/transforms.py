"""From an image as it is stored to the tensor that the model takes."""

from typing import Any

import torch
from datasets import Dataset, Image
from transformers import TimmWrapperImageProcessor

from ..pipeline import open_image  # there because it travels with a saved model

AUGMENTATIONS = ("none", "timm")


class ImageTransform:
    """Turns a batch of stored examples into `pixel_values`, `labels` and `index`.

    Args:
        config: An `AvgKConfig`, whose `pretrained_cfg` says what the backbone takes.
        augmentation: `"none"`, or `"timm"` for random resized crops and flips as in ImageNet training.
    """

    def __init__(self, config: Any, augmentation: str = "none") -> None:
        if augmentation not in AUGMENTATIONS:
            raise ValueError(f"augmentation={augmentation!r} is unknown; choose one of {list(AUGMENTATIONS)}.")
        processor = TimmWrapperImageProcessor(config.pretrained_cfg, config.architecture)
        self.transform = processor.train_transforms if augmentation == "timm" else processor.val_transforms
        self.mode = "L" if config.pretrained_cfg["input_size"][0] == 1 else "RGB"

    def image(self, image: Any, name: str | None = None) -> torch.Tensor:
        """One image as a tensor (C, H, W)."""
        return self.transform(open_image(image, self.mode, name))

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """A batch of examples as `datasets` hands it to `with_transform`."""
        if "image" not in batch:
            raise ValueError(
                f"the dataset has no column 'image', only {list(batch)}: leave `remove_unused_columns` off."
            )
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
