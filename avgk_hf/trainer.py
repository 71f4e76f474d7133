"""`AvgKTrainer`: transformers' Trainer with the average-K objective, and thresholds computed while evaluating."""

import math
import os
import shutil
from bisect import bisect
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import EarlyStoppingCallback, PreTrainedModel, Trainer
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_callback import ExportableState
from transformers.trainer_utils import (
    PREFIX_CHECKPOINT_DIR,
    EvalLoopOutput,
    HubStrategy,
    SaveStrategy,
    get_last_checkpoint,
    has_length,
    rotate_checkpoints,
)
from transformers.utils import logging

from .calibration import Calibration
from .configuration import AvgKConfig
from .conformal import enough_images, level_key
from .data import class_counts
from .data.transforms import ImageTransform
from .evaluation import Evaluation, loop
from .files import UNFINISHED, fresh_folder, new_file, replacing
from .hub import push_folder
from .losses import LOSSES, make_loss
from .model_card import CardCallback, hyperparameters, render_card
from .modeling import check_folder
from .processes import broadcast
from .runs import (
    OBJECTIVE_STATE,
    LogFile,
    check_checkpoint,
    check_output_dir,
    check_space,
    last_checkpoint,
    where_to_go_on,
)
from .sets import NotFinite, check_k, k_key
from .statistics import SetStatistics
from .training_args import AvgKTrainingArguments

logger = logging.get_logger(__name__)
LARGE_STATE = 2 * 2**30


class AvgKTrainer(Trainer):
    """Trains an `AvgKForImageClassification` with its config's objective and calibrates it on the validation set.

    `evaluate()` on the trainer's own `eval_dataset` computes lambda_val for every K asked for in one pass, writes it
    to `model.config` and reports `eval_average_k_accuracy`, `eval_lambda_val`, `eval_mean_set_size`,
    `eval_empty_sets`, `eval_top1_accuracy`, `eval_topk_accuracy`, `eval_macro_accuracy` and the few / medium / many
    shot means; for every further K the same with `@K` behind the name. On any other dataset, and in `predict()`, the
    stored thresholds are used and never changed. A model with both heads is scored by each in the same pass
    (`eval_average_k_accuracy_ml`, `_sccp`, `_mean`); with `head="auto"` the best on validation answers from then on.

    A threshold belongs to the weights it was computed on: it is dropped with the next training step, saved with the
    checkpoint, and comes back with it.

    Args:
        model: The model; or pass `model_init`, as in `Trainer`, for a hyperparameter search.
        args: `AvgKTrainingArguments`.
        train_dataset: Examples with `pixel_values`, `labels` and `index`, as `avgk_hf.prepare` gives them.
        eval_dataset: The validation set, in the same form.
        dataset_name: Name of the data in the calibration record.
        kwargs: As in `Trainer`.
    """

    loss_is_scaled_for_ga = False  # the objective is a mean over the batch

    def __init__(
        self,
        model: PreTrainedModel | None = None,
        args: AvgKTrainingArguments | None = None,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        dataset_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if not isinstance(args, AvgKTrainingArguments):
            raise ValueError("pass `args=AvgKTrainingArguments(output_dir, ...)`.")
        if isinstance(eval_dataset, dict):
            raise ValueError(
                "pass one validation set as `eval_dataset`: the thresholds come from it, not from several."
            )
        if args.should_save:
            check_output_dir(args.output_dir)
        self.dataset_name = dataset_name
        self._fit = partial(self._fit_to_data, args, train_dataset, eval_dataset)
        if model is not None:
            self._fit(model)
        self.card = CardCallback()
        self._calibrating = False
        self._checkpoint_unfinished = self._stopped_early = False
        self._steps_per_epoch: float | None = None
        self.evaluation: Evaluation | None = None  # the last
        # torch's own collates a worker's images in the memory it shares; the stock one costs a further copy of them
        kwargs.setdefault("data_collator", default_collate)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            **kwargs,
        )
        self.add_callback(self.card)
        self.add_callback(LogFile())

    def call_model_init(self, trial: Any = None) -> PreTrainedModel:
        """As in `Trainer`; a new model comes with a new criterion."""
        model = super().call_model_init(trial)
        self._fit(model)
        return model

    def _fit_to_data(
        self, args: AvgKTrainingArguments, train: Dataset | None, validation: Dataset | None, model: PreTrainedModel
    ) -> None:
        """Check that model and data fit each other, and make the loss."""
        config: AvgKConfig = model.config
        for k in args.calibrate_k:
            check_k(k, config.num_labels)
        for name, dataset in (("train_dataset", train), ("eval_dataset", validation)):
            if dataset is not None and has_length(dataset) and len(dataset) == 0:
                raise ValueError(f"{name} is empty.")
            if isinstance(dataset, datasets.Dataset) and "label" in dataset.column_names:
                counts = class_counts(dataset, config.num_labels)
                if name == "train_dataset":
                    config.train_counts = counts.tolist()
        num_examples = len(train) if has_length(train) else 0
        _state_memory(config, num_examples, args)
        # not `objective`: that is what the stock trainer calls the metric of a hyperparameter search
        self.criterion = make_loss(config, num_examples).to(args.device)
        broadcast(list(self.criterion.state_dict().values()))

    @property
    def ks(self) -> list[float]:
        """The average set sizes that are calibrated: the model's own, then `args.calibrate_k`."""
        ks = [self.model.config.k, *self.args.calibrate_k]
        return list({k_key(k): k for k in ks}.values())

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The objective on the model's outputs."""
        outputs = model(pixel_values=inputs["pixel_values"], return_dict=True)
        loss = self.criterion(outputs, inputs["labels"], inputs.get("index"))
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`; parameters of the objective join with their own learning rate and without decay."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        parameters = list(self.criterion.parameters())
        if new and parameters:
            rate = self.args.learning_rate * self.criterion.learning_rate_factor
            optimizer.add_param_group({"params": parameters, "lr": rate, "weight_decay": 0.0})
            # the stock loop clears the gradients of the model only
            optimizer.register_step_post_hook(lambda *_: self.criterion.zero_grad())
        return optimizer

    def get_decay_parameter_names(self, model: nn.Module) -> list[str]:
        """As in `Trainer`, or with `args.decay_all` every parameter."""
        if self.args.decay_all:
            return [name for name, _ in model.named_parameters()]
        return super().get_decay_parameter_names(model)

    def set_initial_training_values(self, args: AvgKTrainingArguments, dataloader: DataLoader) -> tuple:
        """As in `Trainer`; the number of steps in an epoch is kept for the scheduler."""
        values = super().set_initial_training_values(args, dataloader)
        self._steps_per_epoch = values[1]
        return values

    def create_scheduler(
        self, num_training_steps: int, optimizer: torch.optim.Optimizer | None = None
    ) -> torch.optim.lr_scheduler.LRScheduler:
        """As in `Trainer`; with `args.lr_milestones` the learning rate is multiplied by `lr_gamma` after each."""
        milestones, gamma = self.args.lr_milestones, self.args.lr_gamma
        if not milestones or self.lr_scheduler is not None:
            return super().create_scheduler(num_training_steps, optimizer)
        if self._steps_per_epoch is None:
            raise ValueError("lr_milestones are epochs of `train()`: make the scheduler there, or leave them out.")
        steps = [round(epoch * self._steps_per_epoch) for epoch in milestones]
        # not MultiStepLR: a checkpoint would bring back the steps of the run that wrote it
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: gamma ** bisect(steps, step)
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def train(self, resume_from_checkpoint: str | bool | None = None, *args: Any, **kwargs: Any) -> Any:
        """As in `Trainer`.

        Args:
            resume_from_checkpoint: `"last"` or True: the newest complete checkpoint in `output_dir`, or from the start
                where there is none, so that the same command can be repeated. A folder: that checkpoint.
            args: As in `Trainer`.
            kwargs: As in `Trainer`.
        """
        checkpoint, run, first = resume_from_checkpoint, self.args.output_dir, self.is_world_process_zero()
        foreign = self.is_deepspeed_enabled or self.is_fsdp_enabled  # these have checkpoints of their own
        if str(checkpoint).lower() in ("last", "true"):
            checkpoint = get_last_checkpoint(run) if foreign else last_checkpoint(run, warn=first)
            if first and checkpoint:
                logger.warning(f"training goes on from {checkpoint}.")
            elif first:
                logger.warning(f"training starts from the beginning: there is no complete checkpoint in {run}.")
        elif str(checkpoint).lower() in ("none", "false"):
            checkpoint = None
        elif not foreign:
            check_checkpoint(checkpoint)
        self._stopped_early = False
        if self.args.should_save and self.model is not None:  # none yet between the trials of a search
            self._check_space()
        return super().train(str(checkpoint) if checkpoint else None, *args, **kwargs)

    def _check_space(self) -> None:
        """Refuse to start where the checkpoints will not fit on the disk."""
        args = self.args
        model_size = sum(value.nbytes for value in self.model.state_dict().values())
        trained = [p for p in (*self.model.parameters(), *self.criterion.parameters()) if p.requires_grad]
        size = model_size + _optimizer_states(args) * sum(parameter.nbytes for parameter in trained)
        size += sum(value.nbytes for value in self.criterion.state_dict().values())
        planned = 1
        if args.save_strategy in (SaveStrategy.STEPS, SaveStrategy.EPOCH) and has_length(self.train_dataset):
            images = self._train_batch_size * args.gradient_accumulation_steps * args.world_size
            in_epoch = max(math.ceil(len(self.train_dataset) / images), 1)
            steps = args.max_steps if args.max_steps > 0 else args.num_train_epochs * in_epoch
            every = args.save_steps if args.save_strategy == SaveStrategy.STEPS else in_epoch
            planned = math.ceil(steps / (every if every >= 1 else every * steps))
        if args.save_total_limit:  # the oldest goes when the newest is complete
            planned = min(planned, args.save_total_limit + 1)
        standing = len(list(Path(args.output_dir).glob(f"{PREFIX_CHECKPOINT_DIR}-*")))
        checkpoints = 0 if args.save_strategy == SaveStrategy.NO else max(planned - standing, 1)
        check_space(args.output_dir, size, checkpoints, model_size)

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in `Trainer`; thresholds of the weights before the step are dropped, and a loss must be finite."""
        if self.model.config.thresholds:
            Calibration.drop(self.model.config)
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):  # instead of `logging_nan_inf_filter`, which asks the device as often
            self._refuse_divergence(f"the loss is {loss.item()}")
        return loss

    def _refuse_divergence(self, what: str) -> None:
        args = self.args
        precision = "bf16" if args.bf16 else "fp16" if args.fp16 else "float32"
        raise NotFinite(
            f"{what} in step {self.state.global_step + 1} of {self.state.max_steps}, so training was ended. Lower"
            f" learning_rate={args.learning_rate:g}"
            + ("" if precision == "float32" else f" or train without {precision}")
            + f"; max_grad_norm={args.max_grad_norm:g} and warmup_steps={args.warmup_steps:g} matter too."
            f" {where_to_go_on(args.output_dir)}"
        )

    def _run_epoch(self, **kwargs: Any) -> None:
        """As in `Trainer`; a training that had ended when its checkpoint was saved takes no further step."""
        if self._stopped_early or self.state.global_step >= self.state.max_steps:
            self.control.should_training_stop = True
            return
        transform = getattr(self.train_dataset, "format", {}).get("format_kwargs", {}).get("transform")
        if isinstance(transform, ImageTransform):
            seed = self.args.seed if self.args.data_seed is None else self.args.data_seed
            transform.seed(seed, kwargs["epoch"])
        super()._run_epoch(**kwargs)

    def evaluate(
        self,
        eval_dataset: Dataset | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        calibrate: bool | None = None,
    ) -> dict[str, float]:
        """Evaluate, and calibrate where the dataset is the trainer's own validation set.

        Args:
            eval_dataset: Another dataset than the trainer's `eval_dataset`.
            ignore_keys: As in `Trainer`.
            metric_key_prefix: Put before the names of the metrics.
            calibrate: Whether to compute new thresholds from this dataset and store them. Default: only for the
                trainer's own `eval_dataset`.
        """
        self._calibrating = eval_dataset is None if calibrate is None else calibrate
        try:
            return super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._calibrating = False

    def evaluation_loop(
        self,
        dataloader: DataLoader,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> EvalLoopOutput:
        """The one loop, in O(K n) memory; for `predict` the predictions are sets of class ids, best first."""
        num_examples = self.num_examples(dataloader)
        model, self.evaluation = self._evaluated_model(), self._plan(num_examples, description == "Prediction")
        self.callback_handler.eval_dataloader = dataloader
        broadcast(list(self.model.buffers()))  # BatchNorm statistics differ between processes

        def compute(batch: dict[str, Any]) -> tuple[Any, Tensor | None]:
            with self.compute_loss_context_manager():
                if "labels" in batch:
                    return self.compute_loss(model, batch, return_outputs=True)[::-1]
                return model(pixel_values=batch["pixel_values"], return_dict=True), None

        def after() -> None:
            self.control = self.callback_handler.on_prediction_step(self.args, self.state, self.control)

        evaluation = self.evaluation
        loop([evaluation], dataloader, compute, self.args.eval_batch_size, self.args.device, after)
        if self._calibrating:
            dataset = dataloader.dataset
            split = str(getattr(dataset, "split", None) or "validation")
            evaluation.store(dataset=self.dataset_name, split=split, step=self.state.global_step)
        metrics = {"loss": evaluation.loss_sum / num_examples} if evaluation.labelled else {}
        metrics |= evaluation.metrics()
        sets = None if evaluation.sets is None else [one for _, batch in evaluation.sets for one in batch]
        labels = self.statistics().labels if evaluation.labelled and sets is not None else None
        metrics = {f"{metric_key_prefix}_{name}": value for name, value in metrics.items()}
        return EvalLoopOutput(sets, labels, metrics, num_examples)

    def _evaluated_model(self) -> nn.Module:
        """The model in evaluation mode, where and as the arguments want it."""
        model, args = self.model_wrapped if self.is_in_train else self.model, self.args
        if not self.is_in_train:
            model = self.accelerator.prepare_model(model, evaluation_mode=True)
            dtype = torch.float16 if args.fp16_full_eval else torch.bfloat16 if args.bf16_full_eval else None
            model = model if dtype is None else model.to(dtype=dtype)
        return model.eval()

    def _plan(self, num_examples: int, keep_sets: bool) -> Evaluation:
        """What an evaluation collects: of coverage levels, those that the images or the calibration allow."""
        config, args = self.model.config, self.args
        how = {"method": args.coverage_method, "per_class": args.calibrate_per_class, "keep_sets": keep_sets}
        if self._calibrating:
            for level in args.calibrate_coverage:
                if num_examples < enough_images(level):
                    logger.warning_once(
                        f"coverage {level_key(level)} takes {enough_images(level)} validation images at least, and"
                        f" there are {num_examples}: no threshold is computed for it."
                    )
            return Evaluation(config, num_examples, self.ks, True, args.calibrate_coverage, **how)
        calibration = Calibration.of(config)
        calibration.threshold()  # refuses an uncalibrated model, and says what to do
        ks = [k for k in self.ks if calibration.ks[0] <= k <= calibration.ks[-1]]
        recorded = calibration.levels(args.coverage_method, args.calibrate_per_class)
        levels = [level for level in args.calibrate_coverage if level in recorded]
        return Evaluation(config, num_examples, ks, levels=levels, **how)

    def statistics(self, k: float | None = None) -> SetStatistics:
        """What the last evaluation collected for the head that answers for `k`."""
        return self.evaluation.statistics[Calibration.of(self.model.config).head(k)]

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
        """Write our card to README.md: what the model returns, how to call it, and how well it did."""
        if not self.is_world_process_zero():
            return
        config = self.model.config
        repo = self.hub_model_id or model_name or Path(self.args.output_dir).name
        evaluated = (
            config.thresholds and self.evaluation and not self.evaluation.calibrate and self.evaluation.labelled
        )
        sizes = np.bincount(self.statistics().set_sizes(config.k)).tolist() if evaluated else None
        rows = hyperparameters(config, self.args)
        card = render_card(repo, config, self.card.results(config), rows, self.dataset_name, sizes)
        with new_file(Path(self.args.output_dir) / "README.md") as new:
            card.save(new)

    def save_state(self) -> None:
        """As in `Trainer`, not through a link."""
        if self.is_world_process_zero():
            with new_file(Path(self.args.output_dir) / TRAINER_STATE_NAME) as new:
                self.state.save_to_json(str(new))

    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Save model and card and upload both. A failed upload leaves the run intact and says how to go on."""
        if self.hub_model_id is None:
            self.hub_model_id = self.args.hub_model_id or Path(self.args.output_dir).name
        self.save_model(_internal_call=True)
        self.create_model_card(**kwargs)
        if not self.is_world_process_zero():
            return None
        return push_folder(
            self.args.output_dir,
            self.hub_model_id,
            self.args.hub_private_repo,
            token or self.args.hub_token,
            commit_message=commit_message,
            revision=revision or self.args.hub_revision,
            run_as_future=not blocking,
        )

    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        """Upload a checkpoint's model while training goes on; a failed upload must not end the training."""
        if not self.is_world_process_zero() or self.args.hub_strategy == HubStrategy.END:
            return
        try:
            push_folder(checkpoint_folder, self.hub_model_id, self.args.hub_private_repo, self.args.hub_token)
        except OSError as error:
            logger.warning(f"{error} Training goes on.")

    def _save(self, output_dir: str | None = None, state_dict: dict[str, Any] | None = None) -> None:
        """As in `Trainer`, without the pickled training arguments, and with the thresholds beside an adapter."""
        if not self.args.should_save:
            return super()._save(output_dir, state_dict)
        with replacing(output_dir or self.args.output_dir) as folder:
            super()._save(str(folder), state_dict)
            (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
            if not (folder / "config.json").exists():  # peft saves its adapter only
                self.model.config.save_pretrained(folder)

    def _issue_warnings_after_load(self, load_result: Any) -> None:
        """Refuse weights that do not fit exactly; the stock Trainer would go on with a half-loaded model."""
        if load_result.missing_keys or load_result.unexpected_keys:
            raise ValueError(
                f"the checkpoint does not fit the model: missing {load_result.missing_keys}, unexpected"
                f" {load_result.unexpected_keys}."
            )

    def _load_best_model(self) -> None:
        super()._load_best_model()
        self._load_calibration(self.state.best_model_checkpoint)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model)
        self._load_calibration(resume_from_checkpoint)
        if self.criterion.state_dict():
            self.criterion.load_state_dict(load_file(Path(resume_from_checkpoint) / OBJECTIVE_STATE))

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        """As in `Trainer`, with the state of the objective beside the model, not in it."""
        super()._save_optimizer_and_scheduler(output_dir)
        if self.criterion.state_dict() and self.args.should_save:
            save_file(self.criterion.state_dict(), Path(output_dir) / OBJECTIVE_STATE)

    def _get_output_dir(self, trial: Any) -> str:
        """As in `Trainer`; while a checkpoint is written, a folder in the run's."""
        run = super()._get_output_dir(trial)
        return os.path.join(run, UNFINISHED) if self._checkpoint_unfinished else run

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in `Trainer`, but the checkpoint takes its place when it is complete, and only then others may go."""
        if not all(torch.isfinite(parameter).all() for parameter in self.model.parameters()):
            self._refuse_divergence("weights are not finite any more")
        run, name = Path(self._get_output_dir(trial)), f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        unfinished = run / UNFINISHED
        self._checkpoint_unfinished = True
        try:
            if self.args.should_save:
                fresh_folder(unfinished)  # in the place of what a process left that was killed
            self.accelerator.wait_for_everyone()
            super()._save_checkpoint(model, trial)
            if self.state.best_model_checkpoint == str(unfinished / name):
                self.state.best_model_checkpoint = str(run / name)
                if self.args.should_save:
                    self.state.save_to_json(unfinished / name / TRAINER_STATE_NAME)
            self.accelerator.wait_for_everyone()
            if self.args.should_save:
                if (run / name).exists():  # of an earlier run in the same folder
                    os.replace(run / name, unfinished / "old")
                os.replace(unfinished / name, run / name)
                shutil.rmtree(unfinished, ignore_errors=True)
        except (OSError, RuntimeError, SafetensorError) as error:  # torch.save has no error of its own for a full disk
            shutil.rmtree(unfinished, ignore_errors=True)
            raise OSError(
                f"{run / name} could not be written ({' '.join(str(error).split())}). Free some space, or choose"
                f" another `output_dir:`. {where_to_go_on(run)}"
            ) from error
        finally:
            self._checkpoint_unfinished = False
        if self.args.should_save:
            rotate_checkpoints(str(run), self.args.save_total_limit, self.state.best_model_checkpoint, use_mtime=True)
        self.accelerator.wait_for_everyone()

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """As in `Trainer`; the best checkpoint is found again in a run whose folder was moved, and must be whole."""
        progress = super()._init_training_state(*args, **kwargs)
        state = self.state
        if state.best_global_step and state.best_model_checkpoint is None:
            moved = Path(self.args.output_dir) / f"{PREFIX_CHECKPOINT_DIR}-{state.best_global_step}"
            state.best_model_checkpoint = str(moved) if moved.is_dir() else None
        if state.best_model_checkpoint and self.args.load_best_model_at_end:
            check_folder(state.best_model_checkpoint)  # now, and not when it is loaded in the end
        return progress

    def _load_callback_state(self) -> None:
        """Restore what callbacks counted, as early stopping does; their settings are those of this run."""
        for callback in (*self.callback_handler.callbacks, self.control):
            if isinstance(callback, ExportableState):
                saved = self.state.stateful_callbacks.setdefault(type(callback).__name__, {})
                for name, value in saved.get("attributes", {}).items() if isinstance(saved, dict) else ():
                    setattr(callback, name, value)
                if isinstance(callback, EarlyStoppingCallback):
                    self._stopped_early |= callback.early_stopping_patience_counter >= callback.early_stopping_patience

    def _load_calibration(self, checkpoint: str) -> None:
        """Take over the thresholds that were saved with the weights."""
        Calibration.carry(AvgKConfig.from_pretrained(checkpoint), self.model.config)


def _optimizer_states(args: AvgKTrainingArguments) -> int:
    """How many numbers the optimizer keeps for each parameter, about."""
    optim, options = str(getattr(args.optim, "value", args.optim)), args.optim_args or ""
    return 2 if "adam" in optim else int("momentum" in options)


def _state_memory(config: AvgKConfig, num_examples: int, args: AvgKTrainingArguments) -> None:
    """Say what a loss that keeps state for every image will take, before it takes it."""
    states = _optimizer_states(args)
    size = LOSSES[config.objective].memory(num_examples, config.num_labels, states)
    if not size or args.process_index > 0:
        return
    others = ", ".join(name for name, loss in LOSSES.items() if not loss.per_image)
    logger.warning(
        f"{config.objective}: its state for {num_examples} images x {config.num_labels} classes, the gradient and"
        f" {states} optimizer state(s) take {size / 2**30:.2f} GiB on every process."
        + (f" That is more than 2 GiB: the objectives {others} need none of it." if size > LARGE_STATE else "")
    )
