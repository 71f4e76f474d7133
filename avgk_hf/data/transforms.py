"""From an image as it is stored to the tensor that the model takes."""

import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Image
from PIL import Image as Pillow
from timm.data.transforms import CenterCropOrPad
from torchvision import transforms as tv
from transformers import TimmWrapperImageProcessor

from ..checks import check_choice
from ..images import open_image

# what takes the place of the evaluation's centre crop; 4 black pixels on each side are usual for CIFAR
RANDOM_CROPS: dict[str, Callable[[Any], Any]] = {
    "pad_crop_flip": lambda size: tv.Compose([tv.RandomCrop(size, padding=4), tv.RandomHorizontalFlip()]),
    "resize_crop": lambda size: tv.RandomCrop(size, pad_if_needed=True),
}
AUGMENTATIONS = ("none", "timm", *RANDOM_CROPS)


class _Kept(dict):
    """Images by index; `datasets` copies a transform with every view of a dataset, and these must stay the same."""

    def __deepcopy__(self, memo: dict) -> "_Kept":
        return self


class ImageTransform:
    """Turns a batch of stored examples into `pixel_values`, `labels` and `index`.

    Args:
        config: An `AvgKConfig`, whose `pretrained_cfg` says what the backbone takes.
        augmentation: `"none"`; `"timm"` for random resized crops and flips as in ImageNet training; `"resize_crop"`
            for the evaluation's resizing and a random crop instead of its centre crop; `"pad_crop_flip"` for the same
            with 4 black pixels added on each side before the crop, and random flips, as is usual for CIFAR.
        keep: Whether images are kept in memory, by `index`, as they are before the first random change, and never
            opened again: for small images that are read many times, in one process. One such transform serves one
            split.
    """

    mode = "RGB"
    augmentation = "none"
    input_size: tuple[int, ...] | None = None
    kept: _Kept | None = None
    _seed: torch.Tensor | None = None

    def __init__(self, config: Any, augmentation: str = "none", keep: bool = False) -> None:
        check_choice("augmentation", augmentation, AUGMENTATIONS)
        processor = TimmWrapperImageProcessor(config.pretrained_cfg, config.architecture)
        self.transform = processor.train_transforms if augmentation == "timm" else processor.val_transforms
        steps = self.transform.transforms
        fixed = 0 if augmentation == "timm" else len(steps)  # how many come before the first that draws
        if augmentation in RANDOM_CROPS:
            fixed = next(i for i, step in enumerate(steps) if isinstance(step, (tv.CenterCrop, CenterCropOrPad)))
            steps = [*steps[:fixed], RANDOM_CROPS[augmentation](steps[fixed].size), *steps[fixed + 1 :]]
            self.transform = tv.Compose(steps)
        self._fixed, self._drawn = tv.Compose(steps[:fixed]), tv.Compose(steps[fixed:])
        for step in self.transform.transforms:
            if isinstance(step, tv.Normalize):
                step.inplace = True  # the tensor is new, so another copy of it would be wasted
        self.input_size = tuple(config.pretrained_cfg["input_size"])
        if self.input_size[0] == 1:
            self.mode = "L"
        self.augmentation = augmentation
        self.kept = _Kept() if keep else None

    def seed(self, seed: int, epoch: int) -> None:
        """From now on draw each image's changes from these numbers and its index, whatever was drawn before.

        Training that goes on in the middle of an epoch then sees the images it would have seen.
        """
        if self._seed is None:
            self._seed = torch.zeros(2, dtype=torch.int64).share_memory_()  # read by workers that outlive an epoch
        self._seed[:] = torch.tensor([seed, epoch])

    def image(self, image: Any, name: str | None = None, most_pixels: int | None = None) -> torch.Tensor:
        """One image as a tensor (C, H, W); the arguments are those of `open_image`."""
        return self.transform(open_image(image, self.mode, name, most_pixels))

    def described(self) -> str:
        """What is done to an image, as text: equal ones do the same."""
        return f"{self.mode} {self.transform!r}"

    def __call__(self, batch: dict[str, list]) -> dict[str, list]:
        """A batch of examples as `datasets` hands it to `with_transform`."""
        if "image" not in batch:
            raise ValueError(
                f"the dataset has no column 'image', only {list(batch)}: leave `remove_unused_columns` off."
            )
        places = batch.get("index", [None] * len(batch["image"]))
        output = {"pixel_values": [self._tensor(*each) for each in zip(batch["image"], places, strict=True)]}
        names = {"label": "labels", "index": "index"}
        return output | {name: batch[column] for column, name in names.items() if column in batch}

    def _tensor(self, image: Any, place: int | None) -> torch.Tensor:
        name = None if isinstance(image, dict) and image.get("path") else f"image {place}"
        drawn = self.augmentation != "none" and self._seed is not None and place is not None
        keep = self.kept is not None and place is not None
        if keep and place not in self.kept:
            self.kept[place] = self._fixed(open_image(image, self.mode, name))
        with _seeded([*self._seed.tolist(), place]) if drawn else nullcontext():
            return self._drawn(self.kept[place]) if keep else self.image(image, name)


@contextmanager
def _seeded(numbers: list[int]) -> Iterator[None]:
    """Seed the three generators that augmentations draw from, and restore them afterwards."""
    own = np.random.SeedSequence([number % 2**32 for number in numbers]).generate_state(1).item()
    states = random.getstate(), np.random.get_state(), torch.get_rng_state()
    try:
        random.seed(own)
        np.random.seed(own)
        torch.default_generator.manual_seed(own)  # not torch's own function: that formats the stack for a GPU, 1 ms
        yield
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])


class ProcessorTransform(ImageTransform):
    """The same with the image processor of any other classifier.

    Args:
        processor: What `AutoImageProcessor.from_pretrained` gives.
    """

    def __init__(self, processor: Any) -> None:
        self.processor = processor
        self.transform = partial(_processed, processor)  # which workers can be sent, as a lambda cannot

    def described(self) -> str:
        """The settings of the processor."""
        return repr(sorted((name, str(value)) for name, value in self.processor.to_dict().items()))


def _processed(processor: Any, image: Pillow.Image) -> torch.Tensor:
    return processor(images=image, return_tensors="pt")["pixel_values"][0]


def prepare(
    dataset: Dataset, config: Any, augmentation: str = "none", keep: bool = False, labelled: bool = True
) -> Dataset:
    """The dataset as the model takes it: images are opened, resized and normalised when they are read.

    A dataset that was prepared so with `keep` comes back as it is, with the images that it holds.

    Args:
        dataset: One split of `load_splits`.
        config: The model or its config, or an `ImageTransform`.
        augmentation: For training, as in `ImageTransform`.
        keep: As in `ImageTransform`.
        labelled: Whether there have to be labels.
    """
    if isinstance(dataset, dict):
        raise ValueError(
            f"prepare takes one split, not all of {list(dataset)}: e.g. `prepare(splits['train'], model)`."
        )
    if not hasattr(dataset, "column_names"):
        raise ValueError(f"prepare takes the split first and the model second, not a {type(dataset).__name__}.")
    config = getattr(config, "config", config)
    for column in ("image", "label") if labelled else ("image",):
        if column not in dataset.column_names:
            raise ValueError(f"the dataset has no column {column!r}, only {dataset.column_names}: use `load_splits`.")
    transform = config if isinstance(config, ImageTransform) else ImageTransform(config, augmentation, keep)
    held = dataset.format["format_kwargs"].get("transform")
    if transform.kept is not None and isinstance(held, ImageTransform) and held.kept is not None:
        if held.described() == transform.described():
            return dataset
    return dataset.cast_column("image", Image(decode=False)).with_transform(transform)
