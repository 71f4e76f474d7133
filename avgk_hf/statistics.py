"""What is reported about the sets of images, collected batch by batch: accuracies, sizes, coverages.

Evaluation and metric count here, in one pass and O(K n) memory.
"""

import math
from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from .checks import is_number, plain
from .conformal import coverage_record
from .processes import add_up, broadcast, gather, rank, sum_over_processes, world_size
from .questions import Answer
from .records import LEAST_PREVALENCE
from .scores import normalised, wide
from .sets import AverageKThreshold, check_k, k_key, metric_name, ranked_mass, score_matrix

SHOTS = {"few": (0, 20), "medium": (20, 101), "many": (101, math.inf)}  # training images of a class: [low, high)


class SetStatistics:
    """Everything that is reported about the sets of n images, collected batch by batch in O(K n) memory.

    Without `thresholds` it calibrates: lambda_val of every K comes from the images themselves, and the accuracies
    from the same pass (validation). With `thresholds` it only evaluates (test); of images without labels, sizes only.

    Args:
        ks: Average set sizes.
        num_examples: n, the number of images that will be seen.
        thresholds: {K: lambda_val}, or None to calibrate.
        train_counts: Number of training images of each class, for the few / medium / many shot means.
        mass: Whether to keep of every image what the scores better than that of the true class sum to.
        answers: {name: answer}, whose sets are counted besides; see `answered`.
        normalise: Whether scores are balanced, and have to be made sum to 1 for the mass.

    Example:
        >>> scores = torch.tensor([[0.9, 0.1, 0.0], [0.5, 0.4, 0.1]])
        >>> stats = SetStatistics(ks=[1.5], num_examples=2)
        >>> stats.update(scores, labels=torch.tensor([0, 1]))
        >>> result = stats.compute()[1.5]
        >>> result["average_k_accuracy"], result["mean_set_size"], result["top1_accuracy"]
        (1.0, 1.5, 0.5)
    """

    def __init__(
        self,
        ks: Iterable[float],
        num_examples: int,
        thresholds: Mapping[float, float] | None = None,
        train_counts: Iterable[int] | None = None,
        mass: bool = False,
        answers: Mapping[str, Answer] | None = None,
        normalise: bool = False,
    ) -> None:
        self.mass, self.answers, self.normalise = mass, dict(answers or {}), normalise
        self.ks = [check_k(k) for k in ks]
        if thresholds is not None:
            thresholds = {plain(k): plain(lambda_val) for k, lambda_val in thresholds.items()}
            for k in self.ks:
                _check_lambda(thresholds.get(k), k)
        self.thresholds = thresholds
        self.train_counts = None if train_counts is None else np.asarray(list(train_counts))
        self.stream = AverageKThreshold(self.ks, num_examples) if thresholds is None else None
        self.num_examples = num_examples
        self.num_seen = 0
        self.num_labels = 0
        self.labelled = True
        # one row per image, allocated once: small tensors kept from every batch would scatter over the heap, and the
        # large ones between them could not be given back
        self._columns: dict[str, Tensor] = {}

    def update(self, scores: Tensor, labels: Tensor | None = None, first: int | None = None) -> None:
        """Take in scores (b, L) and the true classes (b,) of b images.

        Args:
            scores: One row per image.
            labels: True classes; None, for all images or for none, where they are not known.
            first: Position of the first of these images among the n; default: they follow those seen before.
        """
        scores = score_matrix(scores).detach().float()
        if self.num_labels not in (0, scores.shape[1]):
            raise ValueError(f"scores for {scores.shape[1]} classes after scores for {self.num_labels}.")
        if self.num_seen and self.labelled != (labels is not None):
            raise ValueError("some images have labels and others none: leave out those without, or all labels.")
        first = self.num_seen if first is None else first
        if max(self.num_seen, first) + len(scores) > self.num_examples:
            raise ValueError(f"more than the announced num_examples={self.num_examples} images were given.")
        new = {} if labels is None else self._of_true_class(scores, checked_labels(scores, labels))
        new["best"] = scores.amax(1)
        if self.stream is not None:
            self.stream.update(scores)
        elif new["best"].isnan().any():
            last = self.num_seen + len(scores) - 1
            raise ValueError(
                f"NaN among the scores of images {self.num_seen} to {last}: NaN is in no set. Check the logits of the"
                " model: a lower learning rate or float32 usually cures it."
            )
        else:
            new |= {k_key(k): (scores >= self.thresholds[k]).sum(1) for k in self.ks}
        # nothing is refused from here on: a batch that was does not count
        self.num_labels, self.labelled = scores.shape[1], labels is not None
        self.num_seen += len(scores)
        for name, column in self.columns(scores.device).items():
            column[first : first + len(scores)] = new[name]

    def _of_true_class(self, scores: Tensor, labels: Tensor) -> dict[str, Tensor]:
        own = scores.gather(1, labels[:, None])  # (b, 1)
        # ties are broken by class id, so that constant scores do not count as correct
        lower = torch.arange(scores.shape[1], device=scores.device) < labels[:, None]  # (b, L)
        ahead = (scores > own) | ((scores == own) & lower)
        new = {"label": labels, "true": own[:, 0], "rank": ahead.sum(1)}
        if self.mass:
            summed = normalised(scores) if self.normalise else scores
            new["mass"] = ranked_mass(summed)[1].gather(1, new["rank"][:, None])[:, 0]
        for name, answer in self.answers.items():
            sets = answer.sets(scores)  # (b, L)
            new |= {f"{name} size": sets.sum(1), f"{name} hit": sets.gather(1, labels[:, None])[:, 0].long()}
        return new

    def columns(self, device: torch.device | str = "cpu") -> dict[str, Tensor]:
        """What is kept of every image, (n,) each; 0 for images that were not seen."""
        if not self._columns:
            types = {"best": torch.float32}
            if self.labelled:
                types |= {"label": torch.int32, "true": torch.float32, "rank": torch.int32}
                types |= {f"{name} {what}": torch.int32 for name in self.answers for what in ("size", "hit")}
                if self.mass:
                    types["mass"] = wide(device)
            if self.stream is None:
                types |= {k_key(k): torch.int32 for k in self.ks}  # set sizes
            self._columns = {
                name: torch.zeros(self.num_examples, dtype=dtype, device=device) for name, dtype in types.items()
            }
        return self._columns

    def merge_processes(self, device: torch.device | str) -> None:
        """Give every process the statistics over the images of all processes.

        The rows of an image are filled by one process and 0 elsewhere, so that their sum is exact. Of the scores, only
        those travel that the thresholds can need, one process at a time: O(K n) memory.

        Args:
            device: Where the backend expects tensors.
        """
        if world_size() == 1:
            return
        add_up(self.columns(device).values())
        if self.stream is not None:
            own = self.stream.survivors(device).clone()
            facts = torch.tensor([len(own), *self.stream.facts()], dtype=wide(device), device=device)
            for source, (count, *facts_of_source) in enumerate(gather(facts).tolist()):
                survivors = own if source == rank() else torch.empty(int(count), device=device)
                broadcast([survivors], source)
                if source != rank():
                    self.stream.merge(survivors, *facts_of_source)
        self.num_seen = int(sum_over_processes(self.num_seen, device))
        self.num_labels = int(gather(torch.tensor(self.num_labels, device=device)).max())

    def column(self, name: str) -> np.ndarray:
        """One of `columns`, (n,), for the images seen."""
        return self._columns[name][: self.num_seen].cpu().numpy()

    @property
    def labels(self) -> np.ndarray:
        """The true classes (n,) of the images seen."""
        return self.column("label")

    def set_sizes(self, k: float) -> np.ndarray:
        """The set size (n,) of every image seen; known when the thresholds were given."""
        if self.stream is not None:
            raise ValueError("set sizes per image are known only with given thresholds: evaluate after calibrating.")
        return self.column(k_key(k))

    def answered(self) -> dict[str, dict[str, float]]:
        """Of every answer: `coverage`, the share of the sets with the true class, and `size`, their mean size.

        `worst_class` is the coverage of the class that is covered least, `worst_decile` the mean over the tenth of the
        classes (one at least) that are, `mean_class` the mean over all.

        Example:
            >>> best = Answer("ml", inside=lambda scores, *_: scores == scores.max())
            >>> stats = SetStatistics([1], 2, {1: 0.5}, answers={"best": best})
            >>> stats.update(torch.tensor([[0.9, 0.1], [0.6, 0.4]]), torch.tensor([0, 1]))
            >>> stats.answered()
            {'best': {'coverage': 0.5, 'size': 1.0, 'worst_class': 0.0, 'worst_decile': 0.0, 'mean_class': 0.5}}
        """
        seen = np.bincount(self.labels, minlength=self.num_labels)
        found = {}
        for name in self.answers:
            hit = self.column(f"{name} hit")
            by_class = np.bincount(self.labels, weights=hit, minlength=self.num_labels)[seen > 0] / seen[seen > 0]
            found[name] = {
                "coverage": float(hit.mean()),
                "size": float(self.column(f"{name} size").mean()),
                "worst_class": float(by_class.min()),
                "worst_decile": float(np.sort(by_class)[: max(1, len(by_class) // 10)].mean()),
                "mean_class": float(by_class.mean()),
            }
        return found

    def coverage_metrics(self) -> dict[str, float]:
        """Of questions by coverage: `coverage_<question>`, `_size`, and per class `_worst_class` and `_mean_class`."""
        metrics = {}
        for name, found in self.answered().items():
            metrics |= {f"coverage_{name}": found["coverage"], f"coverage_{name}_size": found["size"]}
            if name.startswith("per_class"):
                metrics |= {f"coverage_{name}_{part}": found[part] for part in ("worst_class", "mean_class")}
        return metrics

    def coverage(self, levels: Iterable[float], per_class: bool, k: float) -> dict[str, Any]:
        """The record of these images that answers by coverage, as `conformal.coverage_record` defines it.

        Args:
            levels: Coverage levels.
            per_class: Whether to record the thresholds of each class too.
            k: The model's own average set size.
        """
        return coverage_record(
            self.column("true"),
            levels,
            self.column("mass") if self.mass else None,
            self.column("rank"),
            self.labels if per_class else None,
            self.num_labels,
            k=k,
        )

    def curve(self) -> list[list[float]]:
        """The trade-off on the images that calibrate: rows of K, lambda_val, mean size, coverage, top-K accuracy.

        K runs from 1 to the largest that is calibrated, as `curve_ks` has it. Coverage is the share of images whose
        set holds the true class, the average-K accuracy; top-K accuracy is that of the best classes, as many for
        every image as K allows.
        """
        true_scores, ranks = self.column("true"), self.column("rank")
        rows = []
        for k, (lambda_val, size) in self.stream.points(curve_ks(max(self.ks))).items():
            coverage, topk = (true_scores >= np.float32(lambda_val)).mean(), (ranks < int(k)).mean()
            rows.append([k, lambda_val, size, float(coverage), float(topk)])
        return rows

    def compute(self) -> dict[float, dict[str, float]]:
        """For every K: lambda_val, the accuracies, and the sizes of the sets."""
        if not self.num_seen:
            raise ValueError("no images were evaluated; is the dataset empty?")
        if self.stream is not None:
            points = self.stream.points(self.ks)
        else:
            points = {k: (self.thresholds[k], float(self.set_sizes(k).mean())) for k in self.ks}
        best_scores, results = self.column("best"), {}
        for k, (lambda_val, size) in points.items():
            empty = float((best_scores < np.float32(lambda_val)).mean())
            results[k] = {"lambda_val": lambda_val, "mean_set_size": size, "empty_sets": empty}
            if self.labelled:
                results[k] = {**self._accuracies(k, lambda_val), **results[k]}
        return results

    def _accuracies(self, k: float, lambda_val: float) -> dict[str, float]:
        correct, ranks = self.column("true") >= np.float32(lambda_val), self.column("rank")
        return {
            "average_k_accuracy": float(correct.mean()),
            "top1_accuracy": float((ranks < 1).mean()),
            "topk_accuracy": float((ranks < int(k)).mean()),  # fractional K: a top-K set may not exceed K
            **class_means(correct, self.labels, self.num_labels, self.train_counts),
        }


class MeanScores:
    """The mean score (L,) of each class over n images, as an estimate of how frequent it is.

    Sums are exact, in multiples of 2^-32, so that neither batches nor processes change them.
    """

    def __init__(self) -> None:
        self.sums: Tensor | None = None

    def update(self, scores: Tensor) -> None:
        """Take in scores (b, L); a class that is left out has -inf."""
        parts = (scores.clamp(min=0).to(wide(scores.device)) * 2**32).round().long().sum(0)
        self.sums = parts if self.sums is None else self.sums + parts

    def merge_processes(self, num_labels: int, device: torch.device | str) -> None:
        """Give every process the sums over the images of all."""
        self.sums = torch.zeros(num_labels, dtype=torch.int64) if self.sums is None else self.sums
        self.sums = self.sums.to(device)
        add_up([self.sums])

    def prevalence(self) -> list[float]:
        """The shares (L,), none of them 0."""
        sums = self.sums.cpu().numpy().astype(float)
        return (sums / sums.sum()).clip(LEAST_PREVALENCE).tolist()


def sizes_only(metrics: Mapping[str, float], num_images: int, watched: float, own: float | None) -> dict[str, float]:
    """Of images without labels: the mean sizes, that of the watched K first and without its K."""
    sizes = {name: value for name, value in metrics.items() if name.startswith("mean_set_size")}
    mean = sizes.pop(metric_name("mean_set_size", watched, own))
    if "mean_set_size" in sizes:
        sizes[f"mean_set_size@{k_key(own)}"] = sizes.pop("mean_set_size")
    return {"num_images": num_images, "mean_set_size": mean, **sizes}


def curve_ks(largest: float) -> list[float]:
    """Round values of K from 1 to the largest, closer where sets are small, because lambda_val bends there.

    >>> curve_ks(3)
    [1.0, 1.1, 1.2, 1.35, 1.5, 1.75, 2.0, 2.5, 3.0]
    >>> curve_ks(12.7)[-4:], len(curve_ks(1000))
    ([10.0, 11.0, 12.0, 12.7], 40)
    """
    steps = (1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8)
    powers = range(math.floor(math.log10(largest)) + 1)
    ks = (round(step * 10.0**power, 6) for power in powers for step in steps)
    return [*(k for k in ks if k < largest), float(largest)]


def _check_lambda(lambda_val: Any, k: float) -> None:
    if not is_number(lambda_val):
        raise ValueError(
            f"thresholds[{k_key(k)}]={lambda_val!r} is not a number; take it from `average_k_threshold(scores, k)`."
        )


def checked_labels(scores: Tensor, labels: Any) -> Tensor:
    """Int64 labels (b,) for scores (b, L), each in [0, L); anything else is refused."""
    labels = torch.as_tensor(labels).detach()
    batch, num_labels = scores.shape
    if labels.shape != (batch,) or labels.dtype.is_floating_point or labels.dtype in (torch.bool, torch.complex64):
        raise ValueError(
            f"labels of shape {tuple(labels.shape)} and type {labels.dtype} for {batch} images: expected one class id"
            " per image, whole numbers."
        )
    outside = (labels < 0) | (labels >= num_labels)
    if outside.any():
        raise ValueError(
            f"label {labels[outside][0].item()} lies outside [0, {num_labels}), the classes of the scores: leave out"
            " images without a label, or check the label column."
        )
    return labels.long()


def check_train_counts(train_counts: Iterable[int], num_labels: int) -> np.ndarray:
    """The number of training images of each class, (L,); anything else is refused."""
    counts = np.asarray(train_counts)
    if counts.shape != (num_labels,):
        raise ValueError(
            f"train_counts has {counts.size} values for {num_labels} classes: give the number of training images of"
            " each class."
        )
    return counts


def class_means(
    correct: np.ndarray, labels: np.ndarray, num_labels: int, train_counts: np.ndarray | None = None
) -> dict[str, float]:
    """Mean over classes of the accuracy within the class, over all classes and by training count.

    Classes without an image in `labels` do not count; a group without classes is left out. Few shot means fewer than
    20 training images, medium 20 to 100, many more than 100.

    Args:
        correct: Whether each image's set holds its true class, (n,).
        labels: True classes, (n,).
        num_labels: L.
        train_counts: Training images of each class, (L,).

    Example:
        >>> class_means(np.array([1, 1, 0]), np.array([0, 0, 1]), 2, np.array([200, 5]))
        {'macro_accuracy': 0.5, 'few_shot_accuracy': 0.0, 'many_shot_accuracy': 1.0}
    """
    seen = np.bincount(labels, minlength=num_labels)
    accuracy = np.bincount(labels, weights=correct, minlength=num_labels) / np.maximum(seen, 1)  # (L,)
    means = {"macro_accuracy": float(accuracy[seen > 0].mean())}
    if train_counts is not None:
        train_counts = check_train_counts(train_counts, num_labels)
        for name, (low, high) in SHOTS.items():
            group = (seen > 0) & (train_counts >= low) & (train_counts < high)
            if group.any():
                means[f"{name}_shot_accuracy"] = float(accuracy[group].mean())
    return means


def set_size_counts(sizes: np.ndarray, labels: np.ndarray, train_counts: list[int] | None) -> dict[str, list[int]]:
    """How many of n images got a set of 0, 1, 2, ... classes, for all classes and, if known, by shot."""
    counts = {"all": np.bincount(sizes).tolist()}
    for name, (low, high) in SHOTS.items() if train_counts else ():
        of_class = np.asarray(train_counts)[labels]  # (n,), training images of each image's class
        counts[name] = np.bincount(sizes[(of_class >= low) & (of_class < high)]).tolist()
    return counts
