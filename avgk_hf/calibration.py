"""`Calibration`: what one pass over labelled images found, and how it answers questions.

Only this file knows how thresholds, heads, coverages and the trade-off curve are stored in a config, looked up,
interpolated, carried and dropped. A config of any class can hold them: `thresholds` {K: lambda_val} of the head that
answers, `heads` {K: head} where one was chosen for each K, and `calibration`, which says where they come from (number
of images, dataset, split, date, training step, head) and holds the rest: `head_thresholds` {head: {K: lambda_val}},
`coverage` (`conformal.coverage_record`) and `curve`, rows of K, lambda_val, mean size, coverage and top-K accuracy.
All of this is of balance 0; `balances` {balance: the same of scores that are balanced by `prevalence`} holds that of
others, and `tradeoff` what each is worth. On disk the first part stands in config.json and the rest, which grows with
the classes, in calibration.json beside it.

Like the model, this file travels with a saved model as remote code.

Example:
    >>> import torch
    >>> from transformers import PreTrainedConfig
    >>> scores = torch.tensor([[0.7, 0.2, 0.1], [0.4, 0.35, 0.25]])  # a clear image and an ambiguous one
    >>> config = PreTrainedConfig(num_labels=3)
    >>> calibration = Calibration.store(config, {1: 0.5, 2: 0.22}, coverage={"lac": {"0.9": 0.3}})
    >>> calibration.answer(Question(k=2)).classes(scores)
    [[0], [0, 1, 2]]
    >>> calibration.answer(Question(coverage=0.9)).classes(scores)
    [[0], [0, 1]]
    >>> calibration.answer(Question(cumulative=0.75, max_size=2)).classes(scores)
    [[0, 1], [0, 1]]
"""

import copy
import weakref
from collections.abc import Mapping
from functools import partial
from typing import Any, ClassVar

import numpy as np

from .checks import check_calibrated, check_ids
from .conformal import METHODS, check_coverage, enough_images, level_key
from .questions import Answer, Question, at_least
from .records import (
    AUGMENTATION,
    FILE,
    check_balance,
    check_curve,
    check_tradeoff,
    check_views,
    checked_balances,
    checked_head_thresholds,
    checked_thresholds,
)
from .scores import HEADS, PROBABILITIES, SUM_TO_ONE, balance_weights, head_scores
from .sets import check_k, interpolated_threshold, k_key

FIELDS = ("thresholds", "heads", "calibration")  # of a config
MOST_ANSWERS = 100  # that are remembered, because visitors may ask anything
OF_BALANCE = ("head_thresholds", "coverage", "curve")
DETAILS = (*OF_BALANCE, "balances", "prevalence", "tradeoff")  # of its `calibration`, kept in the file


class Calibration:
    """What one pass over labelled images found for one balance, read from a config and checked once.

    `Calibration.of(config)` is that of the model's own balance, `at` that of another.

    Attributes:
        k: The model's own average set size, or of a classifier that has none the smallest that was calibrated.
        ks: All that were calibrated, ascending; empty for a model that was not.
        score: What is thresholded, as in `scores.score`; `probabilities` says whether it is one.
        balance: In [0, 1]; `balances` are all that were calibrated, and `weights` (L,) those of this one, or None.
        thresholds: {head: {K: lambda_val}}.
        coverage: What answers by coverage, of the head `source_head`.
        curve: The trade-off, of the same head.
        tradeoff: What balances are worth: rows of K, balance, average-K accuracy, macro accuracy, few-shot accuracy
            (or None) and mean size.
        source: Where all of it comes from.
        classes: The ids of those that sets are restricted to, None for all; `num_answers` is their number.
    """

    _made: ClassVar[dict[int, tuple[Any, tuple, "Calibration"]]] = {}  # by the id of configs that are in use

    def __init__(self, config: Any) -> None:
        record = self.record = getattr(config, "calibration", None)
        record = record if isinstance(record, Mapping) else {}
        self.num_labels: int = config.num_labels
        self.score: str = getattr(config, "score", "softmax")
        self.probabilities = self.score in PROBABILITIES
        self._head: str = getattr(config, "head", "ml")
        self._k: float | None = getattr(config, "k", None)
        self._augmentation = getattr(config, AUGMENTATION, "none")
        self.source = {name: value for name, value in record.items() if name not in DETAILS}
        self.classes = check_ids("calibration.classes", self.source.get("classes"), self.num_labels)
        self.num_answers = self.num_labels if self.classes is None else len(self.classes)
        part = {name: record.get(name) for name in OF_BALANCE} | {"head": self.source.get("head")}
        part |= {name: getattr(config, name, None) for name in ("thresholds", "heads")}
        self._read(part, "calibration", "config.thresholds")
        self.prevalence: list[float] | None = record.get("prevalence")
        self.tradeoff: list[list[float | None]] = record.get("tradeoff") or []
        check_tradeoff(self.tradeoff)
        self._views, self.balance, self.weights, self._lost = {0.0: self}, 0.0, None, None
        stored = checked_balances(record.get("balances") or {}, self.prevalence, self.num_labels, self.score)
        for balance, part in stored.items():
            view = self._views[balance] = copy.copy(self)
            view._read(part, f"calibration.balances['{balance:g}']")
            view.balance, view.weights = balance, balance_weights(self.prevalence, balance)
        own = check_balance(self.source.get("balance", 0), "config.calibration['balance']")
        for view in self._views.values():
            view._own = self._views.get(own, self)
        self._lost = own if own not in self._views else None  # with calibration.json, or not read yet

    def _read(self, part: Mapping[str, Any], place: str, thresholds: str | None = None) -> None:
        """Take in what was calibrated for one balance; `place` says where it stands, `thresholds` where these do."""
        known = self.num_answers, self.score
        own = checked_thresholds(part.get("thresholds") or {}, thresholds or f"{place}.thresholds", *known)
        self.ks = sorted(own)
        self.k: float = min(self.ks, default=1) if self._k is None else self._k
        self._chosen = self._checked_heads(part.get("heads") or {})
        named = part.get("head") if part.get("head") in HEADS else self._chosen.get(self.k)
        self.source_head: str = named or ("ml" if self._head == "auto" else self._head)
        stored = part.get("head_thresholds") or {}
        self.thresholds = checked_head_thresholds(stored, f"{place}.head_thresholds", *known)
        for k, lambda_val in own.items():
            self.thresholds.setdefault(self._chosen.get(k, self.source_head), {})[k] = lambda_val
        self.coverage: dict[str, Any] = part.get("coverage") or {}
        check_coverage(self.coverage, self.num_labels, self.probabilities)
        self.curve: list[list[float]] = part.get("curve") or []
        check_curve(self.curve, f"{place}.curve", *known)
        self._answers: dict[Question, Answer] = {}

    @classmethod
    def of(cls, config: Any) -> "Calibration":
        """What a config of any class holds, for its own balance; the same object as long as its fields stay."""
        fields = vars(config)  # at once, because transformers takes a microsecond for each
        record, labels = fields.get("calibration"), fields.get("id2label", ())
        parts = (fields.get("thresholds"), fields.get("heads"))
        key = (*(tuple(part.items()) if isinstance(part, dict) else part for part in parts), len(labels))
        key += (fields.get("score"), fields.get("head"), fields.get("k"), fields.get(AUGMENTATION))
        found = cls._made.get(id(config))
        if found is None or found[0]() is not config or found[1] != key or found[2].record is not record:
            forget = partial(cls._made.pop, id(config))
            found = weakref.ref(config, lambda _: forget(None)), key, cls(config)
            cls._made[id(config)] = found
        return found[2]._own

    @property
    def balances(self) -> list[float]:
        """All balances that were calibrated, ascending."""
        return sorted(self._views)

    def at(self, balance: float | None = None) -> "Calibration":
        """The calibration for a balance, by default the model's own; one that was not recorded is refused."""
        if balance is None:
            return self._own
        found = self._views.get(check_balance(balance))
        if found is None:
            if not self.probabilities:
                raise ValueError(f"balance={balance:g} is for probabilities, and score={self.score!r} gives none.")
            raise ValueError(
                f"balance={balance:g} is not recorded, only {', '.join(f'{b:g}' for b in self.balances)}: ask for one"
                f" of these, or calibrate with `avgk calibrate MODEL DATASET --balance {balance:g}`."
            )
        return found

    @classmethod
    def store(
        cls,
        config: Any,
        thresholds: Mapping[float, float],
        source: Mapping[str, Any] | None = None,
        heads: Mapping[float, str] | None = None,
        head_thresholds: Mapping[str, Mapping[float, float]] | None = None,
        coverage: Mapping[str, Any] | None = None,
        curve: list[list[float]] | None = None,
        balances: Mapping[float, Mapping[str, Any]] | None = None,
        **about_balances: Any,
    ) -> "Calibration":
        """Write what a pass found to a config of any class.

        Args:
            config: Of the model.
            thresholds: {K: lambda_val} of the head that answers.
            source: Where they come from.
            heads: {K: head} that was chosen, for `head="auto"`; default: the ML head.
            head_thresholds: {head: {K: lambda_val}} of every head, so that all can be compared on other data.
            coverage: What `conformal.coverage_record` made of the same images.
            curve: What `SetStatistics.curve` made of them.
            balances: {balance: the same by name, and `head`, that of coverage and curve}, for others than 0.
            about_balances: With them `prevalence` and `tradeoff`.
        """
        details = {"head_thresholds": head_thresholds, "coverage": coverage, "curve": curve}
        parts = {f"{balance:g}": _as_stored(part) for balance, part in (balances or {}).items()}
        details = {**_as_stored(details), "balances": parts, **about_balances}
        heads = heads or (dict.fromkeys(thresholds, "ml") if getattr(config, "head", "ml") == "auto" else {})
        if heads or hasattr(config, "heads"):
            config.heads = {k_key(k): head for k, head in sorted(heads.items())}
        if getattr(config, AUGMENTATION, "none") != "none":
            source = {**(source or {}), AUGMENTATION: config.test_time_augmentation}
        config.thresholds = _plain(thresholds)
        config.calibration = {**(source or {}), **{name: part for name, part in details.items() if part}}
        config.score = getattr(config, "score", "softmax")
        return cls.of(config)

    @staticmethod
    def drop(config: Any) -> None:
        """Forget the thresholds, because the weights or the classes they belong to have changed."""
        config.thresholds, config.heads, config.calibration = {}, {}, None

    @staticmethod
    def carry(source: Any, target: Any) -> None:
        """Give the config `target` what the config `source` holds."""
        for name in FIELDS:
            setattr(target, name, copy.deepcopy(getattr(source, name)))

    @classmethod
    def keep_head(cls, config: Any, head: str) -> None:
        """Make a config that of a model with one head, `head`, which from now on is its ML head."""
        found = cls.of(config).at(0)

        def kept(view: Calibration) -> dict[str, Any]:
            details = ("coverage", "curve") if view.source_head == head else ()
            thresholds = {k: view.threshold(k) for k in view.ks}
            return {"thresholds": thresholds} | {name: getattr(view, name) for name in details}

        views = {balance: kept(found.at(balance)) for balance in found.balances}
        own = views.pop(0.0)
        config.head = "ml"
        if found.ks or found.source:
            further = {name: getattr(found, name) for name in ("prevalence", "tradeoff")}
            balances = {balance: {**part, "head": "ml"} for balance, part in views.items()}
            cls.store(config, source={**found.source, "head": "ml"}, balances=balances, **own, **further)
        config.heads = {}

    def threshold(self, k: float | None = None) -> float:
        """lambda_val of `k`, by default the model's own.

        Exact for the K that were calibrated. Between two of them it is interpolated, from the nearest K_1 < K < K_2
        that were recorded for the same head, those of the curve included: for probabilities as a power of K, for
        logits linearly in log K (logits are log-probabilities up to a constant),

            t = log(K / K_1) / log(K_2 / K_1),    log lambda = (1 - t) log lambda_1 + t log lambda_2,

        which decreases with K as lambda_val does. Beyond the calibrated range it is refused.
        """
        if self.ks:
            check_views(self.source, self._augmentation)
        return self.head_threshold(self.head(k), self._asked(k))

    def head(self, k: float | None = None) -> str:
        """The head that answers for `k`, by default the model's own.

        With `head="auto"` a K between those that were calibrated is answered by the head of the nearest, the smaller
        one of two, and nothing but the ML head before. Questions other than by K: the head of the model's own K.
        """
        if self._head != "auto" or not self.ks:
            return "ml" if self._head == "auto" else self._head
        k = self._asked(k)
        if not self._chosen:
            raise ValueError("head='auto', and no head was chosen: calibrate the model with `avgk calibrate`.")
        return self._chosen[min(self._chosen, key=lambda other: (abs(other - k), other))]

    def head_threshold(self, head: str, k: float) -> float:
        """lambda_val of `k` for one of the heads, as `threshold` defines it."""
        found = self.thresholds.get(head)
        if not found:
            raise ValueError(
                f"the thresholds of this model are those of head={self.source_head!r}, and none is stored for"
                f" {head!r}: calibrate it with `avgk calibrate MODEL DATASET`."
            )
        if k in found:
            return found[k]
        check_calibrated(k, found)
        if head == self.source_head:
            found = {**{row[0]: row[1] for row in self.curve}, **found}
        return interpolated_threshold(found, k, self.probabilities)

    def scores(self, logits: Any, sccp_logits: Any = None, head: str = "ml") -> Any:
        """The scores (n, L) of one head that its thresholds are for; -inf for classes that are left out."""
        return self.balanced(head_scores(logits, sccp_logits, head, self.score, self.classes))

    def balanced(self, scores: Any) -> Any:
        """Scores (n, L) of balance 0 as those of this balance."""
        return scores if self.weights is None else scores * self.weights.to(scores.device)

    def levels(self, method: str = "lac", per_class: bool = False) -> list[float]:
        """The coverage levels that can be asked for, ascending; none where another head answers than was measured."""
        if (
            not self.coverage
            or self.source_head != self.head()
            or (METHODS[method].sums and self.score not in SUM_TO_ONE)
        ):
            return []
        return sorted(map(float, self.coverage.get("per_class" if per_class else method, ())))

    def answer(self, question: Question) -> Answer:
        """How a question is answered; one that this calibration cannot answer is refused."""
        if question.balance not in (None, self.balance):
            return self.at(question.balance).answer(question)
        if self._lost and question.balance is None:
            raise ValueError(
                f"the model's own balance is {self._lost:g}, and what was calibrated for it is not in {FILE}: restore"
                " that file, ask with `balance=0`, or calibrate again."
            )
        found = self._answers.get(question)
        if found is None:
            if self.ks:
                check_views(self.source, self._augmentation)
            if len(self._answers) >= MOST_ANSWERS:
                self._answers.clear()
            found = self._answers[question] = self._look_up(question)
        return found

    def _look_up(self, question: Question) -> Answer:
        if question.min_size > self.num_answers:
            raise ValueError(
                f"min_size={question.min_size} must be a whole number in [0, {self.num_answers}], the classes."
            )
        bounds = {"min_size": question.min_size, "max_size": question.max_size}
        bounds["normalise"] = self.weights is not None
        if question.coverage is not None:
            return self._by_coverage(question, bounds)
        if question.cumulative is not None:
            self._check_sums(f"cumulative={question.cumulative!r}", "")
            share = float(question.cumulative)
            return Answer(self.head(), lambda scores, before, position: before < share, share, **bounds)
        lambda_val = self.threshold(question.k) if question.lambda_val is None else question.lambda_val
        within = partial(at_least, lambda_val)
        return Answer(self.head(question.k), within, None, **bounds, lambda_val=lambda_val)

    def _by_coverage(self, question: Question, bounds: dict[str, Any]) -> Answer:
        level, method, head = level_key(question.coverage), METHODS[question.method], self.head()
        option = " --per-class" if question.per_class else ""
        levels = " ".join(sorted({*self.coverage.get("lac", {}), level}, key=float))  # others would be forgotten
        again = f"calibrate with `avgk calibrate MODEL DATASET --coverage {levels}{option}`"
        if not self.coverage:
            raise ValueError(f"this model is not calibrated for any coverage: {again}.")
        if method.sums:
            self._check_sums(f"method={question.method!r}", ": use 'lac'")
        if head != self.source_head:
            raise ValueError(
                f"the coverage was calibrated for head={self.source_head!r}, and now {head!r} answers: {again}."
            )
        found = self.coverage.get("per_class" if question.per_class else question.method) or {}
        if level not in found:
            what = "per class" if question.per_class else f"with method={question.method!r}"
            only = f", only {', '.join(sorted(found, key=float))}: ask for one of these, or" if found else ":"
            known, least = self.source.get("num_examples"), enough_images(question.coverage)
            if isinstance(known, int) and known < least and not question.per_class:
                again += f" on more images than the {known} of this calibration"
            raise ValueError(
                f"coverage={level} is not recorded {what}{only} {again}. It takes {least}"
                f" validation images{' of a class' if question.per_class else ''} at least."
            )
        if question.per_class:
            own, pooled = found[level]["own"], found[level]["pooled"]
            lambdas = np.array([own.get(str(j), pooled) for j in range(self.num_labels)])
            if question.per_class is not True:
                of_all, share = self.coverage.get("lac", {}).get(level, pooled), float(question.per_class)
                lambdas = share * lambdas + (1 - share) * of_all
            return Answer(head, partial(at_least, lambdas.astype(np.float32)), None, **bounds)
        most, record = method.sign * found[level], self.coverage

        def inside(scores: Any, before: Any, position: Any) -> Any:
            return method.nonconformity(scores, before, position, record) <= most

        lambda_val = None if method.sums else found[level]
        return Answer(head, inside, most if method.sums else None, **bounds, lambda_val=lambda_val)

    def _check_sums(self, asked: str, remedy: str) -> None:
        if self.score not in SUM_TO_ONE:
            raise ValueError(f"{asked} sums probabilities, and score={self.score!r} does not sum to 1{remedy}.")

    def _asked(self, k: float | None) -> float:
        """The K that is meant; without thresholds there is none."""
        if not self.ks:
            raise ValueError(
                "this model has no thresholds, so it cannot predict sets: calibrate it on validation images with"
                " `trainer.evaluate()`, or with `avgk calibrate MODEL DATASET`."
            )
        return check_k(self.k if k is None else k, self.num_answers)

    def _checked_heads(self, heads: Mapping[str, str]) -> dict[float, str]:
        if self._head == "auto":
            for key in map(k_key, self.ks):
                if heads and heads.get(key) not in HEADS:
                    raise ValueError(f"config.heads[{key!r}]={heads.get(key)!r}; choose among {list(HEADS)}.")
        return {float(key): head for key, head in heads.items()}


def _plain(thresholds: Mapping[float, float]) -> dict[str, float]:
    return {k_key(k): float(lambda_val) for k, lambda_val in sorted(thresholds.items())}


def _as_stored(part: Mapping[str, Any]) -> dict[str, Any]:
    """What was calibrated for one balance, with K as text; what is empty is left out."""
    found = {name: value for name, value in part.items() if value}
    if "thresholds" in found:
        found["thresholds"] = _plain(found["thresholds"])
    if "heads" in found:
        found["heads"] = {k_key(k): head for k, head in sorted(found["heads"].items())}
    if "head_thresholds" in found:
        found["head_thresholds"] = {head: _plain(of_head) for head, of_head in found["head_thresholds"].items()}
    return found
