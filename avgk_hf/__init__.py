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
    "calibrate": "evaluation",
    "load_classifier": "classifiers",
    "load_splits": "data",
    "prepare": "data",
    "save_classifier": "model_card",
}
__all__ = ["__version__", *_WHERE]


def __getattr__(name: str) -> Any:
    if name not in _WHERE:
        raise AttributeError(f"module 'avgk_hf' has no attribute {name!r}")
    return getattr(importlib.import_module(f"avgk_hf.{_WHERE[name]}"), name)


def __dir__() -> list[str]:
    return __all__


importlib.import_module("avgk_hf.auto")  # transformers and timm then know the models, as soon as they are imported
