"""`AvgKTrainer`: transformers' Trainer with the average-K objective, and thresholds computed while evaluating."""

import datetime
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import EvalPrediction, PreTrainedModel, Trainer
from transformers.trainer_utils import EvalLoopOutput, has_length

from .configuration import AvgKConfig
from .data import class_counts
from .losses import make_loss
from .sets import SetStatistics, check_k, head_scores, k_key, predict_sets, ranked_sets
from .training_args import AvgKTrainingArguments


class AvgKTrainer(Trainer):
    """Trains an `AvgKForImageClassification` with its config's objective and calibrates it on the validation set.

    `evaluate()` on the trainer's own `eval_dataset` computes lambda_val for every K asked for in one pass, writes it
    to `model.config` and reports `eval_average_k_accuracy`, `eval_lambda_val`, `eval_mean_set_size`,
    `eval_empty_sets`, `eval_top1_accuracy`, `eval_topk_accuracy`, `eval_macro_accuracy` and the few / medium / many
    shot means; for every further K the same with `@K` behind the name. On any other dataset, and in `predict()`, the
    stored thresholds are used and never changed.

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
        self.objective = make_loss(model.config)
        self._calibrating = False
        self._statistics: SetStatistics | None = None
        super().__init__(
            model=model,
            args=args,
            train_dataset=train_dataset,
            eval_dataset=eval_dataset,
            compute_metrics=self._update_statistics,
            **kwargs,
        )

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
        if self._calibrating:
            ks, thresholds = self.ks, None
        else:
            config.threshold()  # refuses an uncalibrated model, and says what to do
            thresholds = {k: config.threshold(k) for k in self.ks if k_key(k) in config.thresholds}
            ks = list(thresholds)
        self._statistics = SetStatistics(ks, num_examples, thresholds, config.train_counts)
        self._sets: list[list[int]] | None = [] if description == "Prediction" else None
        self._loss_sum = 0.0
        # under its own name, "Prediction" would make the stock loop collect all logits
        output = super().evaluation_loop(dataloader, "Evaluation", False, ignore_keys, metric_key_prefix)
        if f"{metric_key_prefix}_loss" in output.metrics:
            output.metrics[f"{metric_key_prefix}_loss"] = float(self._loss_sum) / num_examples
        if self._sets is not None:
            labelled = f"{metric_key_prefix}_loss" in output.metrics
            output = output._replace(predictions=self._sets, label_ids=self._statistics.labels if labelled else None)
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
        scores = head_scores(logits, sccp_logits, config.head, config.score)
        if self._sets is not None:
            self._sets += ranked_sets(scores, predict_sets(scores, config.threshold()))
        if prediction.losses is None:
            return {}
        self._statistics.update(scores, labels)
        self._loss_sum += prediction.losses.mean() * len(labels)
        if not compute_result:
            return None
        results = self._statistics.compute()
        if self._calibrating:
            record = self._calibration_record()
            config.set_calibration({k: result["lambda_val"] for k, result in results.items()}, record)
        metrics = dict(results[config.k])
        for k, result in results.items():
            if k != config.k:
                shared = ("top1_accuracy",)
                metrics.update({f"{name}@{k_key(k)}": v for name, v in result.items() if name not in shared})
        return metrics

    def _calibration_record(self) -> dict[str, Any]:
        dataset = self.callback_handler.eval_dataloader.dataset
        return {
            "num_examples": len(dataset),
            "dataset": self.dataset_name,
            "split": str(getattr(dataset, "split", None) or "validation"),
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "step": self.state.global_step,
        }

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

    def _load_calibration(self, checkpoint: str) -> None:
        """Take over the thresholds that were saved with the weights."""
        saved = AvgKConfig.from_pretrained(checkpoint)
        self.model.config.thresholds = saved.thresholds
        self.model.config.calibration = saved.calibration
