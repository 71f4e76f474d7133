"""transformers' own `ModelTesterMixin` and `ConfigTester` on our model and configuration, on three tiny backbones.

A first run fetches the tests as a file (see transformers_suite.py); where that fails, this file is skipped.
"""

import unittest
from fnmatch import fnmatchcase
from unittest import mock

import pytest
import torch
import transformers
from timm.models.resnet import BasicBlock
from timm.models.swin_transformer import SwinTransformerBlock
from timm.models.vision_transformer import Block
from transformers import set_seed
from transformers.testing_utils import torch_device
from transformers_suite import load_suite

from avgk_hf import AvgKConfig, AvgKForImageClassification, modeling

modeling_common, configuration_common = load_suite()

ACCELERATOR = "needs an accelerator; run where there is one"
# {reason: tests}, also those that the suite would count as passed although they check nothing for such a model
SKIPPED = {
    "no text: no token embeddings, no position ids, no language-model loss": (
        "test_causal_lm_loss_honors_shift_labels",
        "test_enable_input_require_grads_with_gradient_checkpointing",
        "test_encoder_decoder_loss_no_double_shift",
        "test_inputs_embeds*",
        "test_load_with_mismatched_shapes",
        "test_model_base_model_prefix",
        "test_model_get_set_embeddings",
        "test_model_rope_*",
        "test_resize_*",
        "test_sliding_window_mask",
        "test_vision_axial_rope",
    ),
    "attention, if any, is timm's: neither returned nor exchangeable": (
        "test_attention_outputs",
        "test_attn_implementation_composite_models",
        "test_can_set_attention_dynamically*",
        "test_eager_matches_sdpa_inference*",
        "test_flash_attn_*",
        "test_flex_attention_with_grads",
        "test_sdpa_*",
    ),
    "no mixture of experts": (
        "test_eager_matches_batched_and_grouped_inference*",
        "test_moe_models_record_router_logits",
        "test_output_router_logits_from_config",
    ),
    "no multimodal `get_*_features` methods": ("test_get_*_features_*",),
    "no base model class without heads": (
        "test_base_model_prefix_loads_base_weights",
        "test_correct_missing_keys",
        "test_model_forward_default_config_values",
        "test_torch_save_load",
    ),
    "no sub-configurations": ("test_internal_model_config_and_subconfig_are_same",),
    "weights are saved under the model's own names": (
        "test_can_load_from_already_mapped_keys",
        "test_reverse_loading_mapping",
    ),
    "no tied weights, and none left out of the file": (
        "test_save_load_keys_to_ignore_on_save",
        "test_tied_weights_keys",
    ),
    "no modules kept in float32": ("test_keep_in_fp32_modules*",),
    "no tensor-parallel plan": ("test_tied_head_has_a_tp_plan_entry", "test_tp_plan_matches_params"),
    "hidden states come from timm, not from transformers' recorder": (
        "test_can_capture_specific_layers_hidden_states",
        "test_capture_outputs_decorator",
        "test_format_of_can_record_outputs",
    ),
    "timm returns token maps as copies, which get no gradient": (
        "SwinTest.test_retain_grad_hidden_states_attentions",
        "ViTTest.test_retain_grad_hidden_states_attentions",
    ),
    "layers are checkpointed by timm, not by transformers' GradientCheckpointingLayer (test_modeling.py compares)": (
        "test_training_gradient_checkpointing*",
    ),
    "asks for several labels per image, for regression and for a single class": ("test_problem_types",),
    ACCELERATOR: (
        "test_can_load_with_device_context_manager",
        "test_can_load_with_global_device_set",
        "test_cpu_offload",
        "test_disk_offload_*",
        "test_kernels_can_load_without_crashing",
        "test_model_parallelism",
        "test_torch_compile_for_training",
    ),
}
LISTED_VERSION = "5.23.0"  # the tests of another version may skip themselves without being listed


def reason_to_skip(class_name, test_name):
    for reason, patterns in SKIPPED.items():
        for pattern in patterns:
            if fnmatchcase(test_name, pattern) or f"{class_name}.{test_name}" == pattern:
                return reason
    return None


class ModelTester:
    """What the suite asks for: a configuration, inputs, and sizes to expect."""

    batch_size = 4
    is_training = True
    num_hidden_layers = 2  # the deepest stage; the suite allows no more

    def __init__(self, block, num_maps, map_side, **config_fields):
        self.block = block
        self.expected_num_hidden_layers = num_maps
        self.seq_length = self.hidden_size = map_side  # the suite compares them with the last two dimensions of a map
        self.config_fields = config_fields

    def get_config(self):
        return AvgKConfig(num_labels=10, k=2, **self.config_fields)

    def prepare_config_and_inputs_for_common(self):
        return self.get_config(), {"pixel_values": modeling_common.floats_tensor([self.batch_size, 3, 32, 32])}


class ResNetTest(modeling_common.ModelTesterMixin, unittest.TestCase):
    """Convolutions with BatchNorm, two heads."""

    all_model_classes = (AvgKForImageClassification,)
    has_attentions = False
    test_resize_embeddings = False
    test_can_init_all_missing_weights_before_2023 = True  # otherwise a file without a year of copyright is left out
    always_labels = False
    model_tester = ModelTester(BasicBlock, 5, 16, architecture="test_resnet")

    def setUp(self):
        reason = reason_to_skip(type(self).__name__, self._testMethodName)
        if reason not in (None, ACCELERATOR):
            self.skipTest(reason)
        # the suite knows checkpointed layers by their class, and timm's blocks are others
        self.patch(modeling_common, "GradientCheckpointingLayer", self.model_tester.block)

    def patch(self, module, name, value):
        patch = mock.patch.object(module, name, value)
        patch.start()
        self.addCleanup(patch.stop)

    def skipTest(self, reason):
        listed = reason_to_skip(type(self).__name__, self._testMethodName)
        if listed is None and transformers.__version__ == LISTED_VERSION:
            self.fail(f"{self._testMethodName} skips itself and is not listed in SKIPPED: {reason}")
        super().skipTest(listed or reason)

    def _prepare_for_class(self, inputs_dict, model_class, return_labels=False):
        inputs = super()._prepare_for_class(inputs_dict, model_class)
        if return_labels or self.always_labels:
            inputs["labels"] = torch.arange(self.model_tester.batch_size, device=torch_device)
        return inputs

    def test_can_init_all_missing_weights(self):
        """timm draws its own random weights; with one seed for every backbone they must come out equal."""
        create_backbone = modeling.create_backbone

        def create_seeded(*args, **kwargs):
            set_seed(0)
            return create_backbone(*args, **kwargs)

        self.patch(modeling, "create_backbone", create_seeded)
        super().test_can_init_all_missing_weights()


class ResNetLabelsTest(ResNetTest):
    """Labels in every call, so that the loss is always the first output."""

    always_labels = True


class ViTTest(ResNetTest):
    """A transformer, one head."""

    model_tester = ModelTester(
        Block,
        2,
        2,
        architecture="test_vit",
        model_args={"img_size": 32, "depth": 2},
        objective="ce",
        sccp_head=False,
    )


@pytest.mark.long
class SwinTest(ResNetTest):
    """Buffers that are not saved: relative positions and attention masks."""

    model_tester = ModelTester(
        SwinTransformerBlock,
        2,
        8,
        architecture="swin_tiny_patch4_window7_224",
        model_args={"img_size": 32, "embed_dim": 8, "depths": [2, 2], "num_heads": [1, 2], "window_size": 4},
    )


class ConfigTest(unittest.TestCase):
    model_tester = ResNetTest.model_tester

    def test_config(self):
        fields = {
            "architecture": "test_resnet",
            "model_args": {"in_chans": 1},
            "k": 1.5,
            "hyperparameters": {"alpha": 5.0, "candidate_scope": "local"},
            "head": "auto",
            "thresholds": {"1.5": 0.25},
            "heads": {"1.5": "sccp"},
            "calibration": {"num_examples": 30, "head_thresholds": {"ml": {"1.5": 0.125}, "sccp": {"1.5": 0.25}}},
        }
        tester = configuration_common.ConfigTester(
            self, config_class=AvgKConfig, has_text_modality=False, common_properties=list(fields), **fields
        )
        tester.run_common_tests()


@unittest.skipUnless(transformers.__version__ == LISTED_VERSION, f"SKIPPED lists transformers {LISTED_VERSION}")
def test_skipped_lists_every_skip_and_nothing_else():
    tests = [name for name in dir(ResNetTest) if name.startswith("test_") and callable(getattr(ResNetTest, name))]
    for name in tests:  # what decorators skip, without asking `skipTest`
        if getattr(getattr(ResNetTest, name), "__unittest_skip__", False):
            assert reason_to_skip("ResNetTest", name), f"{name} is skipped and not listed in SKIPPED"
    for pattern in (pattern for patterns in SKIPPED.values() for pattern in patterns):
        assert any(fnmatchcase(name, pattern.rpartition(".")[2]) for name in tests), f"no test is named {pattern}"
