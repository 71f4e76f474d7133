"""The one loop over images: batches in, statistics and calibration out.

It serves our model, classifiers of other packages and ONNX graphs, labelled images or not, one process or many, for
trainer, commands, study and export. No score matrix is kept: O(K n) memory.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from accelerate.data_loader import BatchSamplerShard
from datasets import Dataset, IterableDataset
from huggingface_hub.utils import tqdm
from torch.utils.data import BatchSampler, DataLoader, SequentialSampler
from transformers import PreTrainedConfig, PreTrainedModel, default_data_collator
from transformers.utils import logging

from .calibration import Calibration
from .checks import check_choice, check_whole, reason_of
from .classifiers import best_device, forward, transform_for
from .collecting import Evaluation
from .conformal import METHODS
from .confusions import Listed
from .data import Stream, prepare, skip_bad_images
from .data.classes import Labels, align_classes
from .data.datasets import ON_BAD_IMAGE, is_labelled
from .data.transforms import ImageTransform
from .losses import make_loss
from .modeling import AvgKForImageClassification
from .monitor import SetSizeMonitor
from .processes import rank, world_size
from .scope import Balancing, check_asked, evaluated_levels, evaluated_sizes
from .scores import PROBABILITIES, NotFinite, head_logits, score
from .statistics import MeanScores, sizes_only

logger = logging.get_logger(__name__)


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
    try:
        for evaluation in evaluations:
            evaluation.merge(device)
    except RuntimeError as error:
        if world_size() == 1:
            raise
        raise OSError(f"another process has ended, and has said why ({reason_of(error)[:200]}).") from error


def calibrate(
    model: PreTrainedModel,
    dataset: Dataset | Stream,
    k: float | Iterable[float],
    dataset_name: str | None = None,
    **kwargs: Any,
) -> dict[str, float]:
    """Compute lambda_val for every `k`, and what answers by coverage, in one pass, and store it in the model's config.

    The model may be any image classifier of transformers; its class and weights stay what they are. Afterwards the set
    pipeline, `avgk predict` and `avgk evaluate` take it. The arguments are those of `evaluate`, and so is the answer.
    """
    return evaluate(model, dataset, k, calibrate=True, dataset_name=dataset_name, **kwargs)


def evaluate(
    model: PreTrainedModel,
    dataset: Dataset | IterableDataset | Stream,
    k: float | Iterable[float] = (),
    calibrate: bool = False,
    batch_size: int = 64,
    num_workers: int = 0,
    dataset_name: str | None = None,
    on_bad_image: str = "error",
    coverage: float | Iterable[float] | None = None,
    method: str = "lac",
    per_class: bool = False,
    monitor: SetSizeMonitor | None = None,
    labels: Labels = "name",
    classes_from_dataset: bool = False,
    listed: Sequence[Listed] = (),
    keep_heads: bool = False,
    balance: float | str | None = None,
    **balancing: Any,
) -> dict[str, float]:
    """Evaluate a classifier on one split of `load_splits`, in one streaming pass.

    Args:
        model: With `calibrate` its config receives the thresholds.
        dataset: The split. Without labels only sizes are measured. A stream is counted first, if need be.
        k: Average set size, or several, besides the model's own, in the calibrated range; default: all of these.
        calibrate: Compute the thresholds from this split, instead of using those in the config.
        batch_size: Images per forward pass.
        num_workers: Processes that read images.
        dataset_name: For the record of the calibration.
        on_bad_image: `"error"` refuses an image that cannot be read, `"skip"` leaves it out and counts it.
        coverage: Levels to calibrate (default: 0.9, 0.95, 0.99 where there are images enough), or to report (all).
        method: How the coverage that is reported is reached, as in `Question`.
        per_class: Whether to calibrate the thresholds of each class too, or to answer with them, as in `Question`.
        monitor: Takes in the set sizes of its K, in random order. Not for calibrating, where they are K.
        labels: How the dataset's classes are matched to the model's, as in `match_classes`.
        classes_from_dataset: Calibrate for sets that hold classes of the dataset only, and K of these.
        listed: Each takes in the sets of its K. Not for calibrating.
        keep_heads: As in `Evaluation`: nothing is chosen on this split.
        balance: As in `Question`; to calibrate, what will be the model's own, or `"auto"`, with `balancing`.
        balancing: `prevalence`, `give_up` and `select_by`, as in `calibrated_balances`.

    Returns:
        The metrics, as `AvgKTrainer.evaluate` names them, without prefix; with `"skip"` also how many are `skipped`.
    """
    run, labelled = {"batch_size": batch_size, "num_workers": num_workers}, is_labelled(dataset)
    special, ks = per_class or check_choice("method", method, METHODS) != "lac", k if isinstance(k, Iterable) else [k]
    check_asked(labelled, calibrate, monitor is not None, coverage is not None or special, balancing)
    dataset, skipped = _readable(dataset, dataset_name, on_bad_image, **run)
    dataset, classes = align_classes(dataset, _config_of(model), labels, calibrate, classes_from_dataset)
    if not labelled and monitor is None:
        monitor = SetSizeMonitor.from_config(model.config, *list(ks)[:1], balance=balance)
    how = {"method": method, "per_class": per_class, "classes": classes, "keep_heads": keep_heads}
    if calibrate:
        how["balancing"] = calibrated_balances(model, dataset, classes, balance, run=run, **balancing)
    evaluation = _plan(model.config, dataset, list(ks), calibrate, coverage, monitor, balance, how)
    run_model(model, dataset, [evaluation, *listed], **run, description="calibrate" if calibrate else "evaluate")
    if calibrate:
        evaluation.store(dataset=dataset_name, split=str(dataset.split or "validation"))
    return {**_reported(evaluation, isinstance(model, AvgKForImageClassification), monitor), **skipped}


def _config_of(model: PreTrainedModel) -> PreTrainedConfig:
    if not isinstance(model, torch.nn.Module):
        raise ValueError(f"the model is a {type(model).__name__}: load it first, `load_classifier(NAME)`.")
    return model.config


def _ask_about_guessing(metrics: Mapping[str, float], images: int, number: int) -> None:
    """Ask what a model that is no better than guessing was given; sure enough by two standard deviations."""
    top1, chance = metrics.get("top1_accuracy"), 1 / max(number, 1)
    if top1 is not None and top1 <= chance + 2 * math.sqrt(chance * (1 - chance) / max(images, 1)):
        logger.warning(
            f"top-1 accuracy {top1:.2%} is that of guessing among {number} classes: are the model's names in the order"
            " of its outputs, and the images prepared as for its training?"
        )


def _readable(
    dataset: Dataset | IterableDataset | Stream, name: str | None, on_bad_image: str, batch_size: int, num_workers: int
) -> tuple[Dataset | Stream, dict[str, int]]:
    """The images that can be read, and how many were left out, if that is allowed; their number is known."""
    check_whole("batch_size", batch_size, 1)
    check_whole("num_workers", num_workers)
    skip = check_choice("on_bad_image", on_bad_image, ON_BAD_IMAGE) == "skip"
    if not isinstance(dataset, Dataset):
        dataset = dataset if isinstance(dataset, Stream) else Stream(dataset)
        dataset = dataset.counted(skip, num_workers)
        return dataset, {"skipped": len(dataset.bad)} if skip else {}
    if not skip:
        return dataset, {}
    # before anything is computed, because the threshold depends on the number of images
    dataset, faults = skip_bad_images(dataset, str(dataset.split or name or "the dataset"), num_workers)
    return dataset, {"skipped": len(faults)}


def _plan(
    config: Any,
    dataset: Dataset,
    k: list[float],
    calibrate: bool,
    coverage: float | Iterable[float] | None,
    monitor: SetSizeMonitor | None,
    balance: float | str | None,
    how: dict[str, Any],
) -> Evaluation:
    """What is collected; a question that cannot be answered is refused."""
    how["balance"] = None if calibrate else balance
    coverage = coverage if coverage is None or isinstance(coverage, Iterable) else [coverage]
    labelled, watched = "label" in dataset.column_names, None if monitor is None else monitor.k
    ks = evaluated_sizes(config, k, calibrate, labelled, watched, len(how["classes"] or config.id2label))
    asked = {name: how[name] for name in ("method", "per_class", "balance")}
    levels = evaluated_levels(config, coverage, calibrate, len(dataset), **asked) if labelled else []
    return Evaluation(config, len(dataset), ks, calibrate, levels, **how)


def calibrated_balances(
    model: PreTrainedModel,
    dataset: Dataset,
    classes: list[int] | None,
    own: float | str | None = None,
    prevalence: Iterable[float] | None = None,
    run: Mapping[str, int] | None = None,
    **further: Any,
) -> Balancing:
    """The balances that a calibration computes: 0, 0.5, 1 and the model's own, where the prevalence is known.

    It is what is given, that of the training images in the config, or that of the calibration before. A model of
    which none is known is asked, if it is to have a balance: for its mean probabilities on these images, in a pass of
    its own.

    Args:
        model: The model.
        dataset: Its images, with the model's classes.
        classes: Those that sets are restricted to, or None.
        own: The model's own balance, or `"auto"`; default: what it is.
        prevalence: Shares or numbers of images of each class, (L,), above 0.
        run: Arguments of `run_model`.
        further: `give_up` and `select_by`, as in `Balancing`.
    """
    config, before = model.config, Calibration.of(model.config)
    own = before.balance if own is None else own
    known = prevalence is not None or getattr(config, "train_counts", None)
    if not known and before.prevalence:
        known = prevalence = before.prevalence
        further = {**further, "prevalence_from": before.source.get("prevalence_from")}
    if own and not known and getattr(config, "score", "softmax") in PROBABILITIES:
        means = _MeanOutput(config, classes)
        run_model(model, dataset, [means], description="prevalence", **(run or {}))
        prevalence, further = means.scores.prevalence(), {**further, "prevalence_from": "estimated"}
    return Balancing.of(config, own, prevalence, **further)


class _MeanOutput:
    """Collects the mean scores of a model in the loop."""

    def __init__(self, config: Any, classes: list[int] | None) -> None:
        self.config, self.classes, self.scores = config, classes, MeanScores()

    def update(self, output: Any, labels: torch.Tensor | None, first: int, loss: torch.Tensor | None = None) -> None:
        kind = getattr(self.config, "score", "softmax")
        self.scores.update(score(head_logits(output)[0], kind, first, self.classes))

    def merge(self, device: torch.device | str) -> None:
        self.scores.merge_processes(len(self.config.id2label), device)


def _reported(evaluation: Evaluation, has_loss: bool, monitor: SetSizeMonitor | None) -> dict[str, float]:
    """The metrics of a finished evaluation, and what the monitor has seen in it."""
    metrics = evaluation.metrics()
    if not evaluation.labelled:
        metrics = sizes_only(metrics, evaluation.num_examples, monitor.k, evaluation.own_k)
    elif has_loss:
        metrics = {"loss": evaluation.loss_sum / evaluation.num_examples, **metrics}
    _ask_about_guessing(metrics, evaluation.num_examples, len(evaluation.config.id2label))
    return metrics | ({} if monitor is None else monitor.watch(evaluation.set_sizes(monitor.k)))


def run_model(
    model: PreTrainedModel,
    dataset: Dataset | Stream,
    evaluations: Sequence[Evaluation | Listed],
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
    for listed in (each for each in evaluations if isinstance(each, Listed)):
        listed.dataset = dataset
    loader = _loader(dataset, transform_for(model), batch_size, num_workers)
    model.eval()
    own = isinstance(model, AvgKForImageClassification) and compute is None
    criterion = make_loss(model.config, 0).to(model.device) if own else None

    def on_device(batch: Mapping[str, Any]) -> tuple[Any, torch.Tensor | None]:
        output = forward(model, batch["pixel_values"])
        if criterion is None or "labels" not in batch:
            return output, None
        return output, criterion(output, batch["labels"].to(model.device), None)

    number = math.ceil(len(dataset) / batch_size / world_size())
    batches = tqdm(loader, desc=description, total=number, unit="batch", disable=rank() > 0 or None)
    loop(evaluations, batches, compute or on_device, batch_size, model.device)


def _loader(dataset: Dataset | Stream, transform: ImageTransform, batch_size: int, num_workers: int) -> DataLoader:
    """The batches of this process, in the order of `loop`."""
    if isinstance(dataset, Stream):
        return dataset.loader(transform, batch_size, num_workers)
    sampler = BatchSampler(SequentialSampler(range(len(dataset))), batch_size, drop_last=False)
    if world_size() > 1:
        sampler = BatchSamplerShard(sampler, world_size(), rank(), even_batches=False)
    images = prepare(dataset, transform, labelled="label" in dataset.column_names)
    return DataLoader(images, batch_sampler=sampler, collate_fn=default_data_collator, num_workers=num_workers)
