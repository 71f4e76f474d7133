"""Average-K accuracy as a metric of `evaluate`, and as a plain function.

    metric = evaluate.load("avgk_hf/metrics/average_k_accuracy")
    metric.compute(predictions=scores, references=labels, k=5, lambda_val=lambda_val)

The mathematics is that of `avgk_hf.sets`. Here are the checks of the input, and a way through Arrow that does not turn
every score into a Python object.
"""

import math
import os
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
import evaluate
import numpy as np
import pyarrow as pa
import torch

from avgk_hf.checks import is_number
from avgk_hf.scores import SCORES
from avgk_hf.sets import AverageKThreshold, check_k
from avgk_hf.statistics import SetStatistics

KINDS = ("scores", *SCORES)
ROWS = 1024  # images scored and stored at a time: no second n x L matrix, and Arrow's 32-bit offsets do not overflow

_DESCRIPTION = """
Average-K accuracy: the share of images whose set of predicted classes holds the true class. The set of an image is all
classes with a score of at least lambda_val, and lambda_val is such that the sets hold K classes on average on the
validation images. It is reported with the sizes of the sets, top-1, top-K and class-wise accuracies.
"""

_KWARGS_DESCRIPTION = """
Args:
    predictions: Scores, or logits with `kind`, one row of L numbers for each image.
    references: The true class of each image, an integer in [0, L).
    k: The average set size K, a number in [1, L).
    lambda_val: The threshold, computed on validation images. Give it, or `calibrate=True`.
    calibrate: Compute lambda_val on the given images. Right for validation images only.
    kind: What `predictions` are: `None` or `"scores"` for scores that are compared with lambda_val as they are,
        `"softmax"` or `"sigmoid"` for logits that become scores that way.
    train_counts: Number of training images of each class, (L,), for the few, medium and many shot means.

Returns:
    average_k_accuracy: Share of images whose true class has a score >= lambda_val.
    lambda_val: The threshold that was used.
    mean_set_size: Mean number of classes in a set; K on the images that lambda_val comes from, if no scores tie there.
    empty_sets: Share of images without any class.
    top1_accuracy: Share of images whose true class has the highest score.
    topk_accuracy: Share of images whose true class is among the K highest scores (K rounded down).
    macro_accuracy: Mean over the classes of the average-K accuracy within the class.
    few_shot_accuracy, medium_shot_accuracy, many_shot_accuracy: The same over the classes with fewer than 20, 20 to
        100, more than 100 training images; only with `train_counts`, and only for groups that have images.
    set_size_histogram: List of the number of images with a set of 0, 1, 2, ... classes.

Example:
    >>> import evaluate
    >>> from importlib.resources import files
    >>> metric = evaluate.load(str(files("avgk_hf") / "metrics" / "average_k_accuracy"))
    >>> scores = [[0.9, 0.1, 0.0], [0.5, 0.4, 0.1]]  # a clear image and an ambiguous one
    >>> result = metric.compute(predictions=scores, references=[0, 1], k=1.5, calibrate=True)
    >>> result["average_k_accuracy"], result["mean_set_size"], result["set_size_histogram"]
    (1.0, 1.5, [0, 1, 1])
"""

_CITATION = """\
@article{garcin2023twohead,
  title   = {A two-head loss function for deep Average-K classification},
  author  = {Garcin, Camille and Servajean, Maximilien and Joly, Alexis and Salmon, Joseph},
  journal = {arXiv preprint arXiv:2303.18118},
  year    = {2023}
}
"""


def average_k_accuracy(
    scores: Any,
    labels: Any,
    k: float,
    lambda_val: float | None = None,
    calibrate: bool = False,
    kind: str | None = None,
    train_counts: Any = None,
) -> dict[str, float | list[int]]:
    """Average-K accuracy and what belongs to it, without Arrow: the fastest way for scores that fit in memory.

    Args:
        scores: Scores or logits (n, L): array, tensor, or list of rows. Read as float32.
        labels: True classes (n,), integers in [0, L).
        k: The average set size, in [1, L).
        lambda_val: The threshold from validation. Give it, or `calibrate=True`.
        calibrate: Compute lambda_val on these images, which then have to be validation images.
        kind: `None` or `"scores"` for scores as they are, `"softmax"` or `"sigmoid"` for logits.
        train_counts: Training images of each class, (L,).

    Returns:
        The results that the metric describes, by name.

    Example:
        >>> validation = [[2.0, 1.0, 0.0], [1.0, 0.9, 0.2]]
        >>> lambda_val = average_k_accuracy(validation, [0, 1], k=1.5, calibrate=True, kind="softmax")["lambda_val"]
        >>> test = [[0.0, 3.0, 0.1], [0.5, 0.5, 0.6]]
        >>> result = average_k_accuracy(test, [1, 0], k=1.5, lambda_val=lambda_val, kind="softmax")
        >>> result["average_k_accuracy"], result["empty_sets"], result["set_size_histogram"]
        (1.0, 0.0, [0, 1, 0, 1])
    """
    rows, labels = _checked(scores, labels)
    k, lambda_val, train_counts = _arguments(k, lambda_val, calibrate, kind, train_counts, rows.shape[1])
    if calibrate:
        stream = AverageKThreshold([k], num_examples=len(rows))
        for batch in _scored(rows, kind):
            stream.update(batch)
        lambda_val = _number("lambda_val", stream.compute()[k])
    # a second pass, because the size of a single image's set is known only when lambda_val is
    stats = SetStatistics([k], num_examples=len(rows), thresholds={k: lambda_val}, train_counts=train_counts)
    for batch, batch_labels in zip(_scored(rows, kind), torch.from_numpy(np.array(labels)).split(ROWS), strict=True):
        stats.update(batch, batch_labels)
    return {**stats.compute()[k], "set_size_histogram": np.bincount(stats.set_sizes(k)).tolist()}


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AverageKAccuracy(evaluate.Metric):
    """The metric that `evaluate.load` returns."""

    def _info(self) -> evaluate.MetricInfo:
        info = evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(
                {
                    "predictions": datasets.List(datasets.Value("float32")),
                    "references": datasets.Value("int64"),
                }
            ),
            license="apache-2.0",
            reference_urls=["https://arxiv.org/abs/2303.18118"],
        )
        # MetricInfo refuses "numpy" for lists when it is made; set later it works, 6 times as fast as Python lists
        info.format = "numpy"
        return info

    def add(
        self,
        *,
        prediction: Any = None,
        reference: Any = None,
        predictions: Any = None,
        references: Any = None,
    ) -> None:
        """Add the scores (L,) and the true class of one image; `evaluate` allows both spellings."""
        prediction = predictions if prediction is None else prediction
        reference = references if reference is None else reference
        rows, labels = self._accepted(
            None if prediction is None else [prediction], None if reference is None else [reference]
        )
        self.writer.write({"predictions": rows[0], "references": int(labels[0])})  # in the order of the calls

    def add_batch(self, *, predictions: Any = None, references: Any = None) -> None:
        """Add the scores (b, L) and the true classes (b,) of a batch; nothing is stored if they are refused."""
        rows, labels = self._accepted(predictions, references)
        # the stock method looks at every single score; a flat array with offsets is taken over as it is
        for start in range(0, len(rows), ROWS):
            part = np.ascontiguousarray(rows[start : start + ROWS])
            offsets = np.arange(len(part) + 1, dtype=np.int32) * np.int32(part.shape[1])
            self.writer.write_batch(
                {
                    "predictions": pa.ListArray.from_arrays(offsets, part.reshape(-1)),
                    "references": pa.array(labels[start : start + ROWS]),
                }
            )

    def _accepted(self, predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
        """Checked rows and labels, and a writer that is ready for them."""
        rows, labels = _checked(predictions, references)
        num_labels = self._stored_labels()
        if num_labels not in (None, rows.shape[1]):
            raise ValueError(
                f"predictions for {rows.shape[1]} classes after predictions for {num_labels}: all images of one"
                " evaluation need the same classes. Call `compute` between two evaluations."
            )
        if self.writer is None:
            self._num_labels = rows.shape[1]
            self.selected_feature_format = self.features
            self._init_writer()
        return rows, labels

    def compute(
        self,
        *,
        predictions: Any = None,
        references: Any = None,
        k: float | None = None,
        lambda_val: float | None = None,
        calibrate: bool = False,
        kind: str | None = None,
        train_counts: Any = None,
    ) -> dict[str, float | list[int]] | None:
        """Compute the metric for all images added, and forget them.

        Wrong arguments are refused before the images are forgotten, so that a corrected call finds them.
        """
        if predictions is not None or references is not None:
            predictions, references = _checked(predictions, references)
            num_labels = predictions.shape[1]
        else:
            num_labels = self._stored_labels()
            if num_labels is None:
                raise ValueError("no images: call `add` or `add_batch` first, or give `predictions` and `references`.")
        k, lambda_val, train_counts = _arguments(k, lambda_val, calibrate, kind, train_counts, num_labels)
        try:
            return super().compute(
                predictions=predictions,
                references=references,
                k=k,
                lambda_val=lambda_val,
                calibrate=calibrate,
                kind=kind,
                train_counts=train_counts,
            )
        except Exception:
            self._forget()
            raise

    def _compute(
        self,
        predictions: np.ndarray,
        references: np.ndarray,
        k: float,
        lambda_val: float | None = None,
        calibrate: bool = False,
        kind: str | None = None,
        train_counts: np.ndarray | None = None,
    ) -> dict[str, float | list[int]]:
        return average_k_accuracy(predictions, references, k, lambda_val, calibrate, kind, train_counts)

    def _forget(self) -> None:
        """Remove what a failed computation leaves behind: its file would stay, and its lock delay the next one."""
        if self.data is None:  # it failed before there was a file; the paths are old ones that others may use now
            return
        self.data = self.buf_writer = None
        for path, lock in zip(self.file_paths or (), self.filelocks or (), strict=True):
            os.remove(path)
            lock.release()

    def _stored_labels(self) -> int | None:
        """The number of classes of the images stored so far, None where there are none."""
        return None if self.writer is None else self._num_labels


def _scored(rows: np.ndarray, kind: str | None) -> Iterator[torch.Tensor]:
    """The scores of the next images, (b, L), one batch after the other."""
    for start in range(0, len(rows), ROWS):
        batch = torch.from_numpy(np.array(rows[start : start + ROWS]))  # a copy: it may be read-only, or reversed
        if kind in SCORES:
            batch = SCORES[kind](batch)  # not `score`: a class masked with -inf has probability 0 here
            broken = batch.isnan().any(1).nonzero()  # (number of such rows, 1)
            if len(broken):
                raise ValueError(
                    f"the {kind} of predictions[{start + int(broken[0])}] is NaN: its logits are infinite. Check the"
                    " model; float32 in place of float16 usually cures it."
                )
        yield batch


def _arguments(
    k: float, lambda_val: float | None, calibrate: bool, kind: str | None, train_counts: Any, num_labels: int
) -> tuple[float, float | None, np.ndarray | None]:
    """K, lambda_val and train_counts as plain numbers and an array; wrong arguments are refused."""
    k = check_k(_plain(k), num_labels)
    if calibrate and lambda_val is not None:
        raise ValueError(
            f"lambda_val={lambda_val!r} and calibrate=True contradict each other: keep `lambda_val` to evaluate with a"
            " threshold from validation, or `calibrate=True` to compute it on the given images."
        )
    if not calibrate and lambda_val is None:
        raise ValueError(
            "no threshold: give `lambda_val=...` from validation images (`avgk_hf.average_k_threshold(scores, k)`),"
            " or, if these are the validation images, `calibrate=True`."
        )
    lambda_val = None if lambda_val is None else _number("lambda_val", _plain(lambda_val))
    if kind is not None and kind not in KINDS:
        raise ValueError(f"kind={kind!r} is unknown: use one of {', '.join(map(repr, KINDS))}, or None for scores.")
    if train_counts is not None:
        train_counts = np.asarray(train_counts)
        if train_counts.shape != (num_labels,):
            raise ValueError(
                f"train_counts of shape {train_counts.shape} for {num_labels} classes: give the number of training"
                f" images of each class, shape ({num_labels},)."
            )
    return k, lambda_val, train_counts


def _number(name: str, value: Any) -> float:
    if not is_number(value):
        raise ValueError(f"{name}={value!r} is not a number; take it from `avgk_hf.average_k_threshold(scores, k)`.")
    return value


def _plain(value: Any) -> Any:
    """A Python number in place of a numpy or torch scalar."""
    return value.item() if isinstance(value, (np.generic, np.ndarray, torch.Tensor)) and value.ndim == 0 else value


def _checked(predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
    """Float32 rows (n, L) and int64 labels (n,); anything else is refused with its place."""
    if predictions is None or references is None:
        missing = "predictions" if predictions is None else "references"
        raise ValueError(f"{missing} are missing: both `predictions` and `references` are needed.")
    rows = _rows(predictions)
    labels = _array(references)
    if rows.ndim and len(rows) == 0:
        raise ValueError("predictions are empty: at least one image is needed. Is the dataset empty?")
    if rows.ndim != 2 or rows.shape[1] == 0:
        raise ValueError(
            f"predictions of shape {rows.shape}: expected (images, classes), the scores of all classes and not the"
            " predicted class."
        )
    if rows.dtype.kind not in "fiub":
        raise ValueError(f"predictions of type {rows.dtype}: expected numbers, the scores or logits of all classes.")
    if labels.shape != (len(rows),):
        raise ValueError(
            f"references of shape {labels.shape} for {len(rows)} predictions: expected one class id for each row."
        )
    if labels.dtype.kind not in "iu":
        raise ValueError(f"references of type {labels.dtype}: expected class ids, integers in [0, {rows.shape[1]}).")
    outside = np.flatnonzero((labels < 0) | (labels >= rows.shape[1]))
    if len(outside):
        raise ValueError(
            f"references[{outside[0]}]={labels[outside[0]]} is no class id: with scores for {rows.shape[1]} classes it"
            f" has to lie in [0, {rows.shape[1]}). Leave out images without a label."
        )
    rows = rows.astype(np.float32, copy=False)
    if math.isnan(rows.max()):
        place = np.flatnonzero(np.isnan(rows).any(1))[0]
        raise ValueError(
            f"NaN in predictions[{place}]: NaN can be in no set. Check the model; a lower learning rate or float32"
            " usually cures it."
        )
    return rows, labels.astype(np.int64, copy=False)


def _rows(predictions: Any) -> np.ndarray:
    """The predictions as one array; rows of different length are refused."""
    array = _array(predictions) if hasattr(predictions, "__array__") else None
    if array is not None and array.dtype != np.dtype(object):
        return array
    if isinstance(predictions, (str, bytes)) or not isinstance(predictions, Iterable):
        raise ValueError(
            f"predictions of type {type(predictions).__name__}: expected (images, classes), the scores of all classes."
        )
    rows = [_array(row) for row in predictions]
    for i, row in enumerate(rows):
        if row.shape != rows[0].shape:
            raise ValueError(
                f"predictions[{i}] has shape {row.shape} and predictions[0] {rows[0].shape}: every image needs a score"
                " for every class."
            )
    return np.stack(rows) if rows else np.empty((0, 0), np.float32)


def _array(values: Any) -> np.ndarray:
    if isinstance(values, torch.Tensor):
        values = values.detach().cpu()
        # numpy knows no bfloat16
        return (values.float() if values.is_floating_point() else values).numpy()
    return np.asarray(values)
