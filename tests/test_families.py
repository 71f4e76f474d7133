"""One small model of every timm family: forward, backward, and an exact save and load.

Of each family this is the smallest model, or its smallest part that timm lets one ask for, on the smallest images it
accepts.
"""

import fnmatch

import pytest
import timm
import torch
from safetensors.torch import load_file

from avgk_hf import AvgKConfig, AvgKForImageClassification
from avgk_hf.backbones import UNSUPPORTED

NARROW_VIT = {"depth": 2, "embed_dim": 48, "num_heads": 3}
NARROW_SWIN = {"depths": [2, 2, 1, 1], "embed_dim": 24, "num_heads": [1, 2, 4, 8]}
SHALLOW = {"layers": [1, 1, 1, 1]}

QUICK = {  # among them those that need care: shared weights, a layer of width 0, buffers that are not saved
    "byobnet": ("test_byobnet", 32, {}),
    "coat": ("coat_tiny", 32, {"serial_depths": [1, 1, 1, 1], "parallel_depth": 1}),
    "inception_next": ("inception_next_atto", 32, {}),
    "levit": ("levit_128s", 32, {}),
    "mambaout": ("test_mambaout", 32, {}),
    "mobilenetv3": ("lcnet_035", 32, {}),
    "swin_transformer_v2": ("swinv2_tiny_window8_256", 64, NARROW_SWIN),
    # in timm, head_hidden_size of this model is not the width of its features
    "vision_transformer_sam": ("samvit_base_patch16", 32, NARROW_VIT),
}
SLOW = {
    "beit": ("beit_base_patch16_224", 32, NARROW_VIT),
    "byoanet": ("eca_botnext26ts_256", 32, {}),
    "cait": ("cait_xxs24_224", 32, {"depth": 2}),
    "convit": ("convit_tiny", 32, {"depth": 2}),
    "convmixer": ("convmixer_768_32", 32, {}),
    "convnext": ("test_convnext", 32, {}),
    "cpubone": ("cpubone_nano", 32, {}),
    "crossvit": ("crossvit_tiny_240", 120, {"depth": [[1, 1, 0]] * 3}),
    "csatv2": ("csatv2", 64, {}),
    "cspnet": ("cs3darknet_focus_s", 32, {}),
    "cspnext": ("cspnext_tiny", 32, {}),
    "davit": (
        "davit_tiny",
        32,
        {"depths": [1, 1, 1, 1], "embed_dims": [16, 32, 48, 64], "num_heads": [1, 2, 3, 4]},
    ),
    "deepseek_vit": ("deepseek_vit_412m", 28, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "deit": ("deit_tiny_patch16_224", 32, {"depth": 2}),
    "densenet": ("densenet121", 32, {}),
    "dla": ("dla46x_c", 32, {}),
    "dpn": ("dpn48b", 32, {}),
    "edgenext": ("edgenext_xx_small", 32, {}),
    "efficientformer": ("efficientformer_l1", 224, {}),
    "efficientformer_v2": ("efficientformerv2_s0", 32, {}),
    "efficientnet": ("test_efficientnet", 32, {}),
    "efficientvim": ("efficientvim_m1", 32, {}),
    "efficientvit_mit": ("efficientvit_b0", 32, {}),
    "efficientvit_msra": ("efficientvit_m0", 32, {}),
    "eva": ("vit_tiny_patch16_dinov3_qkvb", 32, {"depth": 2}),
    "fasternet": ("fasternet_t0", 32, {}),
    "fastvit": ("fastvit_t8", 32, {}),
    "focalnet": ("focalnet_tiny_srf", 32, {}),
    "gcvit": ("gcvit_xxtiny", 32, {}),
    "gemma4_vit": ("gemma4_vit_167m", 32, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "ghostnet": ("ghostnet_050", 32, {}),
    "hardcorenas": ("hardcorenas_b", 32, {}),
    "hgnet": ("hgnetv2_b0", 32, {}),
    "hiera": ("hiera_tiny_224", 32, {"embed_dim": 24}),
    "hieradet_sam2": ("sam2_hiera_tiny", 32, {"stages": [1, 1, 1, 1], "embed_dim": 24, "num_heads": 1}),
    "hrnet": ("hrnet_w18_small", 32, {}),
    "iformer": ("iformer_t", 32, {}),
    "inception_resnet_v2": ("inception_resnet_v2", 75, {}),
    "inception_v3": ("inception_v3", 75, {}),
    "inception_v4": ("inception_v4", 75, {}),
    "lcnetv2": ("lcnetv2_small", 32, {}),
    "lowformer": ("lowformer_b0", 32, {}),
    "maxxvit": ("maxvit_pico_rw_256", 32, {"depths": [1, 1, 1, 1]}),
    "metaformer": ("poolformerv2_s12", 32, {}),
    "mlp_mixer": ("gmlp_ti16_224", 32, {}),
    "mobilenetv5": ("mobilenetv5_base", 64, {"channel_multiplier": 0.25}),
    "mobilevit": ("mobilevit_xxs", 32, {}),
    "mvitv2": ("mvitv2_tiny", 32, {}),
    "naflexvit": ("naflexvit_base_patch16_gap", 32, NARROW_VIT),
    "nasnet": ("nasnetalarge", 32, {}),
    "nest": ("nest_tiny", 32, {}),
    "nextvit": ("nextvit_small", 32, {}),
    "nfnet": ("test_nfnet", 32, {}),
    "pit": ("pit_ti_224", 32, {}),
    "pnasnet": ("pnasnet5large", 32, {}),
    "pvt_v2": ("pvt_v2_b0", 32, {}),
    "qwen3_vit": ("qwen3_vit_88m", 32, {"depth": 2, "embed_dim": 64, "num_heads": 4}),
    "rdnet": ("rdnet_tiny", 32, {}),
    "regnet": ("regnetx_002", 32, {}),
    "repghost": ("repghostnet_050", 32, {}),
    "repvit": ("repvit_m0_9", 32, {}),
    "res2net": ("res2net50_14w_8s", 32, SHALLOW),
    "resnest": ("resnest14d", 32, {}),
    "resnet": ("test_resnet", 32, {}),
    "resnetv2": ("resnetv2_18", 32, {}),
    "rexnet": ("rexnet_100", 32, {}),
    "selecsls": ("selecsls42", 32, {}),
    "senet": ("legacy_seresnet18", 32, {}),
    "sequencer": ("sequencer2d_s", 32, SHALLOW),
    "shvit": ("shvit_s1", 32, {}),
    "sknet": ("skresnet18", 32, {}),
    "starnet": ("starnet_s050", 32, {}),
    "swiftformer": ("swiftformer_xs", 32, {}),
    "swin_transformer": ("swin_tiny_patch4_window7_224", 32, NARROW_SWIN),
    "swin_transformer_v2_cr": ("swinv2_cr_tiny_224", 32, NARROW_SWIN),
    "tiny_vit": ("tiny_vit_5m_224", 32, {}),
    "tnt": ("tnt_s_patch16_224", 32, {"depth": 2}),
    "tresnet": ("tresnet_m", 32, SHALLOW),
    "twins": ("twins_svt_small", 32, {"depths": [1, 1, 1, 1], "embed_dims": [16, 32, 64, 128]}),
    "vgg": ("vgg11", 32, {}),
    "visformer": ("visformer_tiny", 32, {}),
    "vision_transformer": ("test_vit", 32, {}),
    "vision_transformer_hybrid": ("vit_tiny_r_s16_p8_224", 32, {}),
    "vision_transformer_relpos": ("vit_relpos_small_patch16_224", 32, {"depth": 2}),
    "vitamin": ("vitamin_small_224", 32, {"depth": 2}),
    "volo": ("volo_d1_224", 32, {}),
    "vovnet": ("ese_vovnet19b_slim_dw", 32, {}),
    "xception": ("legacy_xception", 32, {}),
    "xception_aligned": ("xception41", 32, {}),
    "xcit": ("xcit_nano_12_p16_224", 32, {}),
}


@pytest.mark.parametrize(
    "family", [*QUICK, *(pytest.param(family, marks=pytest.mark.long) for family in sorted(SLOW))]
)
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors:UserWarning")  # inception_next
def test_family(family, make_model, tmp_path):
    name, size, model_args = {**QUICK, **SLOW}[family]
    if not timm.is_model(name):
        pytest.skip(f"timm {timm.__version__} has no {name}")
    assert name in timm.list_models(module=family)
    model = make_model(name, image_size=size, model_args=model_args)
    images = torch.rand(2, 3, size, size, generator=torch.Generator().manual_seed(1))

    output = model.train()(images, labels=torch.tensor([1, 4]))
    output.loss.backward()
    for head in (model.ml_head, model.sccp_head):
        assert head.weight.grad.any() and head.bias.grad.any()
    gradients = [p.grad for p in model.parameters() if p.grad is not None]
    assert all(gradient.isfinite().all() for gradient in gradients)
    # nearly all: efficientvim and convit each have one parameter that their forward does not use
    assert len(gradients) >= len(list(model.parameters())) - 1

    model.eval().save_pretrained(tmp_path)
    loaded, report = AvgKForImageClassification.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report.values())
    (tmp_path / "model.safetensors").unlink()  # pytest would keep some gigabytes for all families
    own, stored = model.state_dict(), loaded.state_dict()
    assert list(own) == list(stored) and all(torch.equal(own[key], stored[key]) for key in own)
    with torch.no_grad():
        before, after = model(images), loaded.eval()(images)
    # after the forward pass, in which convit makes its positions
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), loaded.buffers(), strict=True))
    assert before.logits.shape == (2, 6) and before.logits.isfinite().all()
    assert torch.equal(before.logits, after.logits) and torch.equal(before.sccp_logits, after.sccp_logits)


def test_shared_weights_are_saved_once_and_stay_shared(make_model, tmp_path):
    name, size, model_args = QUICK["coat"]
    model, other = (make_model(name, image_size=size, model_args=model_args) for _ in range(2))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    model.save_pretrained(tmp_path)
    file = load_file(tmp_path / "model.safetensors")
    twin, first = "backbone.serial_blocks1.0.cpe.proj.weight", "backbone.cpe1.proj.weight"
    assert (twin in file) != (first in file) and {twin, first} < set(model.state_dict())
    loaded = AvgKForImageClassification.from_pretrained(tmp_path)
    assert loaded.get_parameter(twin) is loaded.get_parameter(first)
    assert sum(p.numel() for p in loaded.parameters()) == sum(p.numel() for p in model.parameters())
    other.load_state_dict(file, strict=False)  # as the Trainer restores the best model
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))


@pytest.mark.parametrize("pattern", UNSUPPORTED)
def test_unsupported_models_are_refused_with_the_reason(pattern):
    names = fnmatch.filter(timm.list_models(), pattern)
    if not names:
        pytest.skip(f"timm {timm.__version__} has no {pattern}")
    for name in names:
        with pytest.raises(ValueError, match=rf"'{name}' is not supported: it returns many vectors"):
            AvgKForImageClassification.from_timm(name, num_labels=6, k=2)
        with pytest.raises(ValueError, match=rf"'{name}' is not supported"):
            AvgKForImageClassification(AvgKConfig(architecture=name, num_labels=6, k=2))
        assert timm.is_model(name.removesuffix("_enc"))  # which the message advises


def test_every_family_of_timm_is_tried():
    if timm.__version__ != "1.0.31":
        pytest.skip("the list was made for timm 1.0.31")
    assert {*QUICK, *SLOW, "backbones"} == set(timm.list_modules())  # the last is ours
