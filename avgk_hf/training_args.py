"""`AvgKTrainingArguments`: transformers' training arguments, and the sizes to calibrate for.

Every field of `transformers.TrainingArguments` and every argument of `transformers.Trainer` stands in a table here,
`HONOURED` or `REFUSED`, or in both; docs/trainer.md shows them.
"""

import math
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass, fields
from difflib import get_close_matches
from typing import Any

import torch
from transformers import EarlyStoppingCallback, TrainingArguments
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from .checks import check_choice, check_whole, is_number
from .configuration import IMAGE_PROCESSOR, AvgKConfig
from .conformal import LEVELS, METHODS, check_level
from .losses import LOSSES
from .records import check_balance
from .scope import SELECT_BY, Balancing
from .scores import HEADS
from .sets import check_k
from .statistics import SHOTS

logger = logging.get_logger(__name__)
LARGE_STATE = 2 * 2**30
LARGEST_SEED = 2**32 - 1
METRICS = ("loss", "average_k_accuracy", *(f"average_k_accuracy_{head}" for head in HEADS), "lambda_val")
METRICS += ("mean_set_size", "empty_sets", "top1_accuracy", "topk_accuracy", "macro_accuracy")
METRICS += tuple(f"{name}_shot_accuracy" for name in SHOTS)
SMALLER_IS_BETTER = ("loss", "_size", "empty_sets")  # how such a metric's name ends
HONOURED = {  # by what they are about
    "arguments of `Trainer`": (
        *("model", "args", "data_collator", "train_dataset", "eval_dataset", "processing_class", "model_init"),
        *("compute_metrics", "preprocess_logits_for_metrics", "callbacks", "optimizers", "optimizer_cls_and_kwargs"),
    ),
    "length of a training, seeds": (
        *("output_dir", "num_train_epochs", "max_steps", "per_device_train_batch_size", "auto_find_batch_size"),
        *("gradient_accumulation_steps", "seed", "data_seed", "full_determinism", "train_sampling_strategy"),
    ),
    "optimizer and learning rate": (
        *("learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps", "optim", "optim_args"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "optim_target_modules", "max_grad_norm"),
    ),
    "precision, memory, compilation": (
        *("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "tf32", "activation_checkpointing"),
        *("gradient_checkpointing", "torch_compile", "torch_compile_backend", "torch_compile_mode"),
        *("torch_empty_cache_steps", "use_cpu"),
    ),
    "evaluation": (
        *("eval_strategy", "eval_steps", "eval_delay", "eval_on_start", "per_device_eval_batch_size"),
        *("batch_eval_metrics", "include_for_metrics", "eval_do_concat_batches", "eval_accumulation_steps"),
        *("eval_use_gather_object",),
    ),
    "checkpoints, and the best of them": (
        *("save_strategy", "save_steps", "save_total_limit", "save_only_model", "save_on_each_node"),
        *("enable_jit_checkpoint", "load_best_model_at_end", "metric_for_best_model", "greater_is_better"),
        *("resume_from_checkpoint", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
    ),
    "reading data": (
        *("dataloader_drop_last", "dataloader_num_workers", "dataloader_pin_memory", "dataloader_in_order"),
        *("dataloader_persistent_workers", "dataloader_prefetch_factor", "dataloader_multiprocessing_context"),
        *("remove_unused_columns", "label_names"),
    ),
    "logging": (
        *("logging_strategy", "logging_steps", "logging_first_step", "log_on_each_node", "logging_nan_inf_filter"),
        *("log_level", "log_level_replica", "disable_tqdm", "report_to", "run_name", "project", "trackio_space_id"),
        *("trackio_bucket_id", "trackio_static_space_id", "debug", "skip_memory_metrics"),
    ),
    "the Hub": (
        *("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_strategy", "hub_always_push"),
        *("hub_revision",),
    ),
    "several processes": (
        *("accelerator_config", "ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers"),
        *("ddp_static_graph", "ddp_backend", "ddp_timeout", "local_rank"),
    ),
    "handed on to `Trainer`, never tried here": ("fsdp", "fsdp_config", "deepspeed"),
    "for scripts of your own; no `Trainer` reads them": ("do_train", "do_eval", "do_predict"),
}
_TEXT, _TIMM = "it is for text, and a batch here holds images", "timm's backbones have a way of their own"
_LENGTH = "images have no length: use 'random' or 'sequential'"
# the values that are taken, and why no other is; of those that are honoured too, what else they would do
REFUSED: dict[str, tuple[tuple[Any, ...], str]] = {
    "compute_loss_func": (
        (None,),
        "the loss is the objective of the model's config; one of your own is a subclass of `avgk_hf.losses.Loss` and"
        " an entry in `LOSSES`",
    ),
    "label_smoothing_factor": ((0.0,), "the objectives are those of the paper, for one certain label per image"),
    "prediction_loss_only": ((False,), "every evaluation computes sets and thresholds, not the loss only"),
    "include_for_metrics": (([], ["loss"]), "it would keep all images in memory: only 'loss' can be included"),
    "logging_nan_inf_filter": ((False,), "a loss that is NaN or infinite ends the training and is not hidden"),
    "label_names": ((None, ["labels"]), "the labels are `labels`: rename the column, or use a `data_collator`"),
    "hub_strategy": (
        ("end", "every_save"),
        "optimizer states and pickles are never uploaded: use 'every_save', and resume from the local checkpoint",
    ),
    "train_sampling_strategy": (("random", "sequential"), _LENGTH),
    "length_column_name": (("length",), _LENGTH),
    "activation_checkpointing_kwargs": ((None,), _TIMM),
    "gradient_checkpointing_kwargs": ((None,), _TIMM),
    "parallelism_config": ((None,), "an evaluation counts on every process having images of its own"),
    "average_tokens_across_devices": ((True,), _TEXT),
    "include_num_input_tokens_seen": (("no", False), _TEXT),
    "neftune_noise_alpha": ((None,), _TEXT),
    "use_cache": ((False,), _TEXT),
    "use_liger_kernel": ((False,), _TEXT),
    "liger_kernel_config": ((None,), _TEXT),
}
# what transformers takes as it comes, to fail in the middle: fields by the least whole number that they take
LEAST = {
    0: ("dataloader_num_workers", "seed", "data_seed"),
    1: (
        *("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps"),
        *("save_total_limit", "early_stopping_patience", "seeds"),
    ),
}


def check_refused(given: Mapping[str, Any]) -> None:
    """Refuse what is not honoured, by its name.

    Args:
        given: Fields of `TrainingArguments` or arguments of `Trainer`, by name.
    """
    for name, (taken, reason) in REFUSED.items():
        if name in given and not any(given[name] is value or given[name] == value for value in taken):
            raise ValueError(f"{name}={given[name]!r} is not honoured, so it is refused: {reason}. Leave it out.")


def check_metric(name: str | None) -> None:
    """Refuse a `metric_for_best_model` that no evaluation has."""
    best = (name or METRICS[1]).removeprefix("eval_")
    if best.partition("@")[0] not in METRICS and not best.startswith("coverage_"):
        near = get_close_matches(best, METRICS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(METRICS)}."
        raise ValueError(f"metric_for_best_model={name!r} is no metric of an evaluation. {hint}")


def check_trainer_arguments(args: "AvgKTrainingArguments", given: Mapping[str, Any]) -> None:
    """Refuse arguments of `Trainer` that are not honoured, or not with these training arguments."""
    check_refused(given)
    metrics, patience = given.get("compute_metrics"), args.early_stopping_patience
    if not metrics:
        check_metric(args.metric_for_best_model)
    if metrics and not callable(metrics):
        raise ValueError(
            f"compute_metrics={metrics!r} must be a function of `EvalPrediction`, e.g. one of `evaluate`."
        )
    if given.get("preprocess_logits_for_metrics") and not metrics:
        raise ValueError("preprocess_logits_for_metrics prepares what `compute_metrics` is given: pass that too.")
    if metrics and args.batch_eval_metrics and args.world_size > 1:
        raise ValueError(
            f"batch_eval_metrics=True shows compute_metrics every batch, but {args.world_size} processes have"
            " different ones: leave it out; `preprocess_logits_for_metrics` keeps what is gathered small."
        )
    processor = type(given.get("processing_class")).__name__
    if processor not in ("NoneType", IMAGE_PROCESSOR):
        raise ValueError(
            f"processing_class of type {processor} would be saved and not be used: the model's config says how images"
            " are prepared, and the model saves that. Leave it out."
        )
    stopping = [each for each in given.get("callbacks") or () if EarlyStoppingCallback in (each, type(each))]
    if patience and stopping:
        raise ValueError(f"early_stopping_patience={patience} and an EarlyStoppingCallback: leave one of them out.")


def _positive(value: Any) -> bool:
    return is_number(value) and 0 < value < math.inf


def _ascending(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and all(map(_positive, value)) and list(value) == sorted(set(value))


def _pairs(value: Any) -> bool:
    return all(part.count("=") == 1 for part in str(value).split(","))


RULES = (  # further fields, what their values must be, and whether one is
    (
        ("num_train_epochs", "learning_rate", "weight_decay", "max_grad_norm", "warmup_steps"),
        "a finite number of at least 0",
        lambda value: is_number(value) and 0 <= value < math.inf,
    ),
    (("save_steps", "eval_steps", "logging_steps"), "a number of steps, or a share of them in (0, 1)", _positive),
    (("greater_is_better", "remove_unused_columns"), "true or false", lambda value: value in (True, False)),
    (("calibrate_k",), "a list of numbers, e.g. `[1, 2, 5]`", lambda value: isinstance(value, (list, tuple))),
    (("calibrate_coverage",), "a list, e.g. `[0.9, 0.95]`", lambda value: isinstance(value, (list, tuple))),
    (("ema_decay",), "a number in (0, 1), e.g. 0.999, or left out", lambda value: _positive(value) and value < 1),
    (("lr_gamma",), "a number greater than 0, e.g. 0.1", _positive),
    (("lr_milestones",), "a list of epochs in ascending order, e.g. [150, 225]", _ascending),
    (("metric_for_best_model",), "a metric's name, e.g. 'loss'", lambda value: isinstance(value, str) and value),
    (("optim_args",), "`name=value` pairs, e.g. momentum=0.9", _pairs),
)


@dataclass
class AvgKTrainingArguments(TrainingArguments):
    """`TrainingArguments` with the defaults that average-K training needs.

    The best checkpoint is the one with the highest validation average-K accuracy, evaluation keeps no score matrix,
    and dataset columns are left to the transform. Of another `metric_for_best_model` the highest value is best too,
    unless its name ends with `loss`, `_size` or `empty_sets`, or `greater_is_better` says otherwise. What is not
    honoured is refused: `HONOURED` and `REFUSED` hold every field.

    Args:
        calibrate_k: Average set sizes to compute thresholds for in every evaluation; the model's own `k` is always
            among them.
        calibrate_coverage: Coverage levels to compute conformal thresholds for in every evaluation, and to report on
            other data; a level that takes more validation images than there are is left out. Empty for none.
        calibrate_per_class: Whether to compute the thresholds of each class too, and to answer with them.
        coverage_method: How the coverage that is reported on other data is reached: `"lac"`, `"aps"` or `"raps"`.
        balance: The model's own, from 0, every image counts alike, to 1, every class does, or `"auto"`: the largest
            that costs at most `give_up` points of average-K accuracy on validation. Others can still be asked for.
        give_up: Percentage points for `balance="auto"`.
        select_by: What the best checkpoint, and with `head="auto"` the best head, is best in: `"micro"`, the share of
            all images, or `"macro"`, the mean over classes.
        early_stopping_patience: Evaluations without improvement after which the training stops.
        seeds: How often `avgk train` trains, with seeds `seed`, `seed` + 1, ..., each in a folder of its own.
        lr_milestones: Epochs after which the learning rate is multiplied by `lr_gamma`, instead of the schedule that
            `lr_scheduler_type` names.
        lr_gamma: The factor.
        ema_decay: Decay of an exponential moving average of the weights, which is then what is evaluated and saved.
        decay_all: Whether weight decay acts on every parameter, as in plain `torch.optim.SGD`. By default biases and
            most normalisation layers are left out, as in `Trainer`.
    """

    calibrate_k: list[float] = HfArg(
        default_factory=list, help="Average set sizes to compute thresholds for, besides the model's k, e.g. 1 2 5."
    )
    calibrate_coverage: list[float] = HfArg(
        default_factory=lambda: list(LEVELS), help="Coverage levels to compute thresholds for, e.g. 0.9 0.95 0.99."
    )
    calibrate_per_class: bool = HfArg(default=False, help="Compute the thresholds of coverage for each class too.")
    coverage_method: str = HfArg(
        default="lac", help="How the coverage reported on test is reached.", metadata={"choices": list(METHODS)}
    )
    balance: str = HfArg(default="0", help="From 0, every image counts alike, to 1, every class does; or auto.")
    give_up: float = HfArg(default=0.5, help="Points of average-K accuracy that balance auto may cost.")
    select_by: str = HfArg(
        default="micro", help="What the best checkpoint is best in.", metadata={"choices": list(SELECT_BY)}
    )
    early_stopping_patience: int | None = HfArg(
        default=None, help="Stop after this many evaluations without a better one."
    )
    lr_milestones: list[float] = HfArg(
        default_factory=list, help="Epochs after which the learning rate is multiplied by lr_gamma, e.g. 150 225."
    )
    lr_gamma: float = HfArg(default=0.1, help="What lr_milestones multiply the learning rate by.")
    ema_decay: float | None = HfArg(
        default=None, help="Evaluate and save an exponential moving average of the weights, with this decay."
    )
    decay_all: bool = HfArg(default=False, help="Apply weight decay to biases and normalisation layers too.")
    seeds: int = HfArg(default=1, help="Train this often, with seeds `seed`, `seed` + 1, ..., and report the mean.")
    metric_for_best_model: str | None = "average_k_accuracy"
    logging_nan_inf_filter: bool = False  # a loss that is not finite ends the training
    remove_unused_columns: bool = False  # images are made from columns that the model does not know

    def __new__(cls, *args: Any, **given: Any) -> "AvgKTrainingArguments":
        """As in the base class, after refusing a name that is no field."""
        known = [item.name for item in fields(cls)]
        for name in given:
            if name not in known:
                near = get_close_matches(name, known, 1, 0.7) or [each for each in known if name in each and name[5:]]
                hint = f"did you mean {near[0]!r}?" if near else "what shapes the model is given to `from_timm`."
                raise TypeError(f"AvgKTrainingArguments has no field {name!r}; {hint}")
        return super().__new__(cls)

    def __post_init__(self) -> None:
        """As in the base class, after refusing values that could only fail later.

        Several processes without an accelerator train together, not each for itself.
        """
        self._check()
        if int(os.environ.get("WORLD_SIZE", "1")) > 1 and not torch.accelerator.is_available():
            self.use_cpu = True
        if not torch.accelerator.is_available():
            self.dataloader_pin_memory = False  # for what is not there, and torch would warn with every loader
        if self.greater_is_better is None and self.metric_for_best_model:
            self.greater_is_better = not self.metric_for_best_model.partition("@")[0].endswith(SMALLER_IS_BETTER)
        super().__post_init__()
        if self.early_stopping_patience and (self.eval_strategy == "no" or not self.metric_for_best_model):
            raise ValueError(
                f"early_stopping_patience={self.early_stopping_patience} counts evaluations while training: set"
                " `eval_strategy` to 'epoch' or 'steps', and `metric_for_best_model`."
            )
        if self.ema_decay and (self.deepspeed or self.fsdp):
            raise ValueError(f"ema_decay={self.ema_decay} averages whole weights, not those of deepspeed or fsdp.")
        if self.lr_milestones and self.warmup_steps:
            raise ValueError(
                f"warmup_steps={self.warmup_steps} belongs to lr_scheduler_type, which lr_milestones replace: leave"
                " one of them out."
            )

    def __getstate__(self) -> dict[str, Any]:
        """What a pickle holds: all but the token, because `Trainer` writes its arguments into every checkpoint."""
        return {**self.__dict__, "hub_token": None}

    def _check(self) -> None:
        check_refused(vars(self))
        may_be_none = {item.name for item in fields(TrainingArguments) if item.default is None}
        may_be_none |= {"early_stopping_patience", "ema_decay"}
        given = {name: value for name, value in vars(self).items() if value is not None or name not in may_be_none}
        for least, names in LEAST.items():
            for name in names:
                if name in given:
                    check_whole(name, given[name], least, ", or left out" if name in may_be_none else "")
        for names, allowed, is_allowed in RULES:
            for name in names:
                if name in given and not is_allowed(given[name]):
                    raise ValueError(f"{name}={given[name]!r} must be {allowed}.")
        try:
            self.calibrate_k = [check_k(k) for k in self.calibrate_k]
        except ValueError as error:
            raise ValueError(f"calibrate_k={self.calibrate_k!r}: {error}") from None
        self.calibrate_coverage = [check_level(level, "calibrate_coverage") for level in self.calibrate_coverage]
        self._check_balance()
        check_choice("coverage_method", self.coverage_method, METHODS)
        if self.coverage_method != "lac" and self.calibrate_per_class:
            raise ValueError(f"coverage_method={self.coverage_method!r} has no thresholds per class: use 'lac'.")
        last = max(self.seed + self.seeds - 1, self.data_seed or 0)
        if last > LARGEST_SEED:
            raise ValueError(f"seed={last} is too large: seed and data_seed may be {LARGEST_SEED} at most.")
        if self.hub_token and not re.fullmatch("[!-~]+", str(self.hub_token)):  # the client's error would show it
            raise ValueError("hub_token holds a space or another character that no token has; copy it anew.")

    def _check_balance(self) -> None:
        """Refuse a balance that is none; of `select_by` follows the metric of the best checkpoint."""
        if self.balance != "auto":
            try:
                self.balance = check_balance(float(self.balance))
            except (TypeError, ValueError):
                raise ValueError(f"balance={self.balance!r} must be a number in [0, 1], or 'auto'.") from None
        Balancing(give_up=self.give_up, select_by=self.select_by)
        if self.select_by != "micro":
            if self.metric_for_best_model not in (*SELECT_BY.values(), None):
                raise ValueError(
                    f"select_by={self.select_by!r} and metric_for_best_model={self.metric_for_best_model!r} say"
                    " different things: leave one of them out."
                )
            self.metric_for_best_model = SELECT_BY[self.select_by]

    def balancing(self, config: Any) -> Balancing:
        """The balances that an evaluation of this model computes; one that cannot be had is refused."""
        return Balancing.of(config, self.balance, give_up=self.give_up, select_by=self.select_by)


def optimizer_states(args: TrainingArguments) -> int:
    """How many numbers the optimizer keeps for each parameter, about."""
    optim, options = str(getattr(args.optim, "value", args.optim)), args.optim_args or ""
    return 2 if "adam" in optim else int("momentum" in options)


def say_state_memory(config: AvgKConfig, num_examples: int, args: AvgKTrainingArguments) -> None:
    """Say what a loss that keeps state for every image will take, before it takes it."""
    states = optimizer_states(args)
    size = LOSSES[config.objective].memory(num_examples, config.num_labels, states)
    if not size or args.process_index > 0:
        return
    others = ", ".join(name for name, loss in LOSSES.items() if not loss.per_image)
    logger.warning(
        f"{config.objective}: its state for {num_examples} images x {config.num_labels} classes, the gradient and"
        f" {states} optimizer state(s) take {size / 2**30:.2f} GiB on every process."
        + (f" That is more than 2 GiB: the objectives {others} need none of it." if size > LARGE_STATE else "")
    )
