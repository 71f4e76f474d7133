"""`AvgKTrainer`: transformers' Trainer with the average-K objective, and thresholds computed while evaluating."""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import datasets
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset
from transformers import EarlyStoppingCallback, PreTrainedModel
from transformers.trainer_utils import EvalLoopOutput, has_length
from transformers.utils import logging

from .calibration import Calibration
from .configuration import AvgKConfig
from .conformal import enough_images, level_key
from .data import class_counts
from .data.classes import check_names, name_classes
from .data.datasets import TAKE, TAKE_TEST, check_length, check_prepared, check_prepared_for, collate, taken_as
from .evaluation import Evaluation, loop
from .files import new_file, write_text
from .losses import make_loss
from .model_card import CardCallback, render_card
from .optimizers import ObjectiveTrainer
from .predictions import Predictions
from .processes import broadcast
from .results import RESULTS, run_results
from .sets import check_k, k_key
from .statistics import SetStatistics
from .training_args import AvgKTrainingArguments, check_trainer_arguments, say_state_memory

logger = logging.get_logger(__name__)


class AvgKTrainer(ObjectiveTrainer):
    """Trains an `AvgKForImageClassification` with its config's objective and calibrates it on the validation set.

    `evaluate()` on the trainer's own `eval_dataset` computes lambda_val for every K asked for in one pass, writes it
    to `model.config` and reports `eval_average_k_accuracy`, `eval_lambda_val`, `eval_mean_set_size`,
    `eval_empty_sets`, `eval_top1_accuracy`, `eval_topk_accuracy`, `eval_macro_accuracy` and the few / medium / many
    shot means; for every further K the same with `@K` behind the name. On any other dataset, and in `predict()`, the
    stored thresholds are used and never changed. A model with both heads is scored by each in the same pass
    (`eval_average_k_accuracy_ml`, `_sccp`, `_mean`); with `head="auto"` the best on validation answers from then on.

    A threshold belongs to the weights it was computed on: it is dropped with the next training step, saved with the
    checkpoint, and comes back with it.

    An argument of `Trainer` or field of `TrainingArguments` is honoured or refused; `training_args` lists them all.
    What `compute_metrics` returns joins our metrics; its predictions are the `logits`, and for an `ignore_keys` of
    your own all fields of the output but those.

    Args:
        model: The model; or pass `model_init`, as in `Trainer`, for a hyperparameter search.
        args: `AvgKTrainingArguments`.
        train_dataset: Examples with `pixel_values`, `labels` and `index`, as `avgk_hf.prepare` gives them; `label` and
            `label_ids` do for `labels`.
        eval_dataset: The validation set, in the same form and with a length.
        dataset_name: What `load_splits` read, for the calibration record, the card and results.json; of a local folder
            the first two name the last part only. With it goes what `validation_per_class` took from train.
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
            swapped = ": the model comes first" if isinstance(model, AvgKTrainingArguments) else ""
            raise ValueError(f"pass `args=AvgKTrainingArguments(output_dir, ...)`{swapped}.")
        if isinstance(eval_dataset, dict):
            raise ValueError("pass one validation set as `eval_dataset`: thresholds come from it, not from several.")
        check_trainer_arguments(args, kwargs)
        # torch's own collates a worker's images in the memory it shares; the stock one costs a further copy of them
        for name, dataset in (("train_dataset", train_dataset), ("eval_dataset", eval_dataset)):
            if kwargs.setdefault("data_collator", collate) is collate:
                check_prepared(name, dataset)
        # a local folder goes into config and card by its name only: they are made to be shared
        local = dataset_name is not None and Path(dataset_name).exists()
        self.dataset_name = Path(dataset_name).name if local else dataset_name
        taken = (taken_as(getattr(each, "images", each)) for each in (eval_dataset, train_dataset))
        data = {"dataset": dataset_name, TAKE: None, "split_seed": 0} | next(filter(None, taken), {})
        self.record: dict[str, Any] = {"data": data if dataset_name else {}}  # for results.json
        self._fit = partial(self._fit_to_data, args, train_dataset, eval_dataset)
        if model is not None:
            self._fit(model)
        self.card = CardCallback()
        self._calibrating = self._keeping_heads = False
        self.evaluation: Evaluation | None = None  # the last
        if args.early_stopping_patience:
            stop = EarlyStoppingCallback(args.early_stopping_patience)
            kwargs["callbacks"] = [*(kwargs.get("callbacks") or []), stop]
        super().__init__(model=model, args=args, train_dataset=train_dataset, eval_dataset=eval_dataset, **kwargs)
        self.add_callback(self.card)
        self.check_optimizers()

    def call_model_init(self, trial: Any = None) -> PreTrainedModel:
        """As in `Trainer`; a new model comes with a new criterion."""
        model = super().call_model_init(trial)
        self._fit(model)
        return model

    def _fit_to_data(
        self, args: AvgKTrainingArguments, train: Dataset | None, validation: Dataset | None, model: PreTrainedModel
    ) -> None:
        """Check that model and data fit each other, and make the loss."""
        config: AvgKConfig = getattr(model, "config", None)
        if getattr(config, "model_type", None) != AvgKConfig.model_type:
            raise ValueError(
                f"a model of class {type(model).__name__}: AvgKTrainer trains an AvgKForImageClassification, as"
                " `AvgKForImageClassification.from_timm` builds it. Another classifier gets thresholds without"
                " training from `avgk_hf.calibrate`."
            )
        if validation is not None:
            check_length("eval_dataset", validation)
        if train is not None and train is validation:
            logger.warning("eval_dataset is train_dataset: thresholds from images that are learnt suit no others.")
        for k in args.calibrate_k:
            check_k(k, config.num_labels)
        for name, dataset in (("train_dataset", train), ("eval_dataset", validation)):
            if dataset is not None and has_length(dataset) and len(dataset) == 0:
                raise ValueError(f"{name} is empty.")
            check_prepared_for(name, dataset, model)
            dataset = getattr(dataset, "images", dataset)  # those that features stand for
            if isinstance(dataset, datasets.Dataset) and "label" in dataset.column_names:
                check_names(name, dataset, config)
                name_classes(config, getattr(dataset.features["label"], "names", []))
                counts = class_counts(dataset, config.num_labels)
                if name == "train_dataset":
                    config.train_counts = counts.tolist()
        if train is not None:
            args.balancing(config)  # refuses a balance without counts
        num_examples = len(train) if has_length(train) else 0
        say_state_memory(config, num_examples, args)
        # not `objective`: that is what the stock trainer calls the metric of a hyperparameter search
        self.criterion = make_loss(config, num_examples).to(args.device)
        broadcast(list(self.criterion.state_dict().values()))

    def compute_loss(
        self,
        model: nn.Module,
        inputs: dict[str, Any],
        return_outputs: bool = False,
        num_items_in_batch: Tensor | int | None = None,
    ) -> Tensor | tuple[Tensor, Any]:
        """The objective on the model's outputs."""
        if "labels" not in inputs:
            raise ValueError(
                f"a batch has no `labels`, only {list(inputs)}: neither training nor calibration does without them."
            )
        outputs = _forward(model, inputs)
        loss = self.criterion(outputs, inputs["labels"], inputs.get("index"))
        return (loss, outputs) if return_outputs else loss

    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        """As in `Trainer`; thresholds of the weights before the step are dropped, and a loss must be finite."""
        if self.model.config.thresholds:
            Calibration.drop(self.model.config)
        loss = super().training_step(*args, **kwargs)
        if not torch.isfinite(loss):  # instead of `logging_nan_inf_filter`, which asks the device as often
            self._refuse_divergence(f"the loss is {loss.item()}")
        return loss

    @contextmanager
    def _every_image_once(self) -> Iterator[None]:
        """What is loaded meanwhile has no batch that is filled up, dropped or out of order, as in training."""
        config, args = self.accelerator.dataloader_config, self.args
        changed = [(config, "even_batches", False), (config, "split_batches", False)]
        changed += [(config, "dispatch_batches", None)]
        changed += [(args, "dataloader_drop_last", False), (args, "dataloader_in_order", True)]
        kept = [(place, name, getattr(place, name)) for place, name, _ in changed]
        try:
            for each in changed:
                setattr(*each)
            yield
        finally:
            for each in kept:
                setattr(*each)

    def get_eval_dataloader(self, eval_dataset: Dataset | None = None) -> DataLoader:
        """As in `Trainer`, with every image once."""
        if eval_dataset is not None and eval_dataset is not self.eval_dataset:
            # with persistent workers the stock method would give the loader of the validation set again
            return self.get_test_dataloader(eval_dataset)
        with self._every_image_once():
            return super().get_eval_dataloader()

    def get_test_dataloader(self, test_dataset: Dataset) -> DataLoader:
        """As in `Trainer`, with every image once."""
        if self.data_collator is collate:
            check_prepared("the dataset to evaluate", test_dataset)
        check_prepared_for("the dataset to evaluate", test_dataset, self.model)
        check_length("the dataset to evaluate", test_dataset)
        check_names("the dataset to evaluate", getattr(test_dataset, "images", test_dataset), self.model.config)
        with self._every_image_once():
            return super().get_test_dataloader(test_dataset)

    @property
    def ks(self) -> list[float]:
        """The average set sizes that are calibrated: the model's own, then `args.calibrate_k`."""
        ks = [self.model.config.k, *self.args.calibrate_k]
        return list({k_key(k): k for k in ks}.values())

    def evaluate(
        self,
        eval_dataset: Dataset | dict[str, Dataset] | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
        calibrate: bool | None = None,
    ) -> dict[str, float]:
        """Evaluate, and calibrate where the dataset is the trainer's own validation set.

        Args:
            eval_dataset: Another dataset than the trainer's `eval_dataset`; without labels, sizes only. Of several,
                `{name: dataset}`, each is evaluated with its name in the prefix, `eval_<name>`, and none calibrates.
            ignore_keys: As in `Trainer`.
            metric_key_prefix: Put before the names of the metrics.
            calibrate: Whether to compute new thresholds from this dataset and store them. Default: only for the
                trainer's own `eval_dataset`.
        """
        several = isinstance(eval_dataset, dict)
        if several and calibrate:
            raise ValueError(f"calibrate=True: thresholds come from one dataset, not from {list(eval_dataset)}.")
        self._calibrating = eval_dataset is None if calibrate is None else calibrate
        try:
            with self.averaged():
                metrics = super().evaluate(eval_dataset, ignore_keys, metric_key_prefix)
        finally:
            self._calibrating = False
        if not several:
            self.card.record(metric_key_prefix, metrics, self.evaluation, self.weights_step)
        return metrics

    def calibrate(self, dataset: Dataset) -> dict[str, float]:
        """Compute the thresholds anew from images on which nothing was chosen, so that coverages hold exactly.

        Weights and heads stay those that the validation set chose.

        Args:
            dataset: Labelled images, as `eval_dataset`, that are neither in it nor in `train_dataset`.
        """
        if self.train_dataset is not None and dataset is self.train_dataset:
            raise ValueError(
                "calibrate(dataset) got the training images, on which sets look far better than on others: give"
                " images that are neither in train_dataset nor in eval_dataset."
            )
        if not self.model.config.thresholds:
            self.evaluate()  # which chooses the heads
        self._keeping_heads = True
        try:
            return self.evaluate(dataset, metric_key_prefix="calibration", calibrate=True)
        finally:
            self._keeping_heads = False

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
        evaluation = self.evaluation = self._plan(num_examples, description == "Prediction")
        self.callback_handler.eval_dataloader = dataloader
        asked = self._predictions(num_examples, ignore_keys)
        self.collect([evaluation, *asked], dataloader)
        if self._calibrating:
            self._store(evaluation, dataloader.dataset)
        metrics = {"loss": evaluation.loss_sum / num_examples} if evaluation.labelled else {}
        metrics |= evaluation.metrics()
        sets = None if evaluation.sets is None else [one for _, batch in evaluation.sets for one in batch]
        labels = self.statistics().labels if evaluation.labelled and sets is not None else None
        prefix = f"{metric_key_prefix}_"
        metrics = {f"{prefix}{name}": value for name, value in metrics.items()}
        for name, value in (item for predictions in asked for item in predictions.metrics().items()):
            name = name if name.startswith(prefix) else f"{prefix}{name}"
            if name in metrics:
                raise ValueError(f"compute_metrics returns {name!r}, which is a metric of AvgKTrainer: rename it.")
            metrics[name] = value
        return EvalLoopOutput(sets, labels, metrics, num_examples)

    def _store(self, evaluation: Evaluation, dataset: Dataset) -> None:
        """Write the thresholds to the config, with what was chosen on the same images."""
        split = str(getattr(dataset, "split", None) or ("calibration" if self._keeping_heads else "validation"))
        source = {"dataset": self.dataset_name, "split": split, "step": self.weights_step}
        if self.args.load_best_model_at_end or self.args.early_stopping_patience:
            source["selection"] = f"{self.dataset_name} {getattr(self.eval_dataset, 'split', None) or 'validation'}"
        data, names = self.record["data"], {"per_class": TAKE, "test_per_class": TAKE_TEST}
        if taken := {name: data[field] for name, field in names.items() if data.get(field)}:
            source["taken"] = {"dataset": self.dataset_name, **taken, "seed": data["split_seed"]}
        evaluation.store(**source)

    def _predictions(self, num_examples: int, ignore_keys: Sequence[str] | None) -> list[Predictions]:
        """What collects for the user's `compute_metrics`, where there is one."""
        if self.compute_metrics is None:
            return []
        config, args = self.model.config, self.args
        ignored = config.keys_to_ignore_at_inference if ignore_keys is None else ignore_keys
        functions = self.compute_metrics, self.preprocess_logits_for_metrics
        return [Predictions(*functions, args, ignored, num_examples, config.num_labels)]

    def collect(self, evaluations: Sequence[Evaluation | Predictions], dataloader: DataLoader) -> None:
        """Go through images once with the model, its loss and the settings of this trainer.

        Args:
            evaluations: What is to be collected.
            dataloader: As `get_eval_dataloader` gives it.
        """
        model, args = self.model_wrapped if self.is_deepspeed_enabled else self.model, self.args
        if not self.is_in_train and (args.fp16_full_eval or args.bf16_full_eval):
            model = model.to(args.device, torch.float16 if args.fp16_full_eval else torch.bfloat16)
        model.eval()
        broadcast(list(self.model.buffers()))  # BatchNorm statistics differ between processes

        def compute(batch: dict[str, Any]) -> tuple[Any, Tensor | None]:
            with self.compute_loss_context_manager():
                if "labels" in batch or self._calibrating:
                    return self.compute_loss(model, batch, return_outputs=True)[::-1]
                return _forward(model, batch), None

        def after() -> None:
            self.control = self.callback_handler.on_prediction_step(args, self.state, self.control)

        loop(evaluations, dataloader, compute, args.eval_batch_size, args.device, after)

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
            how |= {"balancing": args.balancing(config), "keep_heads": self._keeping_heads}
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

    def results(self) -> dict[str, Any]:
        """What results.json holds: how the model was trained, and what was measured since."""
        frozen = getattr(self.model, "_learning", None) is not None
        return run_results(self.model.config, self.args, self.card, self.dataset_name, frozen) | self.record

    def write_results(self, folder: str | Path) -> None:
        """Write results.json, which `avgk card`, `plot` and `report` read, where validation was evaluated."""
        found = self.results()
        if "validation" in found:
            write_text(Path(folder) / RESULTS, json.dumps(found, indent=2, ensure_ascii=False) + "\n")

    def create_model_card(self, model_name: str | None = None, **kwargs: Any) -> None:
        """Write our card to README.md: what the model returns, how to call it, and how well it did.

        What the stock card is told besides its name (license, tags, ...), ours knows from config and results.
        """
        for name in kwargs:
            raise ValueError(f"{name}={kwargs[name]!r}: the card is made from config and results; leave it out.")
        if not self.is_world_process_zero():
            return
        config = self.model.config
        repo = self.hub_model_id or model_name or Path(self.args.output_dir).name
        rows, sizes = self.results()["hyperparameters"], self.card.set_sizes if config.thresholds else {}
        results, adapter = self.card.results(config), hasattr(self.model, "peft_config")
        card = render_card(repo, config, results, rows, self.dataset_name, sizes.get("all"), adapter=adapter)
        with new_file(Path(self.args.output_dir) / "README.md") as new:
            card.save(new)

    def _load_calibration(self, checkpoint: str) -> None:
        """Take over the thresholds that were saved with the weights."""
        Calibration.carry(AvgKConfig.from_pretrained(checkpoint), self.model.config)


def _forward(model: nn.Module, inputs: Mapping[str, Any]) -> Any:
    given = {name: inputs[name] for name in ("pixel_values", "features") if name in inputs}
    # whatever the config says, nobody here reads the hidden states
    return model(**given, output_hidden_states=False, return_dict=True)
