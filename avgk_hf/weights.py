"""Where weights come from: timm models by name, from a folder or the Hub; and whether a folder of them is whole.

Nothing is unpickled, and no file is opened that a stranger's config names. Like the model, this file travels with a
saved model as remote code.
"""

import json
import logging as py_logging
import os
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import timm
import torch
from huggingface_hub import get_session, hf_hub_download, hf_hub_url, try_to_load_from_cache
from huggingface_hub.errors import EntryNotFoundError
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers.utils import find_adapter_config_file, is_peft_available, logging

from .backbones import (
    check_architecture,
    check_model_args,
    create_backbone,
    is_registered,
    known_cfg,
    near_models,
)
from .calibration import FIELDS, Calibration
from .checks import check_nesting, check_whole, is_hub_id, near_folder, read_config, read_json, reason_of

logger = logging.get_logger(__name__)

WAIT = 10  # seconds for the Hub to answer at all
ADAPTER, CALIBRATION = "adapter_model.safetensors", "calibration"  # of peft, and a tensor in it
ADAPTED = ("k", "score", "head", "train_counts", *FIELDS)  # what an adapter brings with it
CARRIED = ("id2label", *ADAPTED)  # and the classes it is of
MOST_BYTES = 2**27  # of that; thresholds of a million classes at three levels take a hundred million
OTHERWISE = (
    "go online once, or give the weights as a file, with the timm model that they are of: `--model NAME --checkpoint"
    " FILE`, in Python `checkpoint=`"
)
CONVERT = "save_file(torch.load(FILE, weights_only=True), 'model.safetensors', metadata={'format': 'pt'})"


@contextmanager
def without_bars() -> Iterator[None]:
    """Without transformers' bars for a model's shards, usually one, that are loaded or saved meanwhile."""
    before = logging.set_tqdm_hook(lambda make, args, kwargs: make(*args, **{**kwargs, "disable": True}))
    try:
        yield
    finally:
        logging.set_tqdm_hook(before)


def load_backbone(
    name: str,
    pretrained: bool | None,
    checkpoint: str | None,
    image_size: int | None,
    model_args: dict[str, Any] | None,
    frozen: bool = False,
) -> tuple[nn.Module, dict[str, Any]]:
    """A timm model with the weights that are asked for; the arguments are those of `from_timm`.

    Returns:
        The model, and what a config says about it: `architecture`, `model_args`, `pretrained_cfg`, `base_model`.
    """
    if image_size is not None:
        check_whole("image_size", image_size, 1)
    source = f"local-dir:{name}" if Path(name).is_dir() else name
    model_args = dict(model_args or {})
    if pretrained is None:
        pretrained = ":" in source or checkpoint is not None
    _check_weights(name, pretrained, checkpoint, frozen)
    weights: dict[str, Any] = {} if checkpoint is None else {"file": str(checkpoint)}
    if ":" in source:
        architecture, stored_args, cfg = _stored_config(source)
        model_args = {**stored_args, **model_args}
        if pretrained and checkpoint is None:
            weights = {"file": str(_stored_file(source, "model.safetensors"))}
        where = {"pretrained_cfg": {**cfg, **weights}}
    elif not is_registered(name):
        raise ValueError(
            f"{name!r} is neither a timm model nor a local folder. {near_models(name)} For a Hub model write"
            " `hf_hub:<repo id>`."
        )
    else:
        architecture, where = name, {"pretrained_cfg_overlay": weights} if weights else {}
        cfg = timm.get_pretrained_cfg(name, allow_unregistered=True)
        if pretrained and not weights and cfg and cfg.hf_hub_id:
            repo_id, _, revision = cfg.hf_hub_id.partition("@")
            known = (*filter(None, [cfg.hf_hub_filename]), "model.safetensors", "pytorch_model.bin")
            reach(repo_id, revision, known)
        if image_size is not None and cfg and cfg.fixed_input_size:
            model_args.setdefault("img_size", image_size)
    # timm itself loads the weights, once; __init__ builds without them, or every from_pretrained would fetch them
    trained = _created(architecture, model_args, pretrained, where, weights.get("file"))
    cfg = _portable_cfg(trained.pretrained_cfg, model_args.get("in_chans", 3), image_size)
    about = {"architecture": cfg["architecture"], "model_args": model_args, "pretrained_cfg": cfg}
    if not pretrained or checkpoint is not None:  # timm's description is of other weights
        cfg.pop("license", None)
    elif not source.startswith("local-dir:"):
        hub_id = source.partition(":")[2].partition("@")[0] or trained.pretrained_cfg.get("hf_hub_id")
        about["base_model"] = hub_id if is_hub_id(hub_id) else None
    return trained, about


def _check_weights(name: str, pretrained: bool, checkpoint: str | None, frozen: bool) -> None:
    """Refuse weights that cannot be meant, and say which are likely not meant."""
    if frozen and not pretrained:
        logger.warning("a frozen network with random weights learns next to nothing: pretrained=True or a checkpoint.")
    if checkpoint is not None and not pretrained:
        raise ValueError(
            f"checkpoint={checkpoint!r} names weights, and pretrained=False asks for none: leave one of them out."
        )
    if checkpoint is not None and Path(checkpoint).suffix != ".safetensors":
        raise ValueError(
            f"checkpoint={checkpoint!r} is not a .safetensors file. Convert other weights once with"
            " `safetensors.torch.save_file(model.state_dict(), 'weights.safetensors')`."
        )
    if checkpoint is not None and not Path(checkpoint).is_file():
        near = near_folder(str(checkpoint), file=True)
        remedy = f"did you mean {near!r}?" if near else "check the path."
        raise FileNotFoundError(f"checkpoint={checkpoint!r}: there is no such file; {remedy}")
    twin = name.removeprefix("tf_") if name.startswith("tf_") else f"tf_{name}"
    if checkpoint is not None and timm.is_model(twin):
        logger.warning_once(
            f"these weights fit {twin} as well as {name}: sets get worse if it is not the one that they are of"
        )


def _created(architecture: str, model_args: dict, pretrained: bool, where: dict, file: str | None) -> nn.Module:
    """The timm model; a file with the weights of another one is refused."""
    reason = "they fill fewer than half of its tensors"
    try:
        with _without_lists(file):
            model = create_backbone(architecture, model_args, pretrained, **where)
        if file is None or not pretrained or _share_of(model, file) >= 0.5:
            return model
    except RuntimeError as error:
        if file is None or "state_dict" not in str(error):
            raise
        reason = "their tensors have other names or shapes"
    raise ValueError(
        f"the weights in {file} are not those of {architecture!r} ({reason}): name the timm model that they are of"
        " with `model:`, `--model` for a command."
    )


@contextmanager
def _without_lists(file: str | None) -> Iterator[None]:
    """Without timm's lists of the tensors of a file that do not fit, pages of names: what fits is counted."""
    log = py_logging.getLogger("timm.models._builder")
    level = log.level
    log.setLevel(level if file is None else py_logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(level)


def _share_of(model: nn.Module, file: str) -> float:
    """How many of a model's parameters are in a file, by what they hold: timm may have changed their names.

    timm only warns where names do not fit, and the model would keep its random weights.
    """
    stored = {(value.numel(), value.double().sum().item()) for value in load_file(file).values()}
    own = [(value.numel(), value.detach().double().sum().item()) for value in model.parameters()]
    return sum(each in stored for each in own) / max(len(own), 1)


def _stored_config(source: str) -> tuple[str, dict[str, Any], dict[str, Any]]:
    """The architecture, the arguments that shape it and how images are prepared, as a timm folder or Hub repo says."""
    path = _stored_file(source, "config.json")
    stored = read_json(path)
    cfg = stored.get("pretrained_cfg", stored)  # timm once wrote one mapping for all
    if stored.get("model_type") == "avgk":
        raise ValueError(
            f"{path} is of a model of this package: `AvgKForImageClassification.from_pretrained` loads it."
        )
    architecture, model_args = stored.get("architecture"), stored.get("model_args") or {}
    if not isinstance(architecture, str) or not isinstance(model_args, dict) or not isinstance(cfg, dict):
        raise ValueError(f"{path} does not describe a timm model: it needs `architecture` and `pretrained_cfg`.")
    try:
        check_architecture(architecture)
        model_args = {name: value for name, value in model_args.items() if name != "num_classes"}  # heads are ours
        check_model_args(model_args)
        cfg = known_cfg(cfg)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    _, height, width = cfg.get("input_size", (3, 224, 224))
    if cfg.get("fixed_input_size") and model_args.get("img_size"):  # where older exports kept the original's size
        size = model_args["img_size"]
        height, width = size if isinstance(size, (list, tuple)) else (size, size)
    return architecture, model_args, {**cfg, "input_size": (model_args.get("in_chans", 3), height, width)}


def _stored_file(source: str, name: str) -> Path:
    """A file of a local folder or a Hub repo; never one that its config names."""
    kind, _, location = source.partition(":")
    if kind == "local-dir":
        check_folder(location, weights=name != "config.json")
        return Path(location, name)
    if kind not in ("hf_hub", "hf-hub"):
        raise ValueError(f"{source!r} is of an unknown kind; write `hf_hub:<repo id>` or the path of a folder.")
    repo_id, _, revision = location.partition("@")
    reach(repo_id, revision, [name])
    try:
        return Path(hf_hub_download(repo_id, name, revision=revision or None))
    except EntryNotFoundError as error:
        raise FileNotFoundError(
            f"{repo_id} has no {name}, neither on the Hub nor in the cache; weights in other files, which may be"
            " pickles, are not opened here."
        ) from error


def reach(repo_id: str, revision: str, names: Sequence[str], remedy: str = OTHERWISE) -> None:
    """Refuse at once what is neither in the cache nor within reach; a download would try again for a minute.

    Args:
        repo_id: On the Hub.
        revision: Of it, or empty.
        names: Files of which one in the cache will do.
        remedy: What to do.
    """
    if any(try_to_load_from_cache(repo_id, name, revision=revision or None) is not None for name in names):
        return  # there, or known to be missing
    try:
        get_session().head(hf_hub_url(repo_id, names[0], revision=revision or None), timeout=WAIT)
    except Exception as error:  # of the HTTP library that the Hub's client takes; an answer, of whatever kind, is none
        raise OSError(
            f"{repo_id} is not in the cache, and the Hub cannot be reached ({reason_of(error).rstrip('.')}): {remedy}."
        ) from error


def _portable_cfg(pretrained_cfg: dict[str, Any], in_chans: int, image_size: int | None) -> dict[str, Any]:
    """How images are prepared, for this number of channels and size, without download addresses and local paths."""
    cfg = known_cfg(pretrained_cfg)
    height, width = (image_size, image_size) if image_size else cfg["input_size"][1:]
    cfg["input_size"] = [in_chans, height, width]
    cfg.pop("num_classes", None)
    if image_size:
        cfg.update(crop_pct=1.0, crop_mode="center")
        cfg.pop("test_input_size", None)
        cfg.pop("test_crop_pct", None)
    if in_chans == 1:
        cfg.update(mean=[sum(cfg["mean"]) / len(cfg["mean"])], std=[sum(cfg["std"]) / len(cfg["std"])])
    return {k: list(v) if isinstance(v, tuple) else v for k, v in cfg.items() if v is not None}


def with_calibration(config: Any) -> dict[str, Tensor]:
    """The calibration as a tensor among the weights of an adapter: all that peft hands to the model it is loaded into.

    `take_calibration` reads it, before the weights are loaded.
    """
    record = {name: getattr(config, name) for name in CARRIED}
    return {f"base_model.model.{CALIBRATION}": torch.tensor([*json.dumps(record).encode()], dtype=torch.uint8)}


def take_calibration(model: nn.Module, state_dict: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """A hook of a model's `load_state_dict`: the calibration that comes with an adapter, or none, takes its place.

    One of other classes is left out, because thresholds belong to the classes as they do to the weights.
    """
    found = state_dict.pop(prefix + CALIBRATION, None)
    if found is None and not hasattr(model, "peft_config"):
        return
    config = model.config
    Calibration.drop(config)
    if found is None:
        return
    try:
        if found.dtype != torch.uint8 or found.numel() > MOST_BYTES:
            raise ValueError(f"{found.numel()} numbers of type {found.dtype}")
        record = json.loads(found.cpu().numpy().tobytes())
        check_nesting(record, CALIBRATION)
        record = {name: value for name, value in record.items() if name in CARRIED}
        checked = type(config).from_dict({**config.to_dict(), **record})
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise ValueError(f"the calibration in the adapter is damaged ({reason_of(error)}): train it again.") from None
    if checked.id2label == config.id2label:
        for name in ADAPTED:
            setattr(config, name, getattr(checked, name))


def refuse_adapter(name: str | os.PathLike, **kwargs: Any) -> None:
    """Refuse an adapter of peft: its settings name another model to load and a module to import."""
    if not is_peft_available():  # transformers then leaves it alone
        return
    given = ("cache_dir", "force_download", "token", "revision", "local_files_only", "subfolder")
    where = {key: kwargs[key] for key in given if key in kwargs}
    found = (kwargs.get("adapter_kwargs") or {}).get("_adapter_model_path")
    if found or find_adapter_config_file(os.fspath(name), **where):
        raise ValueError(
            f"{found or name} holds an adapter of peft, and adapters are not loaded here: load its base model and the"
            " adapter with peft yourself, and save `model.merge_and_unload()`."
        )


def check_folder(folder: str | os.PathLike, weights: bool = True) -> None:
    """Refuse a folder whose model is missing, half written or pickled, with the name of the file.

    Args:
        folder: A saved model.
        weights: Whether there must be weights, or config.json alone will do.
    """
    folder = Path(folder)
    read_config(folder)
    names = [name for name in ("model.safetensors", ADAPTER) if (folder / name).is_file()]
    index = folder / "model.safetensors.index.json"
    if "model.safetensors" not in names and index.is_file():
        names += check_weight_map(index)
    if not names and weights:
        state = ("training_args", "optimizer", "scheduler", "scaler", "rng_state")  # of a training, not of a model
        pickles = [p.name for ending in ("bin", "pt", "pth", "ckpt") for p in sorted(folder.glob(f"*.{ending}"))]
        for name in (name for name in pickles if not name.startswith(state)):
            raise ValueError(
                f"{folder} holds its weights only as {name}, a pickle, and pickles are not opened here. If you trust"
                f" it, convert it once: `safetensors.torch.{CONVERT.replace('FILE', repr(name))}`."
            )
        raise FileNotFoundError(
            f"{folder} holds no model.safetensors; its writing was interrupted, or it is no model."
        )
    for name in names:
        check_safetensors(folder / name)


def check_weight_map(index: Path) -> list[str]:
    """The files that an index of weights names; one that is not beside it is refused."""
    weight_map = read_json(index).get("weight_map")
    names = list(weight_map.values()) if isinstance(weight_map, dict) else []
    for name in names:
        if not isinstance(name, str) or not re.fullmatch(r"[\w.-]+\.safetensors", name):
            raise ValueError(f"{index} names {name!r}, but weights are only read from *.safetensors files beside it.")
    return sorted(set(names))


def check_safetensors(path: Path) -> None:
    """Refuse a safetensors file that is not whole; only its header is read."""
    try:
        with safe_open(path, "pt") as file:
            file.keys()
    except (SafetensorError, OSError) as error:
        raise OSError(f"{path} is missing, cut off or damaged ({error}); restore it from a copy.") from error


def weight_names(folder: Path) -> set[str]:
    """The names of a saved model's weights, in one file or several; none where there is an adapter only."""
    if (folder / "model.safetensors").is_file():
        with safe_open(folder / "model.safetensors", "pt") as file:
            return set(file.keys())
    index = folder / "model.safetensors.index.json"
    return set(read_json(index)["weight_map"]) if index.is_file() else set()


def shared_names(model: nn.Module) -> dict[str, str]:
    """Further names of parameters and buffers that occur more than once, as in coat; a file holds each one once."""
    first: dict[int, str] = {}
    return {
        name: first[id(tensor)]
        for name, tensor in model.state_dict(keep_vars=True).items()
        if first.setdefault(id(tensor), name) != name
    }
