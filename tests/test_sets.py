"""Thresholds and sets against sorting everything, and against hand-made cases."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from avgk_hf.set_statistics import SetStatistics, class_means
from avgk_hf.sets import (
    AverageKThreshold,
    average_k_threshold,
    head_scores,
    k_key,
    predict_sets,
    ranked_sets,
    score,
)


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
    with pytest.raises(ValueError, match=r"k=.* must be a number in \[1, .*e\.g\. `k=2`"):
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
    with pytest.raises(ValueError, match="scores for 3 classes after scores for 4"):
        stream.update(torch.rand(1, 3))
    with pytest.raises(ValueError, match="lambda_val=nan"):
        predict_sets(torch.rand(2, 3), math.nan)
    with pytest.raises(ValueError, match="min_size=4"):
        predict_sets(torch.rand(2, 3), 0.1, min_size=4)


def test_min_size_adds_the_best_classes():
    scores = torch.tensor([[0.1, 0.3, 0.2], [0.9, 0.8, 0.0]])
    sets = predict_sets(scores, 0.7, min_size=1)
    assert ranked_sets(scores, sets) == [[1], [0, 1]]
    assert ranked_sets(scores, predict_sets(scores, 0.7)) == [[], [0, 1]]
    assert ranked_sets(scores, predict_sets(scores, 0.95, min_size=2)) == [[1, 2], [0, 1]]


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


def test_shot_borders():
    means = class_means(np.array([0, 0, 1, 1]), np.arange(4), 4, np.array([19, 20, 100, 101]))
    assert means == {
        "macro_accuracy": 0.5,
        "few_shot_accuracy": 0.0,
        "medium_shot_accuracy": 0.5,
        "many_shot_accuracy": 1.0,
    }


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
