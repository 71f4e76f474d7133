"""Average-K image classification for timm and Hugging Face: as many classes as the image needs, K on average.

The public names are imported on first use, because the commands should answer `--help` before torch is loaded.
"""

import importlib
from typing import Any

__version__ = "0.1.0"

_WHERE = {
    "AvgKConfig": "configuration",
    "AvgKForImageClassification": "modeling",
    "AvgKOutput": "modeling",
    "AvgKTrainer": "trainer",
    "AvgKTrainingArguments": "training_args",
    "AverageKThreshold": "sets",
    "SetSizeMonitor": "monitor",
    "average_k_threshold": "sets",
    "predict_sets": "sets",
    "load_splits": "data",
    "prepare": "data",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'avgk_hf' has no attribute {name!r}")
    if name.startswith("AvgK"):
        importlib.import_module("avgk_hf.auto")  # AutoModelForImageClassification and the like then know the model
    return getattr(importlib.import_module(f"avgk_hf.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__
