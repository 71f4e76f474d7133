"""`AvgKTrainer`: transformers' Trainer with the average-K objective, and thresholds computed while evaluating."""

import datetime
from bisect import bisect
from pathlib import Path
from typing import Any

import datasets
import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate
from transformers import EvalPrediction, PreTrainedModel, Trainer
from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, EvalLoopOutput, HubStrategy, has_length
from transformers.utils import logging

from .configuration import AvgKConfig
from .data import class_counts
from .hub import push_folder
from .losses import OnlineLabelLoss, make_loss
from .model_card import CardCallback, hyperparameters, render_card
from .sets import HEADS, SetStatistics, check_k, head_scores, k_key, predict_sets, ranked_sets
from .training_args import AvgKTrainingArguments

logger = logging.get_logger(__name__)
OBJECTIVE_STATE = "objective.safetensors"
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
        model: The model.
        args: `AvgKTrainingArguments`.
        train_dataset: Examples with `pixel_values`, `labels` and `index`, as `avgk_hf.prepare` gives them.
        eval_dataset: The validation set, in the same form.
        dataset_name: Name of the data in the calibration record.
        kwargs: As in `Trainer`.
    """

    loss_is_scaled_for_ga = False  # the objective is a mean over the batch

    def __init__(
        self,
        model: PreTrainedModel,
        args: AvgKTrainingArguments,
        train_dataset: Dataset | None = None,
        eval_dataset: Dataset | None = None,
        dataset_name: str | None = None,
        **kwargs: Any,
    ) -> None:
        if isinstance(eval_dataset, dict):
            raise ValueError(
                "pass one validation set as `eval_dataset`: the thresholds come from it, not from several."
            )
        for k in args.calibrate_k:
            check_k(k, model.config.num_labels)
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if dataset is not None and has_length(dataset) and len(dataset) == 0:
                raise ValueError(f"{name} is empty.")
            if isinstance(dataset, datasets.Dataset) and "label" in dataset.column_names:
                counts = class_counts(dataset, model.config.num_labels)
                if name == "train_dataset":
                    model.config.train_counts = counts.tolist()
        self.dataset_name = dataset_name
        num_examples = len(train_dataset) if has_length(train_dataset) else 0
        if model.config.objective == "role" and num_examples:
            _state_memory(num_examples, model.config.num_labels, args)
        self.objective = make_loss(model.config, num_examples)
        self.card = CardCallback()
        self._calibrating = False
        self._statistics: dict[str, SetStatistics] = {}  # by head
        # torch's own collates a worker's images in the memory it shares; the stock one costs a further copy of them
        kwargs.setdefault("data_collator", default_collate)
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._update_statistics,
            **kwargs,
        )
        self.objective.to(self.args.device)
        self.add_callback(self.card)

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
        loss = self.objective(outputs, inputs["labels"], inputs.get("index"))
        return (loss, outputs) if return_outputs else loss

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """As in `Trainer`; parameters of the objective join with their own learning rate and without decay."""
        new = self.optimizer is None
        optimizer = super().create_optimizer(model)
        parameters = list(self.objective.parameters())
        if new and parameters:
            rate = self.args.learning_rate * self.objective.theta_lr
            optimizer.add_param_group({"params": parameters, "lr": rate, "weight_decay": 0.0})
            # the stock loop clears the gradients of the model only
            optimizer.register_step_post_hook(lambda *_: self.objective.zero_grad())
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
        steps = [round(epoch * self._steps_per_epoch) for epoch in milestones]
        # not MultiStepLR: a checkpoint would bring back the steps of the run that wrote it
        self.lr_scheduler = torch.optim.lr_scheduler.LambdaLR(
            optimizer or self.optimizer, lambda step: gamma ** bisect(steps, step)
        )
        self._created_lr_scheduler = True
        return self.lr_scheduler

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in `Trainer`; thresholds of the weights before the step are dropped."""
        if self.model.config.thresholds:
            self.model.config.clear_calibration()
        return super().training_step(*args, **kwargs)

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
            ks = [k for k in self.ks if k_key(k) in config.thresholds]
            stored = config.head_thresholds or {config.head_for(): config.thresholds}
            thresholds = {head: {k: stored[head][k_key(k)] for k in ks} for head in heads if head in stored}
        self._statistics = {
            head: SetStatistics(ks, num_examples, given, config.train_counts) for head, given in thresholds.items()
        }
        self._sets: list[list[int]] | None = [] if description == "Prediction" else None
        self._loss_sum = 0.0
        # under its own name, "Prediction" would make the stock loop collect all logits
        output = super().evaluation_loop(dataloader, "Evaluation", False, ignore_keys, metric_key_prefix)
        if f"{metric_key_prefix}_loss" in output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = float(self._loss_sum) / num_examples
        if self._sets is not None:
            labelled = f"{metric_key_prefix}_loss" in output.metrics
            output = output._replace(predictions=self._sets, label_ids=self.statistics().labels if labelled else None)
        return output

    def prediction_step(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        prediction_loss_only: bool,
        ignore_keys: list[str] | None = None,
    ) -> tuple[Tensor | None, Any, Tensor | None]:
        """As in `Trainer`; images without label get -1, so that their sets are collected all the same."""
        loss, logits, labels = super().prediction_step(model, inputs, prediction_loss_only, ignore_keys)
        if labels is None:
            first = logits[0] if isinstance(logits, tuple) else logits
            labels = torch.full((len(first),), -1, device=first.device)
        return loss, logits, labels

    def _update_statistics(self, prediction: EvalPrediction, compute_result: bool = False) -> dict[str, float] | None:
        """Take in one batch of logits; with the last one, return the metrics and store new thresholds."""
        logits, labels = prediction.predictions, prediction.label_ids
        logits, sccp_logits = logits if isinstance(logits, (tuple, list)) else (logits, None)
        config: AvgKConfig = self.model.config
        scores = {head: head_scores(logits, sccp_logits, head, config.score) for head in self._statistics}
        if self._sets is not None:
            answer = scores[config.head_for()]
            self._sets += ranked_sets(answer, predict_sets(answer, config.threshold()))
        if prediction.losses is None:
            return {}
        for head, statistics in self._statistics.items():
            statistics.update(scores[head], labels)
        self._loss_sum += prediction.losses.mean() * len(labels)
        if not compute_result:
            return None
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
        return metrics

    def _store_calibration(self, results: dict[str, dict[float, dict[str, float]]]) -> None:
        """Write the thresholds to the config, and for `head="auto"` the head that is best on these images."""
        config: AvgKConfig = self.model.config
        ks = list(next(iter(results.values())))
        if config.head == "auto":
            chosen = {k: max(results, key=lambda head: results[head][k]["average_k_accuracy"]) for k in ks}
        else:
            chosen = dict.fromkeys(ks, config.head)
        lambdas = {head: {k: result[k]["lambda_val"] for k in ks} for head, result in results.items()}
        config.set_calibration(
            {k: lambdas[head][k] for k, head in chosen.items()},
            self._calibration_record(),
            heads=chosen if config.head == "auto" else None,
            head_thresholds=lambdas if len(lambdas) > 1 else None,
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
        card.save(Path(self.args.output_dir) / "README.md")

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
        super()._save(output_dir, state_dict)
        folder = Path(output_dir or self.args.output_dir)
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
        if self.objective.state_dict():
            state = load_file(Path(resume_from_checkpoint) / OBJECTIVE_STATE, device=str(self.args.device))
            self.objective.load_state_dict(state)

    def _save_checkpoint(self, model: nn.Module, trial: Any) -> None:
        """As in `Trainer`, with the state of the objective beside the model, not in it."""
        super()._save_checkpoint(model, trial)
        if self.objective.state_dict() and self.args.should_save:
            folder = Path(self._get_output_dir(trial)) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
            save_file(self.objective.state_dict(), folder / OBJECTIVE_STATE)

    def _load_calibration(self, checkpoint: str) -> None:
        """Take over the thresholds that were saved with the weights."""
        saved = AvgKConfig.from_pretrained(checkpoint)
        for name in ("heads", "thresholds", "head_thresholds", "calibration"):
            setattr(self.model.config, name, getattr(saved, name))


def _state_memory(num_examples: int, num_labels: int, args: AvgKTrainingArguments) -> None:
    """Say what ROLE's label estimates will take, before they take it."""
    optim, options = str(getattr(args.optim, "value", args.optim)), args.optim_args or ""
    states = 2 if "adam" in optim else int("momentum" in options)
    size = OnlineLabelLoss.memory(num_examples, num_labels, states)
    logger.warning(
        f"role: label estimates for {num_examples} images x {num_labels} classes, their gradient and {states}"
        f" optimizer state(s) take {size / 2**30:.2f} GiB on every process."
        + (" That is more than 2 GiB: the objectives avgk and epr need none of it." if size > LARGE_STATE else "")
    )
