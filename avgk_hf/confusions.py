"""Which classes are listed together, and which images get the longest sets: what an evaluation shows of its sets."""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from datasets import Dataset, Image

from .calibration import Calibration
from .processes import gather_list
from .questions import Question
from .rows import BETWEEN, Row, plain_number, row
from .scores import head_logits
from .statistics import set_size_counts

LARGEST_GROUP, LEAST_SHARE = 8, 0.1  # classes of a group, and how often two of them are listed together at least
MOST_OTHERS = 3  # classes that a class's row names


class Listed:
    """The sets of n images at one K, collected beside an `Evaluation` in O(K n) memory.

    Args:
        config: Of a calibrated model.
        k: Average set size, in the calibrated range; default the model's own.
        balance: As in `Question`.

    Attributes:
        dataset: The images that were evaluated, as `run_model` sets it.
        sizes: Set size of every image, (n,).
        labels: True classes (n,), or None.
        ids: The classes of all sets one after the other, best first, (sum of sizes,).
        scores: Theirs.
        best: The best class of each image, in its set or below the threshold, (n,).
        best_scores: Theirs.
    """

    dataset: Dataset
    sizes: np.ndarray
    labels: np.ndarray | None
    ids: np.ndarray
    scores: np.ndarray
    best: np.ndarray
    best_scores: np.ndarray

    def __init__(self, config: Any, k: float | None = None, balance: float | None = None) -> None:
        self.calibration, self.names = Calibration.of(config).at(balance), config.id2label
        self.k = self.calibration.k if k is None else k
        self.train_counts: list[int] | None = getattr(config, "train_counts", None)
        self.answer = self.calibration.answer(Question(k=k, balance=balance))
        self._parts: list[tuple[int, list[np.ndarray]]] = []

    def update(self, output: Any, labels: torch.Tensor | None, first: int, loss: torch.Tensor | None = None) -> None:
        """Take in one batch, as `Evaluation.update` does."""
        scores = self.calibration.scores(*head_logits(output), self.answer.head).cpu()  # (b, L)
        sets = self.answer.classes(scores)
        sizes, ids = np.array([len(one) for one in sets]), np.array([j for one in sets for j in one], np.int32)
        of_sets = scores.numpy()[np.repeat(np.arange(len(sets)), sizes), ids]
        best = [each.numpy() for each in scores.max(1)]
        known = [] if labels is None else [labels.cpu().numpy()]
        self._parts.append((first, [sizes, ids, of_sets, *best, *known]))

    def merge(self, device: torch.device | str) -> None:
        """Give every process the sets of all, in the order of the images."""
        parts = [part for _, part in sorted(gather_list(self._parts), key=lambda part: part[0])]
        self._parts = []
        columns = (np.concatenate(column) for column in zip(*parts, strict=True))
        self.sizes, self.ids, self.scores, self.best_scores, self.best, *labels = columns
        self.labels = labels[0] if labels else None
        self._starts = np.concatenate([[0], np.cumsum(self.sizes)])

    def set_of(self, image: int) -> tuple[np.ndarray, np.ndarray]:
        """The classes of one image's set, best first, and their scores."""
        place = slice(self._starts[image], self._starts[image + 1])
        return self.ids[place], self.scores[place]

    def named(self, image: int) -> tuple[np.ndarray, np.ndarray]:
        """The same, but where the set is empty its best class: a guess below the threshold, as in the pipeline."""
        return self.set_of(image) if self.sizes[image] else (self.best[[image]], self.best_scores[[image]])

    @property
    def accuracy(self) -> float:
        """The share of the images whose set holds their class."""
        return float((np.repeat(self.labels, self.sizes) == self.ids).sum() / len(self.sizes))

    def size_counts(self) -> dict[str, list[int]]:
        """How many images have a set of 0, 1, 2, ... classes, and by shot."""
        return set_size_counts(self.sizes, self.labels, self.train_counts)

    def longest(self, number: int) -> np.ndarray:
        """The images with empty sets, then those with the longest, of equals that whose best class scores lowest."""
        return np.lexsort((self.best_scores, -self.sizes, self.sizes > 0))[:number]

    def counts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Pairs of classes (p,), (p,) and on how many images of the first the second is listed, (p,)."""
        number = len(self.names)
        pairs, times = np.unique(np.repeat(self.labels, self.sizes) * number + self.ids, return_counts=True)
        return pairs // number, pairs % number, times

    def by_class(self) -> list[Row]:
        """One row for each class: its images, how many of them are found, and the classes it is listed with.

        `named_first` is the share of its images whose set begins with it, `right_when_first` that of the images whose
        set begins with it that are of it.
        """
        number, some = len(self.names), self.sizes > 0
        images, sizes = np.bincount(self.labels, minlength=number), np.bincount(self.labels, self.sizes, number)
        first, true = self.ids[self._starts[:-1][some]], self.labels[some]
        named, right = (np.bincount(ids, minlength=number) for ids in (first, first[first == true]))
        own, other, times = self.counts()
        hits = np.zeros(number, int)
        hits[own[own == other]] = times[own == other]
        order = np.lexsort((other, -times, own))  # by class, the most frequent first
        others: dict[int, list[str]] = {}
        for j, i, count in zip(own[order].tolist(), other[order].tolist(), times[order].tolist(), strict=True):
            if i != j and len(others.setdefault(j, [])) < MOST_OTHERS:
                others[j].append(f"{self.names[i]} {math.floor(100 * count / images[j] + 0.5)}%")
        rows = []
        for j, count in enumerate(images.tolist()):
            trained = {} if self.train_counts is None else {"training_images": self.train_counts[j]}
            rows.append(
                {
                    "species": self.names[j],
                    **trained,
                    "images": count,
                    "k": plain_number(self.k),
                    **({"balance": balance} if (balance := self.calibration.balance) else {}),
                    "found": int(hits[j]),
                    "accuracy": round(hits[j] / count, 4) if count else None,
                    "named_first": round(right[j] / count, 4) if count else None,
                    "right_when_first": round(right[j] / named[j], 4) if named[j] else None,
                    "mean_size": round(sizes[j] / count, 2) if count else None,
                    "most_often_listed_with": BETWEEN.join(others.get(j, [])),
                }
            )
        return rows

    def groups(self, most: int) -> tuple[list[list[int]], np.ndarray, int]:
        """Groups of classes that are listed together, the most confused first, and how often each is.

        Two classes belong together by the share of the images of both whose set holds the other one too; groups grow
        from the closest pair on, as long as that share is large enough on average over the pairs of both. Where
        there is room for all classes, those in no group come behind, each by itself.

        Args:
            most: Classes in all groups together, at most.

        Returns:
            The groups; the share (m, m) of the images of a class, by row, whose sets hold another, by column, for the
            m classes of the groups in their order; and how many classes are in groups for which there was no room.
        """
        number, images = len(self.names), np.bincount(self.labels, minlength=len(self.names))
        own, other, times = self.counts()
        both = np.minimum(own, other) * number + np.maximum(own, other)
        pairs, place = np.unique(both[own != other], return_inverse=True)
        one, two = pairs // number, pairs % number
        close = np.bincount(place, times[own != other], len(pairs)) / np.maximum(images[one] + images[two], 1)
        order = np.lexsort((pairs, -close))
        order = order[close[order] >= LEAST_SHARE]
        share_of = dict(zip(pairs.tolist(), close.tolist(), strict=True))
        group_of: dict[int, list[int]] = {}
        for i, j in zip(one[order].tolist(), two[order].tolist(), strict=True):
            first, second = group_of.get(i, [i]), group_of.get(j, [j])
            if first is second or len(first) + len(second) > LARGEST_GROUP:
                continue
            between = [share_of.get(min(a, b) * number + max(a, b), 0.0) for a in first for b in second]
            if sum(between) >= LEAST_SHARE * len(between):
                group_of |= dict.fromkeys(joined := [*first, *second], joined)
        found, room = [], most
        for group in {id(group): group for group in group_of.values()}.values():  # in the order of their closest pair
            if len(group) <= room:
                found.append(group)
                room -= len(group)
        crowded = len(group_of) - sum(map(len, found))
        found += [[j] for j in range(number) if j not in group_of] if number <= most else []
        ids = [j for group in found for j in group]
        position = np.full(number, -1)
        position[ids] = np.arange(len(ids))
        shown = (position[own] >= 0) & (position[other] >= 0)
        shares = np.zeros((len(ids), len(ids)))
        shares[position[own[shown]], position[other[shown]]] = times[shown] / images[own[shown]]
        return found, shares, crowded

    def rows(self, images: Sequence[int]) -> list[Row]:
        """Rows as `avgk predict` writes them, of some images, with their true class where it is known."""
        found, asked = [], ("k", self.k)
        for image in images:
            classes, scores = self.named(image)
            names = [{"label": self.names[int(j)], "score": float(s)} for j, s in zip(classes, scores, strict=True)]
            path, known = self.stored()[int(image)].get("path") or f"image {image}", {}
            if self.labels is not None:
                true = int(self.labels[image])
                known = {"true_species": self.names[true], "true_in_set": "yes" if true in classes else "no"}
            own = row(path, asked, names, lambda_val=self.answer.lambda_val, balance=self.calibration.balance)
            found.append({"image": path} | known | own)
        return found

    def stored(self) -> Sequence[dict[str, Any]]:
        """The images as the dataset holds them, each as `bytes` and `path`, read when they are asked for."""
        return self.dataset.with_format(None).cast_column("image", Image(decode=False))["image"]
