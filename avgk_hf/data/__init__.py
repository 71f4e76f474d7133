"""The dataset contract: splits with `image`, `label` (ClassLabel) and `index`, and how images become tensors."""

from ..images import open_image
from .classes import align_labels
from .datasets import class_counts, skip_bad_images
from .loading import load_splits, load_streams
from .sources import image_files
from .streams import Stream
from .transforms import prepare

__all__ = ["Stream", "align_labels", "class_counts", "image_files", "load_splits", "open_image", "prepare"]
__all__ += ["load_streams", "skip_bad_images"]
