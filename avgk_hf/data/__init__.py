"""The dataset contract: splits with `image`, `label` (ClassLabel) and `index`, and how images become tensors."""

from ..images import open_image
from .classes import align_labels
from .datasets import class_counts, skip_bad_images
from .loading import load_splits
from .transforms import image_files, prepare

__all__ = ["align_labels", "class_counts", "image_files", "load_splits", "open_image", "prepare", "skip_bad_images"]
