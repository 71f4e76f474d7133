"""`AvgKTrainer`: transformers' Trainer with the average-K objective, and thresholds computed while evaluating."""

import datetime
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

from .configuration import AvgKConfig
from .conformal import answer, enough_images, level_key, question_name, recorded_levels
from .data import class_counts
from .data.transforms import ImageTransform
from .files import UNFINISHED, fresh_folder, new_file, replacing
from .hub import push_folder
from .losses import LOSSES, make_loss
from .model_card import CardCallback, hyperparameters, render_card
from .modeling import check_folder
from .processes import broadcast, gather_list, rank, sum_over_processes, world_size
from .runs import (
    OBJECTIVE_STATE,
    LogFile,
    check_checkpoint,
    check_output_dir,
    check_space,
    last_checkpoint,
    where_to_go_on,
)
from .set_statistics import SetStatistics, merge_statistics
from .sets import HEADS, all_scores, check_k, head_threshold, k_key, ranked_sets
from .training_args import AvgKTrainingArguments

logger = logging.get_logger(__name__)
LARGE_STATE = 2 * 2**30


class NotFinite(ValueError):
    """A loss, weights or logits that are NaN or infinite: the training has diverged."""


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
        self._statistics: dict[str, SetStatistics] = {}  # by head
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
            self.model.config.clear_calibration()
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
        """As in `Trainer`, in O(K n) memory; for `predict` the predictions are sets of class ids, best first."""
        config: AvgKConfig = self.model.config
        num_examples = self.num_examples(dataloader)
        if num_examples == 0:
            raise ValueError("the dataset to evaluate is empty.")
        heads = HEADS if config.sccp_head else ("ml",)
        if self._calibrating:
            ks, thresholds = self.ks, dict.fromkeys(heads)
        else:
            config.threshold()  # refuses an uncalibrated model, and says what to do
            known = [float(key) for key in config.thresholds]
            ks = [k for k in self.ks if min(known) <= k <= max(known)]
            stored = config.head_thresholds or {config.head_for(): config.thresholds}
            thresholds = {head: {k: head_threshold(config, head, k) for k in ks} for head in heads if head in stored}
        # by coverage answers the head of the model's own K, which with "auto" is known after the calibration
        asked = self._questions(num_examples)
        needed = heads if self._calibrating and config.head == "auto" else (config.head_for(),)
        self._statistics = {
            head: SetStatistics(ks, num_examples, given, config.train_counts, **(asked if head in needed else {}))
            for head, given in thresholds.items()
        }
        self._sets: list[tuple[int, list[list[int]]]] | None = [] if description == "Prediction" else None
        self._next = rank() * self.args.eval_batch_size  # position of the next image in the dataset
        self._loss_sum, self._labelled = 0.0, True
        broadcast(list(self.model.buffers()))  # BatchNorm statistics differ between processes
        output = super().evaluation_loop(dataloader, description, False, ignore_keys, metric_key_prefix)
        self._merge()
        metrics = {}
        if self._labelled:
            metrics = {"loss": self._loss_sum / num_examples, **self._metrics()}
        output.metrics.update({f"{metric_key_prefix}_{name}": value for name, value in metrics.items()})
        if self._sets is not None:
            sets = [of_image for _, batch in sorted(gather_list(self._sets)) for of_image in batch]
            output = output._replace(predictions=sets, label_ids=self.statistics().labels if self._labelled else None)
        return output

    def _questions(self, num_examples: int) -> dict[str, Any]:
        """What an evaluation collects for coverage: in calibrating the sums that APS needs, else sets to count."""
        config, args = self.model.config, self.args
        if self._calibrating:
            for level in args.calibrate_coverage:
                if num_examples < enough_images(level):
                    logger.warning_once(
                        f"coverage {level_key(level)} takes {enough_images(level)} validation images at least, and"
                        f" there are {num_examples}: no threshold is computed for it."
                    )
            return {"mass": config.score == "softmax" and bool(args.calibrate_coverage)}
        how = {"method": args.coverage_method, "per_class": args.calibrate_per_class}
        recorded = recorded_levels(config, **how)
        levels = [level for level in args.calibrate_coverage if level in recorded]
        return {
            "questions": {question_name(c, **how): partial(answer, config=config, coverage=c, **how) for c in levels}
        }

    def _get_dataloader(self, dataset: Dataset, *args: Any, is_training: bool = False, **kwargs: Any) -> DataLoader:
        """As in `Trainer`; evaluation sees every image once, where training fills up and may drop batches."""
        if is_training:
            return super()._get_dataloader(dataset, *args, is_training=True, **kwargs)
        config, drop_last = self.accelerator.dataloader_config, self.args.dataloader_drop_last
        kept = config.even_batches, config.split_batches
        try:
            config.even_batches = config.split_batches = self.args.dataloader_drop_last = False
            return super()._get_dataloader(dataset, *args, is_training=False, **kwargs)
        finally:
            (config.even_batches, config.split_batches), self.args.dataloader_drop_last = kept, drop_last

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[None, None, None]:
        """Take in one batch, and leave nothing for the stock loop to gather from other processes and keep."""
        loss, logits, labels = super().prediction_step(model, inputs, False, ignore_keys)
        logits, sccp_logits = logits if isinstance(logits, (tuple, list)) else (logits, None)
        # batch i of process r is batch i W + r of the dataset
        first, stride = self._next, world_size() * self.args.eval_batch_size
        self._next += stride if world_size() > 1 else len(logits)
        config: AvgKConfig = self.model.config
        try:
            scores = all_scores(logits, sccp_logits, config.score, first)
        except ValueError as error:
            raise NotFinite(f"batch {first // self.args.eval_batch_size} of the evaluation: {error}") from None
        if self._sets is not None:
            own = scores[config.head_for()]
            self._sets.append((first, ranked_sets(own, answer(own, config))))
        if labels is None:
            self._labelled = False
            return None, None, None
        for head, statistics in self._statistics.items():
            statistics.update(scores[head], labels, first)
        self._loss_sum += loss.double() * len(labels)
        return None, None, None

    def _merge(self) -> None:
        """Exchange what the processes collected, so that each has the whole."""
        device = self.args.device
        self._loss_sum = sum_over_processes(float(self._loss_sum), device)
        self._labelled = sum_over_processes(float(not self._labelled), device) == 0
        if self._labelled:
            for statistics in self._statistics.values():
                merge_statistics(statistics, device)

    def _metrics(self) -> dict[str, float]:
        """The metrics of the evaluation; new thresholds are stored."""
        config: AvgKConfig = self.model.config
        results = {head: statistics.compute() for head, statistics in self._statistics.items()}
        if self._calibrating:
            self._store_calibration(results)
        metrics = {}
        for k in next(iter(results.values())):
            suffix = "" if k == config.k else f"@{k_key(k)}"
            for name, value in results[config.head_for(k)][k].items():
                if name != "top1_accuracy" or not suffix:  # the same for every K
                    metrics[name + suffix] = value
            if len(results) > 1:
                for head, result in results.items():
                    metrics[f"average_k_accuracy_{head}{suffix}"] = result[k]["average_k_accuracy"]
        return {**metrics, **self.statistics().coverage_metrics()}

    def _store_calibration(self, results: dict[str, dict[float, dict[str, float]]]) -> None:
        """Write the thresholds to the config, and for `head="auto"` the head that is best on these images."""
        config: AvgKConfig = self.model.config
        ks = list(next(iter(results.values())))
        if config.head == "auto":
            chosen = {k: max(results, key=lambda head: results[head][k]["average_k_accuracy"]) for k in ks}
        else:
            chosen = dict.fromkeys(ks, config.head)
        lambdas = {head: {k: result[k]["lambda_val"] for k in ks} for head, result in results.items()}
        statistics, args = self._statistics[chosen[config.k]], self.args
        config.set_calibration(
            {k: lambdas[head][k] for k, head in chosen.items()},
            {**self._calibration_record(), "head": chosen[config.k], "curve": statistics.curve()},
            heads=chosen if config.head == "auto" else None,
            head_thresholds=lambdas if len(lambdas) > 1 else None,
            coverage=statistics.coverage(args.calibrate_coverage, args.calibrate_per_class, config.k),
        )

    def statistics(self, k: float | None = None) -> SetStatistics:
        """What the last evaluation collected for the head that answers for `k`."""
        return self._statistics[self.model.config.head_for(k)]

    def _calibration_record(self) -> dict[str, Any]:
        dataset = self.callback_handler.eval_dataloader.dataset
        return {
            "num_examples": len(dataset),
            "dataset": self.dataset_name,
            "split": str(getattr(dataset, "split", None) or "validation"),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "step": self.state.global_step,
        }

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
        """Write our card to README.md: what the model returns, how to call it, and how well it did."""
        if not self.is_world_process_zero():
            return
        config, statistics = self.model.config, self._statistics
        repo = self.hub_model_id or model_name or Path(self.args.output_dir).name
        evaluated = config.thresholds and statistics and self.statistics().thresholds is not None
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
        saved = AvgKConfig.from_pretrained(checkpoint)
        for name in ("heads", "thresholds", "head_thresholds", "coverage", "calibration"):
            setattr(self.model.config, name, getattr(saved, name))


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
