"""Image classifiers of any class: loading one safely, what it answers, and saving it with its thresholds."""

import inspect
import os
from pathlib import Path
from typing import Any

import timm
import torch
from accelerate import PartialState
from safetensors import SafetensorError
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoImageProcessor,
    AutoModelForImageClassification,
    PreTrainedConfig,
    PreTrainedModel,
    TimmWrapperConfig,
)

from .backbones import bounded, check_architecture, check_model_args, known_cfg
from .calibration import FIELDS, Calibration
from .checks import check_nesting, model_folder, read_json
from .configuration import CUSTOM_PIPELINES, AvgKConfig, check_dtype, check_labels, code_files, readable_json
from .data.transforms import ImageTransform, ProcessorTransform
from .details import load_details, save_details
from .files import copy_file, write_text
from .modeling import AvgKForImageClassification
from .pipeline import TASK, check_processor
from .records import AUGMENTATION
from .weights import check_folder, reach, refuse_adapter, without_bars

# what calibrating adds to the config of a classifier of another class
CALIBRATED = (*FIELDS, "score")
# the pipeline that travels with a classifier of another class; not by the name that this package registers, for which
# transformers would then ask its users, too, to trust the code
CARRIED = {"average-k": CUSTOM_PIPELINES[TASK]}
# names in a config.json besides the fields of its class that mean something: labels, and timm's own
LABELS = ("model_type", "num_labels", "num_classes", "label_names", "torch_dtype", "pretrained_cfg")


@without_bars()
def load_classifier(name: str) -> PreTrainedModel:
    """An image classifier of any class: a saved folder, a Hub id, or a timm name whose weights are on the Hub."""
    folder, name = Path(name), _place(name)
    try:
        config = load_config(name)
        model = AutoModelForImageClassification.from_pretrained(
            name, config=config, use_safetensors=True, trust_remote_code=False
        ).eval()
    except SafetensorError as error:
        raise ValueError(f"the weights of {name} cannot be read ({error}); copy or download them again.") from error
    _with_details(model.config, name, folder)
    return model


def load_model_config(name: str) -> PreTrainedConfig:
    """The config of such a classifier with its calibration, without its weights."""
    place = _place(name, weights=False)
    config = load_config(place)
    _with_details(config, place, Path(name))
    return config


def _place(name: str, weights: bool = True) -> str:
    """The folder or Hub id that is meant; a folder must be whole."""
    folder = model_folder(name)
    if folder is not None:
        check_folder(folder, weights)
        return name
    place = name if "/" in name else _timm_repo(name)
    reach(place, "", ["config.json"], "there is no such folder here either; check the name, or go online")
    return place


def _with_details(config: PreTrainedConfig, name: str, folder: Path) -> None:
    load_details(config, name)  # as classes of other packages do not
    try:
        Calibration.of(config)
    except ValueError as error:
        raise ValueError(f"{folder / 'config.json'}: {error}") from None


def best_device(join: bool = True) -> torch.device:
    """This process's accelerator, or the CPU where there is none; it joins the other processes, if there are any."""
    if join or not torch.accelerator.is_available():
        return PartialState(cpu=not torch.accelerator.is_available()).device if join else torch.device("cpu")
    torch.accelerator.set_device_index(int(os.environ.get("LOCAL_RANK", "0")) % torch.accelerator.device_count())
    return torch.device(torch.accelerator.current_accelerator().type, torch.accelerator.current_device_index())


def load_config(name: str) -> PreTrainedConfig:
    """The config of a stranger's classifier, of which only what describes the model is taken, within bounds.

    transformers acts on other names that it may hold: which code computes attention, which file holds the weights, how
    they are packed.
    """
    refuse_adapter(name)
    try:
        stored, _ = PreTrainedConfig.get_config_dict(name)
    except RecursionError:
        raise ValueError(f"the config.json of {name} is nested too deep: it is damaged.") from None
    check_nesting(stored, f"the config.json of {name}")
    check_labels(stored)
    if not isinstance(stored.get("model_type"), (str, type(None))):
        raise ValueError(f"the config.json of {name} has model_type={stored['model_type']!r}, which is no name.")
    for dtype in ("dtype", "torch_dtype"):
        check_dtype(stored.get(dtype))
    config = AutoConfig.from_pretrained(name, trust_remote_code=False)
    if isinstance(config, AvgKConfig):
        return config
    if isinstance(config, TimmWrapperConfig):
        given = config.model_args or {}
        stored["model_args"] = {name: given[name] for name in given if name != "num_classes"}  # which labels say too
        check_architecture(config.architecture)
        check_model_args(stored["model_args"])
        known_cfg(stored.get("pretrained_cfg") or {})
    known = {*inspect.signature(type(config)).parameters, *CALIBRATED, *LABELS}
    stored = {field: value for field, value in stored.items() if field in known}
    config = type(config).from_dict(stored, name_or_path=name)
    config._attn_implementation = config._experts_implementation = None  # of parts of the config, too
    with torch.device("meta"), bounded(name):  # a trial that takes no memory
        AutoModelForImageClassification.from_config(config, trust_remote_code=False)
    return config


def _timm_repo(name: str) -> str:
    """The Hub id of the weights that timm would load for a model name."""
    cfg = timm.get_pretrained_cfg(name) if timm.is_model(name.split(".")[0]) else None
    if cfg is None or not cfg.hf_hub_id:
        raise ValueError(f"{name!r} is neither a folder, a Hub id, nor a timm model with weights on the Hub.")
    return cfg.hf_hub_id


def transform_for(model: PreTrainedModel) -> ImageTransform | ProcessorTransform:
    """How images become this model's input."""
    if isinstance(model, AvgKForImageClassification):
        return ImageTransform(model.config)
    return ProcessorTransform(image_processor(model))


def image_processor(model: PreTrainedModel) -> Any:
    """The image processor that was saved with a classifier of another class."""
    if not model.name_or_path:
        raise ValueError(
            "this model was not loaded from anywhere, so its preprocessing is not known: save it with its image"
            " processor and load it with `load_classifier(folder)`."
        )
    only = {"backend": "pil"} if isinstance(model.config, TimmWrapperConfig) else {}  # transformers would say so
    try:
        processor = AutoImageProcessor.from_pretrained(model.name_or_path, trust_remote_code=False, **only)
    except OSError as error:
        if not Path(model.name_or_path).is_dir():
            raise
        raise FileNotFoundError(
            f"{model.name_or_path} holds no preprocessor_config.json, so its preprocessing is not known: save its"
            " image processor there, `AutoImageProcessor.from_pretrained(ITS ORIGIN).save_pretrained(FOLDER)`."
        ) from error
    check_processor(processor)
    return processor


def forward(model: PreTrainedModel, pixel_values: Tensor) -> Any:
    """The output of any classifier, wherever it is; `eval()` and `no_grad` are left to the caller."""
    return model(pixel_values.to(model.device, model.dtype), return_dict=True)


def model_scores(
    model: PreTrainedModel, pixel_values: Tensor, k: float | None = None, balance: float | None = None
) -> Tensor:
    """The scores (B, L) of any classifier that are compared with lambda_val."""
    if isinstance(model, AvgKForImageClassification):
        return model.scores(pixel_values, k, balance)
    with torch.no_grad():
        return Calibration.of(model.config).at(balance).scores(forward(model.eval(), pixel_values).logits)


def write_thresholds(model: PreTrainedModel, folder: str | Path) -> None:
    """Store the calibration of a model in the files of the folder it was loaded from."""
    save_details(model.config, folder)
    write_config(model.config, Path(folder) / "config.json")


def carried_code() -> dict[str, Path]:
    """The files of the pipeline that travels with a classifier of another class, by name."""
    return code_files("pipeline.py")


def carry_code(folder: Path) -> None:
    """Put the pipeline beside a classifier of another class, so that it answers where this package is missing."""
    for name, path in carried_code().items():
        copy_file(path, folder / name)
    config = folder / "config.json"
    write_text(config, readable_json({**read_json(config), "custom_pipelines": CARRIED}))


def write_config(config: PreTrainedConfig, path: Path) -> None:
    """Put the calibration of a config into a config.json of any class; what grows with the classes stays out of it."""
    found = {name: getattr(config, name) for name in (*CALIBRATED, AUGMENTATION) if hasattr(config, name)}
    found["calibration"] = Calibration.of(config).source
    write_text(path, readable_json({**read_json(path), **found}))
