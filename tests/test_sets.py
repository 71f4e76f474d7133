"""Thresholds and sets against sorting everything, and against hand-made cases."""

import math
import warnings
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from asking import Config, threshold
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from played import Processes
from torch.utils._python_dispatch import TorchDispatchMode

from avgk_hf.calibration import Answer, Calibration
from avgk_hf.checks import is_number
from avgk_hf.evaluation import calibrate, evaluate
from avgk_hf.records import LEAST_PREVALENCE
from avgk_hf.scores import all_scores, check_finite, head_logits, head_scores, score, wide
from avgk_hf.sets import AverageKThreshold, average_k_threshold, check_k, k_key, predict_sets, ranked_mass, ranked_sets
from avgk_hf.statistics import MeanScores, SetStatistics, class_means, curve_ks, set_size_counts, sizes_only


def sorted_threshold(scores: np.ndarray, k: float) -> float:
    """Algorithm 1 as it is written: sort everything."""
    ordered = sorted(scores.astype(np.float32).ravel(), reverse=True)
    rank = round(k * len(scores))
    return float(np.float32(0.5) * (ordered[rank - 1] + ordered[rank]))


def stream_in_parts(scores: np.ndarray, ks: list[float], parts: list[int]) -> AverageKThreshold:
    stream = AverageKThreshold(ks, num_examples=len(scores))
    start = 0
    while start < len(scores):
        size = parts[start % len(parts)]
        stream.update(torch.from_numpy(scores[start : start + size].copy()))
        start += size
    return stream


FEW_VALUES = st.sampled_from([0.0, 0.25, 0.5, 0.5000001, 1.0, -1.0, 1e-30])
ANY_VALUES = st.floats(-(2.0**100), 2.0**100, width=32)


@st.composite
def score_matrices(draw):
    shape = draw(st.tuples(st.integers(1, 30), st.integers(2, 12)))
    scores = draw(hnp.arrays(np.float32, shape, elements=draw(st.sampled_from([FEW_VALUES, ANY_VALUES]))))
    order = draw(st.sampled_from(["as is", "ascending", "descending"]))
    if order != "as is":
        flat = np.sort(scores.ravel())
        scores = (flat if order == "ascending" else flat[::-1]).reshape(shape).copy()
    return scores


@settings(max_examples=400, deadline=None)
@given(score_matrices(), st.lists(st.integers(1, 9), min_size=1, max_size=4), st.data())
def test_streaming_equals_sorting(scores, parts, data):
    n, num_labels = scores.shape
    possible = [k for k in (1, 1.25, 1.5, 2, 3, 5, num_labels - 1) if k < num_labels and round(k * n) < n * num_labels]
    ks = data.draw(st.lists(st.sampled_from(possible), min_size=1, unique=True))
    stream = stream_in_parts(scores, ks, parts)
    assert stream.compute() == {k: sorted_threshold(scores, k) for k in ks}
    sizes = {k: (scores >= np.float32(lambda_val)).sum() / n for k, lambda_val in stream.compute().items()}
    assert stream.mean_set_sizes() == sizes


@pytest.mark.parametrize("order", ["random", "ascending", "descending", "constant", "quantised"])
def test_streaming_with_many_compactions(order):
    rng = np.random.default_rng(0)
    scores = rng.random((500, 300)).astype(np.float32)
    if order == "ascending":
        scores = np.sort(scores.ravel()).reshape(scores.shape)
    elif order == "descending":
        scores = np.sort(scores.ravel())[::-1].reshape(scores.shape)
    elif order == "constant":
        scores[:] = 0.5
    elif order == "quantised":
        scores = np.round(scores, 2)
    for parts in ([1], [500], [7, 64]):
        stream = stream_in_parts(scores, [1, 2.5, 10], parts)
        assert stream.compute() == {k: sorted_threshold(scores, k) for k in (1, 2.5, 10)}
        assert len(stream._held) <= 2 * (10 * 500 + 1)
        for k, size in stream.mean_set_sizes().items():
            assert size == (scores >= np.float32(stream.compute()[k])).sum() / 500


def test_streaming_off_the_cpu_path_equals_numpy(monkeypatch):
    """The code for accelerators, run on CPU tensors: they have no numpy view here."""
    scores = torch.rand(200, 50, generator=torch.Generator().manual_seed(0)).round(decimals=2)
    expected = {k: average_k_threshold(scores, k) for k in (1, 3)}
    monkeypatch.setattr(torch.Tensor, "numpy", lambda self: self)
    stream = AverageKThreshold([1, 3], 200)
    for batch in scores.split(33):
        stream.update(batch)
    monkeypatch.undo()
    assert isinstance(stream._held, torch.Tensor)
    assert stream.compute() == expected
    assert stream.mean_set_sizes() == {k: (scores >= v).sum().item() / 200 for k, v in expected.items()}
    # 38 values are held, then the best 19 of them, 100 to 82; 82.5 comes later, and is the 19th of all
    scores = torch.tensor([*range(100, 62, -1), 82.5, *range(9)], dtype=torch.float32).reshape(12, 4)
    expected, stream = sorted_threshold(scores.numpy(), 1.5), AverageKThreshold([1.5], 12)
    monkeypatch.setattr(torch.Tensor, "numpy", lambda self: self)
    for batch in scores.split(1):
        stream.update(batch)
    monkeypatch.undo()
    assert stream.compute() == {1.5: expected} == {1.5: (83 + 82.5) / 2}


def test_half_precision_scores_are_widened():
    scores = torch.rand(50, 20).bfloat16()
    assert average_k_threshold(scores, 3) == average_k_threshold(scores.float(), 3)


def test_mean_size_is_k_without_ties():
    scores = torch.rand(100, 40, dtype=torch.float32, generator=torch.Generator().manual_seed(1))
    for k in (1, 1.5, 7, 39):
        assert predict_sets(scores, average_k_threshold(scores, k)).sum().item() == round(k * 100)


def test_ties_at_the_threshold_enlarge_the_sets():
    scores = torch.full((4, 5), 0.2)
    stats = SetStatistics([2], num_examples=4)
    stats.update(scores, torch.tensor([0, 1, 2, 3]))
    result = stats.compute()[2]
    assert (result["lambda_val"], result["mean_set_size"]) == (pytest.approx(0.2), 5.0)
    assert result["top1_accuracy"] == 0.25  # ties go to the lower class id


@pytest.mark.parametrize("k", [0, 0.5, 4, 5, -1, math.nan, math.inf, "2", True, None])
def test_k_outside_the_range_is_refused(k):
    with pytest.raises(ValueError, match=r"k=.* must be a number (from 1 to below|in \[1, 4).*e\.g\. `k=2`"):
        average_k_threshold(torch.rand(10, 4), k)


def test_too_few_validation_images_for_k():
    with pytest.raises(ValueError, match=r"k=3.6 cannot be calibrated on 1 image.*needs 5 scores and there are 4"):
        average_k_threshold(torch.rand(1, 4), 3.6)


def test_wrong_number_of_images_is_refused():
    stream = AverageKThreshold([2], num_examples=10)
    stream.update(torch.rand(9, 4))
    with pytest.raises(ValueError, match="9 images were given, but num_examples=10"):
        stream.compute()
    with pytest.raises(ValueError, match="more than the announced num_examples=10"):
        stream.update(torch.rand(2, 4))
    with pytest.raises(ValueError, match="at least one image"):
        AverageKThreshold([2], num_examples=0)
    with pytest.raises(ValueError, match="ks is empty"):
        AverageKThreshold([], num_examples=3)


def test_nan_and_bad_shapes_are_refused():
    stream = AverageKThreshold([2], num_examples=10)
    with pytest.raises(ValueError, match="NaN among the scores of images 0 to 4"):
        stream.update(torch.full((5, 4), math.nan))
    with pytest.raises(ValueError, match=r"shape \(5,\)"):
        stream.update(torch.rand(5))
    stream.update(torch.rand(1, 4))
    with pytest.raises(ValueError, match="scores for 3 classes after scores for 4"):
        stream.update(torch.rand(1, 3))
    with pytest.raises(ValueError, match="lambda_val=nan"):
        predict_sets(torch.rand(2, 3), math.nan)
    with pytest.raises(ValueError, match="min_size=4"):
        predict_sets(torch.rand(2, 3), 0.1, min_size=4)


@pytest.mark.parametrize("stored", [False, True])
def test_a_batch_that_is_refused_does_not_count(stored):
    """The stream and the statistics go on as if it had not been there."""
    scores, labels = torch.rand(10, 4, generator=torch.Generator().manual_seed(0)), torch.arange(10) % 4
    refused = [
        (torch.full((5, 4), math.nan), labels[:5], "NaN among the scores of images 0 to 4"),
        (torch.full((1, 2), 0.5), labels[:1], r"k=2 must be a number in \[1, 2\)"),
        (torch.rand(11, 4), torch.arange(11) % 4, "more than the announced num_examples=10"),
        (torch.rand(3, 4), torch.tensor([0, 1, -1]), "label -1 lies outside"),
    ]
    for broken, true_classes, message in refused:
        if not stored and true_classes.min() >= 0:
            stream = AverageKThreshold([2, 3], 10)
            with pytest.raises(ValueError, match=message):
                stream.update(broken)
            stream.update(scores)
            assert stream.compute() == {k: average_k_threshold(scores, k) for k in (2, 3)}
        if stored and broken.shape[1] == 2:  # what a threshold was given for may have any number of classes
            continue
        statistics = SetStatistics([2, 3], 10, {2: 0.5, 3: 0.25} if stored else None)
        with pytest.raises(ValueError, match=message):
            statistics.update(broken, true_classes)
        for part in (slice(7), slice(7, 10)):
            statistics.update(scores[part], labels[part])
        whole = SetStatistics([2, 3], 10, {2: 0.5, 3: 0.25} if stored else None)
        whole.update(scores, labels)
        assert statistics.compute() == whole.compute()


def test_min_size_adds_the_best_classes():
    scores = torch.tensor([[0.1, 0.3, 0.2], [0.9, 0.8, 0.0]])
    sets = predict_sets(scores, 0.7, min_size=1)
    assert ranked_sets(scores, sets) == [[1], [0, 1]]
    assert ranked_sets(scores, predict_sets(scores, 0.7)) == [[], [0, 1]]
    assert ranked_sets(scores, predict_sets(scores, 0.95, min_size=2)) == [[1, 2], [0, 1]]
    with pytest.raises(ValueError, match="shorter"):  # sets of other images
        ranked_sets(scores, sets[:1])


def test_statistics_equal_a_naive_count():
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(60, 7, generator=generator), torch.randint(0, 7, (60,), generator=generator)
    counts = [500, 200, 60, 20, 19, 5, 1]
    lambda_val = 0.7
    stats = SetStatistics([2.5], 60, thresholds={2.5: lambda_val}, train_counts=counts)
    for rows, row_labels in zip(scores.split(11), labels.split(11), strict=True):
        stats.update(rows, row_labels)
    result = stats.compute()[2.5]

    rows = list(zip(scores.tolist(), labels.tolist(), strict=True))
    hits = [row[y] >= np.float32(lambda_val) for row, y in rows]
    sizes = [sum(s >= np.float32(lambda_val) for s in row) for row, _ in rows]
    ranks = [sorted(row, reverse=True).index(row[y]) for row, y in rows]
    by_class = {c: np.mean([h for h, (_, y) in zip(hits, rows, strict=True) if y == c]) for c in set(labels.tolist())}
    assert result["average_k_accuracy"] == pytest.approx(np.mean(hits))
    assert result["mean_set_size"] == pytest.approx(np.mean(sizes))
    assert stats.set_sizes(2.5).tolist() == sizes
    assert result["empty_sets"] == pytest.approx(np.mean([size == 0 for size in sizes]))
    assert result["top1_accuracy"] == pytest.approx(np.mean([rank == 0 for rank in ranks]))
    assert result["topk_accuracy"] == pytest.approx(np.mean([rank < 2 for rank in ranks]))
    assert result["macro_accuracy"] == pytest.approx(np.mean(list(by_class.values())))
    assert result["many_shot_accuracy"] == pytest.approx(np.mean([by_class[c] for c in (0, 1)]))
    assert result["medium_shot_accuracy"] == pytest.approx(np.mean([by_class[c] for c in (2, 3)]))
    assert result["few_shot_accuracy"] == pytest.approx(np.mean([by_class[c] for c in (4, 5, 6)]))


GIVEN = {1: 6.5 / 64, 2: 3.5 / 64}  # thresholds that are scores


def test_everything_in_one_pass_equals_loops():
    """Batches at their positions, in any order: set sizes, questions, sums, ranks and the curve."""
    generator = torch.Generator().manual_seed(2)
    scores = torch.randint(0, 9, (40, 6), generator=generator).add(0.5).div(64)  # ties, which go to the lower class id
    labels = torch.randint(0, 4, (40,), generator=generator)
    labels[17] = 4  # the only image of its class; class 5 has none
    answers = {"0.9": Answer("ml", lambda p, *_: p >= 0.1), "per_class_0.9": Answer("ml", lambda p, *_: p == p.max())}
    rows = list(zip(scores.tolist(), labels.tolist(), strict=True))
    orders = [sorted(range(6), key=lambda j, row=row: (-row[j], j)) for row, _ in rows]
    ranks = [order.index(y) for order, (_, y) in zip(orders, rows, strict=True)]

    def filled(**kwargs):
        stats = SetStatistics([2, 1], 40, mass=True, answers=answers, **kwargs)
        for first in (24, 0, 8, 32, 16):
            stats.update(scores[first : first + 8], labels[first : first + 8], first)
        return stats

    for stats in (filled(), filled(thresholds=GIVEN)):
        assert stats.num_labels == 6 and stats.labels.tolist() == labels.tolist()
        assert stats.column("rank").tolist() == ranks
        assert stats.column("true").tolist() == scores.gather(1, labels[:, None])[:, 0].tolist()
        assert stats.column("best").tolist() == scores.amax(1).tolist()
        sums = [sum(row[j] for j in order[:r]) for (row, _), order, r in zip(rows, orders, ranks, strict=True)]
        assert stats.column("mass").tolist() == pytest.approx(sums, rel=1e-12)
        metrics = stats.coverage_metrics()
        for name, answer in answers.items():
            sets = answer.sets(scores).tolist()
            hits = [of_image[y] for of_image, (_, y) in zip(sets, rows, strict=True)]
            by_class = [np.mean([h for h, (_, y) in zip(hits, rows, strict=True) if y == c]) for c in range(5)]
            assert metrics[f"coverage_{name}"] == pytest.approx(np.mean(hits))
            assert metrics[f"coverage_{name}_size"] == pytest.approx(np.mean([sum(of_image) for of_image in sets]))
            assert stats.answered()[name]["worst_class"] == pytest.approx(min(by_class))
            assert stats.answered()[name]["mean_class"] == pytest.approx(np.mean(by_class))
        assert metrics["coverage_per_class_0.9_worst_class"] == stats.answered()["per_class_0.9"]["worst_class"]
        assert metrics["coverage_per_class_0.9_mean_class"] == stats.answered()["per_class_0.9"]["mean_class"]
        assert len(metrics) == 6
    assert stats.set_sizes(1).tolist() == (scores >= GIVEN[1]).sum(1).tolist()
    assert stats.compute()[1]["empty_sets"] == (scores < GIVEN[1]).all(1).float().mean().item() > 0
    assert stats.compute()[1]["lambda_val"] in scores.amax(1), "no best score equals the threshold"
    assert [result["mean_set_size"] for result in stats.compute().values()] == [
        (scores >= GIVEN[2]).sum().item() / 40,
        (scores >= GIVEN[1]).sum().item() / 40,
    ]
    stats = filled()
    with pytest.raises(ValueError, match="set sizes per image are known only with given thresholds"):
        stats.set_sizes(1)
    assert [row[0] for row in stats.curve()] == [1, 1.1, 1.2, 1.35, 1.5, 1.75, 2]
    for k, lambda_val, size, coverage, topk in stats.curve():
        assert lambda_val == sorted_threshold(scores.numpy(), k)
        sets = scores >= lambda_val
        assert size == sets.sum().item() / 40
        assert coverage == pytest.approx(np.mean([of_image[y] for of_image, (_, y) in zip(sets, rows, strict=True)]))
        assert topk == pytest.approx(np.mean([rank < int(k) for rank in ranks]))
    assert {type(value) for row in stats.curve() for value in row} == {float}
    for k, result in stats.compute().items():
        curve = next(row for row in stats.curve() if row[0] == k)
        names = ("lambda_val", "mean_set_size", "average_k_accuracy", "topk_accuracy")
        assert [k, *(result[name] for name in names)] == curve
    record = stats.coverage([0.5, 0.9], per_class=True, k=2.4)
    assert record["k_reg"] == 2 and record["class_counts"] == torch.bincount(labels, minlength=6).tolist()
    assert record["aps"]["0.5"] == sorted(sums)[math.ceil(41 * 0.5) - 1]
    assert set(SetStatistics.coverage(filled(thresholds=GIVEN), [0.5], False, 2)) >= {"lac", "aps", "raps"}
    plain = SetStatistics([1], 40)
    plain.update(scores, labels)
    assert set(plain.coverage([0.5], False, 1)) == {"num_examples", "lac"}


def test_statistics_refuse():
    scores, labels = torch.rand(4, 3), torch.tensor([0, 1, 2, 0])
    for arguments, message in (
        ((scores, labels[:3]), r"labels of shape \(3,\) and type torch.int64 for 4 images: expected one class id"),
        ((scores, labels.float()), "type torch.float32 for 4 images"),
        ((scores, labels > 0), "type torch.bool for 4 images"),
        ((scores, labels - 1), r"label -1 lies outside \[0, 3\)"),
        ((scores, labels + 1), r"label 3 lies outside \[0, 3\)"),
        ((scores, labels, 1), "more than the announced num_examples=4 images"),
        ((torch.rand(5, 3), torch.zeros(5, dtype=torch.int64)), "more than the announced num_examples=4 images"),
    ):
        for thresholds in (None, {1: 0.5}):
            with pytest.raises(ValueError, match=message):
                SetStatistics([1], 4, thresholds).update(*arguments)
    stats = SetStatistics([1], 4, {1: 0.5})
    with pytest.raises(ValueError, match="no images were evaluated"):
        stats.compute()
    stats.update(scores[:2], labels[:2])
    with pytest.raises(ValueError, match="scores for 2 classes after scores for 3"):
        stats.update(scores[:2, :2], labels[:2])
    with pytest.raises(ValueError, match="NaN among the scores of images 2 to 3: NaN is in no set"):
        stats.update(torch.full((2, 3), math.nan), labels[:2])
    stats.update(scores[2:].double().requires_grad_(), labels[2:].to(torch.uint8))
    assert stats.labels.tolist() == labels.tolist() and stats.num_seen == 4
    for thresholds in ({}, {1: None}, {1: math.nan}, {2: 0.5}):
        with pytest.raises(ValueError, match=r"thresholds\[1\]=.* is not a number"):
            SetStatistics([1], 4, thresholds)
    with pytest.raises(ValueError, match=r"k=0 must be"):
        SetStatistics([0], 4, {0: 0.5})
    with pytest.raises(ValueError, match="train_counts has 2 values for 3 classes"):
        class_means(np.ones(1), np.zeros(1, int), 3, np.array([1, 2]))


def test_columns_lie_where_they_are_wanted():
    for thresholds in (None, {1: 0.5}):
        stats = [SetStatistics([1], 4, thresholds, mass=True, answers={"q": None}) for _ in range(2)]
        columns = [stats[0].columns(), stats[1].columns("meta")]
        assert {column.device.type for column in columns[0].values()} == {"cpu"}
        assert {column.device.type for column in columns[1].values()} == {"meta"}
        assert columns[1]["mass"].dtype == torch.float64 and columns[1]["true"].dtype == torch.float32
        assert {"q size", "q hit"} <= set(columns[1]) and ("1" in columns[1]) == (thresholds is not None)


@pytest.mark.filterwarnings("error::pytest.PytestUnhandledThreadExceptionWarning")
@pytest.mark.parametrize("thresholds", [None, {1: 0.95, 2.5: 0.7}], ids=["calibrate", "evaluate"])
@pytest.mark.parametrize("first_share", [40, 60], ids=["uneven", "one has none"])
def test_two_processes_count_as_one(first_share, thresholds, monkeypatch):
    """Thresholds, accuracies, sizes, coverages and frequencies of two are those of one, bit for bit."""
    generator = torch.Generator().manual_seed(0)
    scores = (torch.rand(60, 9, generator=generator) * 50).round() / 50  # with ties
    labels = torch.randint(0, 9, (60,), generator=generator)

    def counted(rows):
        found = SetStatistics([1, 2.5], 60, thresholds, train_counts=[5] * 5 + [50] * 4, mass=True)
        for i in range(0, 60, 10):
            if i in rows:
                found.update(scores[i : i + 10], labels[i : i + 10], first=i)
        return found

    def frequencies(rows):
        found = MeanScores()
        if len(rows):
            found.update(scores[rows.start : rows.stop])
        return found

    def work(rank):
        rows = range(first_share) if rank == 0 else range(first_share, 60)
        found, mean = counted(rows), frequencies(rows)
        found.merge_processes("cpu")
        mean.merge_processes(9, "cpu")
        return found, mean

    whole = counted(range(60))
    for found, mean in Processes(monkeypatch).run(work):
        assert found.compute() == whole.compute() and (found.num_seen, found.num_labels) == (60, 9)
        assert {type(found.num_seen), type(found.num_labels)} == {int}
        assert found.coverage([0.8], True, 2) == whole.coverage([0.8], True, 2)
        assert np.array_equal(found.column("best"), whole.column("best"))
        if thresholds is None:
            assert found.curve() == whole.curve()
        else:
            assert np.array_equal(found.set_sizes(2.5), whole.set_sizes(2.5))
        assert mean.prevalence() == frequencies(range(60)).prevalence()
    alone = counted(range(60))
    alone.merge_processes("cpu")  # one process has nothing to exchange
    assert alone.compute() == whole.compute()


def test_no_class_is_estimated_as_never_seen():
    mean = MeanScores()
    mean.update(torch.tensor([[0.75, 0.25, 0.0, -math.inf]]))
    assert mean.prevalence() == [0.75, 0.25, LEAST_PREVALENCE, LEAST_PREVALENCE]


def test_sizes_of_images_without_labels():
    """That of the K that is watched comes first and has no K in its name; nothing else is reported."""
    metrics = {"mean_set_size": 2.5, "mean_set_size@1": 1.25, "empty_sets": 0.5, "lambda_val@1": 0.5}
    assert list(sizes_only(metrics, 7, 2, 2).items()) == [
        ("num_images", 7), ("mean_set_size", 2.5), ("mean_set_size@1", 1.25)
    ]  # fmt: skip
    assert sizes_only(metrics, 7, 1, 2) == {"num_images": 7, "mean_set_size": 1.25, "mean_set_size@2": 2.5}
    stats = SetStatistics([1], 2, {1: 0.5})
    stats.update(torch.tensor([[0.9, 0.8, 0.0], [0.4, 0.0, 0.0]]))
    assert stats.compute() == {1: {"lambda_val": 0.5, "mean_set_size": 1.0, "empty_sets": 0.5}}
    bare = {"mean_set_size@1": 1.25, "mean_set_size@3": 3.0}  # a classifier without a K of its own
    assert sizes_only(bare, 7, 3, None) == {"num_images": 7, "mean_set_size": 3.0, "mean_set_size@1": 1.25}


def test_how_many_images_got_sets_of_each_size():
    stats = SetStatistics([1], 4, {1: 0.5})
    scores = torch.tensor([[0.9, 0.8, 0.0], [0.9, 0.0, 0.0], [0.0, 0.0, 0.0], [0.9, 0.9, 0.9]])
    stats.update(scores, torch.tensor([0, 1, 1, 2]))
    assert set_size_counts(stats.set_sizes(1), stats.labels, None) == {"all": [1, 1, 1, 1]}
    # the first two have few and medium images, the last many
    found = set_size_counts(stats.set_sizes(1), stats.labels, [0, 20, 101])
    assert found == {"all": [1, 1, 1, 1], "few": [0, 0, 1], "medium": [1, 1], "many": [0, 0, 0, 1]}


def test_the_sizes_of_the_curve():
    steps = [1, 1.1, 1.2, 1.35, 1.5, 1.75, 2, 2.5, 3, 4, 5, 6, 8]
    assert curve_ks(1) == [1] and curve_ks(1.05) == [1, 1.05]
    assert curve_ks(9.5) == [*steps, 9.5] and curve_ks(10) == [*steps, 10]
    assert curve_ks(130) == [*steps, *(10 * step for step in steps), 100, 110, 120, 130]
    assert {type(k) for k in curve_ks(20)} == {float}


def test_shot_borders():
    means = class_means(np.array([0, 0, 1, 1]), np.arange(4), 4, np.array([19, 20, 100, 101]))
    assert means == {
        "macro_accuracy": 0.5,
        "few_shot_accuracy": 0.0,
        "medium_shot_accuracy": 0.5,
        "many_shot_accuracy": 1.0,
    }


def test_classes_without_images_do_not_count():
    means = class_means(np.array([1, 0, 1]), np.array([0, 1, 1]), 4, np.array([5, 5, 5, 500]))
    assert means == {"macro_accuracy": 0.75, "few_shot_accuracy": 0.75}


def test_heads_and_scores():
    logits, sccp_logits = torch.randn(5, 4), torch.randn(5, 4)
    assert torch.equal(score(logits, "sigmoid"), logits.sigmoid())
    assert torch.equal(score(logits, "logit"), logits)
    assert torch.equal(head_scores(logits, sccp_logits, "sccp"), sccp_logits.softmax(1))
    mean = (logits.softmax(1) + sccp_logits.softmax(1)) / 2
    assert torch.equal(head_scores(logits, sccp_logits, "mean"), mean)
    with pytest.raises(ValueError, match="head='mean' needs the SCCP head"):
        head_scores(logits, None, "mean")
    assert [k_key(k) for k in (1, 2.0, 2.5)] == ["1", "2", "2.5"]


def test_logits_that_are_not_finite_are_named_by_image():
    logits = torch.zeros(9, 3)
    check_finite(logits)
    check_finite(torch.full((2, 2), 3e38))  # whose sum float32 cannot hold
    check_finite(torch.full((2, 2), 1.7e308, dtype=torch.float64))  # nor float64
    logits[[2, 4], [0, 2]] = torch.tensor([math.nan, math.inf])
    for call, numbers in (
        (lambda: check_finite(logits), "2, 4"),
        (lambda: check_finite(logits, 64), "66, 68"),
        (lambda: check_finite(logits.requires_grad_().sum(1), first=1), "3, 5"),
        (lambda: check_finite(torch.tensor(math.nan)), "0"),
        (lambda: check_finite(torch.full((5, 1), -math.inf)), "0, 1, 2, 3, 4"),
        (lambda: check_finite(torch.full((6, 1), -math.inf)), "0, 1, 2, 3, 4, ..."),
        (lambda: score(logits), "2, 4"),
        (lambda: score(logits, first=7), "9, 11"),
        (lambda: all_scores(torch.zeros(9, 3), logits), "2, 4"),
        (lambda: all_scores(torch.zeros(9, 3), logits, first=30), "32, 34"),
        (lambda: all_scores(logits, torch.zeros(9, 3), first=30), "32, 34"),
    ):
        with pytest.raises(ValueError, match=rf"the logits of image\(s\) {numbers} are NaN or infinite"):
            call()


def test_scores_of_every_head():
    logits, sccp_logits = torch.randn(2, 5, 4)
    for kind, function in (("softmax", lambda z: z.softmax(-1)), ("sigmoid", torch.sigmoid), ("logit", lambda z: z)):
        one, other = function(logits), function(sccp_logits)
        expected = {"ml": one, "sccp": other, "mean": (one + other) / 2}
        found = all_scores(logits, sccp_logits, kind)
        assert list(found) == list(expected)
        for head in expected:
            assert torch.equal(found[head], expected[head])
            assert torch.equal(head_scores(logits, sccp_logits, head, kind), expected[head])
        assert list(all_scores(logits, None, kind)) == ["ml"]
        assert torch.equal(head_scores(logits, None, kind=kind), one)
    assert torch.equal(score(logits), logits.softmax(-1)) and torch.equal(
        score(logits.bfloat16()), score(logits.bfloat16().float())
    )
    assert score(logits.double()).dtype == score(logits.half(), "logit").dtype == torch.float32
    assert torch.equal(all_scores(logits, None)["ml"], logits.softmax(-1))
    with pytest.raises(ValueError, match=r"score='max' is unknown; choose one of \['softmax', 'sigmoid', 'logit'\]"):
        score(logits, "max")
    with pytest.raises(ValueError, match=r"head='auto' is unknown; choose one of \['ml', 'sccp', 'mean'\]"):
        head_scores(logits, sccp_logits, "auto")
    with pytest.raises(ValueError, match="head='sccp' needs the SCCP head"):
        head_scores(logits, None, "sccp")
    for output in ({"logits": logits}, SimpleNamespace(logits=logits)):  # of models of any class
        assert head_logits(output)[0] is logits and head_logits(output)[1] is None


def test_what_is_a_number():
    for value in (0, -3, 2.5, math.inf, -math.inf, 2**1023 - 1, -(2**1023) + 1):
        assert is_number(value) is True
    for value in (math.nan, True, False, None, "1", [1], 2**1023, -(2**1023), 10**400):
        assert is_number(value) is False
    assert [check_k(1), check_k(5.5, 6), check_k(10**9)] == [1, 5.5, 10**9]
    for k, num_labels, message in (
        (
            0.999,
            None,
            r"k=0.999 must be a number from 1 to below the number of classes: the average number .* `k=2`\.$",
        ),
        (math.inf, None, r"k=inf must be a number from 1 to below"),
        (6, 6, r"k=6 must be a number in \[1, 6\) for 6 classes: .*`k=2`\.$"),
        (1, 1, r"k=1 must be .* for 1 classes: .*One class makes no sets: give more\.$"),
        (2, 2, r"k=2 must be .* for 2 classes: .*`k=1`\.$"),
        (3, 3, r"k=3 must be .* for 3 classes: .*`k=2`\.$"),
    ):
        with pytest.raises(ValueError, match=message):
            check_k(k, num_labels)


def test_what_is_no_matrix_of_scores_is_refused():
    for scores, message in (
        ("many", r"scores of type str are no matrix of numbers \((?!None).+\): give"),
        ([[1.0], [1.0, 2.0]], r"scores of type list are no matrix of numbers \((?!None).+\): give"),
        (torch.zeros(2, 3, dtype=torch.bool), "scores of type torch.bool: expected real numbers"),
        (torch.zeros(2, 3, dtype=torch.complex64), "scores of type torch.complex64: expected real numbers"),
        (torch.zeros(3), r"scores of shape \(3,\): expected \(images, classes\)"),
        (torch.zeros(1, 2, 3), r"scores of shape \(1, 2, 3\)"),
    ):
        for call in (lambda s=scores: average_k_threshold(s, 1), lambda s=scores: predict_sets(s, 0.5)):
            with pytest.raises(ValueError, match=message) as error:
                call()
            assert "\n" not in str(error.value)
    assert average_k_threshold([[4, 3, 2, 1]], 2) == average_k_threshold(np.array([[4.0, 3, 2, 1]]), 2) == 2.5
    with pytest.raises(ValueError, match="scores are empty"):
        average_k_threshold(torch.zeros(0, 3), 1)


def test_a_stream_refuses_by_position_and_number():
    stream = AverageKThreshold([1, 2], num_examples=np.int64(6))
    stream.update(torch.rand(2, 4))
    stream.update(torch.rand(0, 4))
    with pytest.raises(ValueError, match="NaN among the scores of images 2 to 4"):
        stream.update(torch.tensor([[0.1] * 4, [0.2] * 4, [0.3, 0.1, math.nan, 0.2]]))
    with pytest.raises(ValueError, match=r"k=3 must be a number in \[1, 3\)"):
        AverageKThreshold([1, 3], 5).update(torch.rand(1, 3))
    for number in (True, 2.0, "3", 0, -1):
        with pytest.raises(ValueError, match="at least one image to calibrate on"):
            AverageKThreshold([1], number)
    infinite = AverageKThreshold([1], 1)
    infinite.update(torch.tensor([[math.inf, -math.inf, 0.0]]))
    with pytest.raises(ValueError, match=r"the threshold for k=1 would be inf, between the scores inf and 0.0"):
        infinite.compute()
    assert average_k_threshold(torch.tensor([[math.inf, 1.0, 0.5, 0.0]]), 2) == 0.75
    with warnings.catch_warnings():  # a refusal says it all
        warnings.simplefilter("error")
        for scores, message in (
            ([[0.5, 0.2, -math.inf]], "would be -inf, between the scores 0.2.* and -inf"),
            ([[math.inf, math.inf, -math.inf]], "would be nan, between the scores inf and -inf"),
            ([[3e38, 3e38, 3e38]], "would be inf, between the scores 3"),
        ):
            stream = AverageKThreshold([2], 1)
            with np.errstate(over="ignore", invalid="ignore"):
                stream.update(torch.tensor(scores))
            with pytest.raises(ValueError, match=message):
                stream.compute()


def test_a_threshold_needs_one_score_more_than_its_sets_hold():
    """P_[round(K n) + 1] must exist: with n = 1 and L = 4, K = 3 is the last that has one."""
    scores = torch.tensor([[0.4, 0.3, 0.2, 0.1]])
    assert average_k_threshold(scores, 3) == pytest.approx(0.15)
    with pytest.raises(ValueError, match=r"k=3\.5 cannot be calibrated on 1 image.*needs 5 scores and there are 4"):
        average_k_threshold(scores, 3.5)


@pytest.mark.parametrize("off_the_cpu", [False, True])
@pytest.mark.parametrize("values", ["random", "ties", "constant"])
def test_parts_of_a_stream_merge_in_any_order(values, off_the_cpu, monkeypatch):
    """As if one stream had seen all scores, sizes included; also where a part has seen nothing."""
    scores = np.random.default_rng(0).random((60, 9)).astype(np.float32)
    scores = torch.from_numpy({"random": scores, "ties": scores.round(1), "constant": scores * 0 + 0.5}[values])
    ks = [1, 1.5, 2]
    expected = {k: sorted_threshold(scores.numpy(), k) for k in ks}
    parts, totals = [], []
    with monkeypatch.context() as patch:
        if off_the_cpu:  # as in the test above
            patch.setattr(torch.Tensor, "numpy", lambda self: self)
        for share in (scores[:30], scores[30:34], None, scores[34:]):
            parts.append(AverageKThreshold(ks, 60))
            for batch in share.split(7) if share is not None else ():
                parts[-1].update(batch)
        for order in ((0, 1, 2, 3), (3, 2, 1, 0), (1, 3, 0, 2)):
            totals.append(AverageKThreshold(ks, 60))
            for i in order:
                totals[-1].merge(parts[i].survivors().clone(), *map(float, parts[i].facts()))
    assert (parts[1].facts(), parts[2].facts()) == ((4, 9, -math.inf, 0), (0, 0, -math.inf, 0))
    assert sorted(parts[1].survivors().tolist()) == sorted(scores[30:34].flatten().tolist())
    assert len(parts[0].survivors()) <= len(parts[0]._held) == 2 * (2 * 60 + 1)
    assert isinstance(parts[0]._held, torch.Tensor) == off_the_cpu
    for total in totals:
        assert isinstance(total._held, torch.Tensor) == off_the_cpu and len(total._held) == 2 * (2 * 60 + 1)
        assert (total.num_seen, total.num_labels) == (60, 9)
        assert {type(number) for number in (total.num_seen, total.num_labels, total._num_ties)} == {int}
        assert total.compute() == expected
        assert total.mean_set_sizes() == {k: (scores >= v).sum().item() / 60 for k, v in expected.items()}


def test_a_late_score_that_is_just_large_enough_counts():
    """After most have been dropped: one that lies between the two smallest that are still needed."""
    scores = torch.zeros(8, 4)
    scores[:4] = torch.arange(3.0, 19.0).reshape(4, 4)
    scores[6, 2] = 10.5
    stream = AverageKThreshold([1], 8)
    for batch in scores.split(1):
        stream.update(batch)
    assert stream._bound == 10 and stream.compute() == {1: (11 + 10.5) / 2}


def test_equal_scores_of_a_part_with_lower_ones_do_not_count():
    """Of parts with one score each, the larger is the threshold, and only what is equal to it is in the sets."""
    for order in ((5.0, 3.0), (3.0, 5.0)):
        total = AverageKThreshold([1], 8)
        for value in order:
            part = AverageKThreshold([1], 8)
            part.update(torch.full((4, 8), value))
            total.merge(part.survivors(), *part.facts())
        assert total.compute() == {1: 5.0} and total.mean_set_sizes() == {1: 4.0}


def test_thresholds_and_bounds():
    scores = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.3, 0.6]])
    assert predict_sets(scores, 0.3).int().tolist() == [[1, 1, 0], [0, 1, 1]]  # equal is inside
    assert predict_sets(scores.double(), float(np.float32(0.3))).int().tolist() == [[1, 1, 0], [0, 1, 1]]
    assert predict_sets(scores, 2.0, min_size=3).all()
    for arguments, message in (
        (([0.5, 0.4, 0.1],), "is not a number; take it from"),
        ((None,), "lambda_val=None is not a number"),
        ((True,), "lambda_val=True is not a number"),
        ((0.5, 4), r"min_size=4 must be a whole number in \[0, 3\]"),
        ((0.5, -1), "min_size=-1 must be"),
        ((0.5, 1.0), "min_size=1.0 must be"),
        ((0.5, True), "min_size=True must be"),
    ):
        with pytest.raises(ValueError, match=message):
            predict_sets(scores, *arguments)
    scores[1, 2] = math.nan
    with pytest.raises(ValueError, match="NaN among the scores of image 1: NaN is in no set"):
        predict_sets(scores, 0.5)


def test_bounds_on_sizes_against_loops():
    generator = torch.Generator().manual_seed(0)
    scores = torch.randint(0, 4, (200, 6), generator=generator) / 4  # with ties, which go to the lower class id
    sets = torch.rand(200, 6, generator=generator) < 0.4
    for least, most in ((0, None), (2, None), (0, 2), (1, 3), (6, 6), (0, 0), (2, 2)):
        for row, members in zip(scores, sets, strict=True):
            mask, members = members.numpy(), members.tolist()
            bounded = Answer("ml", lambda *_, mask=mask: mask, min_size=least, max_size=most)
            order = sorted(range(6), key=lambda j: (not members[j], -row[j], j))
            size = min(max(sum(members), least), 6 if most is None else most)
            assert bounded.classes(row[None]) == [order[:size]]
            assert bounded.sets(row[None]).tolist() == [[j in order[:size] for j in range(6)]]


def test_ranks_against_loops():
    generator = torch.Generator().manual_seed(1)
    scores = torch.randint(1, 5, (100, 6), generator=generator) / 8
    sets = torch.rand(100, 6, generator=generator) < 0.5
    order, mass = ranked_mass(scores)
    assert mass.dtype == torch.float64
    for i, row in enumerate(scores.tolist()):
        expected = sorted(range(6), key=lambda j: (-row[j], j))
        assert order[i].tolist() == expected
        assert mass[i].tolist() == [sum(row[j] for j in expected[:n]) for n in range(6)]
        assert ranked_sets(scores, sets)[i] == [j for j in expected if sets[i, j]]
    assert ranked_mass(scores[0])[1].tolist() == mass[0].tolist()
    equal, inside = torch.full((2, 3000), 0.5), torch.ones(2, 3000, dtype=torch.bool)  # enough to disturb other sorts
    assert ranked_sets(equal, inside) == ranked_mass(equal)[0].tolist() == [list(range(3000))] * 2
    few = torch.randint(0, 3, (2, 3000), generator=generator) / 4
    order = [sorted(range(3000), key=lambda j, row=row: (-row[j], j)) for row in few.tolist()]
    assert Answer("ml", lambda scores, *_: scores >= 0, max_size=1700).classes(few) == [o[:1700] for o in order]
    assert Answer("ml", lambda scores, *_: scores >= 2, min_size=1700).classes(few) == [o[:1700] for o in order]
    assert predict_sets(few, 2.0, 1700).tolist() == [[j in set(o[:1700]) for j in range(3000)] for o in order]
    assert ranked_sets(torch.tensor([[-math.inf, -1.0]]), torch.tensor([[True, True]])) == [[1, 0]]


def test_everything_is_made_on_the_device_of_the_scores():
    """The meta device computes nothing, and refuses what lies on another, as an accelerator does."""
    with torch.device("meta"):
        scores = torch.zeros(3, 4)
    assert {found.device.type for found in ranked_mass(scores)} == {"meta"}
    stream = AverageKThreshold([1], 3)
    assert stream.survivors("meta").device.type == "meta" and stream.survivors().shape == (0,)
    stream.update(torch.rand(3, 4))
    assert stream.survivors("meta").device.type == "meta" and stream.survivors().device.type == "cpu"


def test_thresholds_in_a_config():
    assert Calibration(Config(num_labels=4, thresholds={"1": 0, "2.5": 1, "3": 0.5})).ks == [1, 2.5, 3]
    assert Calibration(Config(num_labels=4, thresholds={"1": -7, "3": 9.5}, score="logit")).ks == [1, 3]
    for thresholds, kind, message in (
        (3, "softmax", r"config\.thresholds=3 must map K to lambda_val"),
        ({"4": 0.5}, "softmax", r"config\.thresholds has the key '4': k=4 must be a number in \[1, 4\)"),
        ({"x": 0.5}, "softmax", r"config\.thresholds has the key 'x': could not convert"),
        ({None: 0.5}, "softmax", r"config\.thresholds has the key None"),
        ({"1": 0.5, "2": None}, "softmax", r"config\.thresholds\['2'\]=None is not a finite number\. Take"),
        ({"2": math.inf}, "logit", r"config\.thresholds\['2'\]=inf is not a finite number\. Take"),
        ({"2": 1.01}, "softmax", r"=1\.01 is no probability, and score='softmax' gives probabilities\. Take"),
        ({"2": -0.01}, "sigmoid", r"=-0\.01 is no probability, and score='sigmoid' gives probabilities\. Take"),
    ):
        with pytest.raises(ValueError, match=message):
            Calibration.of(Config(num_labels=4, thresholds=thresholds, score=kind))
    with pytest.raises(ValueError, match=r"calibration\.head_thresholds\['ml'\]\['2'\]=7"):
        Calibration.of(Config(num_labels=4, thresholds={}, head_thresholds={"ml": {"2": 7}}))


def test_stored_thresholds_of_any_config():
    """A config of another class says little: one head, softmax, and the smallest K where it has none of its own."""
    plain = Config(num_labels=9, thresholds={"4": 0.1, "1": 0.4, "2": 0.3})
    own = [Calibration.of(config).k for config in (plain, Config(num_labels=9, k=3, thresholds={"1": 0.4}))]
    assert own == [1, 3]
    assert [threshold(plain, k) for k in (None, 1, 2.0, 4)] == [0.4, 0.4, 0.3, 0.1]
    assert threshold(plain, math.sqrt(8)) == pytest.approx(math.sqrt(0.3 * 0.1))
    assert threshold(plain, math.sqrt(2)) == pytest.approx(math.sqrt(0.4 * 0.3))
    logit = Config(num_labels=9, thresholds={"1": -1.0, "4": -3.0}, score="logit")
    assert threshold(logit, 2) == pytest.approx(-2)
    assert threshold(logit, 4**0.25) == pytest.approx(-1.5)
    logit.thresholds = {"1": 2.0, "4": 1.0}  # linear though both are positive
    assert threshold(logit, 2) == pytest.approx(1.5)
    logit.thresholds["4"] = 0.0  # edited in place
    assert threshold(logit, 2) == pytest.approx(1.0)
    zero = Config(num_labels=9, thresholds={"1": 0.4, "4": 0.0})
    assert threshold(zero, 2) == pytest.approx(0.2)  # linear, because there is no logarithm
    zero.keep(curve=[[2, 0.3, 2, 1, 1]])
    assert threshold(zero, 2) == 0.3
    found = Calibration.of(plain)
    assert (found.head(), found.source_head, found.source) == ("ml", "ml", {}) and found is Calibration.of(plain)
    assert Calibration.of(Config(num_labels=9, calibration=[1])).source == {}
    for config, k, message in (
        (Config(num_labels=9), 2, "this model has no thresholds"),
        (Config(num_labels=9, thresholds={}), 2, "this model has no thresholds"),
        (plain, 9, r"k=9 must be a number in \[1, 9\)"),
        (plain, 5, r"no threshold is stored for k=5; .* for k in 1, 2, 4, and .* in \[1, 4\], .*--k 1 2 4 5`"),
        (Config(num_labels=9, thresholds={"2": 1.5}), 2, "is no probability, and score='softmax' gives"),
        (Config(num_labels=9, thresholds={"2": 0.5, "12": 0.1}), 2, r"config\.thresholds has the key '12'"),
    ):
        with pytest.raises(ValueError, match=message):
            threshold(config, k)


def test_a_curve_is_checked_as_the_thresholds_are():
    plain = {"num_labels": 9, "thresholds": {"1": 0.4, "4": 0.1}}
    for row, message in (
        ([2, -1.0, 2, 1, 1], r"calibration\.curve\['2'\]=-1\.0 is no probability, and score='softmax' gives"),
        ([12, 0.01, 2, 1, 1], r"calibration\.curve has the key '12': k=12 must be a number in \[1, 9\)"),
        ([2], r"calibration\.curve is damaged"),
        ([2, 0.2, 2, 1], r"calibration\.curve is damaged"),
        ([2, 0.2, 2, 1, "x"], r"calibration\.curve is damaged"),
    ):
        with pytest.raises(ValueError, match=message):
            Calibration.of(Config(**plain, curve=[row]))
    logit = Config(num_labels=9, thresholds={"1": 3, "4": -3}, score="logit", curve=[[2, -1.75, 2, 1, 1]])
    assert threshold(logit, 2) == -1.75


def test_whose_thresholds_they_are():
    """Those of `head`, or with "auto" of the head that was chosen for each K; the curve is that of one head."""
    heads = {"1": "ml", "2": "sccp", "4": "ml"}
    chosen = Config(num_labels=9, k=2, head="auto", thresholds={"1": 0.5, "2": 0.2, "4": 0.1}, heads=heads)
    assert Calibration.of(chosen).source_head == "sccp"  # of the model's own K
    assert [threshold(chosen, k) for k in (None, 1, 2, 4)] == [0.2, 0.5, 0.2, 0.1]
    chosen.keep(head_thresholds={"sccp": {"1": 0.6, "4": 0.05}, "mean": {"1": 0.55}})
    found = Calibration.of(chosen)
    assert [found.head(k) for k in (None, 1, 1.5, 2, 3, 4)] == ["sccp", "ml", "ml", "sccp", "sccp", "ml"]
    with pytest.raises(ValueError, match="no threshold is stored for k=7"):
        found.threshold(7)
    t = math.log(3 / 2) / math.log(4 / 2)
    assert found.threshold(3) == pytest.approx(0.2 ** (1 - t) * 0.05**t)
    assert found.head_threshold("mean", 1) == 0.55 and found.head_threshold("sccp", 1) == 0.6
    chosen.keep(head="ml", curve=[[1.4, 0.45, 1, 1, 1], [3, 0.01, 1, 1, 1]])
    found = Calibration.of(chosen)
    assert found.source_head == "ml"
    assert found.threshold(1.4) == 0.45  # of ml, whose curve it is
    assert found.threshold(3) > 0.05  # of sccp
    with pytest.raises(ValueError, match="are those of head='ml', and none is stored for 'both'"):
        found.head_threshold("both", 1)
    chosen.keep(head="sccp", curve=None)
    assert threshold(chosen, 3) > 0.05
    fixed = Calibration.of(Config(num_labels=9, k=2, head="sccp", thresholds={"2": 0.2}, heads={}, calibration=None))
    assert (fixed.source_head, fixed.head(), fixed.threshold()) == ("sccp", "sccp", 0.2)
    with pytest.raises(ValueError, match="head='auto', and no head was chosen"):
        threshold(Config(num_labels=9, k=2, head="auto", thresholds={"2": 0.2}, heads={}))
    nothing = Calibration.of(Config(num_labels=9, k=2, head="auto", thresholds={}, heads={"2": "sccp"}))
    assert nothing.head() == "ml"  # before anything was chosen
    with pytest.raises(ValueError, match="has no thresholds"):
        nothing.threshold()


def test_sets_are_those_of_the_lac_conformal_predictor():
    """Least ambiguous set-valued classifiers with q_hat = 1 - lambda: {j : 1 - p_j <= q_hat}."""
    probabilities = torch.randn(200, 30, generator=torch.Generator().manual_seed(0)).softmax(1)
    for k in (1, 2.5, 10):
        lambda_val = average_k_threshold(probabilities, k)
        q_hat = 1 - lambda_val
        nonconformity = 1 - probabilities.double()
        assert torch.equal(nonconformity <= q_hat, predict_sets(probabilities, lambda_val))


def test_coverage_and_width_agree_with_mapie():
    metrics = pytest.importorskip("mapie.metrics.classification")
    generator = torch.Generator().manual_seed(0)
    scores, labels = torch.rand(300, 12, generator=generator), torch.randint(0, 12, (300,), generator=generator)
    lambda_val = average_k_threshold(scores, 4)
    stats = SetStatistics([4], 300, thresholds={4: lambda_val})
    stats.update(scores, labels)
    result = stats.compute()[4]
    sets = predict_sets(scores, lambda_val).numpy()[..., None]  # (n, L, 1), as MAPIE takes them
    assert metrics.classification_coverage_score(labels.numpy(), sets)[0] == pytest.approx(
        result["average_k_accuracy"]
    )
    assert metrics.classification_mean_width_score(sets)[0] == pytest.approx(result["mean_set_size"])


class _Watch(TorchDispatchMode):
    """Refuses every tensor of double precision."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        made = result if isinstance(result, (tuple, list)) else [result]
        doubles = [t for t in made if isinstance(t, torch.Tensor) and t.dtype == torch.float64]
        assert not doubles, f"{func} makes float64"
        return result


def test_devices_without_double_precision(make_model, splits, monkeypatch):
    """On MPS a float64 tensor is an error: a calibration and an evaluation make none where `wide` says so."""
    assert wide("mps") == wide(torch.device("mps", 0)) == torch.float32
    assert wide("cpu") == wide("cuda:1") == torch.float64
    monkeypatch.setattr("avgk_hf.scores.NO_FLOAT64", ("cpu",))
    model = make_model(head="auto")
    with _Watch():
        calibrate(model, splits["validation"], k=[1, 3], coverage=[0.8], per_class=True)
        evaluate(model, splits["test"], coverage=[0.8], method="aps")
    with pytest.raises(AssertionError, match="makes float64"), _Watch():
        torch.zeros(2).double()
