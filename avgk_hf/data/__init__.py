"""The dataset contract: splits with `image`, `label` (ClassLabel) and `index`, and how images become tensors."""

from .datasets import class_counts, load_splits
from .transforms import open_image, prepare

__all__ = ["class_counts", "load_splits", "open_image", "prepare"]
