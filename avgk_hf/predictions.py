"""What a user's own `compute_metrics` is given, collected in the pass that an `Evaluation` makes."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from transformers import EvalPrediction, TrainingArguments
from transformers.trainer_pt_utils import nested_detach, nested_numpify
from transformers.trainer_utils import denumpify_detensorize
from transformers.utils import logging

from .processes import gather_list

logger = logging.get_logger(__name__)

LARGE = 64  # MiB of logits that are worth a word


class Predictions:
    """Predictions and labels of n images for `compute_metrics`, which is called as `Trainer` calls it.

    With `args.batch_eval_metrics` it is called with every batch, and nothing is kept. Otherwise what
    `preprocess` makes of the logits is kept, or the logits themselves, n x L, which a warning says.

    Args:
        compute: The user's `compute_metrics`.
        preprocess: The user's `preprocess_logits_for_metrics`.
        args: For `batch_eval_metrics`, `include_for_metrics`, `eval_do_concat_batches`, `eval_accumulation_steps`.
        ignored: Fields of the model's output that are no predictions.
        num_examples: n.
        num_labels: L.
    """

    def __init__(
        self,
        compute: Callable[..., dict[str, float]],
        preprocess: Callable[[Any, torch.Tensor], Any] | None,
        args: TrainingArguments,
        ignored: Sequence[str],
        num_examples: int,
        num_labels: int,
    ) -> None:
        self.compute, self.preprocess, self.args = compute, preprocess, args
        self.ignored, self.num_examples = {*ignored, "loss"}, num_examples
        self._num_seen, self._metrics = 0, {}
        self._on_device: list[tuple[int, dict[str, Any]]] = []
        self._batches: list[tuple[int, dict[str, Any]]] = []  # as arrays, each with the position of its first image
        size = num_examples * num_labels * 4 / 2**20
        if preprocess is None and not args.batch_eval_metrics and size >= LARGE:
            logger.warning_once(
                f"compute_metrics is given the logits of {num_examples} images for {num_labels} classes at once, which"
                f" takes {size:,.0f} MiB or more: keep less of them with"
                " `preprocess_logits_for_metrics`, or take them batch by batch with `batch_eval_metrics=True`."
            )

    def update(self, output: Any, labels: torch.Tensor | None, first: int, loss: torch.Tensor | None = None) -> None:
        """Take in one batch, as `Evaluation.update` does; without labels there is nothing to compute."""
        if labels is None:
            return
        found = nested_detach(tuple(value for name, value in output.items() if name not in self.ignored))
        found = found[0] if len(found) == 1 else found
        kept = {"predictions": self.preprocess(found, labels) if self.preprocess else found, "label_ids": labels}
        if "loss" in self.args.include_for_metrics:
            kept["losses"] = loss.detach().repeat(len(labels))
        self._num_seen += len(labels)
        if self.args.batch_eval_metrics:
            last = self._num_seen == self.num_examples
            self._metrics = self.compute(EvalPrediction(**kept), compute_result=last)
            return
        self._on_device.append((first, kept))
        if len(self._on_device) == self.args.eval_accumulation_steps:
            self._move()

    def _move(self) -> None:
        self._batches += [(first, nested_numpify(kept)) for first, kept in self._on_device]
        self._on_device = []

    def merge(self, device: torch.device | str) -> None:
        """Give every process the predictions of all, in the order of the images."""
        self._move()
        self._batches = sorted(gather_list(self._batches), key=lambda batch: batch[0])

    def metrics(self) -> dict[str, float]:
        """What `compute_metrics` returns; nothing for images without labels."""
        if self._batches:
            batches = [kept for _, kept in self._batches]
            join = _joined if self.args.eval_do_concat_batches else list
            found = {name: join([kept[name] for kept in batches]) for name in batches[0]}
            self._metrics = self.compute(EvalPrediction(**found))
        if not isinstance(self._metrics, Mapping):
            raise ValueError(f"compute_metrics returns {self._metrics!r}, and must name it: {{'my_metric': value}}.")
        return denumpify_detensorize(self._metrics)


def _joined(parts: Sequence[Any]) -> Any:
    """Arrays of batches as one, also inside tuples, lists and mappings."""
    first = parts[0]
    if isinstance(first, (tuple, list)):
        return type(first)(_joined(inside) for inside in zip(*parts, strict=True))
    if isinstance(first, Mapping):
        return {name: _joined([part[name] for part in parts]) for name in first}
    return np.concatenate([np.atleast_1d(part) for part in parts])
