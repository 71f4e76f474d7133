"""The one loop over images: batches in, statistics and calibration out.

It serves our model, classifiers of other packages and ONNX graphs, labelled images or not, one process or many, for
trainer, commands, study and export. No score matrix is kept: O(K n) memory.
"""

import datetime
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset
from huggingface_hub.utils import tqdm
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import PreTrainedModel, default_data_collator

from .calibration import Calibration
from .checks import check_choice, check_whole
from .classifiers import best_device, forward, transform_for
from .conformal import METHODS, question_name
from .data import prepare, skip_bad_images
from .data.classes import Labels, align_classes
from .data.datasets import ON_BAD_IMAGE
from .losses import make_loss
from .modeling import AvgKForImageClassification
from .monitor import SetSizeMonitor
from .processes import gather_list, rank, sum_over_processes, world_size
from .questions import Question
from .scope import check_asked, choices, evaluated_levels, evaluated_sizes, stored_thresholds
from .scores import HEADS, SUM_TO_ONE, NotFinite, all_scores, head_logits, wide
from .sets import metric_name
from .statistics import SetStatistics, set_size_counts, sizes_only


class Evaluation:
    """What one pass over n images collects about one model: statistics of every head, the loss, and sets.

    Args:
        config: The model's config.
        num_examples: n.
        ks: Average set sizes.
        calibrate: Whether the thresholds come from these images, or from the config's calibration.
        levels: Coverage levels to calibrate, or to measure.
        method: How the coverage that is measured is reached.
        per_class: Whether to calibrate thresholds of each class too, or to measure with them.
        score: What is thresholded, if not what the config says.
        thresholds: {head: {K: lambda_val}} in place of those of the calibration.
        keep_sets: Whether to keep the sets of the model's own K.
        classes: To calibrate for sets of these only, as in `score`.
        keep_heads: Whether a calibration leaves the heads as they were chosen before, on other images.
    """

    def __init__(
        self,
        config: Any,
        num_examples: int,
        ks: Sequence[float],
        calibrate: bool = False,
        levels: Iterable[float] = (),
        method: str = "lac",
        per_class: bool = False,
        score: str | None = None,
        thresholds: Mapping[str, Mapping[float, float]] | None = None,
        keep_sets: bool = False,
        classes: list[int] | None = None,
        keep_heads: bool = False,
    ) -> None:
        if num_examples == 0:
            raise ValueError("the dataset to evaluate is empty.")
        self.config, self.num_examples, self.calibrate = config, num_examples, calibrate
        self.levels, self.per_class = list(levels), per_class
        before = Calibration.of(config)
        self.classes = classes if calibrate else before.classes
        self.kept_heads = {k: before.head(k) for k in ks} if keep_heads and before.ks else None
        self.score = score or getattr(config, "score", "softmax")
        # all metrics of a classifier without a K of its own are named by their K
        self.own_k: float | None = getattr(config, "k", None)
        heads = HEADS if getattr(config, "sccp_head", False) else HEADS[:1]
        counts = getattr(config, "train_counts", None)
        answering, answers, self.answer = set(heads), {}, None
        if calibrate:
            given: Mapping[str, Any] = dict.fromkeys(heads)
        elif thresholds is not None:
            given = thresholds
        else:
            given, answering = stored_thresholds(before, heads, ks), {before.head()}
            how = {"method": method, "per_class": per_class}
            asked = {question_name(c, **how): Question(coverage=c, **how) for c in self.levels}
            answers = {name: before.answer(question) for name, question in asked.items()}
            self.answer = before.answer(Question())
        sums = calibrate and self.score in SUM_TO_ONE and bool(self.levels)
        self.statistics = {
            head: SetStatistics(
                ks if of_head is None else list(of_head),
                num_examples,
                of_head,
                counts,
                mass=sums and (head in answering),
                answers=answers if head in answering else None,
            )
            for head, of_head in given.items()
        }
        self.sets: list[tuple[int, list[list[int]]]] | None = [] if keep_sets else None
        self.labelled, self.loss_sum, self._results = True, 0.0, None

    def update(self, output: Any, labels: torch.Tensor | None, first: int, loss: torch.Tensor | None = None) -> None:
        """Take in one batch.

        Args:
            output: Of the model, with the logits (b, L) of its heads as in `head_logits`.
            labels: True classes (b,), or None.
            first: Position of the first image among the n.
            loss: Mean over the batch.
        """
        scores = all_scores(*head_logits(output), self.score, first, self.classes)
        for head, statistics in self.statistics.items():
            statistics.update(scores[head], None if labels is None else labels.to(scores[head].device), first)
        self.labelled &= labels is not None
        if self.sets is not None:
            self.sets.append((first, self.answer.classes(scores[self.answer.head])))
        if loss is not None:
            self.loss_sum += loss.detach().to(wide(loss.device)) * len(output.logits)

    def merge(self, device: torch.device | str) -> None:
        """Exchange what the processes collected, so that each has the whole."""
        self.labelled = sum_over_processes(float(not self.labelled), device) == 0
        self.loss_sum = sum_over_processes(float(self.loss_sum), device)
        for statistics in self.statistics.values():
            statistics.labelled = self.labelled
            statistics.merge_processes(device)
        if self.sets is not None:
            self.sets = sorted(gather_list(self.sets))

    @property
    def results(self) -> dict[str, dict[float, dict[str, float]]]:
        """{head: {K: metrics}}."""
        if self._results is None:
            self._results = {head: statistics.compute() for head, statistics in self.statistics.items()}
        return self._results

    def lambdas(self) -> dict[str, dict[float, float]]:
        """{head: {K: lambda_val}}."""
        return {head: {k: of_k["lambda_val"] for k, of_k in found.items()} for head, found in self.results.items()}

    def best_head(self, k: float) -> str:
        """The head with the highest accuracy on these images."""
        return max(self.results, key=lambda head: self.results[head][k]["average_k_accuracy"])

    @property
    def chooses_head(self) -> bool:
        """Whether the heads that answer are chosen on these images."""
        return self.kept_heads is None and getattr(self.config, "head", "ml") == "auto" and len(self.statistics) > 1

    def store(self, **source: Any) -> Calibration:
        """Write the thresholds to the config, and for `head="auto"` the head that is best on these images."""
        config, results = self.config, self.results
        ks, head, two_heads = list(results["ml"]), getattr(config, "head", "ml"), hasattr(config, "head")
        chosen = self.kept_heads or {k: self.best_head(k) if head == "auto" else head for k in ks}
        own = chosen[min(ks) if self.own_k is None else self.own_k]
        statistics, lambdas = self.statistics[own], self.lambdas()
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        source |= choices(Calibration.of(config), source, self.chooses_head)
        source |= {} if self.classes is None else {"classes": self.classes}
        return Calibration.store(
            config,
            {k: lambdas[head][k] for k, head in chosen.items()},
            {"num_examples": self.num_examples, **source, "date": today, **({"head": own} if two_heads else {})},
            heads=chosen if head == "auto" else None,
            head_thresholds=lambdas if len(lambdas) > 1 else None,
            coverage=statistics.coverage(self.levels, self.per_class, min(ks) if self.own_k is None else self.own_k),
            curve=statistics.curve(),
        )

    def metrics(self) -> dict[str, float]:
        """What is reported: of the head that answers, with `@K` behind the name for every K but the model's own."""
        calibration, results, metrics = Calibration.of(self.config), self.results, {}
        ks = list(dict.fromkeys(k for of_k in results.values() for k in of_k))
        if self.labelled:
            first = ks[0] if self.own_k is None else self.own_k
            metrics["top1_accuracy"] = results[calibration.head(first)][first]["top1_accuracy"]
        for k in ks:
            for name, value in results[calibration.head(k)][k].items():
                if name != "top1_accuracy":  # the same for every K
                    metrics[metric_name(name, k, self.own_k)] = value
            if len(results) > 1 and self.labelled:
                for head in results:
                    if k in results[head]:
                        accuracy = results[head][k]["average_k_accuracy"]
                        metrics[metric_name(f"average_k_accuracy_{head}", k, self.own_k)] = accuracy
        if self.labelled:
            metrics |= self.statistics[calibration.head()].coverage_metrics()
        return metrics

    def set_sizes(self, k: float) -> np.ndarray:
        """The set size (n,) of every image at the threshold of `k`."""
        return self.statistics[Calibration.of(self.config).head(k)].set_sizes(k)

    def size_counts(self) -> dict[str, list[int]]:
        """How many images got a set of 0, 1, 2, ... classes for the model's own K, and by shot."""
        statistics = self.statistics[Calibration.of(self.config).head()]
        return set_size_counts(statistics, self.own_k, self.config.train_counts)


@torch.no_grad()
def loop(
    evaluations: Sequence[Evaluation],
    batches: Iterable[Mapping[str, Any]],
    compute: Callable[[Mapping[str, Any]], tuple[Any, torch.Tensor | None]],
    batch_size: int,
    device: torch.device | str = "cpu",
    after: Callable[[], None] | None = None,
) -> None:
    """Go through images once, for one or more evaluations of the same model.

    Args:
        evaluations: What is to be collected.
        batches: With `pixel_values` and, where they are known, `labels`; of several processes, batch i of process r is
            batch i W + r of the dataset.
        compute: A batch to the model's output and the loss, or None.
        batch_size: Of all batches but the last.
        device: Where processes exchange tensors.
        after: Called after every batch.
    """
    first, stride = rank() * batch_size, world_size() * batch_size
    for batch in batches:
        output, loss = compute(batch)
        try:
            for evaluation in evaluations:
                evaluation.update(output, batch.get("labels"), first, loss)
        except NotFinite as error:
            raise NotFinite(f"batch {first // batch_size} of the evaluation: {error}") from None
        first += stride if world_size() > 1 else len(output.logits)
        if after is not None:
            after()
    for evaluation in evaluations:
        evaluation.merge(device)


def calibrate(
    model: PreTrainedModel, dataset: Dataset, k: Iterable[float], dataset_name: str | None = None, **kwargs: Any
) -> dict[str, float]:
    """Compute lambda_val for every `k`, and what answers by coverage, in one pass, and store it in the model's config.

    The model may be any image classifier of transformers; its class and weights stay what they are. Afterwards the set
    pipeline, `avgk predict` and `avgk evaluate` take it. The arguments are those of `evaluate`, and so is the answer.
    """
    return evaluate(model, dataset, k, calibrate=True, dataset_name=dataset_name, **kwargs)


def evaluate(
    model: PreTrainedModel,
    dataset: Dataset,
    k: Iterable[float] = (),
    calibrate: bool = False,
    batch_size: int = 64,
    num_workers: int = 0,
    dataset_name: str | None = None,
    on_bad_image: str = "error",
    coverage: Iterable[float] | None = None,
    method: str = "lac",
    per_class: bool = False,
    monitor: SetSizeMonitor | None = None,
    labels: Labels = "name",
    classes_from_dataset: bool = False,
    keep_heads: bool = False,
) -> dict[str, float]:
    """Evaluate a classifier on one split of `load_splits`, in one streaming pass.

    Args:
        model: The model; with `calibrate` its config receives the thresholds.
        dataset: The split. Without labels only sizes are measured.
        k: Average set sizes besides the model's own, in the calibrated range; default: all that are calibrated.
        calibrate: Compute the thresholds from this split, instead of using those in the config.
        batch_size: Images per forward pass.
        num_workers: Processes that read images.
        dataset_name: For the record of the calibration.
        on_bad_image: `"error"` refuses an image that cannot be read, `"skip"` leaves it out and counts it.
        coverage: Coverage levels to calibrate (default: 0.9, 0.95 and 0.99, as far as there are images enough), or to
            report (default: all that are recorded).
        method: How the coverage that is reported is reached, as in `Question`.
        per_class: Whether to calibrate the thresholds of each class too, or to answer with them.
        monitor: Takes in the set sizes of its K, in random order, because folders are read class by class. Not for
            calibrating, where the sizes are K by construction. Images without labels always have one.
        labels: How the dataset's classes are matched to the model's, as in `match_classes`.
        classes_from_dataset: Calibrate for sets that hold classes of the dataset only, and K of these.
        keep_heads: As in `Evaluation`: nothing is chosen on this split, and coverage holds exactly.

    Returns:
        The metrics, as `AvgKTrainer.evaluate` names them, without prefix; with `"skip"` also how many are `skipped`.
    """
    _check_options(batch_size, num_workers, on_bad_image, method)
    config, labelled, k, skipped = model.config, "label" in dataset.column_names, list(k), {}
    by_coverage = coverage is not None or per_class or method != "lac"
    check_asked(labelled, calibrate, monitor is not None, by_coverage)
    if on_bad_image == "skip":  # before anything is computed, because the threshold depends on the number of images
        dataset, number = skip_bad_images(dataset, str(dataset.split or dataset_name or "the dataset"), num_workers)
        skipped = {"skipped": number}
    dataset, classes = align_classes(dataset, config, labels, calibrate, classes_from_dataset)
    if not labelled:
        monitor = monitor or SetSizeMonitor.from_config(config, *k[:1])
    watched = None if monitor is None else monitor.k
    ks = evaluated_sizes(config, k, calibrate, labelled, watched, len(classes or config.id2label))
    levels = evaluated_levels(config, coverage, calibrate, len(dataset), method, per_class) if labelled else []
    how = {"method": method, "per_class": per_class, "classes": classes, "keep_heads": keep_heads}
    evaluation = Evaluation(config, len(dataset), ks, calibrate, levels, **how)
    run_model(model, dataset, [evaluation], batch_size, num_workers, "calibrate" if calibrate else "evaluate")
    if calibrate:
        evaluation.store(dataset=dataset_name, split=str(dataset.split or "validation"))
    return {**_reported(evaluation, isinstance(model, AvgKForImageClassification), monitor), **skipped}


def _check_options(batch_size: int, num_workers: int, on_bad_image: str, method: str) -> None:
    check_whole("batch_size", batch_size, 1)
    check_whole("num_workers", num_workers)
    check_choice("on_bad_image", on_bad_image, ON_BAD_IMAGE)
    check_choice("method", method, METHODS)


def _reported(evaluation: Evaluation, has_loss: bool, monitor: SetSizeMonitor | None) -> dict[str, float]:
    """The metrics of a finished evaluation, and what the monitor has seen in it."""
    metrics = evaluation.metrics()
    if not evaluation.labelled:
        metrics = sizes_only(metrics, evaluation.num_examples, monitor.k, evaluation.own_k)
    elif has_loss:
        metrics = {"loss": evaluation.loss_sum / evaluation.num_examples, **metrics}
    return metrics | ({} if monitor is None else monitor.watch(evaluation.set_sizes(monitor.k)))


def run_model(
    model: PreTrainedModel,
    dataset: Dataset,
    evaluations: Sequence[Evaluation],
    batch_size: int = 64,
    num_workers: int = 0,
    description: str = "evaluate",
    compute: Callable[[Mapping[str, Any]], tuple[Any, torch.Tensor | None]] | None = None,
) -> None:
    """`loop` over a dataset as it was loaded, with the model where it is; of several processes, each takes a share.

    Args:
        model: For its preprocessing and, without `compute`, its output.
        dataset: One split of `load_splits`.
        evaluations: As in `loop`.
        batch_size: Images per forward pass.
        num_workers: Processes that read images.
        description: For the progress bar.
        compute: As in `loop`.
    """
    best_device()  # joins the other processes, if there are any
    sampler = BatchSampler(SequentialSampler(range(len(dataset))), batch_size, drop_last=False)
    if world_size() > 1:
        sampler = BatchSamplerShard(sampler, world_size(), rank(), even_batches=False)
    images = prepare(dataset, transform_for(model), labelled="label" in dataset.column_names)
    loader = DataLoader(images, batch_sampler=sampler, collate_fn=default_data_collator, num_workers=num_workers)
    model.eval()
    own = isinstance(model, AvgKForImageClassification) and compute is None
    criterion = make_loss(model.config, 0).to(model.device) if own else None

    def on_device(batch: Mapping[str, Any]) -> tuple[Any, torch.Tensor | None]:
        output = forward(model, batch["pixel_values"])
        if criterion is None or "labels" not in batch:
            return output, None
        return output, criterion(output, batch["labels"].to(model.device), None)

    batches = tqdm(loader, desc=description, unit="batch", disable=rank() > 0)
    loop(evaluations, batches, compute or on_device, batch_size, model.device)
