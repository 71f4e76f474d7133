"""What the same weights answer with other scores: a temperature, flipped images, the mean of both heads' logits.

Each is looked at in the pass that measures a model anyway. Of every option and head, the temperature with the highest
average-K accuracy on validation is the one whose sets on test are reported, for every K by itself.
"""

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..scores import HEADS, all_scores, head_logits
from ..sets import k_key
from ..statistics import SetStatistics

TEMPERATURES = (0.35, 0.5, 0.7, 1.0, 1.4, 2.0, 2.8, 4.0, 5.6, 8.0)
LOGITS = "logits"  # what answers by the mean of both heads' logits
# by name: the temperatures that validation chooses from, and whether the scores of the mirrored image count half
OPTIONS = {"none": ((1.0,), False), "temperature": (TEMPERATURES, False)}
OPTIONS |= {"flip": ((1.0,), True), "flip, temperature": (TEMPERATURES, True)}
REPORTED = ("average_k_accuracy", "mean_set_size", "macro_accuracy")
Kind = tuple[float, bool]  # a temperature, and whether images are mirrored too


class Variant:
    """Collects in `loop` the statistics of every head of one model, with the score softmax(z / T).

    Args:
        config: The model's config.
        num_examples: Number of images.
        ks: Average set sizes.
        kind: T, and whether the score is the mean over the image and its mirror image.
        thresholds: {head: {K: lambda_val}}; None to calibrate.
    """

    def __init__(
        self, config: Any, num_examples: int, ks: Sequence[float], kind: Kind, thresholds: dict | None = None
    ) -> None:
        self.temperature, self.flip = kind
        heads = (*HEADS, LOGITS) if config.sccp_head else HEADS[:1]
        self.statistics = {
            head: SetStatistics(ks, num_examples, thresholds and thresholds[head], config.train_counts)
            for head in heads
        }

    def update(self, output: Any, labels: Tensor, first: int, loss: Tensor | None = None) -> None:
        """Take in one batch, as `Evaluation.update` does; with `flip`, an output of `mirrored`."""
        views = [self._scores(output), *([self._scores(output.mirrored)] if self.flip else [])]
        for head, statistics in self.statistics.items():
            statistics.update(sum(view[head] for view in views) / len(views), labels, first)

    def _scores(self, output: Any) -> dict[str, Tensor]:
        ml, sccp = (None if logits is None else logits.float() / self.temperature for logits in head_logits(output))
        scores = all_scores(ml, sccp)
        return scores if sccp is None else {**scores, LOGITS: ((ml + sccp) / 2).softmax(-1)}

    def merge(self, device: torch.device | str) -> None:
        """As `Evaluation.merge`."""
        for statistics in self.statistics.values():
            statistics.merge_processes(device)

    def results(self) -> dict[str, dict[float, dict[str, float]]]:
        """{head: {K: metrics}}."""
        return {head: statistics.compute() for head, statistics in self.statistics.items()}


@contextmanager
def mirrored(model: nn.Module) -> Iterator[None]:
    """Meanwhile every output of the model has, as `mirrored`, the output for the same images mirrored."""

    def add(module: nn.Module, _: tuple, kwargs: dict[str, Any], output: Any) -> None:
        output.mirrored = module.forward(pixel_values=kwargs["pixel_values"].flip(-1), return_dict=True)

    handle = model.register_forward_hook(add, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def to_calibrate(config: Any, num_examples: int, ks: Sequence[float], flip: bool = True) -> dict[Kind, Variant]:
    """All variants, to be calibrated on validation; without those of mirrored images where `flip` is False."""
    kinds = [(t, mirror) for choice, mirror in OPTIONS.values() for t in choice if flip or not mirror]
    return {kind: Variant(config, num_examples, ks, kind) for kind in dict.fromkeys(kinds)}


def to_test(config: Any, num_examples: int, ks: Sequence[float], found: dict[Kind, Variant]) -> dict[Kind, Variant]:
    """The same variants with the thresholds found on validation."""
    made = {}
    for kind, variant in found.items():
        lambdas = {head: {k: m["lambda_val"] for k, m in of_k.items()} for head, of_k in variant.results().items()}
        made[kind] = Variant(config, num_examples, ks, kind, lambdas)
    return made


def chosen(validation: dict[Kind, Variant], test: dict[Kind, Variant]) -> dict[str, Any]:
    """{option: {head: {K: temperature, accuracy on validation, metrics on test}}}, temperatures by validation."""
    on_validation, on_test = ({kind: v.results() for kind, v in found.items()} for found in (validation, test))
    entries: dict[str, Any] = {}
    for option, (temperatures, flip) in OPTIONS.items():
        kinds = [(t, flip) for t in temperatures if (t, flip) in on_validation]
        for head, of_k in on_validation[kinds[0]].items() if kinds else ():
            for k in of_k:
                accuracy = {kind: on_validation[kind][head][k][REPORTED[0]] for kind in kinds}
                # of equally good ones that nearest to 1, which changes nothing
                best = max(kinds, key=lambda kind: (accuracy[kind], -abs(math.log(kind[0]))))
                metrics = {name: on_test[best][head][k][name] for name in REPORTED}
                entry = {"temperature": best[0], "validation": accuracy[best], "test": metrics}
                entries.setdefault(option, {}).setdefault(head, {})[k_key(k)] = entry
    return entries
