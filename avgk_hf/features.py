"""Features of a frozen backbone, computed once and kept in a file: `cache_features: true` in a recipe.

The file's name is a digest of all that decides on the features: the backbone's weights, the transform, the images and
the batch size. Where one of them differs there is no such file, and the features are computed anew.
"""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import datasets
import torch
from huggingface_hub.utils import tqdm
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils.data import DataLoader, Dataset
from transformers.utils import logging

from .data import prepare
from .data.datasets import class_ids, collate
from .data.transforms import ImageTransform
from .files import new_file, output_folder
from .modeling import AvgKForImageClassification

logger = logging.get_logger(__name__)


class Features(Dataset):
    """The images of a split as rows of features (n, d); a batch is one look at the matrix.

    Args:
        images: The split, with `label`.
        features: One row for each image.
        transform: What was done to the images before.
        network: A digest of the network that computed them.
    """

    def __init__(
        self,
        images: datasets.Dataset,
        features: Tensor,
        transform: ImageTransform | None = None,
        network: str | None = None,
    ) -> None:
        self.images, self.split, self.features, self.transform = images, images.split, features, transform
        self.labels, self.network = torch.tensor(class_ids(images)), network

    def check_for(self, name: str, model: AvgKForImageClassification) -> None:
        """Refuse a model whose network learns, or is not the one that computed these features."""
        if any(weight.requires_grad for weight in model.backbone.parameters()):
            raise ValueError(f"{name} holds features of a frozen backbone, and this one learns: freeze it first.")
        if self.network not in (None, _network(model)):
            raise ValueError(
                f"{name} holds features of another network than the model's, or of other weights: compute them with"
                " this model, `cached_features(model, split)`."
            )

    def __len__(self) -> int:
        return len(self.features)

    def __getitem__(self, place: int) -> dict[str, Tensor]:
        return {name: column[0] for name, column in self.__getitems__([place]).items()}

    def __getitems__(self, places: list[int]) -> dict[str, Tensor]:
        """A whole batch, as a `DataLoader` asks for it; `collate` lets it through."""
        index = torch.tensor(places)
        return {"features": self.features[index], "labels": self.labels[index], "index": index}


def cached_features(model: AvgKForImageClassification, images: datasets.Dataset, batch_size: int = 64) -> Features:
    """The features of a split, from their file or computed and written there.

    Args:
        model: Its backbone must be frozen: `model.freeze_backbone()`.
        images: One split of `load_splits`.
        batch_size: Of the forward passes, on which the last bits can depend.
    """
    if not isinstance(model, AvgKForImageClassification):
        raise ValueError(f"cached_features takes the model first and the split second, not a {type(model).__name__}.")
    if any(parameter.requires_grad for parameter in model.backbone.parameters()):
        raise ValueError(
            "features of a backbone that learns change: freeze it, `model.freeze_backbone()`, in a recipe"
            " `freeze_backbone: true`."
        )
    if isinstance(images, dict):
        raise ValueError(
            f"cached_features takes one split, not {list(images)}: `cached_features(model, it['train'])`."
        )
    transform, network = ImageTransform(model.config), _network(model)
    path = cache_folder() / f"{_digest(network, transform, images, batch_size)}.safetensors"
    features = _read(path, len(images), model.ml_head.in_features)
    if features is None:
        features = _compute(model, prepare(images, transform), batch_size)
        output_folder(path.parent)
        with new_file(path) as new:
            save_file({"features": features}, new)
    return Features(images, features, transform, network)


def cache_folder() -> Path:
    """Where features are kept: beside what `datasets` keeps, HF_DATASETS_CACHE."""
    return Path(datasets.config.HF_DATASETS_CACHE) / "avgk_features"


@torch.no_grad()
def _compute(model: AvgKForImageClassification, images: datasets.Dataset, batch_size: int) -> Tensor:
    was_training = model.training
    model.eval()
    features = []
    split = f" of {images.split}" if images.split else ""
    logger.warning(f"computing the features of {len(images)} images{split}, once; they are kept in {cache_folder()}")
    bar = tqdm(DataLoader(images, batch_size, collate_fn=collate), "features", unit="batch", disable=None)
    for batch in bar:
        pixels = batch["pixel_values"]
        rows = torch.arange(batch_size) % len(pixels)  # the last batch is filled up: other sizes round differently
        features.append(model.features(pixels[rows])[: len(pixels)].float().cpu())
    model.train(was_training)
    return torch.cat(features)


def _read(path: Path, number: int, width: int) -> Tensor | None:
    """What the file holds, or None where there is none, or one that is cut off or of another shape."""
    try:
        features = load_file(path)["features"]
    except (OSError, SafetensorError, KeyError):
        return None
    fits = features.shape == (number, width) and features.dtype == torch.float32
    return features.clone() if fits else None  # not a map of the file, which another process may replace


def _network(model: AvgKForImageClassification) -> str:
    """A digest of the backbone and its weights."""
    config, dtype = model.config, str(next(model.backbone.parameters()).dtype)
    found = hashlib.sha256(json.dumps([config.architecture, config.model_args, dtype], sort_keys=True).encode())
    for name, tensor in model.backbone.state_dict().items():
        found.update(f"{name} {tensor.stride()}".encode())  # channels last rounds differently
        found.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return found.hexdigest()


def _digest(network: str, transform: ImageTransform, images: Any, batch_size: int) -> str:
    """All that decides on the features; images in files count with path, size and time, as for `make`."""
    found = hashlib.sha256(json.dumps([network, transform.described(), batch_size], sort_keys=True).encode())
    for stored in images.cast_column("image", datasets.Image(decode=False)).with_format(None)["image"]:
        if stored["bytes"] is not None:
            found.update(hashlib.sha256(stored["bytes"]).digest())
        else:
            status = os.stat(stored["path"])
            found.update(f"{os.path.abspath(stored['path'])} {status.st_size} {status.st_mtime_ns}\n".encode())
    return found.hexdigest()[:40]
