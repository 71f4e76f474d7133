"""`AvgKForImageClassification`: a timm backbone with two linear heads that predicts sets.

This file and those it imports also travel with a saved model as remote code, so it imports only what inference needs.
"""

import json
import math
import os
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers import initialization as init
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES
from transformers.utils import ModelOutput

from .backbones import check_pixels, create_backbone, feature_width, match_channels
from .calibration import Calibration
from .checks import model_folder
from .configuration import AvgKConfig, check_fields, code_files, installed_losses, processor_config
from .details import load_details
from .files import copy_file, make_folder, replacing, write_text
from .pipeline import AverageKImageClassificationPipeline  # noqa: F401  (so that it travels with this file)
from .questions import Question
from .scores import answering_logits, head_logits, view_logits
from .sets import check_k
from .weights import check_folder, load_backbone, refuse_adapter, shared_names, take_calibration, without_bars

ALIGNMENT = 64  # bytes, as torch allocates
MOST_HEAD_WEIGHTS = 500_000_000  # of both heads, 2 GB

# where the stock pipeline looks up whether it supports a model; registering with the Auto class does not get there
MODEL_FOR_IMAGE_CLASSIFICATION_MAPPING_NAMES.setdefault("avgk", "AvgKForImageClassification")


@dataclass
class AvgKOutput(ModelOutput):
    """Output of `AvgKForImageClassification`.

    Args:
        loss: The objective, a scalar; only with labels.
        logits: Of the head that answers for the model's own K, (B, L), with its own balance, so that they order
            classes as sets do; while training, and until the model is calibrated, the ML head Z.
        sccp_logits: SCCP head Z', (B, L); None for a model without that head.
        ml_logits: ML head Z, (B, L), where `logits` are not it; losses take it in their place.
        hidden_states: Feature maps of the backbone's stages; only with `output_hidden_states=True`.
    """

    loss: Tensor | None = None
    logits: Tensor | None = None
    sccp_logits: Tensor | None = None
    ml_logits: Tensor | None = None
    hidden_states: tuple[Tensor, ...] | None = None


class AvgKForImageClassification(PreTrainedModel):
    """An image classifier that returns as many classes as the image needs, K on average.

    A timm backbone gives pooled features H (B, d). The ML head Z = H W + b is thresholded in use; the SCCP head
    Z' = H W' + b' proposes candidate classes while training with AVG-K, and single-head objectives do without it.

    Example:
        >>> model = AvgKForImageClassification.from_timm("test_resnet", num_labels=10, k=2)
        >>> outputs = model(torch.zeros(3, 3, 32, 32))
        >>> outputs.logits.shape, outputs.sccp_logits.shape
        (torch.Size([3, 10]), torch.Size([3, 10]))
        >>> _ = Calibration.store(model.config, {2: 0.0})
        >>> [len(classes) for classes in model.predict_sets(torch.zeros(3, 3, 32, 32))]
        [10, 10, 10]
    """

    config_class = AvgKConfig
    base_model_prefix = "avgk"
    main_input_name = "pixel_values"
    input_modalities = ("image",)
    model_tags = ("timm", "average-k")
    supports_gradient_checkpointing = True  # what the class can; an instance answers for its backbone
    accepts_loss_kwargs = False  # otherwise the Trainer would scale the loss by the number of accumulation steps
    _learning: nn.ModuleList | None = None  # the heads, where they alone learn

    def __init__(self, config: AvgKConfig) -> None:
        super().__init__(config)
        check_k(config.k, config.num_labels)
        if config.head in ("sccp", "mean") and not config.sccp_head:
            raise ValueError(
                f"config.head={config.head!r} needs the SCCP head, which objective={config.objective!r} does not"
                " train: use `head='ml'`."
            )
        self.backbone = create_backbone(config.architecture, config.model_args)
        self._built_on_meta = any(parameter.is_meta for parameter in self.backbone.parameters())
        self.supports_gradient_checkpointing = hasattr(self.backbone, "set_grad_checkpointing")
        width = feature_width(self.backbone)
        if (1 + config.sccp_head) * width * config.num_labels > MOST_HEAD_WEIGHTS:
            raise ValueError(
                f"config.num_labels={config.num_labels} is too many for {config.architecture}, whose {width} features"
                f" each need a weight for each class: at most {MOST_HEAD_WEIGHTS:,} weights are allowed in the heads."
            )
        self.ml_head = nn.Linear(width, config.num_labels)
        self.sccp_head = nn.Linear(width, config.num_labels) if config.sccp_head else None
        self._tied_weights_keys = shared_names(self) or None  # peft takes a dict, even empty, for word embeddings
        self.register_load_state_dict_pre_hook(take_calibration)
        self.post_init()

    @classmethod
    def from_timm(
        cls,
        name: str,
        num_labels: int | None = None,
        *,
        k: float = 5,
        objective: str = "avgk",
        pretrained: bool | None = None,
        checkpoint: str | None = None,
        image_size: int | None = None,
        model_args: dict[str, Any] | None = None,
        freeze_backbone: bool = False,
        **config_fields: Any,
    ) -> "AvgKForImageClassification":
        """Build a model on a timm backbone.

        Args:
            name: A timm model name, `hf_hub:<repo id>`, or a local folder in timm's own layout (config.json and
                model.safetensors, as written by `timm.models.save_for_hf`).
            num_labels: Number of classes L; may be left out when `id2label` is given.
            k: Average set size, in [1, L).
            objective: Training loss, which says whether there is the SCCP head.
            pretrained: Whether to load the backbone's weights. Default: for a folder or Hub id yes, for a name no.
            checkpoint: A local safetensors file with the weights of the named timm model.
            image_size: Side of the square input, if not the backbone's own. Images are resized to it uncropped.
            model_args: Arguments that shape the backbone, among `backbones.MODEL_ARGS`, e.g. `{"in_chans": 1}` for
                grey images.
            freeze_backbone: Whether the heads alone learn, as with the method of this name.
            config_fields: Hyperparameters of the objective by name, e.g. `alpha=5.0`, and further fields of
                `AvgKConfig`, e.g. `id2label={0: "oak", 1: "elm"}`.
        """
        check_fields(config_fields, num_labels)
        if (labels := config_fields.get("id2label")) is not None:
            if len(set(labels.values())) < len(labels):
                twice = next(label for label in labels.values() if list(labels.values()).count(label) > 1)
                raise ValueError(f"id2label names two classes {twice!r}: give every class a name of its own.")
            config_fields.setdefault("label2id", {label: i for i, label in labels.items()})
        elif num_labels is None:
            raise ValueError("from_timm needs the number of classes: pass `num_labels=` or `id2label=`.")
        else:
            config_fields["num_labels"] = num_labels
        check_k(k, num_labels or len(config_fields["id2label"]))
        trained, about = load_backbone(name, pretrained, checkpoint, image_size, model_args, freeze_backbone)
        losses = installed_losses()
        if objective in losses:  # of any other the config says what is wrong
            config_fields["sccp_head"] = losses[objective].two_heads
        model = cls(cls.config_class(k=k, objective=objective, **about, **config_fields))
        model.backbone.load_state_dict(trained.state_dict())
        return model.freeze_backbone() if freeze_backbone else model

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if module is self.ml_head or module is self.sccp_head:
            bound = 1 / math.sqrt(module.in_features)  # as nn.Linear does
            init.uniform_(module.weight, -bound, bound)
            init.uniform_(module.bias, -bound, bound)
        elif self._built_on_meta:
            # what no checkpoint filled is uninitialised memory: non-persistent buffers always, and backbone tensors
            # that the file lacks or holds in another shape
            own = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
            missing = {name: tensor for name, tensor in own if not getattr(tensor, "_is_hf_initialized", False)}
            if missing:
                path = next(path for path, other in self.backbone.named_modules() if other is module)
                fresh = self._fresh.get_submodule(path)
                for name, tensor in missing.items():
                    tensor.copy_(getattr(fresh, name))

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """As in the base class, which would ask a setting for word embeddings first."""
        return dict(self._tied_weights_keys or {})

    @cached_property
    def _fresh(self) -> nn.Module:
        with torch.device("cpu"):
            return create_backbone(self.config.architecture, self.config.model_args)

    @classmethod
    @without_bars()
    def from_pretrained(cls, *args: Any, **kwargs: Any) -> "AvgKForImageClassification":
        """As in the base class, from safetensors only; a half-written folder is refused with the file's name."""
        folder = args[0] if args else kwargs.get("pretrained_model_name_or_path")
        if folder is not None:
            model_folder(str(folder))  # refuses what can be neither a folder nor on the Hub
            refuse_adapter(folder, **kwargs)
            if Path(folder).is_dir() and not kwargs.get("variant"):
                check_folder(Path(folder, kwargs.get("subfolder") or ""))
        result = super().from_pretrained(*args, **{"use_safetensors": True, **kwargs})
        model = result[0] if isinstance(result, tuple) else result
        if isinstance(kwargs.get("config"), AvgKConfig) and folder is not None:  # Auto classes load it by itself
            load_details(model.config, folder, **kwargs)
        model.__dict__.pop("_fresh", None)
        # tensors mapped from the file may be unaligned, and products with unaligned tensors round differently
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.device.type == "cpu" and tensor.data_ptr() % ALIGNMENT:
                tensor.data = tensor.data.clone()
        return result

    @without_bars()
    def save_pretrained(self, save_directory: str | os.PathLike, is_main_process: bool = True, **kwargs: Any) -> None:
        """As in the base class, with the code that `trust_remote_code=True` needs where this package is missing."""
        if not is_main_process:
            super().save_pretrained(make_folder(save_directory), is_main_process=False, **kwargs)
            return
        push = kwargs.pop("push_to_hub", False)
        names = ("repo_id", "commit_message", "create_pr", "private") if push else ()
        upload = {name: kwargs.pop(name) for name in names if name in kwargs}
        with replacing(save_directory) as folder:
            for name, path in code_files().items():
                copy_file(path, folder / name)
            processor = json.dumps(processor_config(self.config), indent=2)
            write_text(folder / "preprocessor_config.json", processor + "\n")
            super().save_pretrained(folder, **kwargs)
        if push:  # of the model, and not of what else the folder holds; one that fails leaves what was saved
            upload = {"repo_id": Path(save_directory).name, "token": kwargs.get("token"), **upload}
            self.push_to_hub(**upload)

    def load_adapter(self, *args: Any, **kwargs: Any) -> Any:
        """As in the base class; thresholds of the weights before are dropped, and none comes but by way of peft."""
        Calibration.drop(self.config)
        return super().load_adapter(*args, **kwargs)

    def freeze_backbone(self) -> "AvgKForImageClassification":
        """Train the heads only: the backbone keeps its weights and its BatchNorm statistics. Returns the model."""
        self.backbone.requires_grad_(False)
        self._backbone_frozen = True
        return self.train(self.training)

    def train(self, mode: bool = True) -> "AvgKForImageClassification":
        """As in the base class; a frozen backbone stays in evaluation mode."""
        learning = self.learning()
        if learning is self or self.backbone.training:
            super().train(mode)
        else:
            learning.train(mode)
            self.training = mode
        if getattr(self, "_backbone_frozen", False) and self.backbone.training:
            self.backbone.eval()
        return self

    def learning(self) -> nn.Module:
        """What learns: the heads of a model whose backbone is frozen, so that no step walks through the rest."""
        if not getattr(self, "_backbone_frozen", False) or getattr(self, "_hf_peft_config_loaded", False):
            return self
        heads, kept = [head for head in (self.ml_head, self.sccp_head) if head is not None], self._learning
        if kept is None or [*map(id, kept)] != [*map(id, heads)]:
            # no submodule, or the weights would be saved twice
            self.__dict__["_learning"] = kept = nn.ModuleList(heads)
        return kept

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As in the base class."""
        nn.Module.zero_grad(self.learning(), set_to_none)

    def _set_gradient_checkpointing(self, enable: bool = True, *args: Any, **kwargs: Any) -> None:
        self.backbone.set_grad_checkpointing(enable)
        self.gradient_checkpointing = enable  # read by `is_gradient_checkpointing`, and so by the Trainer under DDP

    def forward(
        self,
        pixel_values: Tensor | None = None,
        labels: Tensor | None = None,
        index: Tensor | None = None,
        output_hidden_states: bool | None = None,
        return_dict: bool | None = None,
        features: Tensor | None = None,
        **kwargs: Any,
    ) -> AvgKOutput | tuple:
        """Compute both heads' logits, and the objective's loss where labels are given.

        Args:
            pixel_values: Images (B, C, H, W). Grey images fit a colour backbone, and colour images a grey one.
            labels: True classes (B,).
            index: Position of each image in the training set (B,), for objectives that keep state per image.
            output_hidden_states: Also return the backbone's intermediate feature maps.
            return_dict: False for a plain tuple.
            features: What `features` gave for the images (B, d), in their place.
            kwargs: Ignored, so that callers may pass what other models take.
        """
        hidden_states, mirrored = None, self.config.test_time_augmentation == "flip" and not self.training
        if features is not None:
            if mirrored:
                raise ValueError("test_time_augmentation='flip' mirrors images: pass `pixel_values`, no features.")
            features = features.to(self.ml_head.weight)  # whose device and dtype are the model's
        elif output_hidden_states if output_hidden_states is not None else self.config.output_hidden_states:
            last, hidden_states = self.backbone.forward_intermediates(self._pixels(pixel_values))
            features, hidden_states = self.backbone.forward_head(last), tuple(hidden_states)
        else:
            features = self.features(pixel_values)
        logits, second = self.ml_head(features), None if self.sccp_head is None else self.sccp_head(features)
        if mirrored:
            features = self.features(pixel_values.flip(-1))
            logits = view_logits(logits, self.ml_head(features), self.config.score)
            second = second if second is None else view_logits(second, self.sccp_head(features), self.config.score)
        heads = {"logits": logits, "sccp_logits": second}
        loss = None if labels is None else self._objective()(AvgKOutput(**heads), labels, index)
        if self.config.thresholds and not self.training:
            calibration = Calibration.of(self.config)
            head, weights = calibration.head(), calibration.weights
            if head != "ml" or weights is not None:
                answering = answering_logits(logits, second, head, self.config.score, weights)
                heads |= {"logits": answering, "ml_logits": logits}
        output = AvgKOutput(loss=loss, **heads, hidden_states=hidden_states)
        return_dict = self.config.return_dict if return_dict is None else return_dict
        return output if return_dict else output.to_tuple()

    def features(self, pixel_values: Tensor) -> Tensor:
        """The backbone's pooled features (B, d) of images (B, C, H, W), which the heads take."""
        return self.backbone(self._pixels(pixel_values))

    def _pixels(self, pixel_values: Tensor) -> Tensor:
        channels = self.config.model_args.get("in_chans", 3)
        check_pixels(pixel_values, channels)
        return match_channels(pixel_values.to(self.device, self.dtype), channels)

    def _objective(self) -> nn.Module:
        try:
            from avgk_hf.losses import make_loss
        except ImportError as error:
            raise ImportError("a loss needs the installed package: `pip install avgk_hf`.") from error
        return make_loss(self.config)

    def scores(self, pixel_values: Tensor, k: float | None = None, balance: float | None = None) -> Tensor:
        """The scores (B, L) in float32 that are compared with lambda_val, in evaluation mode and without gradient.

        Args:
            pixel_values: Images (B, C, H, W).
            k: Average set size whose head answers; it matters only for `head="auto"`.
            balance: As in `Question`; default the model's own.
        """
        return self._scores(pixel_values, Calibration.of(self.config).at(balance).head(k), balance)

    def _scores(self, pixel_values: Tensor, head: str, balance: float | None = None) -> Tensor:
        was_training = self.training
        if was_training:
            self.eval()
        try:
            with torch.no_grad():
                output = self(pixel_values, return_dict=True)
        except (RuntimeError, AssertionError) as error:
            size = (self.config.pretrained_cfg.get("input_size") or pixel_values.shape[1:])[1:]
            if tuple(size) == tuple(pixel_values.shape[2:]):
                raise
            reason = " ".join(str(error).split())
            raise ValueError(
                f"pixel_values of shape {tuple(pixel_values.shape)} do not fit {self.config.architecture} ({reason});"
                f" resize the images to {size[0]} x {size[1]}."
            ) from error
        finally:
            if was_training:
                self.train()
        return Calibration.of(self.config).at(balance).scores(*head_logits(output), head)

    def predict_sets(self, pixel_values: Tensor, k: float | None = None, **question: Any) -> list[list[int]]:
        """The predicted set of each image: class ids, best first.

        Args:
            pixel_values: Images (B, C, H, W).
            k: Average set size, in the range that was calibrated; default `config.k`.
            question: Other questions and bounds, as in `Question`: `coverage` with `method` and `per_class`,
                `cumulative`, `lambda_val`, `min_size` (0: sets may be empty), `max_size`, `balance`.
        """
        answer = Calibration.of(self.config).answer(asked := Question.of(k=k, **question))
        return answer.classes(self._scores(pixel_values, answer.head, asked.balance))

    def drop_sccp_head(self) -> "AvgKForImageClassification":
        """Remove the SCCP head, which only training needs, and return the model."""
        if self._needed_heads() - {"ml"}:
            raise ValueError(f"the SCCP head answers for this model (head={self.config.head!r}); it must stay.")
        return self._keep_head("ml")

    def drop_unused_head(self) -> "AvgKForImageClassification":
        """Remove the head that no calibrated K needs, if there is one, and return the model.

        Where only the SCCP head is needed, it takes the place of the ML head, so that `logits` are always those that
        answer.
        """
        needed = self._needed_heads()
        return self._keep_head(*needed) if needed in ({"ml"}, {"sccp"}) else self

    def _keep_head(self, head: str) -> "AvgKForImageClassification":
        """Keep one head as the ML head, with what was calibrated for it."""
        Calibration.keep_head(self.config, head)
        if head == "sccp" and self.sccp_head is not None:
            self.ml_head = self.sccp_head
        self.sccp_head, self.config.sccp_head = None, False
        return self

    def _needed_heads(self) -> set[str]:
        if self.config.head != "auto":
            return {self.config.head}
        found = Calibration.of(self.config)
        return {view.head(k) for view in map(found.at, found.balances) for k in view.ks}
