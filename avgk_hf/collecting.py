"""`Evaluation`: what one pass over images collects about a model, in O(K n) memory."""

import datetime
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from .calibration import Calibration
from .conformal import question_name
from .processes import gather_list, sum_over_processes
from .questions import Question
from .scope import SELECT_BY, Balancing, choices, stored_thresholds
from .scores import HEADS, SUM_TO_ONE, all_scores, balance_weights, head_logits, wide
from .sets import metric_name
from .statistics import SetStatistics, set_size_counts


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
        balancing: The balances to calibrate; default: as far as the model knows how frequent its classes are, those of
            `Balancing`. With `thresholds`, the one that they are of.
        balance: Whose thresholds to evaluate with, by default the model's own.
        keep_heads: Whether a calibration leaves heads and balance as they were chosen before, on other images.
    """

    def __init__(
        self,
        config: Any,
        num_examples: int,
        ks: Sequence[float],
        calibrate: bool = False,
        levels: Iterable[float] = (),
        method: str = "lac",
        per_class: bool | float = False,
        score: str | None = None,
        thresholds: Mapping[str, Mapping[float, float]] | None = None,
        keep_sets: bool = False,
        classes: list[int] | None = None,
        balancing: Balancing | None = None,
        balance: float | None = None,
        keep_heads: bool = False,
    ) -> None:
        if num_examples == 0:
            raise ValueError("the dataset to evaluate is empty.")
        self.config, self.num_examples, self.calibrate = config, num_examples, calibrate
        self.levels, self.per_class = list(levels), per_class
        before = Calibration.of(config)
        self.classes = classes if calibrate else before.classes
        self._kept = before if keep_heads and before.ks else None  # whose choices stay
        self.score = score or getattr(config, "score", "softmax")
        # all metrics of a classifier without a K of its own are named by their K
        self.own_k: float | None = getattr(config, "k", None)
        heads = HEADS if getattr(config, "sccp_head", False) else HEADS[:1]
        self.answer, self.balancing = None, balancing or (Balancing.of(config) if calibrate else Balancing())
        self._counts = getattr(config, "train_counts", None)
        self._collected: dict[float, dict[str, SetStatistics]] = {}
        self._weights: dict[float, torch.Tensor | None] = {}
        self.balance: float = 0.0  # that the metrics are of
        if calibrate:
            for each in self.balancing.all:
                self._collect(each, dict.fromkeys(heads), ks, mass=self._sums(each))
            self.balance = 0.0 if self.balancing.own == "auto" else self.balancing.own
        elif thresholds is not None:
            self.balance = self.balancing.own
            self._collect(self.balance, thresholds)
        else:
            calibration = before.at(balance)
            self.balance = calibration.balance
            how = {"method": method, "per_class": per_class, "balance": self.balance}
            named = {question_name(c, method, per_class): Question(coverage=c, **how) for c in self.levels}
            answers = {name: calibration.answer(question) for name, question in named.items()}
            self._collect(self.balance, stored_thresholds(calibration, heads, ks), calibration=calibration)
            if answers:
                self.statistics[calibration.head()].answers = answers
            self.answer = calibration.answer(Question(balance=balance))  # refused where the own balance is lost
        self.sets: list[tuple[int, list[list[int]]]] | None = [] if keep_sets else None
        self.labelled, self.loss_sum = True, 0.0
        self._results: dict[float, dict[str, dict[float, dict[str, float]]]] = {}

    def _sums(self, balance: float) -> bool:
        """Whether a balance that is calibrated needs what rules by sums ask for."""
        return self.score in SUM_TO_ONE and bool(self.levels) and self.balancing.whole(balance)

    def _collect(
        self,
        balance: float,
        of_heads: Mapping[str, Any],
        ks: Sequence[float] = (),
        mass: bool = False,
        calibration: Calibration | None = None,
    ) -> None:
        """Collect for a balance: of each head its thresholds {K: lambda_val}, or None to calibrate those of `ks`."""
        weights = None if calibration is None else calibration.weights
        if calibration is None and balance:
            weights = balance_weights(self.balancing.prevalence, balance)
        self._weights[balance] = weights
        self._collected[balance] = {
            head: SetStatistics(
                ks if found is None else list(found),
                self.num_examples,
                found,
                self._counts,
                mass=mass,
                normalise=weights is not None,
            )
            for head, found in of_heads.items()
        }

    @property
    def statistics(self) -> dict[str, SetStatistics]:
        """{head: what was collected}, of the balance that the metrics are of."""
        return self._collected[self.balance]

    def update(self, output: Any, labels: torch.Tensor | None, first: int, loss: torch.Tensor | None = None) -> None:
        """Take in one batch.

        Args:
            output: Of the model, with the logits (b, L) of its heads as in `head_logits`.
            labels: True classes (b,), or None.
            first: Position of the first image among the n.
            loss: Mean over the batch.
        """
        scores = all_scores(*head_logits(output), self.score, first, self.classes)  # once for all balances
        for balance, of_heads in self._collected.items():
            weights = self._weights[balance]
            for head, statistics in of_heads.items():
                own = scores[head] if weights is None else scores[head] * weights.to(scores[head].device)
                statistics.update(own, None if labels is None else labels.to(own.device), first)
                if self.sets is not None and head == self.answer.head:
                    self.sets.append((first, self.answer.classes(own)))
        self.labelled &= labels is not None
        if loss is not None:
            self.loss_sum += loss.detach().to(wide(loss.device)) * len(output.logits)

    def merge(self, device: torch.device | str) -> None:
        """Exchange what the processes collected, so that each has the whole."""
        self.labelled = sum_over_processes(float(not self.labelled), device) == 0
        self.loss_sum = sum_over_processes(float(self.loss_sum), device)
        for statistics in (each for of_heads in self._collected.values() for each in of_heads.values()):
            statistics.labelled = self.labelled
            statistics.merge_processes(device)
        if self.sets is not None:
            self.sets = sorted(gather_list(self.sets))

    def results_at(self, balance: float) -> dict[str, dict[float, dict[str, float]]]:
        """{head: {K: metrics}} of one balance."""
        if balance not in self._results:
            found = self._collected[balance].items()
            self._results[balance] = {head: statistics.compute() for head, statistics in found}
        return self._results[balance]

    @property
    def results(self) -> dict[str, dict[float, dict[str, float]]]:
        """{head: {K: metrics}}."""
        return self.results_at(self.balance)

    def lambdas(self, balance: float | None = None) -> dict[str, dict[float, float]]:
        """{head: {K: lambda_val}}, by default of the balance that the metrics are of."""
        results = self.results_at(self.balance if balance is None else balance)
        return {head: {k: of_k["lambda_val"] for k, of_k in found.items()} for head, found in results.items()}

    def best_head(self, k: float, balance: float | None = None) -> str:
        """The head that is best on these images, as `select_by` has it."""
        results = self.results_at(self.balance if balance is None else balance)
        return max(results, key=lambda head: results[head][k][SELECT_BY[self.balancing.select_by]])

    def answering_head(self, k: float, balance: float | None = None) -> str:
        """The head that answers for `k` after these images have calibrated."""
        head = getattr(self.config, "head", "ml")
        if head == "auto" and self._kept is not None:
            balance = self.balance if balance is None else balance
            return self._kept.at(balance if balance in self._kept.balances else 0).head(k)
        return self.best_head(k, balance) if head == "auto" else head

    def tradeoff(self) -> list[list[float | None]]:
        """What each balance is worth on these images, as `Calibration.tradeoff`; nothing where there is none but 0."""
        rows = []
        for k in self.results["ml"] if len(self._collected) > 1 else ():
            for balance in self._collected:
                found = self.results_at(balance)[self.answering_head(k, balance)][k]
                names = ("average_k_accuracy", "macro_accuracy", "few_shot_accuracy", "mean_set_size")
                rows.append([k, balance, *(found.get(name) for name in names)])
        return sorted(rows, key=lambda row: row[:2])

    def chosen_balance(self, k: float) -> float:
        """The model's own balance; of `"auto"` the largest that costs few enough of all images at `k`."""
        if self.balancing.own != "auto":
            return self.balancing.own
        if self._kept is not None:
            return self._kept.balance
        reached = {balance: accuracy for size, balance, accuracy, *_ in self.tradeoff() if size == k}
        least = reached[0.0] - self.balancing.give_up / 100 - 1e-9  # accuracies are rounded
        return max(balance for balance, accuracy in reached.items() if accuracy >= least)

    def store(self, **source: Any) -> Calibration:
        """Write the thresholds to the config, and for `head="auto"` the head that is best on these images."""
        at = min(self.results["ml"]) if self.own_k is None else self.own_k
        self.balance = self.chosen_balance(at)
        parts = {each: self._part(each, at) for each in sorted({*self.balancing.recorded, self.balance})}
        own = parts.pop(0.0)
        head = own.pop("head")
        source |= choices(Calibration.of(self.config), source, self._made())
        today = datetime.datetime.now(datetime.timezone.utc).date().isoformat()
        source |= {} if self.classes is None else {"classes": self.classes}
        source |= {"balance": self.balance} if self.balance else {}
        source |= {"prevalence_from": self.balancing.prevalence_from} if parts else {}
        source = {"num_examples": self.num_examples, **source, "date": today, **({"head": head} if head else {})}
        further = {"prevalence": list(self.balancing.prevalence), "tradeoff": self.tradeoff()} if parts else {}
        return Calibration.store(self.config, source=source, **own, balances=parts, **further)

    def _made(self) -> list[str]:
        """What is chosen on these images."""
        auto = getattr(self.config, "head", "ml") == "auto" and len(self.statistics) > 1
        made = ["head"] * auto + ["balance"] * (self.balancing.own == "auto")
        return made if self._kept is None else []

    def _part(self, balance: float, at: float) -> dict[str, Any]:
        """What is stored for a balance; coverage and curve are those of the head that answers for the K `at`."""
        auto, lambdas = getattr(self.config, "head", "ml") == "auto", self.lambdas(balance)
        chosen = {k: self.answering_head(k, balance) for k in lambdas["ml"]}
        statistics = self._collected[balance][chosen[at]]
        return {
            "thresholds": {k: lambdas[head][k] for k, head in chosen.items()},
            "heads": chosen if auto else None,
            "head": chosen[at] if hasattr(self.config, "head") else None,
            "head_thresholds": lambdas if len(lambdas) > 1 else None,
            "coverage": statistics.coverage(self.levels, bool(self.per_class), at),
            "curve": statistics.curve(),
        }

    @property
    def calibration(self) -> Calibration:
        """What answers, for the balance that the metrics are of."""
        return Calibration.of(self.config).at(self.balance)

    def metrics(self) -> dict[str, float]:
        """What is reported: of the head that answers, with `@K` behind the name for every K but the model's own."""
        calibration, results, metrics = self.calibration, self.results, {}
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
        return self.statistics[self.calibration.head(k)].set_sizes(k)

    def size_counts(self) -> dict[str, list[int]]:
        """How many images got a set of 0, 1, 2, ... classes for the model's own K, and by shot."""
        found = self.statistics[self.calibration.head()]
        return set_size_counts(found.set_sizes(self.own_k), found.labels, self._counts)
