"""timm models by name: what a config may say about them, and how they are built.

A config comes from strangers, so it may name a registered architecture and arguments that shape it, and nothing else:
no address, no path, no weights. Like the model, this file travels with a saved model as remote code.
"""

import difflib
import fnmatch
import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .densenet import densenet40_40_cifar  # noqa: F401  (so that timm knows it)

MOST_SIDE = 4_096  # pixels of an input image
MOST_CHANNELS = 1_000
MOST_PARAMETERS = 8_000_000_000  # timm's largest model has 6.7 billion
MOST_TENSORS = 10_000  # timm's models have up to 2,500
MOST_LABELS = 1_000_000
ENCODER = "returns many vectors for an image, not one; take the model of the same name without `_enc`"
UNSUPPORTED = {  # timm models, as patterns, and why they are refused
    "deepseek_vit_*_enc": ENCODER,
    "gemma4_vit_*_enc": ENCODER,
    "mobilenetv5_*_enc": ENCODER,
    "qwen3_vit_*_enc": ENCODER,
}

RATES = "drop_rate drop_path_rate proj_drop_rate attn_drop_rate pos_drop_rate patch_drop_rate drop_block_rate"
COUNTS = "depth depths layers num_blocks serial_depths parallel_depth stages depth_list block_config num_blocks_list"
COUNTS += " depth_token_only transformer_depths cls_attn_layers num_rnn_layers num_levels num_heads num_kv_heads heads"
COUNTS += " num_heads_inner num_heads_outer reg_tokens num_reg_tokens cardinality group groups num_vit"
WIDTHS = "embed_dim embed_dims dim dims base_dim base_dims inner_dim hidden_sizes intermediate_size channels widths"
WIDTHS += " width_list head_widths base_width stem_width stem_size stem_chs stem_hidden_dim init_channels initial_chs"
WIDTHS += " final_chs growth_rate growth_rates num_init_features num_features head_hidden_size head_dim key_dim qk_dim"
WIDTHS += " partial_dim state_dim neck_chans rel_pos_dim feature_dim"
FACTORS = "mlp_ratio mlp_ratios ffn_ratio expand_ratio expansion_ratio attn_ratio conv_ratio sr_ratios bottle_ratio"
FACTORS += " se_ratio width width_factor width_mult depth_mult channel_multiplier depth_multiplier widen_factor"
FACTORS += " deepen_factor scale bn_size init_values ls_init_value layer_scale_init_value head_init_scale norm_eps"
SIZES = "img_size patch_size patch_sizes output_stride"
WINDOWS = "window_size window_sizes window_ratio kernel_size kernel_sizes stem_kernel_size down_kernel_size"
WINDOWS += " first_stride stride strides"
WORDS = "global_pool act_layer norm_layer norm_layer_cl aa_layer stem_type pos_embed rel_pos_type weight_init pad_type"
WORDS += " class_token no_embed_class dynamic_img_size dynamic_img_pad strict_img_size always_partition qkv_bias"
WORDS += " proj_bias qk_norm pre_norm final_norm fc_norm use_fc_norm head_norm_first conv_mlp conv_bias use_grn"
WORDS += " swiglu_mlp scale_mlp avg_down preact replace_stem_pool zero_init_last use_abs_pos_emb use_rel_pos"
WORDS += " use_rel_pos_bias use_shared_rel_pos_bias use_rot_pos_emb use_pos_embed use_post_norm use_overlap_down"
WORDS += " fix_init fix_stem distilled"
# the arguments of `timm.create_model` that shape a model, each with the largest number it takes; words take none
MODEL_ARGS = {
    "in_chans": MOST_CHANNELS,
    **dict.fromkeys(RATES.split(), 1),
    **dict.fromkeys(COUNTS.split(), 200),
    **dict.fromkeys(WIDTHS.split(), 20_000),
    **dict.fromkeys(FACTORS.split(), 100),
    **dict.fromkeys(SIZES.split(), MOST_SIDE),
    **dict.fromkeys(WINDOWS.split(), 64),
    **dict.fromkeys(WORDS.split(), 0),
}

INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random")
CROP_MODES = ("center", "squash", "border")
# what is kept of timm's description of a model besides the fields that `known_cfg` looks at: no address and no path
DESCRIPTION = ("architecture", "tag", "license", "fixed_input_size", "first_conv", "classifier", "num_classes")
DESCRIPTION += ("label_offset", "pool_size", "test_pool_size")


def check_model_args(model_args: dict[str, Any]) -> None:
    """Refuse, by its name, an argument that does not shape an architecture, and a value that is no plain small one."""
    for name, value in model_args.items():
        if name not in MODEL_ARGS:
            near = difflib.get_close_matches(str(name), MODEL_ARGS, n=1)
            hint = f"Did you mean {near[0]!r}?" if near else "`avgk_hf.backbones.MODEL_ARGS` lists those that are."
            raise ValueError(
                f"model_args: {_short(name)} is not among the arguments that shape a timm model and are allowed here."
                f" {hint}"
            )
        most = MODEL_ARGS[name]
        if not _is_plain(value, most):
            numbers = f"numbers in [0, {most}], " if most else ""
            raise ValueError(
                f"model_args: {name}={_short(value)} is not allowed; give {numbers}true, false, a plain word, or a"
                " short list of these."
            )


def _is_plain(value: Any, most: float, depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < 2 and len(value) <= 64 and all(_is_plain(item, most, depth + 1) for item in value)
    if isinstance(value, str):
        return re.fullmatch(r"[A-Za-z0-9_]{0,40}", value) is not None
    return value is None or isinstance(value, bool) or (isinstance(value, (int, float)) and 0 <= value <= most)


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= 80 else f"{text[:80]}..."


def check_architecture(name: str) -> None:
    """Refuse what is no registered timm model, above all an address (`hf_hub:...`) or a path."""
    if not is_registered(name):
        raise ValueError(f"architecture={_short(name)} is no timm model. {near_models(name)}")


def is_registered(name: str) -> bool:
    """Whether timm has a model of this name; a tag of its weights may follow after a dot."""
    return re.fullmatch(r"\w+(\.[\w-]+)?", name) is not None and timm.is_model(name.split(".")[0])


def near_models(name: str) -> str:
    """A hint at the timm models that may have been meant."""
    near = difflib.get_close_matches(name[:80].split(".")[0], timm.list_models(), n=3)
    return f"Did you mean {' or '.join(near)}?" if near else "`timm.list_models()` lists all of them."


def known_cfg(cfg: dict[str, Any]) -> dict[str, Any]:
    """What is known here of timm's description of a model, with checked values; the rest is left out."""
    known = {name: cfg[name] for name in DESCRIPTION if name in cfg and _is_described(cfg[name])}
    for name in ("input_size", "test_input_size", "min_input_size"):
        if cfg.get(name) is not None:
            known[name] = _check(cfg, name, _is_size, f"[channels, height, width], at most {MOST_SIDE} pixels a side")
    for name in ("crop_pct", "test_crop_pct"):
        if cfg.get(name) is not None:  # images are resized to the side divided by it, and then cropped
            known[name] = _check(cfg, name, lambda value: _is_number(value) and 0.25 <= value <= 2, "in [0.25, 2]")
    for name, choices in (("interpolation", INTERPOLATIONS), ("crop_mode", CROP_MODES)):
        if cfg.get(name) is not None:
            known[name] = _check(cfg, name, lambda value, choices=choices: value in choices, f"one of {choices}")
    for name, least in (("mean", -math.inf), ("std", 0)):
        if cfg.get(name) is not None:
            wanted = f"a number above {least} for each channel" if name == "std" else "a number for each channel"
            known[name] = _check(cfg, name, lambda value, least=least: _is_channels(value, least), wanted)
    return known


def _check(cfg: dict[str, Any], name: str, right: Any, wanted: str) -> Any:
    if not right(cfg[name]):
        raise ValueError(f"pretrained_cfg: {name}={_short(cfg[name])} is not allowed; it must be {wanted}.")
    return cfg[name]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= 1e6


def _is_size(value: Any) -> bool:
    whole = isinstance(value, (list, tuple)) and len(value) == 3 and all(type(side) is int for side in value)
    return whole and 1 <= value[0] <= MOST_CHANNELS and 1 <= min(value[1:]) <= max(value[1:]) <= MOST_SIDE


def _is_channels(value: Any, least: float) -> bool:
    several = isinstance(value, (list, tuple)) and 1 <= len(value) <= MOST_CHANNELS
    return several and all(_is_number(item) and item > least for item in value)


def _is_described(value: Any) -> bool:
    items = value if isinstance(value, (list, tuple)) and len(value) <= 16 else (value,)
    short = (item is None or _is_number(item) or isinstance(item, bool) for item in items)
    return all(fine or (isinstance(item, str) and len(item) <= 200) for fine, item in zip(short, items, strict=True))


def create_backbone(
    name: str, model_args: dict[str, Any] | None = None, pretrained: bool = False, **source: Any
) -> nn.Module:
    """A registered timm model without classifier.

    Args:
        name: The architecture.
        model_args: Arguments that shape it, among `MODEL_ARGS`.
        pretrained: Whether timm loads weights; never what a config says.
        source: Where from, as `pretrained_cfg` or `pretrained_cfg_overlay`; never what a config says.
    """
    model_args = model_args or {}
    check_architecture(name)
    for pattern, reason in UNSUPPORTED.items():
        if fnmatch.fnmatchcase(name.split(".")[0], pattern):
            raise ValueError(f"the timm model {name!r} is not supported: it {reason}.")
    check_model_args(model_args)
    if model_args or source:  # a trial that takes no memory
        try:
            with torch.device("meta"), bounded(f"{name} with model_args={_short(model_args)}"):
                timm.create_model(name, pretrained=False, num_classes=0, **source, **model_args)
        except TooLarge:
            raise
        except Exception as error:  # of a constructor that takes its arguments on trust
            reason = " ".join(str(error).split()) or type(error).__name__
            raise ValueError(f"the timm model {name!r} refuses model_args={_short(model_args)} ({reason}).") from error
    backbone = timm.create_model(name, pretrained=pretrained, num_classes=0, **source, **model_args)
    if any(getattr(module, "out_features", None) == 0 for module in backbone.modules()):
        backbone.reset_classifier(0)  # inception_next builds a layer of width 0 where others leave the layer out
    return backbone


class TooLarge(ValueError):
    """A model of more numbers than are allowed."""


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Refuse a model while it is built, as soon as it has too many parameters or tensors."""
    numbers = tensors = 0

    def count(module: nn.Module, _: str, tensor: Tensor | None) -> None:
        nonlocal numbers, tensors
        if tensor is not None:
            numbers, tensors = numbers + tensor.numel(), tensors + 1
        if numbers > MOST_PARAMETERS or tensors > MOST_TENSORS:
            raise TooLarge(
                f"{name} is too large: at most {MOST_PARAMETERS:,} numbers in {MOST_TENSORS:,} tensors are allowed."
            )

    hooks = [
        torch_module.register_module_parameter_registration_hook(count),
        torch_module.register_module_buffer_registration_hook(count),
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def feature_width(backbone: nn.Module) -> int:
    """Number of pooled features d; timm has two names for it, and a SAM encoder sets the wrong one behind its neck."""
    has_neck = isinstance(getattr(backbone, "neck", None), nn.Sequential)
    return (not has_neck and getattr(backbone, "head_hidden_size", None)) or backbone.num_features
