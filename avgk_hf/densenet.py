"""`densenet40_40_cifar`: the DenseNet 40-40 of the CIFAR-100 experiments, as a timm model.

timm's DenseNets are made for images of 224 pixels. This one is built from their parts for 32: depth 40 with
bottlenecks, growth 40, and compression 0.5, so three blocks of (40 - 4) / 6 = 6 layers. The first convolution keeps
the resolution, and the first dense layer normalises it.

The file also travels with a saved model as remote code, so it imports only what inference needs.
"""

from typing import Any

from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from timm.models._features import feature_take_indices
from timm.models.densenet import DenseNet
from torch import Tensor, nn

DEPTH, GROWTH = 40, 40
default_cfgs = generate_default_cfgs(
    {
        "densenet40_40_cifar.untrained": {
            "num_classes": 100,
            "input_size": (3, 32, 32),
            "pool_size": (8, 8),
            "crop_pct": 1.0,
            "interpolation": "bilinear",
            "mean": (0.5071, 0.4865, 0.4409),
            "std": (0.2673, 0.2564, 0.2762),
            "first_conv": "features.conv0",
            "classifier": "classifier",
        }
    }
)


class CifarDenseNet(DenseNet):
    """timm's DenseNet with a stem for small images: one 3 x 3 convolution with 2 x growth channels, and no pooling.

    Args:
        growth_rate: Channels that each layer adds.
        in_chans: Channels of the image.
        kwargs: As in timm's `DenseNet`.
    """

    def __init__(self, growth_rate: int = GROWTH, in_chans: int = 3, **kwargs: Any) -> None:
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
        """The final feature map and those of the stem and each block, in the form of timm's other models.

        Args:
            x: Images (B, C, H, W).
            indices: The last n maps if a number, the named ones if a list, all of them by default.
            norm: Not used: the last map is normalised, the others are not.
            stop_early: Compute no more than the maps asked for.
            output_fmt: `"NCHW"` only.
            intermediates_only: Return the list alone.
        """
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


@register_model
def densenet40_40_cifar(pretrained: bool = False, **kwargs: Any) -> DenseNet:
    """DenseNet-BC of depth 40 and growth 40 for 32 x 32 images; there are no pretrained weights."""
    layers = (DEPTH - 4) // 6  # a stem, two transitions, a classifier; two convolutions in each of the layers
    return build_model_with_cfg(
        CifarDenseNet,
        "densenet40_40_cifar",
        pretrained,
        block_config=(layers, layers, layers),
        growth_rate=GROWTH,
        feature_cfg={"out_indices": (0, 1, 2, 3), "flatten_sequential": True},
        **kwargs,
    )
