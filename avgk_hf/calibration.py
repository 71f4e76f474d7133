"""`Calibration`: what one pass over labelled images found, and how it answers questions.

Only this file knows how thresholds, heads, coverages and the trade-off curve are stored in a config, looked up,
interpolated, carried and dropped. A config of any class can hold them: `thresholds` {K: lambda_val} of the head that
answers, `heads` {K: head} where one was chosen for each K, and `calibration`, which says where they come from (number
of images, dataset, split, date, training step, head) and holds the rest: `head_thresholds` {head: {K: lambda_val}},
`coverage` (`conformal.coverage_record`) and `curve`, rows of K, lambda_val, mean size, coverage and top-K accuracy. On
disk the first part stands in config.json and the rest, which grows with the classes, in calibration.json beside it.

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
import json
import math
import weakref
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from transformers.utils import cached_file

from .checks import check_calibrated, check_counts, check_ids, is_number, read_json, same_labels
from .conformal import METHODS, check_coverage, enough_images, level_key
from .files import write_text
from .questions import Answer, Question, at_least
from .scores import HEADS, PROBABILITIES, SUM_TO_ONE, head_scores
from .sets import check_k, interpolated_threshold, k_key

FILE = "calibration.json"
FIELDS = ("thresholds", "heads", "calibration")  # of a config
MOST_ANSWERS = 100  # that are remembered, because visitors may ask anything
DETAILS = ("head_thresholds", "coverage", "curve")  # of its `calibration`, kept in the file
HUB = ("cache_dir", "force_download", "local_files_only", "token", "revision", "subfolder")  # where a file is


class Calibration:
    """What one pass over labelled images found, read from a config and checked once.

    Attributes:
        k: The model's own average set size, or of a classifier that has none the smallest that was calibrated.
        ks: All that were calibrated, ascending; empty for a model that was not.
        score: What is thresholded, as in `scores.score`; `probabilities` says whether it is one.
        thresholds: {head: {K: lambda_val}}.
        coverage: What answers by coverage, of the head `source_head`.
        curve: The trade-off, of the same head.
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
        self.source = {name: value for name, value in record.items() if name not in DETAILS}
        self.classes = check_ids("calibration.classes", self.source.get("classes"), self.num_labels)
        self.num_answers = self.num_labels if self.classes is None else len(self.classes)
        own = self._checked(getattr(config, "thresholds", None) or {}, "config.thresholds")
        self.ks = sorted(own)
        self.k: float = config.k if hasattr(config, "k") else min(self.ks, default=1)
        self._chosen = self._checked_heads(getattr(config, "heads", None) or {})
        named = self.source.get("head") if self.source.get("head") in HEADS else self._chosen.get(self.k)
        self.source_head: str = named or ("ml" if self._head == "auto" else self._head)
        stored = record.get("head_thresholds") or {}
        if not isinstance(stored, Mapping):
            raise ValueError(f"calibration.head_thresholds={stored!r} must map heads to thresholds.")
        for head in set(stored) - set(HEADS):
            raise ValueError(f"calibration.head_thresholds has the key {head!r}; choose among {list(HEADS)}.")
        self.thresholds = {
            head: self._checked(part, f"calibration.head_thresholds[{head!r}]") for head, part in stored.items()
        }
        for k, lambda_val in own.items():
            self.thresholds.setdefault(self._chosen.get(k, self.source_head), {})[k] = lambda_val
        self.coverage: dict[str, Any] = record.get("coverage") or {}
        check_coverage(self.coverage, self.num_labels, self.probabilities)
        self.curve: list[list[float]] = record.get("curve") or []
        self._check_curve()
        self._answers: dict[Question, Answer] = {}

    @classmethod
    def of(cls, config: Any) -> "Calibration":
        """What a config of any class holds; the same object as long as its fields stay the same."""
        fields = vars(config)  # at once, because transformers takes a microsecond for each
        record, labels = fields.get("calibration"), fields.get("id2label", ())
        parts = (fields.get("thresholds"), fields.get("heads"))
        key = (*(tuple(part.items()) if isinstance(part, dict) else part for part in parts), len(labels))
        key += (fields.get("score"), fields.get("head"), fields.get("k"))
        found = cls._made.get(id(config))
        if found is None or found[0]() is not config or found[1] != key or found[2].record is not record:
            forget = partial(cls._made.pop, id(config))
            found = weakref.ref(config, lambda _: forget(None)), key, cls(config)
            cls._made[id(config)] = found
        return found[2]

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
        """
        details = {"head_thresholds": {head: _plain(part) for head, part in (head_thresholds or {}).items()}}
        details |= {"coverage": coverage, "curve": curve}
        heads = heads or (dict.fromkeys(thresholds, "ml") if getattr(config, "head", "ml") == "auto" else {})
        if heads or hasattr(config, "heads"):
            config.heads = {k_key(k): head for k, head in sorted(heads.items())}
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
        found = cls.of(config)
        own = {k: found.threshold(k) for k in found.ks}
        config.head = "ml"
        if found.ks or found.source:
            details = (found.coverage, found.curve) if found.source_head == head else (None, None)
            cls.store(config, own, {**found.source, "head": "ml"}, None, None, *details)
        config.heads = {}

    def threshold(self, k: float | None = None) -> float:
        """lambda_val of `k`, by default the model's own.

        Exact for the K that were calibrated. Between two of them it is interpolated, from the nearest K_1 < K < K_2
        that were recorded for the same head, those of the curve included: for probabilities as a power of K, for
        logits linearly in log K (logits are log-probabilities up to a constant),

            t = log(K / K_1) / log(K_2 / K_1),    log lambda = (1 - t) log lambda_1 + t log lambda_2,

        which decreases with K as lambda_val does. Beyond the calibrated range it is refused.
        """
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
        return head_scores(logits, sccp_logits, head, self.score, self.classes)

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
        found = self._answers.get(question)
        if found is None:
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
        again = (
            f"calibrate with `avgk calibrate MODEL DATASET --coverage {level}{' --per-class' * question.per_class}`"
        )
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
            raise ValueError(
                f"coverage={level} is not recorded {what}{only} {again}. It takes {enough_images(question.coverage)}"
                " validation images at least."
            )
        if question.per_class:
            own, pooled = found[level]["own"], found[level]["pooled"]
            lambdas = np.array([own.get(str(j), pooled) for j in range(self.num_labels)], np.float32)
            return Answer(head, partial(at_least, lambdas), None, **bounds)
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

    def _checked(self, thresholds: Any, name: str) -> dict[float, float]:
        """Thresholds {K as text: lambda_val} that were not edited or damaged, by number."""
        if not isinstance(thresholds, Mapping):
            raise ValueError(f"{name}={thresholds!r} must map K to lambda_val, e.g. `{{'2': 0.1}}`.")
        found = {}
        for key, lambda_val in thresholds.items():
            try:
                found[check_k(float(key), self.num_answers)] = lambda_val
            except (ValueError, TypeError) as error:
                raise ValueError(f"{name} has the key {key!r}: {error}") from None
            if not is_number(lambda_val) or math.isinf(lambda_val):
                reason = "is not a finite number"
            elif self.probabilities and not 0 <= lambda_val <= 1:
                reason = f"is no probability, and score={self.score!r} gives probabilities"
            else:
                continue
            raise ValueError(
                f"{name}[{key!r}]={lambda_val!r} {reason}. Take the field out of"
                f" {'config.json' if name.startswith('config') else FILE} and calibrate again: `avgk calibrate MODEL"
                " DATASET`."
            )
        return found

    def _checked_heads(self, heads: Mapping[str, str]) -> dict[float, str]:
        if self._head == "auto":
            for key in map(k_key, self.ks):
                if heads and heads.get(key) not in HEADS:
                    raise ValueError(f"config.heads[{key!r}]={heads.get(key)!r}; choose among {list(HEADS)}.")
        return {float(key): head for key, head in heads.items()}

    def _check_curve(self) -> None:
        try:
            rows = {k_key(row[0]): row[1] for row in self.curve}
            if not all(len(row) == 5 and all(map(is_number, row)) for row in self.curve):
                raise ValueError
        except (TypeError, ValueError, IndexError, KeyError, OverflowError):
            raise ValueError("calibration.curve is damaged: calibrate again with `avgk calibrate`.") from None
        self._checked(rows, "calibration.curve")


def _plain(thresholds: Mapping[float, float]) -> dict[str, float]:
    return {k_key(k): float(lambda_val) for k, lambda_val in sorted(thresholds.items())}


def save_details(config: Any, folder: str | Path) -> None:
    """Write calibration.json beside config.json, or remove one that is out of date."""
    path, record = Path(folder, FILE), getattr(config, "calibration", None) or {}
    found = {name: record[name] for name in DETAILS if record.get(name)}
    if getattr(config, "train_counts", None):
        found["train_counts"] = config.train_counts
    if found:
        write_text(path, json.dumps({"num_labels": config.num_labels, **found}) + "\n")
    else:
        path.unlink(missing_ok=True)


def load_details(config: Any, name: str | Path, /, **hub: Any) -> None:
    """Add what calibration.json holds to the config, if it and config.json beside it are of the same classes.

    Args:
        config: What config.json gave.
        name: Folder or Hub id.
        hub: Where on the Hub, as `from_pretrained` takes it; other arguments are left out.
    """
    if set(DETAILS) & set(getattr(config, "calibration", None) or ()):  # loaded before
        return
    where = {key: value for key, value in hub.items() if key in HUB and value is not None}
    if Path(name).is_dir():
        path = Path(name, where.get("subfolder", ""), FILE)
        path = path if path.is_file() else None
    else:
        silent = ("missing_entries", "connection_errors", "gated_repo")
        path = cached_file(str(name), FILE, **{f"_raise_exceptions_for_{case}": False for case in silent}, **where)
    if path is None:
        return
    found, beside = read_json(Path(path)), Path(path).with_name("config.json")
    labels = read_json(beside).get("id2label") if beside.is_file() else None
    if found.get("num_labels") != config.num_labels or not same_labels(labels or config.id2label, config.id2label):
        return
    unknown = set(found) - {"num_labels", "train_counts", *DETAILS}
    if unknown:
        raise ValueError(f"{path} has the unknown field {sorted(unknown)[0]!r}: calibrate again.")
    if "train_counts" in found:
        config.train_counts = check_counts(f"{path}: train_counts", found["train_counts"], config.num_labels)
    if getattr(config, "calibration", None) is not None:
        config.calibration = {**config.calibration, **{name: found[name] for name in DETAILS if name in found}}
    try:
        Calibration.of(config)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
