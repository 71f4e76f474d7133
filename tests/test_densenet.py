"""DenseNet 40-40 for 32 x 32 images: its size, and that it behaves as any timm model."""

import pytest
import timm
import torch
from torch import nn

from avgk_hf import AvgKForImageClassification

NAME = "densenet40_40_cifar"


def parameter_count(depth: int, growth: int, classes: int) -> int:
    """DenseNet-BC, from its description; a batch norm has two parameters per channel, a convolution no bias."""
    channels = 2 * growth
    total = 3 * 3 * 3 * channels
    for block in range(3):
        for _ in range((depth - 4) // 6):
            total += 2 * channels + channels * 4 * growth  # norm, 1 x 1
            total += 2 * 4 * growth + 4 * growth * 3 * 3 * growth  # norm, 3 x 3
            channels += growth
        if block < 2:
            total += 2 * channels + channels * (channels // 2)
            channels //= 2
    return total + 2 * channels + channels * classes + classes


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    return timm.create_model(NAME).eval()


def test_size(model):
    assert sum(p.numel() for p in model.parameters()) == parameter_count(40, 40, 100) == 1_941_620
    convolutions = [module for module in model.modules() if isinstance(module, nn.Conv2d)]
    assert len(convolutions) == 39 and all(module.bias is None for module in convolutions)  # and the classifier
    assert [name for name, _ in model.features.named_children()] == [
        "conv0", "denseblock1", "transition1", "denseblock2", "transition2", "denseblock3", "norm5"
    ]  # fmt: skip
    first = model.features.conv0
    assert (first.kernel_size, first.stride, first.padding, first.out_channels) == ((3, 3), (1, 1), (1, 1), 80)
    for module in convolutions:  # normal with variance 2 / (k k channels out)
        wanted = (2 / (module.kernel_size[0] ** 2 * module.out_channels)) ** 0.5
        assert module.weight.std().item() == pytest.approx(wanted, rel=0.1)


def test_input(model):
    cfg = model.pretrained_cfg
    assert cfg["input_size"] == (3, 32, 32) and cfg["crop_pct"] == 1.0
    assert cfg["mean"] == (0.5071, 0.4865, 0.4409) and cfg["std"] == (0.2673, 0.2564, 0.2762)
    assert timm.data.resolve_model_data_config(model)["input_size"] == (3, 32, 32)
    with pytest.raises(RuntimeError, match=r"[Nn]o pretrained weights"):
        timm.create_model(NAME, pretrained=True)


def test_features(model):
    images = torch.randn(2, 3, 32, 32)
    shapes = [(2, 80, 32, 32), (2, 320, 32, 32), (2, 400, 16, 16), (2, 440, 8, 8)]
    assert model(images).shape == (2, 100)
    final, maps = model.forward_intermediates(images)
    assert [tuple(each.shape) for each in maps] == shapes
    assert torch.equal(final, model.forward_features(images)) and torch.equal(final, maps[-1])
    assert torch.equal(model.forward_head(final), model(images))
    assert torch.equal(model.forward_head(final, pre_logits=True), final.mean((2, 3)))
    some = model.forward_intermediates(images, indices=[0, 2], stop_early=True, intermediates_only=True)
    assert [torch.equal(a, maps[i]) for a, i in zip(some, (0, 2), strict=True)] == [True, True]
    with pytest.raises(ValueError, match="output_fmt='NLC'"):
        model.forward_intermediates(images, output_fmt="NLC")
    pyramid = timm.create_model(NAME, features_only=True).eval()
    assert pyramid.feature_info.reduction() == [1, 1, 2, 4]
    assert pyramid.feature_info.channels() == [80, 320, 400, 440]
    pyramid.load_state_dict({k.replace(".", "_", 1): v for k, v in model.state_dict().items()}, strict=False)
    assert all(torch.equal(a, b) for a, b in zip(pyramid(images), maps, strict=True))
    assert [tuple(each.shape) for each in timm.create_model(NAME, features_only=True, out_indices=(1, 3))(images)] == [
        shapes[1], shapes[3]
    ]  # fmt: skip
    headless = timm.create_model(NAME, num_classes=0, in_chans=1)
    assert headless(torch.randn(2, 1, 32, 32)).shape == (2, headless.num_features) == (2, 440)
    headless.reset_classifier(7)
    assert headless(torch.randn(2, 1, 48, 40)).shape == (2, 7)


def test_gradient_checkpointing_changes_nothing():
    torch.manual_seed(0)
    model = timm.create_model(NAME, num_classes=3).train()
    images = torch.randn(2, 3, 32, 32)
    gradients = []
    for enable in (False, True):
        model.set_grad_checkpointing(enable)
        model.zero_grad()
        model(images).square().sum().backward()
        gradients.append(model.features.conv0.weight.grad.clone())
    assert torch.allclose(*gradients, rtol=1e-4, atol=1e-6) and gradients[0].abs().max() > 0


@pytest.mark.long
def test_wrapped_model_saves_and_loads(forks, tmp_path):
    """With the package, and as remote code without it."""
    torch.manual_seed(0)
    model = AvgKForImageClassification.from_timm(NAME, num_labels=12, k=2).eval()
    images = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32) / 6144
    with torch.no_grad():
        output = model(images, output_hidden_states=True)
        assert [each.shape[1] for each in output.hidden_states] == [80, 320, 400, 440]
        assert torch.equal(output.logits, model(images).logits)
    model.save_pretrained(tmp_path / "model")
    again = AvgKForImageClassification.from_pretrained(tmp_path / "model")
    assert all(torch.equal(value, again.state_dict()[name]) for name, value in model.state_dict().items())
    program = (
        "import sys, torch\nsys.modules['avgk_hf'] = None\nfrom transformers import AutoModelForImageClassification\n"
        "model = AutoModelForImageClassification.from_pretrained(sys.argv[1], trust_remote_code=True)\n"
        "images = torch.arange(2 * 3 * 32 * 32).reshape(2, 3, 32, 32) / 6144\n"
        "with torch.no_grad(): print(model(images).logits.sum().item())"
    )
    status, out, err = forks.run(program, tmp_path / "model", folder=tmp_path)
    assert status == 0, err
    assert float(out.splitlines()[-1]) == pytest.approx(output.logits.sum().item(), abs=1e-3)


def test_the_small_network_for_cifar():
    """Ten layers, halved from 32 x 32 by the stem, and every stage but the first."""
    model = timm.create_model("resnet10_cifar", features_only=True)
    shapes = [tuple(found.shape[1:]) for found in model(torch.zeros(1, 3, 32, 32))]
    assert shapes == [(24, 16, 16), (24, 16, 16), (48, 8, 8), (96, 4, 4), (192, 2, 2)]
    assert model.feature_info.reduction() == [2, 2, 4, 8, 16]
    model = timm.create_model("resnet10_cifar", channels=(8, 8, 8, 8), in_chans=1, num_classes=3)
    assert model(torch.zeros(2, 1, 32, 32)).shape == (2, 3)
