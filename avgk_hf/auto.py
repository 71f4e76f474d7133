"""Makes transformers and timm know this package's models after `import avgk_hf`, whichever is imported first.

Registering needs their classes, and so torch, which `import avgk_hf` must not load, and neither library looks for
plug-ins. So it waits until the module is imported whose lists are meant, and is done at once if that has happened
before. It takes public functions of the libraries only; lazy entries in their lists would need private ones.

The module itself stands before the finders of `sys.meta_path`, and registers after the outermost of nested imports:
inside one, modules that registering needs may be half imported.
"""

import importlib
import sys
import threading
import warnings
from collections.abc import Callable
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any


def _register_transformers() -> None:
    from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, TimmWrapperImageProcessor
    from transformers.pipelines import PIPELINE_REGISTRY

    from .configuration import AvgKConfig
    from .modeling import AvgKForImageClassification
    from .pipeline import TASK, AverageKImageClassificationPipeline

    AutoConfig.register("avgk", AvgKConfig, exist_ok=True)
    AutoModelForImageClassification.register(AvgKConfig, AvgKForImageClassification, exist_ok=True)
    AutoImageProcessor.register(
        AvgKConfig,
        image_processor_classes={"pil": TimmWrapperImageProcessor, "torchvision": TimmWrapperImageProcessor},
        exist_ok=True,
    )
    if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
        how = {"pt_model": AutoModelForImageClassification, "type": "image"}
        PIPELINE_REGISTRY.register_pipeline(TASK, pipeline_class=AverageKImageClassificationPipeline, **how)


# what is not yet registered, by the module whose import it waits for; every Auto class and pipeline imports the first
WAITING: dict[str, Callable[[], Any]] = {
    "transformers.models.auto.configuration_auto": _register_transformers,
    "timm": lambda: importlib.import_module("avgk_hf.backbones"),  # timm's decorator does it
}
_thread = threading.local()


def find_spec(name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
    """What the finders behind this one find; of modules that matter, with a loader that registers."""
    if not WAITING or name.partition(".")[0] not in ("transformers", "timm", "avgk_hf"):
        return None
    behind = sys.meta_path[sys.meta_path.index(sys.modules[__name__]) + 1 :]
    found = (finder.find_spec(name, path, target) for finder in behind if hasattr(finder, "find_spec"))
    spec = next(filter(None, found), None)
    if spec is not None and spec.loader is not None:
        spec.loader = _Loader(spec.loader)
    return spec


class _Loader:
    """In place of a module's own loader, which the module gets back before it runs."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__.loader = module.__loader__ = self.loader
        _then_register(self.loader.exec_module, module)


def _then_register(load: Callable[..., None], *module: ModuleType) -> None:
    """Load a module, and register what can be by now, unless this is part of another import."""
    if getattr(_thread, "imports", False):
        return load(*module)
    _thread.imports = True
    try:
        load(*module)
    finally:  # a module that fails may have imported what is waited for
        for name, register in list(WAITING.items()):
            try:
                if name in sys.modules:
                    register()
                    WAITING.pop(name, None)
            except Exception as error:  # an import of somebody else must not fail; the next one tries again
                warnings.warn(f"{name.partition('.')[0]} does not know avgk_hf's models: {error}", stacklevel=2)
        _thread.imports = False


if sys.modules[__name__] not in sys.meta_path:  # as it is when this is reloaded
    sys.meta_path.insert(0, sys.modules[__name__])
_then_register(lambda: None)
