"""Sets by coverage, by any K and per image: against slow code, other packages, and the law that coverage follows."""

import gc
import importlib.util
import json
import math
import re
import shutil
import sys
import types
from fractions import Fraction
from typing import ClassVar

import numpy as np
import pytest
import torch
from asking import Config, answer, resolve, threshold
from hypothesis import given, settings
from hypothesis import strategies as st
from mapie.classification import SplitConformalClassifier
from mapie.conformity_scores import RAPSConformityScore
from scipy.stats import betabinom
from transformers import PreTrainedConfig, pipeline

from avgk_hf import AvgKConfig, AvgKForImageClassification, SetSizeMonitor, conformal, load_splits
from avgk_hf.calibration import Answer, Calibration, Question
from avgk_hf.classifiers import load_classifier, model_scores, transform_for
from avgk_hf.cli import main
from avgk_hf.conformal import (
    LAC,
    check_coverage,
    check_level,
    conformal_quantile,
    conformal_rank,
    coverage_record,
    describe_coverage,
    enough_images,
    level_key,
    question_name,
)
from avgk_hf.evaluation import evaluate
from avgk_hf.export import export_onnx
from avgk_hf.model_card import render_card
from avgk_hf.sets import average_k_threshold, ranked_mass, ranked_sets
from avgk_hf.statistics import SetStatistics, curve_ks
from conftest import CLASSES, save_vit

PENALTY, K_REG = 0.01, 2
METHODS = ("lac", "aps", "raps")


def calibrated(scores, labels, levels, per_class=False, batch=64):
    """A config that holds what one streaming pass over the scores records."""
    stats = SetStatistics([1], len(scores), mass=True)
    for rows, row_labels in zip(scores.split(batch), labels.split(batch), strict=True):
        stats.update(rows, row_labels)
    record = stats.coverage(levels, per_class, k=K_REG)
    return Config(num_labels=scores.shape[1], coverage=json.loads(json.dumps(record)))


def synthetic(n, classes, generator, spread=None):
    """Scores and labels of n exchangeable images; `spread` makes some classes harder than others."""
    labels = torch.randint(0, classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator) * 1.5
    gain = torch.full((classes,), 3.0) if spread is None else spread
    logits[torch.arange(n), labels] += gain[labels]
    return logits.softmax(1), labels


# ------------------------------------------------------------------------------------------------ against slow code


def nonconformity(row, j, method):
    """e of class j as the formulas have it, for one row of scores as Python numbers."""
    if method == "lac":
        return -row[j]
    order = sorted(range(len(row)), key=lambda i: (-row[i], i))
    place = order.index(j) + 1
    sums = np.cumsum([row[i] for i in order])
    return (sums[place - 2] if place > 1 else 0.0) + (PENALTY * max(0, place - K_REG) if method == "raps" else 0.0)


def brute_force(rows, labels, new, level, method):
    values = sorted(nonconformity(row, y, method) for row, y in zip(rows, labels, strict=True))
    rank = math.ceil((len(rows) + 1) * Fraction(str(level)))
    return [[nonconformity(row, j, method) <= values[rank - 1] for j in range(len(row))] for row in new]


@settings(max_examples=150, deadline=None)
@given(
    st.integers(9, 40), st.integers(2, 7), st.integers(0, 2**31), st.sampled_from([0.5, 0.7, 0.8, 0.9]), st.booleans()
)
def test_sets_are_those_of_the_definition(n, classes, seed, level, ties):
    generator = torch.Generator().manual_seed(seed)
    scores, labels = synthetic(n + 20, classes, generator)
    if ties:
        scores = (scores * 8).round() / 8  # sums stay exact, and many scores are equal
    config = calibrated(scores[:n], labels[:n], [level], batch=7)
    rows = scores.double().tolist()
    for method in METHODS:
        sets = answer(scores[n:], config, coverage=level, method=method)
        assert sets.tolist() == brute_force(rows[:n], labels[:n].tolist(), rows[n:], level, method)


@settings(max_examples=60, deadline=None)
@given(st.integers(20, 60), st.integers(2, 5), st.integers(0, 2**31), st.sampled_from([0.5, 0.75, 0.9]))
def test_thresholds_per_class_are_those_of_the_definition(n, classes, seed, level):
    generator = torch.Generator().manual_seed(seed)
    scores, labels = synthetic(n + 20, classes, generator)
    config = calibrated(scores[:n], labels[:n], [level], per_class=True)
    record, key = config.coverage, level_key(level)
    assert record["class_counts"] == torch.bincount(labels[:n], minlength=classes).tolist()
    columns, counts = [], record["class_counts"]
    rare = torch.tensor([math.ceil((count + 1) * Fraction(str(level))) > count for count in counts])[labels[:n]]
    if math.ceil((rare.sum().item() + 1) * Fraction(str(level))) > rare.sum().item():
        rare[:] = True  # too few even together
        assert record["per_class"][key]["pooled_from"] == "all"
    for j in range(classes):
        own = labels[:n] == j
        few = math.ceil((own.sum().item() + 1) * Fraction(str(level))) > own.sum().item()
        assert (str(j) not in record["per_class"][key]["own"]) == few
        rows, truth = (scores[:n][rare], labels[:n][rare]) if few else (scores[:n][own], labels[:n][own])
        found = brute_force(rows.double().tolist(), truth.tolist(), scores[n:].double().tolist(), level, "lac")
        columns.append([row[j] for row in found])
    sets = answer(scores[n:], config, coverage=level, per_class=True)
    assert sets.T.tolist() == columns


def test_the_rank_is_exact_where_floats_are_not():
    for level, smallest in ((0.9, 9), (0.95, 19), (0.99, 99), (0.999, 999), (0.7, 3), (2 / 3, 2)):
        assert enough_images(level) == smallest
    true = np.arange(1, 100, dtype=np.float32) / 100  # n = 99: the 99th largest for 0.99, the 90th for 0.9
    record = coverage_record(true, [0.9, 0.99, 0.995])
    assert record["lac"] == {"0.9": float(true[9]), "0.99": float(true[0])}


def test_levels_ranks_and_names():
    for level in (0.001, 0.5, 0.999):
        assert check_level(level) == level and type(check_level(np.float64(level).item())) is float
    for level in (0, 1, 1.5, -0.1, math.nan, "0.5", None, True):
        with pytest.raises(ValueError, match=r"coverage=.* must be a number between 0 and 1"):
            check_level(level)
    with pytest.raises(ValueError, match="levels=2 must be"):
        check_level(2, "levels")
    for n in range(1, 60):
        for level in (0.3, 0.5, 0.7, 0.9, 0.95):
            rank = conformal_rank(level, n)
            assert rank == math.ceil((n + 1) * Fraction(str(level)))
            assert (enough_images(level) <= n) == (rank <= n)
            values = np.random.default_rng(n).permutation(n).astype(np.float32)
            if rank <= n:
                assert (
                    conformal_quantile(values, level) == rank - 1 and type(conformal_quantile(values, level)) is float
                )
            else:
                takes = rf"coverage={level} cannot be calibrated on {n} image.*takes {enough_images(level)} at least"
                with pytest.raises(ValueError, match=takes):
                    conformal_quantile(values, level)
    for seed in range(50, 66):  # the neighbour of a selected value is mostly in its place too, but not always
        values = np.random.default_rng(seed).permutation(4999)
        assert [conformal_quantile(values, level) for level in (0.1, 0.5, 0.9)] == [499, 2499, 4499]
    names = [
        question_name(0.9),
        question_name(0.9, "aps"),
        question_name(0.9, "raps"),
        question_name(0.95, "lac", True),
        question_name(0.95, "lac", 0.25),
    ]
    assert names == ["0.9", "aps_0.9", "raps_0.9", "per_class_0.95", "per_class_0.25_0.95"]


def test_the_record_in_full():
    """Every number of it, for images whose nonconformities are in order."""
    true, ranks = np.arange(1, 11) / 16, np.array([5, 4, 4, 3, 3, 2, 2, 1, 1, 0])
    mass, labels = 1 - np.arange(1, 11) / 16, np.array([0, 0, 0, 1, 1, 1, 1, 1, 2, 2])
    record = coverage_record(true, [0.8, 0.5, 0.99, 0.8], mass, ranks, labels, 4, k=2.4, penalty=0.5)
    regularised = sorted(m + 0.5 * max(0, r + 1 - 2) for m, r in zip(mass, ranks, strict=True))
    assert record == {
        "num_examples": 10,
        "lac": {"0.5": 5 / 16, "0.8": 2 / 16},  # the 6th and the 9th of 10 from above
        "aps": {"0.5": 11 / 16, "0.8": 14 / 16},
        "raps": {"0.5": regularised[5], "0.8": regularised[8]},
        "k_reg": 2,
        "penalty": 0.5,
        "class_counts": [3, 5, 2, 0],
        "per_class": {
            "0.5": {"own": {"0": 2 / 16, "1": 6 / 16, "2": 9 / 16}, "pooled": 5 / 16, "pooled_from": "all"},
            "0.8": {"own": {"1": 4 / 16}, "pooled": 1 / 16, "pooled_from": "rare"},
        },
    }
    assert list(record["lac"]) == list(record["per_class"]) == ["0.5", "0.8"]
    assert coverage_record(true, [0.5]) == {"num_examples": 10, "lac": {"0.5": 5 / 16}}
    assert coverage_record(true, [0.99]) == coverage_record(true, []) == {}
    labels = np.array([0, 0, 1, 1, 2, 2, 2, 2, 2, 2])  # two rare classes have just enough together
    part = coverage_record(true, [0.8], labels=labels, num_labels=3)["per_class"]["0.8"]
    assert part == {"own": {"2": 5 / 16}, "pooled": 1 / 16, "pooled_from": "rare"}
    default = coverage_record(true, [0.5], mass, ranks)
    assert (default["k_reg"], default["penalty"]) == (1, 0.01)
    assert describe_coverage(record) == {
        "0.5": "lac, aps, raps, per class (1 of 4 with too few images share the threshold of all)",
        "0.8": "lac, aps, raps, per class (3 of 4 with too few images share one threshold)",
    }
    part = {"own": {"0": 0.1, "1": 0.2}, "pooled": 0.1, "pooled_from": "all"}
    assert describe_coverage({"lac": {"0.5": 0.1}, "class_counts": [3, 3], "per_class": {"0.5": part}}) == {
        "0.5": "lac, per class"
    }
    assert describe_coverage({"lac": {"0.5": 0.1, "0.9": 0.1}, "aps": {"0.9": 1}}) == {"0.5": "lac", "0.9": "lac, aps"}
    assert describe_coverage({}) == {}


def stored(config, level, method="lac", per_class=False):
    """The threshold of a coverage, as it was recorded."""
    found = resolve(config, coverage=level, method=method, per_class=per_class)
    if per_class:
        return [float(value) for value in found.inside.args[0]]
    return found.lambda_val if method == "lac" else found.most


def levels(config, *how, **named):
    return Calibration.of(config).levels(*how, **named)


def test_whose_coverage_it_is():
    """That of the level, method and head that are asked for."""
    part = {"own": {"0": 0.125, "2": 0.375}, "pooled": 0.25, "pooled_from": "rare"}
    record = {"lac": {"0.95": 0.1, "0.9": 0.2}, "aps": {"0.9": 0.8}, "raps": {"0.9": 0.9}, "k_reg": 1, "penalty": 0.1}
    record |= {"class_counts": [9, 0, 9], "per_class": {"0.9": part}}
    config = Config(num_labels=3, coverage=record)
    assert stored(config, 0.9) == 0.2 and stored(config, 0.95) == 0.1
    assert [stored(config, 0.9, method) for method in METHODS] == [0.2, 0.8, 0.9]
    assert stored(config, 0.9, per_class=True) == [0.125, 0.25, 0.375]
    assert levels(config) == [0.9, 0.95] and levels(config, "aps") == [0.9]
    assert levels(config, per_class=True) == levels(config, "raps") == [0.9]
    only = Config(num_labels=3, coverage={name: record[name] for name in ("class_counts", "per_class")})
    assert levels(only, per_class=True) == [0.9] and levels(only) == []
    assert levels(Config(num_labels=3)) == []
    for damaged in ({**record, "lac": {"0.95": 7, "0.9": 0.2}}, {**record, "aps": {"0.9": "x"}}):
        with pytest.raises(ValueError, match=r"calibration\.coverage\["):
            stored(Config(num_labels=3, coverage=damaged), 0.9)
    with pytest.raises(ValueError, match=r"calibration\.coverage=\[1\] must be a mapping"):
        stored(Config(num_labels=3, coverage=[1]), 0.9)
    with pytest.raises(ValueError, match=r"only 0\.9, 0\.95: ask for one of these, or calibrate .*takes 1 validation"):
        stored(config, 0.5)
    with pytest.raises(ValueError, match=r"not recorded with method='aps', only 0\.9: .*--coverage 0\.9 0\.95`"):
        stored(config, 0.95, "aps")
    other = Config(num_labels=3, coverage=record, head="sccp", calibration={"head": "ml"})
    with pytest.raises(ValueError, match="calibrated for head='ml', and now 'sccp' answers"):
        stored(other, 0.9)
    assert levels(other) == []
    other.keep(head="sccp")
    assert stored(other, 0.9) == 0.2 and levels(other) == [0.9, 0.95]
    assert stored(Config(num_labels=3, score="logit", coverage={"lac": {"0.9": -3.5}}), 0.9) == -3.5
    for kind in ("sigmoid", "logit"):
        assert levels(Config(num_labels=3, score=kind, coverage=record), "aps") == []


def test_a_record_that_is_in_order():
    """What lies on a border is allowed."""
    part = {"own": {"0": 0, "5": 1}, "pooled": 1, "pooled_from": "all"}
    record = {"num_examples": 0, "k_reg": 6, "penalty": 0, "class_counts": [0] * 6, "lac": {"0.9": 0, "0.5": 1}}
    record |= {"aps": {"0.9": 7.5}, "raps": {"0.9": -1}, "per_class": {"0.9": part}}
    check_coverage(record, 6, True)
    check_coverage({"lac": {"0.9": -7}}, 6, False)
    check_coverage({**record, "per_class": {"0.9": {**part, "own": {"0": 7}, "pooled": -7}}}, 6, False)
    check_coverage({}, 6, True)
    for changed, message in (
        ({"k_reg": 7}, r"calibration\.coverage\['k_reg'\]=7 must be a finite number >= 0, whole"),
        ({"k_reg": -1}, r"\['k_reg'\]=-1 must be"),
        ({"num_examples": 1.0}, r"\['num_examples'\]=1\.0 must be"),
        ({"penalty": math.inf}, r"\['penalty'\]=inf must be a finite number"),
        ({"class_counts": (0,) * 6}, r"\['class_counts'\] must hold 6 whole numbers"),
        ({"class_counts": [0.0] * 6}, r"\['class_counts'\] must hold 6"),
        ({"lac": {0.9: 0.5}}, r"\['lac'\] has the key 0\.9, which is no coverage level"),
        ({"lac": {"0.5": 0.5, "0.9": 7}}, r"\['lac'\]\['0\.9'\]=7 is no probability"),
        ({"per_class": 3}, r"\['per_class'\]=3 must map coverage levels"),
        ({"per_class": {"0.9": {"own": {}}}}, r"=\{'own': \{\}\} must hold \['own', 'pooled', 'pooled_from'\]"),
        ({"per_class": {"0.9": {**part, "own": {0: 0.5}}}}, "has a key that is no class"),
        ({"per_class": {"0.9": {**part, "own": {"x": 0.5}}}}, "has a key that is no class"),
        ({"per_class": {"0.9": {**part, "own": {"0": 1.5}}}}, r"\['own'\]\['0'\]=1\.5 is no probability"),
        ({"per_class": {"0.9": {**part, "pooled": math.nan}}}, r"\['pooled'\]=nan is not a finite number"),
        ({"aps": {"0.9": "x"}}, r"\['aps'\]\['0\.9'\]='x' is not a finite number"),
    ):
        with pytest.raises(ValueError, match=message):
            check_coverage({**record, **changed}, 6, True)
    for left_out, message in (
        ("k_reg", r"\['raps'\] is without k_reg"),
        ("penalty", r"\['raps'\] is without penalty"),
        ("class_counts", r"\['per_class'\] is without class_counts"),
    ):
        with pytest.raises(ValueError, match=message):
            check_coverage({name: part for name, part in record.items() if name != left_out}, 6, True)


def test_questions_at_the_borders():
    scores, config = torch.tensor([[0.5, 0.25, 0.125, 0.125]]), Config(num_labels=4, thresholds={"1": 0.25})
    assert answer(scores, config).int().tolist() == answer(scores, config, k=1).int().tolist() == [[1, 1, 0, 0]]
    assert answer(scores, config, lambda_val=0.5).int().tolist() == [[1, 0, 0, 0]]
    assert answer(scores, config, cumulative=0.75).int().tolist() == [[1, 1, 0, 0]]  # reached, so no further class
    assert answer(scores, config, cumulative=0.76).int().tolist() == [[1, 1, 1, 0]]
    assert answer(scores, config, cumulative=1).all()
    assert answer(scores, config, min_size=4).all() and answer(scores, config, lambda_val=0, max_size=10**30).all()
    assert answer(scores, config, lambda_val=0, max_size=0).sum() == 0
    assert answer(scores, config, lambda_val=0, min_size=2, max_size=2).int().tolist() == [[1, 1, 0, 0]]
    assert resolve(config).lambda_val == resolve(config, max_size=0).lambda_val == 0.25
    assert resolve(config, lambda_val=-1).lambda_val == -1 and resolve(config, cumulative=1).most == 1
    for how, name in (({"method": "aps"}, "method='aps'"), ({"per_class": True}, "per_class")):
        with pytest.raises(ValueError, match=f"^{name} says how a coverage is reached: give one too"):
            resolve(config, **how)
    record = {"raps": {"0.5": 0.75}, "aps": {"0.5": 0.75}, "k_reg": 2, "penalty": 0.25}
    config.keep(coverage=record)  # before the classes stand 0, 0.5, 0.75, 0.875
    assert answer(scores, config, coverage=0.5, method="aps").int().tolist() == [[1, 1, 1, 0]]
    assert answer(scores, config, coverage=0.5, method="raps").int().tolist() == [[1, 1, 0, 0]]
    config.keep(coverage={**record, "raps": {"0.5": 1.0}})  # 0.75 + 0.25 for the third
    assert answer(scores, config, coverage=0.5, method="raps").int().tolist() == [[1, 1, 1, 0]]
    config.keep(coverage={**record, "raps": {"0.5": 0.75 + 0.1}, "penalty": 0.1})  # in double precision
    assert answer(scores, config, coverage=0.5, method="raps").int().tolist() == [[1, 1, 1, 0]]
    for question in ({"min_size": True}, {"max_size": -1}, {"max_size": False}, {"min_size": 1.0}):
        with pytest.raises(ValueError, match=r"(min|max)_size=.* must be a whole number of classes"):
            resolve(config, **question)


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 9), st.integers(0, 2**31), st.floats(0.05, 1.0), st.integers(0, 2), st.integers(2, 4))
def test_cumulative_probability_and_bounds(classes, seed, share, least, most):
    scores, _ = synthetic(12, classes, torch.Generator().manual_seed(seed))
    config, least = Config(num_labels=classes), min(least, classes)
    sets = ranked_sets(scores, answer(scores, config, cumulative=share))
    bounded = ranked_sets(scores, answer(scores, config, cumulative=share, min_size=least, max_size=most))
    for row, found, within in zip(scores.double().tolist(), sets, bounded, strict=True):
        order = sorted(range(classes), key=lambda j: -row[j])
        sums = [sum(row[j] for j in order[:size]) for size in range(classes + 1)]
        size = next((size for size in range(classes + 1) if sums[size] >= share), classes)
        assert found == order[:size]
        assert within == order[: min(max(size, least), most)]


def test_a_rule_by_sums_sees_the_class_itself():
    """Its score, what stands before it and its position, whether a few large scores are enough or all are needed."""
    for scores in ([0.5, 0.25, 0.125, 0.125], [0.5, 0.484375, 0.0078125, 0.0078125]):
        for most, size in ((0.5, 1), (0.75, 2 if scores[1] == 0.25 else 1), (1.0, 4)):
            within = Answer("ml", lambda score, before, position, most=most: score + before <= most, most)
            assert within.classes(torch.tensor([scores])) == [[0, 1, 2, 3][:size]]
    nothing = Answer("ml", lambda score, before, position: score < 0, 0.25, min_size=1)
    assert json.dumps(nothing.classes(torch.tensor([[0.25, 0.75]]))) == "[[1]]"  # class ids are whole numbers
    second = Answer("ml", lambda score, before, position: position == 2, 1.0)
    assert second.classes(torch.tensor([[0.25, 0.75], [1.0, 0.0]])) == [[0], [1]]


def test_sums_are_told_apart_close_to_one():
    """In double precision; and a class that is left out is not what a sum lacks."""
    tiny = 2.0**-26  # half of what float32 can add to the first score
    scores = torch.tensor([[1 - 2.0**-24, tiny, tiny, tiny]])
    config = Config(num_labels=4, coverage={"aps": {"0.9": 1 - 2.0**-24 + 1.5 * tiny}})
    assert resolve(config, coverage=0.9, method="aps").classes(scores) == [[0, 1, 2]]
    rest = torch.tensor([[0.5, 0.25, -math.inf, 0.125]])
    assert resolve(config, cumulative=1).classes(rest) == [[0, 1, 3]]


def test_a_weight_takes_thresholds_between():
    """w q_y + (1 - w) q of each class, q that of all images, or where it is not recorded that of the rare classes."""
    part = {"own": {"0": 0.75}, "pooled": 0.125, "pooled_from": "rare"}
    record = {"lac": {"0.5": 0.25}, "class_counts": [9, 0, 0, 0], "per_class": {"0.5": part, "0.6": part}}
    config = Config(num_labels=4, coverage=record)
    between = ((0.5, 0.5, 0.5, 0.1875), (0.5, 0.25, 0.375, 0.21875), (0.6, 0.5, 0.4375, 0.125))
    for level, weight, of_class, of_others in between:
        found = resolve(config, coverage=level, per_class=weight)
        assert found.lambda_val is found.most is None and found.head == "ml"
        scores = torch.tensor([[of_class, of_others, 0, 0], [of_class - 1e-6, of_others - 1e-6, 0, 0]])
        assert found.classes(scores) == [[0, 1], []]
    config.keep(coverage={name: part for name, part in record.items() if name != "lac"})
    assert resolve(config, coverage=0.5, per_class=0.5).classes(torch.full((1, 4), 0.125)) == [[1, 2, 3]]
    for wrong in (-0.5, 1.5, 2, "x", math.nan):
        with pytest.raises(ValueError, match=r"per_class=.* must be true, false, or a weight"):
            Question(coverage=0.9, per_class=wrong)


def test_at_most_keeps_the_best_of_a_set_with_holes():
    """Thresholds per class may leave out a class that scores higher than one they take."""
    part = {"own": {"0": 0.9}, "pooled": 0.1, "pooled_from": "rare"}
    record = {"lac": {"0.5": 0.3}, "class_counts": [9, 0, 0, 0], "per_class": {"0.5": part}}
    config = Config(num_labels=4, coverage=record)
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    ask = {"coverage": 0.5, "per_class": True}
    assert ranked_sets(scores, answer(scores, config, **ask)) == [[1, 2, 3]]
    assert ranked_sets(scores, answer(scores, config, max_size=2, **ask)) == [[1, 2]]
    assert ranked_sets(scores, answer(scores, config, min_size=1, max_size=2, **ask)) == [[1, 2]]
    assert ranked_sets(scores, answer(scores, config, min_size=3, **ask)) == [[1, 2, 3]]
    assert ranked_sets(scores, answer(scores, config, min_size=4, **ask)) == [[0, 1, 2, 3]]
    assert ranked_sets(scores, answer(scores, config, max_size=0, **ask)) == [[]]


def test_a_calibration_for_every_question_keeps_no_score_matrix():
    """Sizes, coverages, classes and the curve come from one pass that holds O(K n) numbers."""
    n, classes, k = 300, 2000, 3
    stats = SetStatistics([1, k], n, mass=True)
    for batch in range(10):
        scores, labels = synthetic(n // 10, classes, torch.Generator().manual_seed(batch))
        stats.update(scores, labels)
        held = [*stats.columns().values(), *(v for v in vars(stats.stream).values() if hasattr(v, "shape"))]
        assert sum(math.prod(values.shape) for values in held) <= (2 * k + 8) * n < n * classes / 100
    record = stats.coverage([0.9], True, k)
    assert {"lac", "aps", "raps", "per_class"} <= set(record) and stats.curve() and stats.compute()[k]


def test_the_record_of_many_classes_is_small():
    """As for Pl@ntNet-300K: most of 1,081 classes are rare, and cost a number each, whatever the levels."""
    labels = np.random.default_rng(0).zipf(1.3, 200_000)
    labels = labels[labels <= 1081][:31_000] - 1
    true = np.random.default_rng(1).random(len(labels), dtype=np.float32)
    record = coverage_record(true, [0.9, 0.95, 0.99], true, labels, labels, 1081)
    rare = sum(count < 9 for count in record["class_counts"])
    assert len(labels) == 31_000 and rare > 500 and len(json.dumps(record)) < 32 * 1081


# -------------------------------------------------------------------------------------------------- the guarantee

SPLITS, CALIBRATION, TEST, LEVEL = 200, 30, 150, 0.9
SIGMAS = 5  # of a nearly normal mean of 200 independent splits: a false alarm in 1.7 million, for each of the asserts


def expected(n, tests, level):
    """Mean and variance of how many of `tests` sets hold the true class: beta-binomial, where scores do not tie."""
    rank = math.ceil((n + 1) * Fraction(str(level)))
    law = betabinom(tests, rank, n + 1 - rank)
    return law.mean(), law.var(), law


@pytest.mark.parametrize("method", METHODS)
def test_coverage_over_random_splits_follows_its_law(method):
    generator = torch.Generator().manual_seed(0)
    hits = []
    for _ in range(SPLITS):
        scores, labels = synthetic(CALIBRATION + TEST, 10, generator)
        order = torch.randperm(len(scores), generator=generator)
        own, new = order[:CALIBRATION], order[CALIBRATION:]
        config = calibrated(scores[own], labels[own], [LEVEL])
        sets = answer(scores[new], config, coverage=LEVEL, method=method)
        hits.append(sets.gather(1, labels[new, None]).sum().item())
    mean, variance, law = expected(CALIBRATION, TEST, LEVEL)
    assert LEVEL * TEST <= mean <= (LEVEL + 1 / (CALIBRATION + 1)) * TEST
    assert abs(np.mean(hits) - mean) < SIGMAS * math.sqrt(variance / SPLITS)
    assert law.ppf(1e-8) <= min(hits) and max(hits) <= law.isf(1e-8)  # 200 splits: a false alarm in 250,000
    inside = np.mean([law.ppf(0.05) <= hit <= law.isf(0.05) for hit in hits])
    share = law.cdf(law.isf(0.05)) - law.cdf(law.ppf(0.05) - 1)
    assert abs(inside - share) < SIGMAS * math.sqrt(share * (1 - share) / SPLITS)
    uncorrected = TEST * math.ceil(CALIBRATION * LEVEL) / (CALIBRATION + 1)  # so many splits can tell it apart
    assert np.mean(hits) - uncorrected > SIGMAS * math.sqrt(variance / SPLITS)


def test_coverage_per_class_follows_its_law_in_every_class():
    generator, classes = torch.Generator().manual_seed(0), 3
    spread = torch.tensor([4.0, 2.0, 0.0])  # an easy, a middling and a hopeless class
    excess = {True: np.zeros(classes), False: np.zeros(classes)}
    variance = np.zeros(classes)
    for _ in range(SPLITS):
        scores, labels = synthetic(90 + TEST, classes, generator, spread)
        config = calibrated(scores[:90], labels[:90], [LEVEL], per_class=True)
        assert (
            len(config.coverage["per_class"]["0.9"]["own"]) == classes
        )  # 9 images of 90 in every class, but for one split in 10^7
        truth = labels[90:]
        for per_class in (True, False):
            hit = answer(scores[90:], config, coverage=LEVEL, per_class=per_class).gather(1, truth[:, None])[:, 0]
            for j, count in enumerate(config.coverage["class_counts"]):
                mean, var, _ = expected(count, int((truth == j).sum()), LEVEL)
                excess[per_class][j] += hit[truth == j].sum().item() - mean
                variance[j] += var * per_class
    assert (np.abs(excess[True]) < SIGMAS * np.sqrt(variance)).all()
    assert excess[False][0] > SIGMAS * np.sqrt(variance)[0]  # one threshold for all covers the easy class too often
    assert excess[False][2] < -SIGMAS * np.sqrt(variance)[2]  # and the hopeless one too seldom


def test_rare_classes_are_covered_together():
    """Two frequent classes and ten rare, harder ones with three images each: one threshold for all leaves them out."""
    generator = torch.Generator().manual_seed(0)
    spread = torch.tensor([4.0] * 2 + [1.0] * 10)
    hits = {True: [], False: []}
    for _ in range(100):
        scores, labels = synthetic(800, 12, generator, spread)
        numbers = torch.arange(800)
        frequent, rare = numbers[labels < 2], numbers[labels >= 2]
        own = torch.cat([frequent[:60], *(rare[labels[rare] == j][:3] for j in range(2, 12))])
        new = torch.cat([rare[labels[rare] == j][3:13] for j in range(2, 12)])
        config = calibrated(scores[own], labels[own], [LEVEL], per_class=True)
        assert list(config.coverage["per_class"]["0.9"]["own"]) == ["0", "1"]
        assert config.coverage["per_class"]["0.9"]["pooled_from"] == "rare"
        for per_class in (True, False):
            sets = answer(scores[new], config, coverage=LEVEL, per_class=per_class)
            hits[per_class].append(sets.gather(1, labels[new, None]).float().mean().item())
    mean, variance, _ = expected(30, 100, LEVEL)
    # three images of each class are more even than 30 at random, so that the law's spread is an upper bound
    assert abs(np.mean(hits[True]) - mean / 100) < SIGMAS * math.sqrt(variance / 100) / 100
    assert np.mean(hits[False]) < mean / 100 - SIGMAS * math.sqrt(variance / 100) / 100


# ------------------------------------------------------------------------------------------- against other packages


class NoDraw(np.random.RandomState):
    """MAPIE's APS draws u and counts the true class as 1 - u of itself; here none of it counts, as in ours."""

    def uniform(self, low=0.0, high=1.0, size=None):
        return np.ones(size)


class Known:
    """A fitted scikit-learn classifier whose probabilities are given: image i is the number i."""

    def __init__(self, scores):
        self.scores, self.classes_ = scores, np.arange(scores.shape[1])

    def fit(self, X, y):
        return self

    def __sklearn_is_fitted__(self):
        return True

    def predict_proba(self, X):
        return self.scores[X[:, 0].astype(int)]

    def predict(self, X):
        return self.predict_proba(X).argmax(1)


@pytest.fixture(scope="module")
def images_of_two_packages():
    scores, labels = synthetic(700, 12, torch.Generator().manual_seed(0))
    config = calibrated(scores[:400], labels[:400], [0.8, 0.9, 0.95])
    return scores, labels, config


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_sets_agree_with_mapie(images_of_two_packages, level):
    """LAC, and APS with the label that goes beyond q, which is also the set of cumulative probability q."""
    scores, labels, config = images_of_two_packages
    wide = scores.double().numpy()
    wide /= wide.sum(1, keepdims=True)  # MAPIE insists on a sum of 1; the order of scores and sums stays
    numbers = np.arange(len(scores))[:, None].astype(float)

    def sets(name, **params):
        predictor = SplitConformalClassifier(
            Known(wide), confidence_level=level, conformity_score=name, prefit=True, random_state=NoDraw(0)
        )
        predictor.conformalize(numbers[:400], labels[:400].numpy())
        return predictor.predict_set(numbers[400:], conformity_score_params=params)[1][:, :, 0]

    new = torch.from_numpy(wide[400:])
    assert np.array_equal(sets("lac"), answer(scores[400:], config, coverage=level).numpy())
    theirs = sets("aps", include_last_label=True)
    assert np.array_equal(theirs, answer(new, config, coverage=level, method="aps").numpy())
    assert np.array_equal(theirs, answer(new, config, cumulative=config.coverage["aps"][level_key(level)]).numpy())


@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
def test_raps_agrees_with_mapie_but_for_its_last_class(level):
    """MAPIE chooses k_reg and penalty on part of the images, and penalises the last class of a set as the one before.

    So its quantile is ours, and its sets are ours and the next class where only that class' own penalty leaves it out.
    """
    scores, labels = synthetic(1000, 12, torch.Generator().manual_seed(0))
    wide = scores.double().numpy()
    wide /= wide.sum(1, keepdims=True)
    numbers, raps = np.arange(len(scores))[:, None].astype(float), RAPSConformityScore(size_raps=0.2)
    predictor = SplitConformalClassifier(
        Known(wide), confidence_level=level, conformity_score=raps, prefit=True, random_state=NoDraw(0)
    )
    predictor.conformalize(numbers[:700], labels[:700].numpy())
    theirs = predictor.predict_set(numbers[700:], conformity_score_params={"include_last_label": True})[1][:, :, 0]
    own = np.setdiff1d(np.arange(700), raps.X_raps[:, 0].astype(int))
    stats = SetStatistics([1], len(own), mass=True)
    stats.update(torch.from_numpy(wide[own]), labels[own])
    k_reg, penalty = int(raps.k_star[0]), float(raps.lambda_star)
    record = coverage_record(
        stats.column("true"), [level], stats.column("mass"), stats.column("rank"), k_reg=k_reg, penalty=penalty
    )
    assert record["raps"][level_key(level)] == pytest.approx(raps.quantiles_[0], abs=1e-7)
    new, config = torch.from_numpy(wide[700:]), Config(num_labels=12, coverage=record)
    ours = answer(new, config, coverage=level, method="raps").numpy()
    order, mass = ranked_mass(new)
    before = mass + penalty * (torch.arange(12) - k_reg).clamp(min=0)  # with the penalty of the class before
    by_their_rule = torch.zeros_like(order, dtype=torch.bool).scatter_(1, order, before < raps.quantiles_[0])
    assert np.array_equal(theirs, by_their_rule.numpy())
    assert not (ours & ~theirs).any() and (theirs.sum(1) - ours.sum(1)).max() == 1


@pytest.fixture(scope="module")
def torchcp():
    """TorchCP's scores and predictors, without the packages that its losses and its graphs import (torchsort)."""
    spec = importlib.util.find_spec("torchcp")
    assert spec is not None, "TorchCP is not installed: `make test` does it, or `uv pip install --no-deps torchcp`"
    kept = {name: module for name, module in sys.modules.items() if name.split(".")[0] == "torchcp"}
    for name in ("torchcp", "torchcp.classification"):
        module = types.ModuleType(name)
        module.__path__ = [spec.submodule_search_locations[0] + name.removeprefix("torchcp").replace(".", "/")]
        sys.modules[name] = module
    from torchcp.classification.predictor import ClassConditionalPredictor, SplitPredictor
    from torchcp.classification.score import APS, LAC, RAPS

    yield {
        "split": SplitPredictor,
        "per_class": ClassConditionalPredictor,
        "lac": LAC("identity"),
        "aps": APS("identity", randomized=True),
        "raps": RAPS("identity", randomized=True, penalty=PENALTY, kreg=K_REG),
    }
    for name in [name for name in sys.modules if name.split(".")[0] == "torchcp"]:
        del sys.modules[name]
    sys.modules.update(kept)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("level", [0.8, 0.9, 0.95])
@pytest.mark.parametrize("method", METHODS)
def test_sets_agree_with_torchcp(images_of_two_packages, torchcp, method, level, monkeypatch):
    """TorchCP draws u as MAPIE does; its `randomized=False` is u = 0, which leaves clear images without a class."""
    monkeypatch.setattr(torch, "rand", torch.ones)
    scores, labels, config = images_of_two_packages
    predictor = torchcp["split"](torchcp[method], alpha=float(1 - Fraction(str(level))))
    predictor.calculate_threshold(scores[:400].double(), labels[:400])
    theirs = predictor.predict_with_logits(scores[400:].double()).bool()
    assert torch.equal(answer(scores[400:], config, coverage=level, method=method), theirs)
    assert 0 < theirs.sum() < theirs.numel()


@pytest.mark.filterwarnings("ignore")
def test_sets_per_class_agree_with_torchcp(torchcp):
    """Where a class has images enough; where not, TorchCP takes the class into every set, and ours pools."""
    scores, labels = synthetic(700, 6, torch.Generator().manual_seed(1))
    seen = torch.arange(400)[(labels[:400] != 5) | (torch.arange(400) < 20)]
    config = calibrated(scores[seen], labels[seen], [0.9], per_class=True)
    predictor = torchcp["per_class"](torchcp["lac"], alpha=0.1)
    predictor.calculate_threshold(scores[seen].double(), labels[seen])
    theirs = predictor.predict_with_logits(scores[400:].double()).bool()
    ours = answer(scores[400:], config, coverage=0.9, per_class=True)
    assert list(config.coverage["per_class"]["0.9"]["own"]) == list("01234")
    assert torch.equal(ours[:, :5], theirs[:, :5]) and theirs[:, 5].all()
    assert torch.equal(ours[:, 5], answer(scores[400:], config, coverage=0.9)[:, 5])


# ------------------------------------------------------------------------------------------------------- any K


@pytest.mark.parametrize("kind", ["softmax", "logit"])
@pytest.mark.parametrize("recorded", [[1, 2, 3, 5, 10], [1.5, 4]])
def test_interpolated_thresholds_give_about_k_classes(kind, recorded):
    logits = torch.randn(1500, 60, generator=torch.Generator().manual_seed(0)) * 2
    scores = logits.softmax(1) if kind == "softmax" else logits
    thresholds = {str(k): average_k_threshold(scores, k) for k in recorded}
    config = Config(num_labels=60, thresholds=thresholds, score=kind)
    grid = np.linspace(recorded[0], recorded[-1], 25)
    lambdas = [threshold(config, k) for k in grid.tolist()]
    assert lambdas == sorted(lambdas, reverse=True)
    for k in grid.tolist():
        assert answer(scores, config, k=k).sum().item() / 1500 == pytest.approx(k, rel=0.06)
    for k in recorded:
        assert resolve(config, k=k).lambda_val == thresholds[str(k)]
    for k in (recorded[0] - 0.4, recorded[-1] + 0.01):
        if k >= 1:
            with pytest.raises(ValueError, match=rf"no threshold is stored.*\[{recorded[0]}, {recorded[-1]}\]"):
                answer(scores, config, k=k)


def between(lambdas, k):
    """The formula for one head's thresholds {K as text: lambda_val}."""
    known = sorted(map(float, lambdas))
    above = next(size for size in known if size > k)
    below = known[known.index(above) - 1]
    t = math.log(k / below) / math.log(above / below)
    return lambdas[f"{below:g}"] ** (1 - t) * lambdas[f"{above:g}"] ** t


def test_heads_are_not_mixed_between_k():
    """With `head="auto"`: the head of the nearest K, and thresholds of that head alone."""
    lambdas = {"ml": {"1": 0.8, "2": 0.4, "4": 0.2}, "sccp": {"1": 0.9, "2": 0.6, "4": 0.4}}
    chosen = {"1": "ml", "2": "ml", "4": "sccp"}
    own = {key: lambdas[head][key] for key, head in chosen.items()}
    config = AvgKConfig(
        num_labels=6, k=2, head="auto", thresholds=own, heads=chosen, calibration={"head_thresholds": lambdas}
    )
    found = Calibration.of(config)
    assert (found.head(2.5), found.head(3), found.head(3.5)) == ("ml", "ml", "sccp")
    assert found.threshold(2.5) == pytest.approx(between(lambdas["ml"], 2.5))
    assert found.threshold(3.5) == pytest.approx(between(lambdas["sccp"], 3.5))
    # the curve is that of one head
    curve = [[2, 0.4, 2, 1, 1], [2.5, 0.39, 2.5, 1, 1], [4, 0.2, 4, 1, 1]]
    config.calibration = {"head": "ml", "curve": curve, "head_thresholds": lambdas}
    found = Calibration.of(config)
    assert found.threshold(2.5) == 0.39 and found.threshold(3) == pytest.approx(between({"2.5": 0.39, "4": 0.2}, 3))
    assert found.threshold(3.5) == pytest.approx(between(lambdas["sccp"], 3.5))
    config.calibration = {"head": "ml", "curve": curve}
    with pytest.raises(ValueError, match=r"no threshold is stored for k=3.5"):
        threshold(config, 3.5)
    assert threshold(config, 1.5) == pytest.approx(between(lambdas["ml"], 1.5))


def test_another_head_does_not_get_the_thresholds_of_the_first():
    config = AvgKConfig(num_labels=6, k=2)
    coverage = {"num_examples": 30, "lac": {"0.9": 0.1}}
    lambdas = {"ml": {1: 0.8, 2: 0.4}, "sccp": {1: 0.9, 2: 0.6}}
    Calibration.store(config, lambdas["ml"], {"head": "ml"}, head_thresholds=lambdas, coverage=coverage)
    assert (threshold(config), resolve(config, coverage=0.9).lambda_val) == (0.4, 0.1)
    config.head = "sccp"
    assert threshold(config) == 0.6
    with pytest.raises(ValueError, match="coverage was calibrated for head='ml', and now 'sccp' answers: calibrate"):
        resolve(config, coverage=0.9)
    config.calibration = {"head": "ml"}
    with pytest.raises(ValueError, match="are those of head='ml', and none is stored for 'sccp': calibrate"):
        threshold(config)


def carried():
    """A stand-in for a config that was calibrated with two heads, of which "sccp" answers for the model's own K."""
    config = Config(num_labels=6, k=2, head="auto", heads={}, thresholds={}, calibration=None)
    lambdas = {"ml": {1: 0.5, 2: 0.3, 4: 0.1}, "sccp": {1: 0.45, 2: 0.2, 4: 0.02}}
    heads = {1: "ml", 2: "sccp", 4: "sccp"}
    own = {k: lambdas[head][k] for k, head in heads.items()}
    coverage = {"num_examples": 30, "lac": {"0.9": 0.125}}
    curve = [[1, 0.45, 1, 1, 1], [3, 0.15, 3, 1, 1], [4, 0.02, 4, 1, 1]]
    Calibration.store(config, own, {"num_examples": 30, "head": "sccp"}, heads, lambdas, coverage, curve)
    return config, lambdas


def test_a_calibration_is_carried_whole():
    config, _ = carried()
    other = Config(num_labels=6, k=2, head="auto")
    Calibration.carry(config, other)
    for name in ("thresholds", "heads", "calibration"):
        assert getattr(other, name) == getattr(config, name) and getattr(other, name) is not getattr(config, name)
    other.calibration["coverage"]["lac"]["0.9"] = 0.5
    assert config.calibration["coverage"]["lac"]["0.9"] == 0.125  # nothing is shared
    assert config.score == "softmax"
    config.score = "logit"
    assert Calibration.store(config, {2: 0.5}).score == config.score == "logit"
    Calibration.drop(config)
    assert (config.thresholds, config.heads, config.calibration) == ({}, {}, None)


@pytest.mark.parametrize("head", ["ml", "sccp"])
def test_a_calibration_is_kept_with_a_head(head):
    """With that head's thresholds, and with curve and coverage where they are its own."""
    config, lambdas = carried()
    config.head = head
    Calibration.keep_head(config, head)
    assert (config.head, config.heads) == ("ml", {})
    assert config.thresholds == {str(k): value for k, value in lambdas[head].items()}
    own = {"coverage": {"num_examples": 30, "lac": {"0.9": 0.125}}} if head == "sccp" else {}
    own |= {"curve": [[1, 0.45, 1, 1, 1], [3, 0.15, 3, 1, 1], [4, 0.02, 4, 1, 1]]} if own else {}
    assert config.calibration == {"num_examples": 30, "head": "ml", **own}
    assert resolve(config).head == "ml" and levels(config) == ([0.9] if own else [])
    bare = Config(num_labels=6, k=2, head="sccp", heads={}, thresholds={}, calibration=None)
    Calibration.keep_head(bare, "sccp")
    assert (bare.head, bare.heads, bare.thresholds, bare.calibration) == ("ml", {}, {}, None)


def test_a_calibration_follows_its_config():
    """Fields that change are read again, and what was read of a config goes with it."""
    config, _ = carried()
    assert (Calibration.of(config).k, Calibration.of(config).head(4)) == (2, "sccp")
    config.k = 4
    assert Calibration.of(config).k == 4 and Calibration.of(config).threshold() == 0.02
    config.heads["4"] = "ml"
    assert Calibration.of(config).head() == "ml"
    bare = PreTrainedConfig(num_labels=3)
    assert (Calibration.of(bare).num_labels, Calibration.of(bare).k) == (3, 1)
    bare.num_labels = 5
    assert Calibration.of(bare).num_labels == 5
    auto = Calibration.of(Config(num_labels=6, k=2, head="auto", coverage={"lac": {"0.9": 0.1}}))
    assert auto.source_head == "ml" and auto.levels() == [0.9]  # before a head was chosen
    key = id(bare)
    assert key in Calibration._made
    del bare
    gc.collect()
    assert key not in Calibration._made


def test_answers_are_made_once_and_say_whose_scores_they_take():
    config, _ = carried()
    found = Calibration.of(config)
    ask = Question(k=1)
    assert found.answer(ask) is found.answer(Question(k=1)) and found.answer(ask).head == "ml"
    assert [found.answer(Question(**q)).head for q in ({}, {"coverage": 0.9}, {"cumulative": 0.5})] == ["sccp"] * 3
    assert found.answer(Question(coverage=0.9)).lambda_val == 0.125
    assert found.threshold(1) == 0.5 and found.head_threshold("sccp", 1) == 0.45 and found.threshold(4) == 0.02
    for k in range(200):
        found.answer(Question(k=1 + k / 300))
        assert len(found._answers) <= 100  # visitors may ask anything
    part = {"own": {"0": 0.1}, "pooled": 0.7, "pooled_from": "rare"}
    config.keep(head="ml", coverage={"aps": {"0.9": 0.5}, "class_counts": [9] * 6, "per_class": {"0.9": part}})
    config.head = "ml"
    answered = resolve(config, coverage=0.9, per_class=True)
    assert answered.head == "ml" and answered.lambda_val is None
    assert answered.inside.args[0].dtype == np.float32  # as the scores
    assert resolve(config, coverage=0.9, method="aps").lambda_val is None
    config.score = "sigmoid"
    with pytest.raises(ValueError, match="does not sum to 1: use 'lac'"):
        resolve(config, coverage=0.9, method="aps")


def test_a_head_that_is_set_later_gets_its_own_thresholds(make_model, tmp_path):
    """After a choice for every K (`head="auto"`): by name, with one head dropped, and exported."""
    chosen = {1: "ml", 2: "sccp", 5: "ml"}
    lambdas = {"ml": {1: 0.5, 2: 0.3, 5: 0.1}, "sccp": {1: 0.45, 2: 0.2, 5: 0.02}}
    coverage = {"num_examples": 30, "lac": {"0.9": 0.1}}
    curve = [[1, 0.45, 1, 1, 1], [3, 0.15, 3, 1, 1], [5, 0.02, 5, 1, 1]]
    record = {"num_examples": 30, "head": "sccp"}
    own = {k: lambdas[head][k] for k, head in chosen.items()}

    def model(head, record=record):
        found = make_model(head="auto")
        Calibration.store(found.config, own, record, chosen, lambdas, coverage, curve)
        found.config.head = head
        return found

    for head, between in (("ml", math.exp((math.log(0.3) + math.log(0.1)) / 2)), ("sccp", 0.15)):
        config = model(head).config
        assert [Calibration.of(config).threshold(k) for k in (1, 2, 5)] == list(lambdas[head].values())
        middle = 3 if head == "sccp" else math.sqrt(10)
        assert Calibration.of(config).threshold(middle) == pytest.approx(between)
        assert levels(config) == ([0.9] if head == "sccp" else [])
        # a record of earlier versions does not name the head: it is that of the model's own K
        old = model(head, {"num_examples": 30}).config
        assert Calibration.of(old).threshold(middle) == pytest.approx(between)
        report = export_onnx(model(head), tmp_path / head)
        assert report["head"] == head and list(report["thresholds"].values()) == list(lambdas[head].values())
        kept = model(head).drop_unused_head()
        assert kept.sccp_head is None and kept.config.head == kept.config.calibration["head"] == "ml"
        assert [Calibration.of(kept.config).threshold(k) for k in (1, 2, 5)] == list(lambdas[head].values())
        assert Calibration.of(kept.config).threshold(middle) == pytest.approx(between)
        assert levels(kept.config) == ([0.9] if head == "sccp" else [])
    assert threshold(model("ml").drop_sccp_head().config, 2) == 0.3
    assert make_model(head="sccp").drop_unused_head().config.calibration is None
    lost = make_model(head="ml")
    Calibration.store(lost.config, {2: 0.2}, {})
    lost.config.head = "auto"
    with pytest.raises(ValueError, match="head='auto', and no head was chosen: calibrate"):
        Calibration.of(lost.config).threshold(2)


def test_evaluation_with_another_head_leaves_the_coverage_out(make_model, splits):
    model = make_model(head="ml")
    evaluate(model, splits["validation"], [1, 3], calibrate=True, coverage=[0.9])
    model.config.head = "sccp"
    assert not any(name.startswith("coverage") for name in evaluate(model, splits["test"]))
    with pytest.raises(ValueError, match="calibrated for head='ml', and now 'sccp' answers"):
        evaluate(model, splits["test"], coverage=[0.9])


def two_kinds(n, generator):
    """Clear images and ambiguous ones: lambda_val as a function of K has a bend that two points do not show."""
    logits = torch.randn(n, 100, generator=generator)
    clear = torch.arange(n) < 0.7 * n
    logits[clear, 0] += 12
    logits[~clear, :20] += 3
    return logits.softmax(1), torch.zeros(n, dtype=torch.long)


def test_the_points_of_the_curve_serve_between_the_recorded_sizes():
    scores, labels = two_kinds(2000, torch.Generator().manual_seed(0))
    stats = SetStatistics([1, 20], len(scores))
    stats.update(scores, labels)
    thresholds = {f"{k:g}": result["lambda_val"] for k, result in stats.compute().items()}
    config = Config(num_labels=100, thresholds=thresholds, calibration={"curve": stats.curve()})
    plain = Config(num_labels=100, thresholds=thresholds)
    for k in (3, 5, 7.3, 13):
        assert answer(scores, config, k=k).sum().item() / 2000 == pytest.approx(k, rel=0.04)
    assert answer(scores, plain, k=5).sum().item() / 2000 > 1.2 * 5
    # other images of the same kind are no drift, at a K that was not calibrated by itself
    more, _ = two_kinds(4000, torch.Generator().manual_seed(1))
    monitor = SetSizeMonitor.from_config(config, 5, num_calibrated=2000)
    monitor.watch(answer(more, config, k=5).sum(1).numpy())
    assert not monitor.drifted
    for curve in ([[1]], [[2, "x"]], [3], [[2, -1.0]], [[10**400, 0.5]]):
        config.calibration = {"curve": curve}
        with pytest.raises(ValueError, match=r"calibration\.curve"):
            threshold(config, 5)


# ---------------------------------------------------------------------------------------------- a further method


class Margin(LAC):
    """How far a class is behind the best one, with a setting of its own: e = scale (p_1 - p_y)."""

    sign, sums = 1, True  # the sum before the second class is the best score
    settings: ClassVar = {"scale": (int, float)}

    @staticmethod
    def choose(k):
        return {"scale": 10 * k}

    @staticmethod
    def nonconformity(scores, before, position, settings):
        return np.where(position == 1, before, before + settings["scale"])


def test_a_method_from_outside(make_model, splits, image_folder, tmp_path, monkeypatch, capsys):
    """One class and one line: calibrated, stored, asked by every door and evaluated, without touching the package."""
    monkeypatch.setitem(conformal.METHODS, "margin", Margin)
    model = make_model(id2label=dict(enumerate(CLASSES)))
    evaluate(model, splits["validation"], [1, 3], calibrate=True, coverage=[0.9])
    found = Calibration.of(model.config)
    assert found.coverage["scale"] == 20 and found.levels("margin") == [0.9]
    assert describe_coverage(found.coverage) == {"0.9": "lac, aps, raps, margin"}
    model.save_pretrained(tmp_path)
    path = str(image_folder / "test" / "oak" / "0.png")
    scores = model_scores(model, transform_for(model).image(path)[None])
    expected = [
        CLASSES[j] for j in resolve(model.config, coverage=0.9, method="margin", min_size=1).classes(scores)[0]
    ]
    most = found.coverage["margin"]["0.9"]
    order, mass = ranked_mass(scores)
    inside = [i == 0 or mass[0, i].item() + 20 <= most for i in range(6)]
    assert expected == [CLASSES[j] for j, kept in zip(order[0].tolist(), inside, strict=True) if kept]
    classify = pipeline("average-k-image-classification", model=str(tmp_path), coverage=0.9, method="margin")
    assert [item["label"] for item in classify(path)] == expected
    assert main(["predict", str(tmp_path), path, "--coverage", "0.9", "--method", "margin", "--json"]) == 0
    assert [item["label"] for item in json.loads(capsys.readouterr().out)[0]["set"]] == expected
    metrics = evaluate(model, splits["test"], method="margin")
    assert 0 <= metrics["coverage_margin_0.9"] <= 1
    monkeypatch.undo()
    with pytest.raises(ValueError, match=r"calibration\.json: calibration\.coverage\['scale'\] is unknown"):
        AvgKForImageClassification.from_pretrained(tmp_path)


# ----------------------------------------------------------------------------------------------------- refusals

ASKED = Config(
    num_labels=4,
    thresholds={"1": 0.5, "2": 0.2},
    coverage={"num_examples": 30, "lac": {"0.9": 0.1}, "aps": {"0.9": 0.99}},
)


@pytest.mark.parametrize(
    ("question", "message"),
    [
        ({"k": 2, "coverage": 0.9}, "k=2 and coverage=0.9 are different questions: ask one"),
        ({"cumulative": 0.5, "lambda_val": 0.1}, "cumulative=0.5 and lambda_val=0.1 are different questions"),
        ({"coverage": 95}, "coverage=95 must be a number between 0 and 1"),
        ({"coverage": 1.0}, "coverage=1.0 must be a number between 0 and 1"),
        ({"coverage": float("nan")}, "coverage=nan must be a number"),
        ({"coverage": "0.9"}, "coverage='0.9' must be a number"),
        (
            {"coverage": 0.95},
            r"coverage=0.95 is not recorded with method='lac', only 0.9.*--coverage 0.9 0.95`.*takes 19",
        ),
        ({"coverage": 0.9, "method": "raps"}, "coverage=0.9 is not recorded with method='raps': calibrate with"),
        ({"coverage": 0.9, "method": "thr"}, r"method='thr' is unknown; choose one of \['lac', 'aps', 'raps'\]"),
        ({"coverage": 0.9, "per_class": True}, r"not recorded per class.*--coverage 0.9 --per-class`"),
        ({"coverage": 0.9, "per_class": True, "method": "aps"}, "method='aps' has no thresholds per class"),
        ({"method": "aps"}, "method='aps' says how a coverage is reached: give one too"),
        ({"k": 2, "per_class": True}, "per_class says how a coverage is reached"),
        ({"cumulative": 0}, r"cumulative=0 must be a probability in \(0, 1\]"),
        ({"cumulative": 1.01}, "cumulative=1.01 must be a probability"),
        ({"lambda_val": "low"}, "lambda_val='low' is not a number"),
        ({"min_size": -1}, "min_size=-1 must be a whole number"),
        ({"min_size": 5}, r"min_size=5 must be a whole number in \[0, 4\]"),
        ({"max_size": 1.5}, "max_size=1.5 must be a whole number"),
        ({"min_size": 3, "max_size": 2}, "max_size=2 is below min_size=3"),
    ],
)
def test_questions_that_cannot_be_answered(question, message):
    with pytest.raises(ValueError, match=message) as error:
        answer(torch.rand(2, 4), ASKED, **question)
    assert "\n" not in str(error.value)


def per_class(**part):
    """A record of six classes that is in order, but for the parts that are given."""
    part = {"own": {"0": 0.1}, "pooled": 0.2, "pooled_from": "rare", **part}
    return {"class_counts": [9] + [1] * 5, "per_class": {"0.9": part}}


def test_scores_that_do_not_sum_to_one():
    for kind in ("sigmoid", "logit"):
        config = Config(**{**vars(ASKED), "score": kind})
        with pytest.raises(ValueError, match=f"method='aps' sums probabilities, and score='{kind}'"):
            resolve(config, coverage=0.9, method="aps")
        with pytest.raises(
            ValueError, match=f"cumulative=0.9 sums probabilities, and score='{kind}' does not sum to 1\\.$"
        ):
            resolve(config, cumulative=0.9)
        assert resolve(config, coverage=0.9).lambda_val == 0.1
    with pytest.raises(ValueError, match="not calibrated for any coverage: calibrate with `avgk calibrate MODEL"):
        resolve(Config(num_labels=4), coverage=0.9)


@pytest.mark.parametrize(
    ("coverage", "message"),
    [
        (3, "coverage"),
        ([0.9], "coverage"),
        ({"lac": 3}, r"calibration.coverage\['lac'\]=3 must map"),
        ({"lac": {"0.9": None}}, r"calibration.coverage\['lac'\]\['0.9'\]=None is not a finite number"),
        ({"lac": {"0.9": math.nan}}, r"\['lac'\]\['0.9'\]=nan is not a finite number"),
        ({"lac": {"0.9": -0.1}}, r"\['lac'\]\['0.9'\]=-0.1 is no probability"),
        ({"lac": {"90": 0.1}}, r"\['lac'\] has the key '90', which is no coverage level"),
        ({"lac": {"high": 0.1}}, "key 'high'"),
        ({"aps": {"0.9": math.inf}}, r"\['aps'\]\['0.9'\]=inf"),
        ({"raps": {"0.9": 1.0}}, r"\['raps'\] is without k_reg and penalty"),
        ({"raps": {"0.9": 1.0}, "k_reg": 1.5, "penalty": 0.1}, r"\['k_reg'\]=1.5"),
        ({"raps": {"0.9": 1.0}, "k_reg": 1, "penalty": -0.1}, r"\['penalty'\]=-0.1"),
        (
            {"per_class": {"0.9": [0.1] * 6}},
            r"\['per_class'\]\['0.9'\]=.* must hold \['own', 'pooled', 'pooled_from'\]",
        ),
        (per_class(own=[0.1]), r"\['own'\]=\[0.1\] must map class ids"),
        (per_class(own={"6": 0.1}), r"\['own'\]=\{'6': 0.1\} has a key that is no class"),
        (per_class(own={"5": "x"}), r"\['per_class'\]\['0.9'\]\['own'\]\['5'\]='x' is not a finite"),
        (per_class(pooled=1.5), r"\['pooled'\]=1.5 is no probability"),
        (per_class(pooled_from="some"), r"\['pooled_from'\]='some' is not rare or all"),
        ({"per_class": per_class()["per_class"]}, r"\['per_class'\] is without class_counts"),
        ({"class_counts": [1] * 5}, r"\['class_counts'\]"),
        ({"class_counts": [-1] * 6}, r"\['class_counts'\]"),
        ({"knn": {"0.9": 0.1}}, r"\['knn'\] is unknown"),
        ({"raps": {"0.9": 1.0}, "k_reg": 2**70, "penalty": 0.1}, r"\['k_reg'\]=\d+ must be"),
        ({"num_examples": True}, r"\['num_examples'\]=True"),
    ],
)
def test_a_damaged_record_is_refused_by_name(coverage, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AvgKConfig(num_labels=6, k=2, calibration={"coverage": coverage})
    Calibration.store(good := AvgKConfig(num_labels=6, k=2), {2: 0.5}, {"num_examples": 30})
    good.save_pretrained(tmp_path)
    (tmp_path / "calibration.json").write_text(json.dumps({"num_labels": 6, "coverage": coverage}))
    with pytest.raises(ValueError, match=f"calibration.json: .*{message}"):
        AvgKConfig.from_pretrained(tmp_path)


def test_the_record_goes_with_the_thresholds(tmp_path):
    record = {"num_examples": 30, "lac": {"0.9": 0.1}}
    config = AvgKConfig(num_labels=6, k=2)
    Calibration.store(config, {2: 0.1}, {}, coverage=record)
    config.save_pretrained(tmp_path)
    assert Calibration.of(AvgKConfig.from_pretrained(tmp_path)).coverage == record
    assert AvgKConfig.from_pretrained(tmp_path, num_labels=7).calibration is None
    Calibration.drop(config)
    assert Calibration.of(config).coverage == {} and config.calibration is None
    config.save_pretrained(tmp_path)
    assert not (tmp_path / "calibration.json").exists()
    logit = AvgKConfig(num_labels=6, score="logit", calibration={"coverage": {"lac": {"0.9": -3.5}}})
    assert Calibration.of(logit).coverage


# -------------------------------------------------------------------- the whole way: calibrate, save, ask, evaluate


@pytest.fixture(scope="module", params=["avgk", "vit"])
def folder(request, image_folder, tmp_path_factory):
    """A classifier of this package and one of another, calibrated by the command."""
    path = tmp_path_factory.mktemp("asked") / request.param
    torch.manual_seed(0)
    if request.param == "vit":
        save_vit(path)
    else:
        labels = dict(enumerate(CLASSES))
        model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32)
        for head in (model.ml_head, model.sccp_head):
            torch.nn.init.normal_(head.weight)
        model.save_pretrained(path)
    arguments = ["calibrate", str(path), str(image_folder), "--k", "1", "2", "4", "--coverage", "0.7", "0.9"]
    assert main([*arguments, "--per-class", "--plot", str(path.parent / "tradeoff.svg")]) == 0
    return path


@pytest.fixture(scope="module")
def scored(folder, splits):
    model = load_classifier(str(folder))
    transform = transform_for(model)
    scores = {
        name: model_scores(model, torch.stack([transform.image(row["image"]) for row in splits[name]]))
        for name in ("validation", "test")
    }
    return model, scores


def test_the_record_of_the_command(folder, scored, splits):
    scores = scored[1]
    labels = torch.tensor(splits["validation"]["label"])
    config, details = (json.loads((folder / name).read_text()) for name in ("config.json", "calibration.json"))
    assert details["coverage"]["class_counts"] == [5] * 6
    parts = details["coverage"]["per_class"]
    assert [len(part["own"]) for part in parts.values()] == [6, 0] and parts["0.9"]["pooled_from"] == "rare"
    k_reg = details["coverage"]["k_reg"]
    stats = SetStatistics([1], 30, mass=True)
    stats.update(scores["validation"], labels)
    again = stats.coverage([0.7, 0.9], True, k_reg)
    for method in METHODS:
        assert details["coverage"][method] == pytest.approx(again[method], rel=1e-4)
    curve = np.array(details["curve"])
    assert curve[:, 0].tolist() == curve_ks(4)
    for k, lambda_val, size, coverage, topk in curve.tolist():
        sets = scores["validation"] >= lambda_val
        assert size == pytest.approx(sets.float().sum(1).mean().item(), abs=0.05) and size == pytest.approx(k, abs=0.2)
        assert coverage == pytest.approx(sets.gather(1, labels[:, None]).float().mean().item(), abs=0.04)
        assert topk == pytest.approx(np.mean(stats.column("rank") < int(k)), abs=0.04)
        if f"{k:g}" in config["thresholds"]:
            assert lambda_val == config["thresholds"][f"{k:g}"]


def test_the_picture_of_the_trade_off(folder):
    """Two lines, sets and top-K, with a marker for every point of the curve that is recorded."""
    picture = (folder.parent / "tradeoff.svg").read_text()
    lines = ("sets, of this size on average", "top-K, so many for every image")
    for words in (folder.name, *lines, "classes in a set, mean on validation"):
        assert words in picture
    curve = json.loads((folder / "calibration.json").read_text())["curve"]
    points = len(curve) + sum(float(row[0]).is_integer() for row in curve)
    markers = re.findall(r'<g clip-path="[^"]*">(.*?)</g>', picture, re.DOTALL)  # those of ticks and legend are not
    assert sum(group.count("<use ") for group in markers) == points


QUESTIONS = [
    ({"k": 1.7}, ["--k", "1.7"]),
    ({"coverage": 0.9}, ["--coverage", "0.9"]),
    ({"coverage": 0.7, "method": "raps"}, ["--coverage", "0.7", "--method", "raps"]),
    ({"coverage": 0.7, "per_class": True}, ["--coverage", "0.7", "--per-class"]),
    ({"cumulative": 0.6, "max_size": 2}, ["--cumulative", "0.6", "--max-size", "2"]),
]


@pytest.mark.parametrize(("question", "options"), QUESTIONS, ids=lambda part: "")
def test_every_door_gives_the_same_sets(folder, scored, image_folder, capsys, question, options):
    """The function, the method of the model, the pipeline and the command."""
    model, _ = scored
    images = [str(path) for path in sorted((image_folder / "test").glob("*/0.png"))]
    transform = transform_for(model)
    pixels = torch.stack([transform.image(path) for path in images])
    scores = model_scores(model, pixels, question.get("k"))
    expected = ranked_sets(scores, answer(scores, model.config, min_size=1, **question))
    names = [[CLASSES[j] for j in found] for found in expected]

    classify = pipeline("average-k-image-classification", model=str(folder), k=2)  # the call's question goes first
    assert [[item["label"] for item in found] for found in classify(images, **question)] == names
    capsys.readouterr()
    assert main(["predict", str(folder), *images, "--json", *options]) == 0
    assert [[item["label"] for item in row["set"]] for row in json.loads(capsys.readouterr().out)] == names
    if isinstance(model, AvgKForImageClassification):
        assert model.predict_sets(pixels, min_size=1, **question) == expected


@pytest.mark.parametrize("how", [{}, {"method": "aps"}, {"per_class": True}], ids=["lac", "aps", "per class"])
def test_evaluate_reports_the_coverage_that_is_reached(folder, scored, splits, image_folder, capsys, how):
    model, scores = scored
    labels = torch.tensor(splits["test"]["label"])
    options = ["--method", how["method"]] if "method" in how else ["--per-class"] * bool(how)
    capsys.readouterr()
    assert main(["evaluate", str(folder), str(image_folder), "--coverage", "0.7", *options, "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    sets = answer(scores["test"], model.config, coverage=0.7, **how)
    hit = sets.gather(1, labels[:, None])[:, 0]
    name = "coverage_" + {"aps": "aps_", "": "per_class_" * ("per_class" in how)}[how.get("method", "")] + "0.7"
    assert metrics[name] == pytest.approx(hit.float().mean().item(), abs=0.04)
    assert metrics[f"{name}_size"] == pytest.approx(sets.sum(1).float().mean().item(), abs=0.1)
    by_class = [hit[labels == j].float().mean().item() for j in range(6)]
    if "per_class" in how:
        assert metrics[f"{name}_worst_class"] == pytest.approx(min(by_class), abs=0.21)
        assert metrics[f"{name}_mean_class"] == pytest.approx(np.mean(by_class), abs=0.04)
    assert sorted(found for found in metrics if found.startswith("coverage")) == sorted(
        [name, f"{name}_size"] + [f"{name}_{part}_class" for part in ("worst", "mean") if "per_class" in how]
    )
    card = render_card("trees", model.config, {"test": metrics}, {}, calibrated_only=True).content
    words = how.get("method", "per class" if how else "lac")
    assert f"{100 * metrics[name]:.2f}% ({words}) | {metrics[f'{name}_size']:.2f} |" in card


def test_commands_refuse_in_one_line(folder, image_folder, capsys):
    image = str(image_folder / "test" / "oak" / "0.png")
    for arguments, message in (
        (["predict", str(folder), image, "--coverage", "0.95"], "coverage=0.95 is not recorded with method='lac'"),
        (["predict", str(folder), image, "--k", "2", "--cumulative", "0.5"], "are different questions"),
        (["predict", str(folder), image, "--max-size", "0"], "max_size=0 is below min_size=1"),
        (["evaluate", str(folder), str(image_folder), "--coverage", "0.8"], "coverage=0.8 is not recorded"),
        (["calibrate", str(folder), str(image_folder), "--k", "2", "--coverage", "0.99"], "takes 99 at least"),
        (["calibrate", str(folder), str(image_folder), "--k", "2", "--coverage", "2"], "coverage=2.0 must be"),
    ):
        assert main(arguments) == 2
        error = capsys.readouterr().err.strip().splitlines()[-1]
        assert error.startswith(f"avgk {arguments[0]}: ") and message in error, error


def test_a_calibration_says_what_it_replaces(folder, image_folder, tmp_path, capsys):
    model = shutil.copytree(folder, tmp_path / "model")
    (model / "README.md").write_text("a card")
    capsys.readouterr()
    assert main(["calibrate", str(model), str(image_folder), "--k", "1", "2", "3", "--coverage", "0.7"]) == 0
    printed = capsys.readouterr().out
    assert "\nK = 4 of an earlier calibration: not recorded any more\n" in printed
    assert "\ncoverage = 0.9 of an earlier calibration: not recorded any more\n" in printed
    assert "older than these thresholds: README.md (`avgk calibrate` with --out another folder" in printed


def test_a_card_has_no_results_for_a_k_that_was_not_evaluated(make_model):
    model = make_model()
    Calibration.store(model.config, {1: 0.3, 1.5: 0.25, 2: 0.2}, {})
    metrics = {"top1_accuracy": 0.5}
    for suffix in ("", "@1"):
        names = ("average_k_accuracy", "mean_set_size", "lambda_val", "empty_sets")
        metrics |= {f"{name}{suffix}": 0.125 for name in names}
    card = render_card("trees", model.config, {"test": metrics}, {}, "someone/trees")
    rows = [line.split(" | ")[0] for line in card.content.partition("## Results")[2].splitlines()]
    assert [row for row in rows if row in ("| 1", "| 1.5", "| 2")] == ["| 1", "| 2"]
    assert {result.metric_name for result in card.data.eval_results} == {
        "average-1 accuracy", "average-2 accuracy", "mean set size for K = 1", "mean set size for K = 2",
        "top-1 accuracy",
    }  # fmt: skip


def test_training_records_what_the_images_allow(make_trainer):
    """0.9 and 0.95 by default, for 0.99 the 30 images are too few; the test metrics say what was reached."""
    trainer = make_trainer(num_train_epochs=1, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    metrics = trainer.evaluate()
    config = trainer.model.config
    assert (
        list(Calibration.of(config).coverage["lac"])
        == list(Calibration.of(config).coverage["raps"])
        == ["0.9", "0.95"]
    )
    assert "per_class" not in Calibration.of(config).coverage and not any("coverage" in name for name in metrics)
    again = trainer.evaluate(trainer.eval_dataset, metric_key_prefix="test")
    assert again["test_coverage_0.9"] >= 28 / 30
    assert again["test_coverage_0.95_size"] >= again["test_coverage_0.9_size"]
    metrics = {name.removeprefix("test_"): value for name, value in again.items()}
    card = render_card("someone/trees", config, {"test": metrics}, {}).content
    reached = f"{100 * metrics['coverage_0.9']:.2f}% (lac) | {metrics['coverage_0.9_size']:.2f} |"
    assert f"\n| 0.9 | lac, aps, raps | {reached}\n| 0.95 | lac, aps, raps |" in card
    for k, lambda_val, size, coverage, topk in config.calibration["curve"]:
        row = f"| {k:g} | {size:.2f} | {100 * coverage:.2f}% | {100 * topk:.2f}% | {lambda_val:.6f} |"
        assert f"\n{row}\n" in card.partition("## Trade-off")[2]
    trainer.args.calibrate_coverage = []
    trainer.evaluate()
    assert Calibration.of(config).coverage == {} and config.thresholds


def test_levels_in_a_recipe(recipe):
    from avgk_hf.recipes import parse_recipe

    assert parse_recipe([str(recipe)])[2].calibrate_coverage == [0.9, 0.95, 0.99]
    assert parse_recipe([str(recipe), "--calibrate_coverage", "0.8"])[2].calibrate_coverage == [0.8]
    recipe.write_text(recipe.read_text() + "calibrate_coverage: []\ncalibrate_per_class: true\n")
    args = parse_recipe([str(recipe)])[2]
    assert args.calibrate_coverage == [] and args.calibrate_per_class


def test_auto_head_records_the_coverage_of_its_own_k(make_model, splits, tmp_path):
    model = make_model(head="auto")
    evaluate(model, splits["validation"], [1, 3], calibrate=True, coverage=[0.9])
    assert Calibration.of(model.config).head() == "ml"
    ml = Calibration.of(model.config).coverage
    with torch.no_grad():  # the other head is the better one now
        for own, other in zip(model.ml_head.parameters(), model.sccp_head.parameters(), strict=True):
            own.copy_(other), other.copy_(torch.randn_like(other))
    model.ml_head, model.sccp_head = model.sccp_head, model.ml_head
    evaluate(model, splits["validation"], [1, 3], calibrate=True, coverage=[0.9])
    head = Calibration.of(model.config).head()
    fixed = make_model(head=head)
    fixed.load_state_dict(model.state_dict())
    evaluate(fixed, splits["validation"], [1, 3], calibrate=True, coverage=[0.9])
    assert head != "ml" and model.config.calibration["head"] == head
    assert Calibration.of(model.config).coverage == Calibration.of(fixed.config).coverage != ml
    assert model.config.calibration["curve"] == fixed.config.calibration["curve"]
    assert evaluate(model, splits["test"])["coverage_0.9"] == evaluate(fixed, splits["test"])["coverage_0.9"]
    assert f"with the head\n`{head}`, which answers for K = 2" in render_card("trees", model.config, {}, {}).content


@pytest.mark.parametrize("kind", ["sigmoid", "logit"])
def test_other_scores_the_whole_way(make_model, splits, image_folder, tmp_path, kind):
    """From the calibration to the pipeline, by size and by coverage; what sums probabilities is not recorded."""
    model = make_model(score=kind)
    evaluate(model, splits["validation"], [1, 3], calibrate=True, coverage=[0.9], per_class=True)
    assert set(Calibration.of(model.config).coverage) == {"num_examples", "lac", "class_counts", "per_class"}
    model.save_pretrained(tmp_path)
    classify = pipeline("average-k-image-classification", model=str(tmp_path))
    path = image_folder / "test" / "oak" / "0.png"
    scores = model_scores(model, transform_for(model).image(path)[None])
    for question in ({"coverage": 0.9}, {"k": 2.4}, {"coverage": 0.9, "per_class": True}):
        expected = ranked_sets(scores, answer(scores, model.config, min_size=1, **question))[0]
        assert [item["label"] for item in classify(str(path), **question)] == [
            model.config.id2label[j] for j in expected
        ]
    metrics = evaluate(model, splits["test"], [2.4], coverage=[0.9])
    assert 0 < metrics["coverage_0.9"] <= 1 and metrics["mean_set_size@2.4"] > 0


def test_a_pipeline_keeps_its_method_for_another_level(folder, image_folder):
    images = [str(path) for path in sorted((image_folder / "test").glob("*/*.png"))]
    ask = pipeline("average-k-image-classification", model=str(folder), coverage=0.9, method="aps")
    plain = pipeline("average-k-image-classification", model=str(folder))
    assert ask(images, coverage=0.7) == plain(images, coverage=0.7, method="aps") != plain(images, coverage=0.7)
    assert ask(images, k=2) == plain(images, k=2)
    assert ask(images, coverage=0.9, per_class=True) == plain(images, coverage=0.9, per_class=True)
    ask = pipeline("average-k-image-classification", model=str(folder), coverage=0.9, per_class=True)
    assert ask(images, method="aps") == plain(images, coverage=0.9, method="aps")


def test_evaluation_at_a_k_in_between(make_model, splits, image_folder):
    model = make_model()
    evaluate(model, splits["validation"], [1, 3], calibrate=True)
    metrics = evaluate(model, load_splits(str(image_folder))["test"], [2.5])
    assert metrics["lambda_val@2.5"] == Calibration.of(model.config).threshold(2.5)
    with pytest.raises(ValueError, match=r"no threshold is stored for k=3.5.*\[1, 3\]"):
        evaluate(model, splits["test"], [3.5])
