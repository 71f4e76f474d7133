"""`AvgKConfig`: everything that makes a saved folder a set-valued classifier, thresholds included."""

import difflib
import functools
import json
import math
import os
import re
from dataclasses import field, fields
from pathlib import Path
from typing import Any, ClassVar

import torch
from huggingface_hub.dataclasses import strict
from huggingface_hub.errors import StrictDataclassError
from transformers import PreTrainedConfig
from transformers.dynamic_module_utils import get_relative_import_files
from transformers.utils import logging

from .backbones import MOST_LABELS, check_architecture, check_model_args, known_cfg
from .calibration import FIELDS, Calibration
from .checks import check_choice, check_counts, is_hub_id, is_number, plain, read_json, same_labels
from .details import load_details, save_details
from .files import new_file
from .scores import HEADS, SCORES, VIEWS
from .sets import check_k

logger = logging.get_logger(__name__)

INSTALLED = __name__.startswith("avgk_hf.")  # False where this file was loaded as remote code
AUTO_MAP = {
    "AutoConfig": "configuration.AvgKConfig",
    "AutoModelForImageClassification": "modeling.AvgKForImageClassification",
}
CUSTOM_PIPELINES = {
    "average-k-image-classification": {
        "impl": "pipeline.AverageKImageClassificationPipeline",
        "pt": ["AutoModelForImageClassification"],
        "type": "image",
    }
}
IMAGE_PROCESSOR = "TimmWrapperImageProcessor"
DTYPES = ("float16", "bfloat16", "float32", "float64")
# names in a config.json besides the fields of the class that mean something here
NOT_FIELDS = ("model_type", "num_labels", "torch_dtype", "name_or_path", "auto_map", "custom_pipelines")
NOT_FIELDS += ("output_attentions",)
OF_FROM_TIMM = ("pretrained", "checkpoint", "image_size", "model_args", "freeze_backbone")  # which are no fields
MOST_LETTERS = 100  # of a word among the hyperparameters
SHORT = 110  # letters of a value that stands on one line


@strict
class AvgKConfig(PreTrainedConfig):
    """Configuration of `AvgKForImageClassification`.

    Args:
        architecture: Name of a timm model.
        model_args: Arguments that shape the model, among `backbones.MODEL_ARGS`, e.g. `{"in_chans": 1}`.
        pretrained_cfg: timm's description of the input (size, mean, std, ...), read by the image processor; what is
            not known here is left out.
        objective: The training loss, a key of `avgk_hf.losses.LOSSES`.
        k: The average set size asked for in training, and the default in prediction. In [1, L).
        hyperparameters: Those of the objective, by name, as its class states them; what is not given is the class's
            default. Each can also be given by its own name, e.g. `AvgKConfig(alpha=5.0)`.
        score: What is thresholded: `"softmax"`, `"sigmoid"` or `"logit"`.
        head: Which head answers: `"ml"` (the paper), `"sccp"`, `"mean"` of both heads' scores, or `"auto"`, for each
            K the one with the highest validation accuracy; of a model with one head that is the ML head.
        sccp_head: Whether the model has the SCCP head besides the ML head.
        test_time_augmentation: `"flip"` where the score of a class is the mean over an image and its mirror image, at
            twice the cost; not while training.
        thresholds: {K: lambda_val} of the head that answers, from validation; K as text, lambda_val a plain float.
        heads: {K: head} that answers, as chosen on validation; only for `head="auto"`.
        calibration: Where the thresholds come from, and further what `Calibration` keeps; on disk that stands, with
            the training counts, in calibration.json beside config.json.
        train_counts: Training images of each class, for the few / medium / many shot means.
        base_model: Hub id of the model that the backbone's weights come from, for the card; nothing is loaded from it.

    Example:
        >>> config = AvgKConfig(architecture="test_resnet", num_labels=10, k=2, head="ml", thresholds={"2": 0.125})
        >>> Calibration.of(config).threshold(2)
        0.125
    """

    model_type = "avgk"
    # what a Trainer's `compute_metrics` is not given, so that it gets one matrix
    keys_to_ignore_at_inference: ClassVar = ["ml_logits", "sccp_logits", "hidden_states"]

    architecture: str = "resnet18"
    model_args: dict[str, Any] = field(default_factory=dict)
    pretrained_cfg: dict[str, Any] = field(default_factory=dict)
    image_processor_type: str = IMAGE_PROCESSOR
    objective: str = "avgk"
    k: float | int = 5
    hyperparameters: dict[str, float | int | str] = field(default_factory=dict)
    score: str = "softmax"
    head: str = "auto"
    sccp_head: bool = True
    test_time_augmentation: str = "none"
    thresholds: dict[str, float | int] = field(default_factory=dict)
    heads: dict[str, str] = field(default_factory=dict)
    calibration: dict[str, Any] | None = None
    train_counts: list[int] | None = None
    base_model: str | None = None

    def __post_init__(self, **kwargs: Any) -> None:
        """Refuse a field that could only fail later, by its name."""
        if INSTALLED:  # the registered classes and pipeline serve; remote code would ask for trust_remote_code
            for name in ("auto_map", "custom_pipelines"):  # to_diff_dict writes both, so a config reads back equal
                kwargs.pop(name, None)
        self.hyperparameters = _objective(self.objective, self.hyperparameters, kwargs)
        for name in kwargs:  # any other name is kept as an attribute, as transformers does
            _refuse_misspelt(name)
        check_num_labels(kwargs.get("num_labels"))
        for dtype in (self.dtype, kwargs.get("torch_dtype")):
            check_dtype(dtype)
        super().__post_init__(**kwargs)
        check_k(self.k)
        choices = {"score": SCORES, "head": (*HEADS, "auto"), "image_processor_type": (IMAGE_PROCESSOR,)}
        choices["test_time_augmentation"] = VIEWS
        for name, allowed in choices.items():
            check_choice(f"config.{name}", getattr(self, name), allowed)
        if self.head == "auto" and not self.sccp_head:
            self.head = "ml"  # there is nothing to choose
        check_architecture(self.architecture)
        check_model_args(self.model_args)
        self.pretrained_cfg = known_cfg(self.pretrained_cfg)
        if self.score == "sigmoid":
            self.problem_type = "multi_label_classification"  # the stock pipeline then applies the sigmoid too
        check_counts("config.train_counts", self.train_counts, self.num_labels)
        if self.base_model is not None and not is_hub_id(self.base_model):
            raise ValueError(f"config.base_model={self.base_model!r} must be a Hub id, `user/name`, or be left out.")
        calibration = Calibration.of(self)  # refuses what was edited or damaged
        if calibration.ks:
            calibration.head()  # refuses where none was chosen

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> "AvgKConfig":
        """As in the base class; thresholds of other classes, or of another score, are dropped.

        So is a name that is no field: transformers would keep it as an attribute, and act on some of them.
        """
        kwargs = {name: plain(value) for name, value in kwargs.items()}
        folder = kwargs.get("name_or_path")  # given by AutoConfig
        try:
            known = cls._known(config_dict, **kwargs)
            if kwargs.get("objective", known.get("objective")) != known.get("objective"):
                known |= {"objective": kwargs.pop("objective"), "hyperparameters": {}}
            known |= {name: kwargs.pop(name) for name in [*kwargs] if name in {*_own(), *_every_hyperparameter()}}
            found = super().from_dict(known, **kwargs)
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise (error if folder is None else _in_file(Path(folder, "config.json"), error)) from error
        if folder is not None and Path(folder).is_dir():
            load_details(found[0] if isinstance(found, tuple) else found, folder)
        return found

    @classmethod
    def _known(cls, config_dict: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
        """The fields of a stored config that are known and still hold, for the labels that are asked for."""
        known = {*(item.name for item in fields(cls)), *NOT_FIELDS}
        kind, timms = config_dict.get("model_type"), {"architecture", "num_classes"} <= set(config_dict)
        if kind not in (None, cls.model_type) or (kind is None and timms):
            text = f"it is a classifier of {'timm' if timms else f'transformers ({kind})'}: `avgk_hf.load_classifier`"
            text += " loads it" + ", `from_timm` trains its network" * timms
            raise ValueError(f"this is no config of this package, {text}.")
        for name in set(config_dict) - known - {"use_cache"}:  # which the Trainer writes into any config
            _refuse_misspelt(name)
            if not name.startswith("_"):
                logger.warning(f"config.{name} is no field of {cls.__name__} and is left out.")
        check_labels(config_dict)
        labels = config_dict.get("id2label") or {}
        same = kwargs.get("num_labels", len(labels)) == len(labels)
        if labels and not (same and same_labels(kwargs.get("id2label", labels), labels)):
            known -= {*FIELDS, "train_counts"}
        for name in ("score", "test_time_augmentation"):
            if kwargs.get(name, stored := config_dict.get(name, getattr(cls, name))) != stored:
                known -= {*FIELDS, "problem_type"}  # which the score implies
        if config_dict.get("thresholds") and "thresholds" not in known:
            logger.warning_once("the classes or the score are not those that were calibrated: thresholds are dropped.")
        return {name: value for name, value in config_dict.items() if name in known}

    @classmethod
    def from_pretrained(cls, pretrained_model_name_or_path: str | os.PathLike, **kwargs: Any) -> "AvgKConfig":
        """As in the base class, with calibration.json; a broken file is refused with its name and the field's."""
        path = Path(pretrained_model_name_or_path, kwargs.get("subfolder") or "", "config.json")
        if path.is_file():
            read_json(path)
        try:
            found = super().from_pretrained(pretrained_model_name_or_path, **kwargs)
        except (ValueError, TypeError, StrictDataclassError) as error:
            raise (_in_file(path, error) if path.is_file() else error) from error
        load_details(found[0] if isinstance(found, tuple) else found, pretrained_model_name_or_path, **kwargs)
        return found

    def save_pretrained(self, save_directory: str | os.PathLike, **kwargs: Any) -> None:
        """As in the base class; what grows with the classes is put in calibration.json, beside config.json."""
        whole = self.calibration, self.train_counts
        if self.calibration is not None:
            self.calibration = Calibration.of(self).source
        self.train_counts = None
        try:
            super().save_pretrained(save_directory, **kwargs)
        finally:
            self.calibration, self.train_counts = whole
        save_details(self, save_directory)

    @classmethod
    def from_json_file(cls, json_file: str | os.PathLike) -> "AvgKConfig":
        """As in the base class, by way of `from_dict`."""
        return cls.from_dict(read_json(Path(json_file)))

    def to_json_file(self, json_file_path: str | os.PathLike, use_diff: bool = True) -> None:
        """As in the base class; a file that exists is replaced when the new one is complete."""
        with new_file(json_file_path) as new:
            super().to_json_file(new, use_diff)

    def to_diff_dict(self) -> dict[str, Any]:
        """What is written to config.json: also those defaults that other readers of the file depend on."""
        stated = ("architecture", "pretrained_cfg", "image_processor_type", "objective", "hyperparameters", "k")
        stated += ("score", "head", "sccp_head", "thresholds")
        output = {**super().to_diff_dict(), "auto_map": AUTO_MAP, "custom_pipelines": CUSTOM_PIPELINES}
        output |= {name: getattr(self, name) for name in stated}
        if self.base_model is None:
            output.pop("base_model", None)
        return output

    def to_json_string(self, use_diff: bool = True) -> str:
        """As in the base class, with what is short on one line."""
        return readable_json(self.to_diff_dict() if use_diff else self.to_dict())


def _readable(init: Any) -> Any:
    """`__init__` whose refusal of a type is one line, as for every other wrong value."""

    @functools.wraps(init)
    def wrapped(self: AvgKConfig, *args: Any, **kwargs: Any) -> None:
        kwargs = {name: plain(value) for name, value in kwargs.items()}
        try:
            init(self, *args, **kwargs)
        except StrictDataclassError as error:
            name = re.search(r"'(\w+)'", str(error))[1]
            reason = str(error.__cause__ or error).partition(" Errors: ")[0]
            raise ValueError(f"config.{name}={kwargs.get(name)!r} is of the wrong type: {reason}") from None

    return wrapped


AvgKConfig.__init__ = _readable(AvgKConfig.__init__)


def check_num_labels(num_labels: Any) -> None:
    """Refuse a number of classes for which no labels can be made."""
    if num_labels is None:
        return
    if isinstance(num_labels, bool) or not isinstance(num_labels, int) or not 0 <= num_labels <= MOST_LABELS:
        raise ValueError(f"num_labels={num_labels!r} must be a whole number of at most {MOST_LABELS:,}.")


def check_labels(stored: dict[str, Any]) -> None:
    """Refuse labels of a config.json, of any class, that are no labels."""
    for name in ("num_labels", "num_classes"):
        check_num_labels(stored.get(name))
    for name in ("id2label", "label2id"):
        if not isinstance(stored.get(name), (dict, type(None))):
            raise ValueError(f"config.{name} must be a mapping, but is of type {type(stored[name]).__name__}.")


def check_dtype(dtype: Any) -> None:
    """Refuse a name that is no type of weights; transformers would take any name of torch."""
    if not (dtype is None or isinstance(dtype, torch.dtype) or dtype in DTYPES):
        raise ValueError(f"config.dtype={dtype!r} is unknown; choose one of {list(DTYPES)}.")


def installed_losses() -> dict[str, Any]:
    """The losses, whose classes state all there is to know about them; none in remote code, which trains nothing."""
    try:  # what is imported elsewhere than in a `try`, transformers wants to be there for remote code as well
        from avgk_hf.losses import LOSSES
    except ImportError:
        return {}
    return LOSSES if INSTALLED else {}


def _every_hyperparameter() -> set[str]:
    return {name for loss in installed_losses().values() for name in loss.hyperparameters}


def _objective(objective: str, given: dict[str, Any], further: dict[str, Any]) -> dict[str, Any]:
    """The hyperparameters of an objective, with those that `further` names, which are taken out of it."""
    losses = installed_losses()
    if losses:
        if objective not in losses:
            raise ValueError(f"config.objective={objective!r} is unknown; choose one of {list(losses)}.")
        own = {name: further.pop(name) for name in [*further] if name in _every_hyperparameter()}
        return losses[objective].complete({**given, **own}, "config.hyperparameters[{!r}]")
    for name, value in given.items():
        is_word = isinstance(value, str) and value.isprintable() and len(value) <= MOST_LETTERS
        if not is_word and (not is_number(value) or math.isinf(value)):
            raise ValueError(f"config.hyperparameters[{name!r}]={value!r} must be a finite number or a word.")
    return given


def _own() -> list[str]:
    return [name for name in AvgKConfig.__annotations__ if name not in PreTrainedConfig.__annotations__]


def check_fields(given: dict[str, Any], num_labels: int | None = None) -> None:
    """Refuse a name that is no field of a config, which transformers would keep as an attribute and nobody read.

    And a number of classes that is not that of their names.
    """
    if not isinstance(given.get("id2label", {}), dict):
        raise ValueError("id2label must be a mapping, {0: name, 1: name, ...}: of a list, `dict(enumerate(names))`.")
    if not all(str(i).isdecimal() for i in given.get("id2label", ())):
        raise ValueError("id2label maps ids to names, {0: name, ...}, and this is another: is it the wrong way round?")
    if given.get("id2label") and num_labels not in (None, len(given["id2label"])):
        raise ValueError(f"num_labels={num_labels}, but id2label has {len(given['id2label'])} names: leave one out.")
    known = {*(item.name for item in fields(AvgKConfig)), *NOT_FIELDS, *_every_hyperparameter()}
    for name in given:
        if name not in known:
            _refuse_misspelt(name)
            for near in difflib.get_close_matches(name.lower(), OF_FROM_TIMM, 1, 0.75):
                raise ValueError(f"{name!r} is no argument of from_timm; did you mean {near!r}?")
            raise ValueError(f"{name!r} is neither an argument of from_timm nor a field of AvgKConfig: leave it out.")


def _refuse_misspelt(name: str) -> None:
    own = [*_own(), "num_labels", "id2label", "label2id", *_every_hyperparameter()]
    near = difflib.get_close_matches(name.lower(), own, n=1, cutoff=0.75)
    if near and near[0] != name and not hasattr(PreTrainedConfig, name):
        raise ValueError(f"config.{name} is no field of AvgKConfig. Did you mean {near[0]!r}?")


def _in_file(path: Path, error: Exception) -> ValueError:
    return ValueError(f"{path}: {' '.join(str(error).split())}")


def readable_json(content: dict[str, Any]) -> str:
    """JSON for a person: every field on a line of its own, with what it holds if that is short.

    >>> print(readable_json({"thresholds": {"2": 0.1, "1": 0.5}, "labels": ["a rather long name"] * 6}), end="")
    {
      "labels": [
        "a rather long name",
        "a rather long name",
        "a rather long name",
        "a rather long name",
        "a rather long name",
        "a rather long name"
      ],
      "thresholds": {"1": 0.5, "2": 0.1}
    }
    """

    def lines(value: Any, indent: str) -> str:
        short = json.dumps(value, sort_keys=True, ensure_ascii=False)
        if len(short) <= SHORT or not isinstance(value, (dict, list)):
            return short
        if isinstance(value, list):
            parts = [lines(item, indent + "  ") for item in value]
        else:
            parts = [f"{json.dumps(str(key))}: {lines(value[key], indent + '  ')}" for key in sorted(value)]
        first, last = ("[", "]") if isinstance(value, list) else ("{", "}")
        return f"{first}\n{indent}  " + f",\n{indent}  ".join(parts) + f"\n{indent}{last}"

    parts = [f"  {json.dumps(key)}: {lines(content[key], '  ')}" for key in sorted(content)]
    return "{\n" + ",\n".join(parts) + "\n}\n"


def processor_config(config: AvgKConfig) -> dict[str, Any]:
    """What preprocessor_config.json holds, from which the image processor is made."""
    return {name: getattr(config, name) for name in ("image_processor_type", "architecture", "pretrained_cfg")}


def code_files(first: str = "modeling.py") -> dict[str, Path]:
    """What a saved model carries as remote code: the first file and those it needs, by name."""
    path = Path(__file__).with_name(first)
    return {Path(file).name: Path(file) for file in (path, *get_relative_import_files(path))}
