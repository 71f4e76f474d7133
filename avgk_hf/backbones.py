"""timm models by name: what a config may say about them, how they are built, and two for CIFAR.

A config comes from strangers, so it may name a registered architecture and arguments that shape it, and nothing else:
no address, no path, no weights. Like the model, this file travels with a saved model as remote code.
"""

import difflib
import fnmatch
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import timm
import torch
from timm.models import build_model_with_cfg, generate_default_cfgs, is_model, register_model
from timm.models._features import feature_take_indices
from timm.models.densenet import DenseNet
from timm.models.resnet import BasicBlock, ResNet
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from .checks import is_number, reason_of

MOST_SIDE = 4_096  # pixels of an input image
MOST_CHANNELS = 1_000
MOST_PARAMETERS = 8_000_000_000  # timm's largest model has 6.7 billion
MOST_TENSORS = 10_000  # timm's models have up to 2,500
MOST_LABELS = 1_000_000
# timm models, as patterns, that return many vectors for an image, not one
UNSUPPORTED = ("deepseek_vit_*_enc", "gemma4_vit_*_enc", "mobilenetv5_*_enc", "qwen3_vit_*_enc")

# the arguments of `timm.create_model` that shape a model, by the largest number they take: rates, windows, factors,
# counts, sizes, widths; those that take words or truth values, but no number
LIMITS = {
    MOST_CHANNELS: "in_chans",
    1: "drop_rate drop_path_rate proj_drop_rate attn_drop_rate pos_drop_rate patch_drop_rate drop_block_rate",
    64: """window_size window_sizes window_ratio kernel_size kernel_sizes stem_kernel_size down_kernel_size
        first_stride stride strides""",
    100: """mlp_ratio mlp_ratios ffn_ratio expand_ratio expansion_ratio attn_ratio conv_ratio sr_ratios bottle_ratio
        se_ratio width width_factor width_mult depth_mult channel_multiplier depth_multiplier widen_factor
        deepen_factor scale bn_size init_values ls_init_value layer_scale_init_value head_init_scale norm_eps""",
    200: """depth depths layers num_blocks serial_depths parallel_depth stages depth_list block_config num_blocks_list
        depth_token_only transformer_depths cls_attn_layers num_rnn_layers num_levels num_heads num_kv_heads heads
        num_heads_inner num_heads_outer reg_tokens num_reg_tokens cardinality group groups num_vit""",
    MOST_SIDE: "img_size patch_size patch_sizes output_stride",
    20_000: """embed_dim embed_dims dim dims base_dim base_dims inner_dim hidden_sizes intermediate_size channels
        widths width_list head_widths base_width stem_width stem_size stem_chs stem_hidden_dim init_channels
        initial_chs final_chs growth_rate growth_rates num_init_features num_features head_hidden_size head_dim
        key_dim qk_dim partial_dim state_dim neck_chans rel_pos_dim feature_dim""",
    0: """global_pool act_layer norm_layer norm_layer_cl aa_layer stem_type pos_embed rel_pos_type weight_init pad_type
        class_token no_embed_class dynamic_img_size dynamic_img_pad strict_img_size always_partition qkv_bias
        proj_bias qk_norm pre_norm final_norm fc_norm use_fc_norm head_norm_first conv_mlp conv_bias use_grn
        swiglu_mlp scale_mlp avg_down preact replace_stem_pool zero_init_last use_abs_pos_emb use_rel_pos
        use_rel_pos_bias use_shared_rel_pos_bias use_rot_pos_emb use_pos_embed use_post_norm use_overlap_down
        fix_init fix_stem distilled""",
}
MODEL_ARGS = {name: most for most, names in LIMITS.items() for name in names.split()}

# what is kept of timm's description of a model besides the fields that are `CHECKED`: no address and no path
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


def _is_plain(value: Any, most: float, words: str = r"[A-Za-z0-9_]{0,40}", depth: int = 0) -> bool:
    if isinstance(value, (list, tuple)):
        return depth < 2 and len(value) <= 64 and all(_is_plain(item, most, words, depth + 1) for item in value)
    if isinstance(value, str):
        return re.fullmatch(words, value) is not None
    return value is None or isinstance(value, bool) or (is_number(value) and 0 <= value <= most)


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
    name, known = name[:80].split(".")[0], timm.list_models()
    near = [each for each in known if each.startswith(name)][:3] or difflib.get_close_matches(name, known, n=3)
    return f"Did you mean {' or '.join(near)}?" if near else "`timm.list_models()` lists all of them."


def _is_size(value: Any) -> bool:
    whole = isinstance(value, (list, tuple)) and len(value) == 3 and all(type(side) is int for side in value)
    return whole and 1 <= value[0] <= MOST_CHANNELS and 1 <= min(value[1:]) <= max(value[1:]) <= MOST_SIDE


def _are_channels(value: Any, above: float) -> bool:
    several = isinstance(value, (list, tuple)) and 1 <= len(value) <= MOST_CHANNELS
    return several and all(is_number(item) and above < item <= 1e6 for item in value)


INTERPOLATIONS = ("nearest", "bilinear", "bicubic", "box", "hamming", "lanczos", "random")
CROP_MODES = ("center", "squash", "border")
SIZE = _is_size, f"[channels, height, width], at most {MOST_SIDE} pixels a side"
# images are resized to the side divided by it, and then cropped
CROP = lambda value: is_number(value) and 0.25 <= value <= 2, "in [0.25, 2]"
# fields of timm's description: what holds of the value, and how that is said
CHECKED: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("input_size", "test_input_size", "min_input_size"), SIZE),
    **dict.fromkeys(("crop_pct", "test_crop_pct"), CROP),
    "interpolation": (INTERPOLATIONS.__contains__, f"one of {INTERPOLATIONS}"),
    "crop_mode": (CROP_MODES.__contains__, f"one of {CROP_MODES}"),
    "mean": (lambda value: _are_channels(value, -1e6), "a number for each channel"),
    "std": (lambda value: _are_channels(value, 0), "a number above 0 for each channel"),
}


def known_cfg(cfg: dict[str, Any]) -> dict[str, Any]:
    """What is known here of timm's description of a model, with checked values; the rest is left out."""
    known = {name: cfg[name] for name in DESCRIPTION if name in cfg and _is_plain(cfg[name], 1e6, "(?s).{0,200}")}
    for name, (holds, wanted) in CHECKED.items():
        if cfg.get(name) is not None:
            if not holds(cfg[name]):
                raise ValueError(f"pretrained_cfg: {name}={_short(cfg[name])} is not allowed; it must be {wanted}.")
            known[name] = cfg[name]
    return known


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
    if any(fnmatch.fnmatchcase(name.split(".")[0], pattern) for pattern in UNSUPPORTED):
        raise ValueError(
            f"the timm model {name!r} is not supported: it returns many vectors for an image, not one; take the model"
            " of the same name without `_enc`."
        )
    check_model_args(model_args)
    if model_args or source:  # a trial that takes no memory
        try:
            with torch.device("meta"), bounded(name):
                timm.create_model(name, pretrained=False, num_classes=0, **source, **model_args)
        except Exception as error:  # of a constructor that takes its arguments on trust
            refused = f"the timm model {name!r} refuses model_args={_short(model_args)}"
            raise ValueError(f"{refused} ({reason_of(error)}).") from error
    backbone = timm.create_model(name, pretrained=pretrained, num_classes=0, **source, **model_args)
    if any(getattr(module, "out_features", None) == 0 for module in backbone.modules()):
        backbone.reset_classifier(0)  # inception_next builds a layer of width 0 where others leave the layer out
    return backbone


@contextmanager
def bounded(name: str) -> Iterator[None]:
    """Refuse a model while it is built, as soon as it has too many parameters or tensors."""
    numbers = tensors = 0

    def count(module: nn.Module, _: str, tensor: Tensor | None) -> None:
        nonlocal numbers, tensors
        if tensor is not None:
            numbers, tensors = numbers + tensor.numel(), tensors + 1
        if numbers > MOST_PARAMETERS or tensors > MOST_TENSORS:
            raise ValueError(
                f"{name} is too large: at most {MOST_PARAMETERS:,} numbers in {MOST_TENSORS:,} tensors are allowed."
            )

    with (
        torch_module.register_module_parameter_registration_hook(count),
        torch_module.register_module_buffer_registration_hook(count),
    ):
        yield


def feature_width(backbone: nn.Module) -> int:
    """Number of pooled features d; timm has two names for it, and a SAM encoder sets the wrong one behind its neck."""
    has_neck = isinstance(getattr(backbone, "neck", None), nn.Sequential)
    return (not has_neck and getattr(backbone, "head_hidden_size", None)) or backbone.num_features


OF_CIFAR = {
    "num_classes": 100,
    "input_size": (3, 32, 32),
    "crop_pct": 1.0,
    "interpolation": "bilinear",
    "mean": (0.5071, 0.4865, 0.4409),
    "std": (0.2673, 0.2564, 0.2762),
}
default_cfgs = generate_default_cfgs(
    {
        "densenet40_40_cifar.untrained": {
            **OF_CIFAR,
            "pool_size": (8, 8),
            "first_conv": "features.conv0",
            "classifier": "classifier",
        },
        "resnet10_cifar.untrained": {
            **OF_CIFAR,
            "pool_size": (2, 2),
            "first_conv": "conv1",
            "classifier": "fc",
        },
    }
)


class CifarDenseNet(DenseNet):
    """timm's DenseNet with a stem for small images: one 3 x 3 convolution with 2 x growth channels, and no pooling.

    The stem keeps the resolution, and the first dense layer normalises it. All arguments are those of `DenseNet`.
    """

    def __init__(self, growth_rate: int, in_chans: int = 3, **kwargs: Any) -> None:
        super().__init__(growth_rate=growth_rate, in_chans=in_chans, **kwargs)
        place = {name: kwargs.get(name) for name in ("device", "dtype")}
        self.features.conv0 = nn.Conv2d(in_chans, 2 * growth_rate, 3, padding=1, bias=False, **place)
        del self.features.norm0, self.features.pool0
        self.feature_info[0]["module"] = "features.conv0"
        for i, info in enumerate(self.feature_info):
            info["reduction"] = 2 ** max(0, i - 1)  # the stem and the first block keep the resolution
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")  # as in the code that the paper follows

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | None = None,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
    ) -> list[Tensor] | tuple[Tensor, list[Tensor]]:
        """As in timm's other models: the final map and those of the stem and each block, the last one normalised."""
        if output_fmt != "NCHW":
            raise ValueError(f"output_fmt={output_fmt!r} is not supported; use 'NCHW'.")
        places = [info["module"].removeprefix("features.") for info in self.feature_info]
        wanted, last = feature_take_indices(len(places), indices)
        maps = []
        for name, module in self.features.named_children():
            x = module(x)
            if name in places:
                if places.index(name) in wanted:
                    maps.append(x)
                if stop_early and intermediates_only and places.index(name) == last:
                    break
        return maps if intermediates_only else (x, maps)


def _registered(make: Any) -> Any:
    """`register_model`, unless the name is known: as remote code this file comes beside the installed package."""
    return make if is_model(make.__name__) else register_model(make)


@_registered
def densenet40_40_cifar(pretrained: bool = False, **kwargs: Any) -> DenseNet:
    """DenseNet-BC of depth 40 and growth 40 for the 32 x 32 images of CIFAR-100; there are no pretrained weights."""
    return build_model_with_cfg(
        CifarDenseNet,
        "densenet40_40_cifar",
        pretrained,
        block_config=((40 - 4) // 6,) * 3,  # a stem, two transitions, a classifier; two convolutions in each layer
        growth_rate=40,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **kwargs,
    )


class CifarResNet(ResNet):
    """timm's ResNet with a stem for small images: one 3 x 3 convolution with stride 2, and no pooling.

    All arguments are those of `ResNet`; the stem has 2 x `stem_width` channels.
    """

    def __init__(self, in_chans: int = 3, stem_width: int = 12, **kwargs: Any) -> None:
        super().__init__(in_chans=in_chans, stem_width=stem_width, stem_type="deep", **kwargs)
        place = {name: kwargs.get(name) for name in ("device", "dtype")}
        self.conv1 = nn.Conv2d(in_chans, 2 * stem_width, 3, stride=2, padding=1, bias=False, **place)
        nn.init.kaiming_normal_(self.conv1.weight, mode="fan_out", nonlinearity="relu")  # as timm's
        self.maxpool = nn.Identity()
        for i, info in enumerate(self.feature_info):
            info["reduction"] = 2 ** max(1, i)  # the first stage keeps the stem's resolution


@_registered
def resnet10_cifar(pretrained: bool = False, **kwargs: Any) -> ResNet:
    """A ResNet of 10 layers and 0.7 million weights for 32 x 32 images, which a processor trains in minutes."""
    shape = {"block": BasicBlock, "layers": (1, 1, 1, 1), "channels": (24, 48, 96, 192)}
    return build_model_with_cfg(CifarResNet, "resnet10_cifar", pretrained, **{**shape, **kwargs})


def check_pixels(pixel_values: Any, channels: int) -> None:
    """Refuse what is no batch of prepared images for a model with so many channels."""
    remedy = "Prepare images with `avgk_hf.prepare` or the image processor of the model."
    if not isinstance(pixel_values, Tensor):
        raise ValueError(f"pixel_values of type {type(pixel_values).__name__}: expected a tensor. {remedy}")
    if pixel_values.ndim != 4:
        raise ValueError(
            f"pixel_values of shape {tuple(pixel_values.shape)}: expected (images, channels, height, width), so"
            f" `pixel_values[None]` for one image. {remedy}"
        )
    if not pixel_values.is_floating_point():
        raise ValueError(f"pixel_values of type {pixel_values.dtype} are not normalised. {remedy}")
    if pixel_values.shape[1] != channels and {pixel_values.shape[1], channels} != {1, 3}:
        raise ValueError(f"pixel_values with {pixel_values.shape[1]} channels: the model takes {channels}. {remedy}")


def match_channels(pixel_values: Tensor, channels: int) -> Tensor:
    """Grey images (B, 1, H, W) for a colour model, and colour images for a grey one."""
    given = pixel_values.shape[1]
    if given == 1 and channels == 3:
        return pixel_values.expand(-1, 3, -1, -1)
    if given == 3 and channels == 1:
        luma = pixel_values.new_tensor([0.299, 0.587, 0.114])  # as Pillow converts to grey
        return (pixel_values * luma[:, None, None]).sum(1, keepdim=True)
    return pixel_values
