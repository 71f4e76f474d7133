"""Makes transformers and timm know this package's models after `import avgk_hf`, whichever is imported first.

Registering needs their classes, and so torch, which `import avgk_hf` must not load, and neither library looks for
plug-ins. So it waits until the module is imported whose lists are meant, and is done at once if that has happened
before. It takes public functions of the libraries only; lazy entries in their lists would need private ones.
"""

import sys
import threading
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
    AutoImageProcessor.register(AvgKConfig, image_processor_classes={"pil": TimmWrapperImageProcessor}, exist_ok=True)
    if TASK not in PIPELINE_REGISTRY.get_supported_tasks():
        PIPELINE_REGISTRY.register_pipeline(
            TASK,
            pipeline_class=AverageKImageClassificationPipeline,
            pt_model=AutoModelForImageClassification,
            type="image",
        )


def _register_timm() -> None:
    from . import backbones  # noqa: F401  (timm's decorator does it)


# what is not yet registered, by the module whose import it waits for; every Auto class and pipeline imports the first
WAITING = {"transformers.models.auto.configuration_auto": _register_transformers, "timm": _register_timm}


class _Registration(threading.local):
    """Stands before the finders of `sys.meta_path`, and registers after the outermost of nested imports.

    Inside one, modules that registering needs may be half imported: those of transformers import each other, and ours
    import them.
    """

    depth = 0  # of each thread

    def find_spec(self, name: str, path: Any = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """What the finders behind this one find; of modules that matter, with a loader that counts."""
        if not WAITING or name.partition(".")[0] not in ("transformers", "timm", "avgk_hf"):
            return None
        behind = [finder for finder in sys.meta_path[sys.meta_path.index(self) + 1 :] if hasattr(finder, "find_spec")]
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in behind)), None)
        if spec is not None and spec.loader is not None:
            spec.loader = _CountingLoader(spec.loader, self)
        return spec

    def settle(self) -> None:
        """Register what can be by now."""
        for module, register in list(WAITING.items()):
            if module in sys.modules:
                self.depth += 1  # what is imported here is no reason to begin again
                try:
                    register()
                finally:
                    self.depth -= 1
                WAITING.pop(module, None)


class _CountingLoader:
    """In place of a module's own loader, which the module gets back before it runs."""

    def __init__(self, loader: Any, registration: _Registration) -> None:
        self.loader, self.registration = loader, registration

    def __getattr__(self, name: str) -> Any:
        return getattr(self.loader, name)

    def exec_module(self, module: ModuleType) -> None:
        """Run the module, and register if it was no part of another import."""
        module.__spec__.loader = module.__loader__ = self.loader
        self.registration.depth += 1
        try:
            self.loader.exec_module(module)
        finally:
            self.registration.depth -= 1
        if self.registration.depth == 0:
            self.registration.settle()


_registration = _Registration()
sys.meta_path.insert(0, _registration)
_registration.settle()
