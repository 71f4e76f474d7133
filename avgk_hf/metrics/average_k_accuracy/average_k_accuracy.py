"""Average-K accuracy as a metric of `evaluate`, and as a plain function.

    metric = evaluate.load("avgk_hf/metrics/average_k_accuracy")
    metric.compute(predictions=scores, references=labels, k=5, lambda_val=lambda_val)

The mathematics is that of `avgk_hf.sets`; here is a way through Arrow that does not turn every score into a Python
object.
"""

import functools
import math
from collections.abc import Iterator
from typing import Any

import datasets
import evaluate
import numpy as np
import pyarrow as pa
import torch

from avgk_hf.checks import check_choice, is_number, plain
from avgk_hf.records import check_balance
from avgk_hf.scope import given_prevalence
from avgk_hf.scores import SCORES, balance_weights
from avgk_hf.sets import AverageKThreshold, check_k, score_matrix
from avgk_hf.statistics import SetStatistics, check_train_counts, checked_labels

KINDS = {"scores": lambda scores: scores, **SCORES}
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
    kind: What `predictions` are: `"scores"` (default), compared with lambda_val as they are; `"softmax"` or
        `"sigmoid"` for logits that become scores that way.
    train_counts: Number of training images of each class, (L,), for the few, medium and many shot means.
    balance: From 0 (default), every image counts alike, to 1, every class does: what is compared with lambda_val is
        score / prevalence^balance, up to a factor. For probabilities only.
    prevalence: With `balance`, how frequent each class is, (L,): shares or numbers of images, above 0.

Returns:
    average_k_accuracy: Share of images whose true class has a score >= lambda_val.
    lambda_val: The threshold that was used.
    mean_set_size: Mean number of classes in a set; K on the images that lambda_val comes from, if no scores tie there.
    empty_sets: Share of images without any class.
    top1_accuracy, topk_accuracy: Share of images whose true class is first, or among the first K (rounded down).
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


def average_k_accuracy(scores: Any, labels: Any, k: float, **further: Any) -> dict[str, float | list[int]]:
    """Average-K accuracy and what belongs to it, without Arrow: the fastest way for scores that fit in memory.

    Args:
        scores: Scores or logits (n, L): array, tensor, or list of rows. Read as float32.
        labels: True classes (n,), integers in [0, L).
        k: The average set size, in [1, L).
        further: `lambda_val` or `calibrate`, `kind`, `train_counts`, `balance` and `prevalence`, which the metric
            describes, as the results.

    Example:
        >>> validation = [[2.0, 1.0, 0.0], [1.0, 0.9, 0.2]]
        >>> lambda_val = average_k_accuracy(validation, [0, 1], k=1.5, calibrate=True, kind="softmax")["lambda_val"]
        >>> test = [[0.0, 3.0, 0.1], [0.5, 0.5, 0.6]]
        >>> result = average_k_accuracy(test, [1, 0], k=1.5, lambda_val=lambda_val, kind="softmax")
        >>> result["average_k_accuracy"], result["empty_sets"], result["set_size_histogram"]
        (1.0, 0.0, [0, 1, 0, 1])
    """
    rows, labels = _images(scores, labels)
    asked = _asked(rows.shape[1], k, **further)
    k, lambda_val = asked["k"], asked["lambda_val"]
    scored = functools.partial(_scored, rows, asked["kind"], asked["balance"], asked["prevalence"])
    if lambda_val is None:
        stream = AverageKThreshold([k], num_examples=len(rows))
        for batch in scored():
            stream.update(batch)
        lambda_val = stream.compute()[k]
    # a second pass, because the size of a single image's set is known only when lambda_val is
    stats = SetStatistics([k], len(rows), thresholds={k: lambda_val}, train_counts=asked["train_counts"])
    for batch, batch_labels in zip(scored(), torch.from_numpy(labels).split(ROWS), strict=True):
        stats.update(batch, batch_labels)
    return {**stats.compute()[k], "set_size_histogram": np.bincount(stats.set_sizes(k)).tolist()}


@evaluate.utils.file_utils.add_start_docstrings(_DESCRIPTION, _KWARGS_DESCRIPTION)
class AverageKAccuracy(evaluate.Metric):
    """The metric that `evaluate.load` returns."""

    def _info(self) -> evaluate.MetricInfo:
        columns = {"predictions": datasets.List(datasets.Value("float32")), "references": datasets.Value("int64")}
        info = evaluate.MetricInfo(
            description=_DESCRIPTION,
            citation=_CITATION,
            inputs_description=_KWARGS_DESCRIPTION,
            features=datasets.Features(columns),
            license="apache-2.0",
            reference_urls=["https://arxiv.org/abs/2303.18118"],
        )
        # MetricInfo refuses "numpy" for lists when it is made; set later it works, 6 times as fast as Python lists
        info.format = "numpy"
        return info

    def add(
        self, *, prediction: Any = None, reference: Any = None, predictions: Any = None, references: Any = None
    ) -> None:
        """Add the scores (L,) and the true class of one image; `evaluate` allows both spellings."""
        row = predictions if prediction is None else prediction
        label = references if reference is None else reference
        rows, labels = self._accepted([row], [label])
        self.writer.write({"predictions": rows[0], "references": int(labels[0])})

    def add_batch(self, *, predictions: Any = None, references: Any = None) -> None:
        """Add the scores (b, L) and the true classes (b,) of a batch; nothing is stored if they are refused."""
        rows, labels = self._accepted(predictions, references)
        # the stock method looks at every single score; a flat array with offsets is taken over as it is
        for start in range(0, len(rows), ROWS):
            part = np.ascontiguousarray(rows[start : start + ROWS])
            offsets = np.arange(len(part) + 1, dtype=np.int32) * np.int32(part.shape[1])
            scores, ids = pa.ListArray.from_arrays(offsets, part.reshape(-1)), pa.array(labels[start : start + ROWS])
            self.writer.write_batch({"predictions": scores, "references": ids})

    def _accepted(self, predictions: Any, references: Any) -> tuple[np.ndarray, np.ndarray]:
        """Checked rows and labels, and a writer that is ready for them."""
        rows, labels = _images(predictions, references)
        if self.writer is None:
            self._num_labels = rows.shape[1]
            self.selected_feature_format = self.features
            self._init_writer()
        if self._num_labels != rows.shape[1]:
            raise ValueError(
                f"scores for {rows.shape[1]} classes after scores for {self._num_labels}: all images of one evaluation"
                " need the same classes. Call `compute` between two evaluations."
            )
        return rows, labels

    def compute(
        self, *, predictions: Any = None, references: Any = None, **asked: Any
    ) -> dict[str, float | list[int]] | None:
        """Compute the metric for all images added, and forget them.

        Wrong arguments are refused before the images are forgotten, so that a corrected call finds them.
        """
        if predictions is not None or references is not None:
            predictions, references = _images(predictions, references)
        elif self.writer is None:
            raise ValueError("no images: call `add` or `add_batch` first, or give `predictions` and `references`.")
        asked = _asked(self._num_labels if predictions is None else predictions.shape[1], **asked)
        found = super().compute(predictions=predictions, references=references, **asked)
        if isinstance(found, Exception):
            raise found
        return found

    def _compute(self, **asked: Any) -> dict[str, float | list[int]] | Exception:
        try:
            return average_k_accuracy(asked.pop("predictions"), asked.pop("references"), **asked)
        except Exception as error:  # raised later: `evaluate` would leave its file behind, locked
            return error


def _scored(rows: np.ndarray, kind: str, balance: float, prevalence: Any) -> Iterator[torch.Tensor]:
    """The scores of the next images, (b, L), one batch after the other."""
    weights = balance_weights(prevalence, balance) if balance else None
    for start in range(0, len(rows), ROWS):
        batch = np.array(rows[start : start + ROWS])  # a copy: it may be read-only, or reversed
        scores = KINDS[kind](torch.from_numpy(batch))  # not `score`: a class masked with -inf has probability 0 here
        yield scores if weights is None else scores * weights


def _asked(
    num_labels: int,
    k: float | None = None,
    lambda_val: float | None = None,
    calibrate: bool = False,
    kind: str = "scores",
    train_counts: Any = None,
    balance: float = 0.0,
    prevalence: Any = None,
) -> dict[str, Any]:
    """The arguments by name, with plain numbers in place of scalars of numpy and torch; wrong ones are refused."""
    k, lambda_val = check_k(k, num_labels), plain(lambda_val)
    check_choice("kind", kind, KINDS)
    if not (lambda_val is None if calibrate else is_number(lambda_val)):
        raise ValueError(
            f"lambda_val={lambda_val!r} with calibrate={calibrate!r}: give either a number from validation images"
            " (`average_k_threshold(scores, k)`), or, if these are the validation images, `calibrate=True` alone."
        )
    if train_counts is not None:
        train_counts = check_train_counts(train_counts, num_labels)
    balance = check_balance(balance)
    if balance and kind == "logit":
        raise ValueError(f"balance={balance:g} is for probabilities, and kind='logit' gives none: use 'softmax'.")
    if bool(balance) != (prevalence is not None):
        raise ValueError(f"balance={balance:g} and prevalence belong together: give both, or neither.")
    if balance:
        prevalence = given_prevalence(prevalence, num_labels)
    asked = {"k": k, "lambda_val": lambda_val, "calibrate": calibrate, "kind": kind, "train_counts": train_counts}
    return {**asked, "balance": balance, "prevalence": prevalence}


def _images(scores: Any, labels: Any) -> tuple[np.ndarray, np.ndarray]:
    """Float32 rows (n, L) without NaN and int64 labels (n,), each in [0, L); anything else is refused."""
    rows, labels = _array("scores", scores), _array("labels", labels)
    if rows.size == 0:
        raise ValueError(f"scores of shape {rows.shape} are empty: at least one image is needed, and its classes.")
    # of the scores only the shape: torch takes no array that is read-only or reversed without a copy
    labels = labels.astype(np.int64 if labels.dtype.kind in "iu" else labels.dtype)
    labels = checked_labels(score_matrix(torch.empty(()).expand(rows.shape)), labels)
    rows = rows.astype(np.float32, copy=False)
    if math.isnan(rows.max()):
        row = int(np.isnan(rows).any(1).argmax())
        raise ValueError(f"NaN among the scores of image {row}: NaN is in no set. Check the logits of the model.")
    return rows, labels.numpy()


def _array(name: str, values: Any) -> np.ndarray:
    """One array of numbers, from a list of tensors or a column of rows too."""
    try:
        if isinstance(values, (list, tuple)) and values and isinstance(values[0], torch.Tensor):
            values = torch.stack(values)
        if isinstance(values, torch.Tensor):  # numpy knows neither bfloat16 nor other devices
            values = values.detach().cpu().float() if values.is_floating_point() else values.cpu()
        array = np.asarray(values)
        array = np.asarray([*values]) if array.dtype == object else array
        reason = f"they are of type {array.dtype}"
    except (TypeError, ValueError, RuntimeError) as error:
        array, reason = np.empty(0, object), str(error)
    if array.dtype.kind not in "fiu":
        raise ValueError(
            f"{name} of type {type(values).__name__} are no array of real numbers ({reason}): give scores of shape"
            " (images, classes) and labels of shape (images,)."
        )
    return array
