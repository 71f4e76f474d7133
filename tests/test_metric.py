"""The `evaluate` metric against loops, through all its doors, and in two processes at once."""

import json
import os
import re
from pathlib import Path

import evaluate
import numpy as np
import pandas as pd
import pytest
import torch
import yaml

import avgk_hf
from avgk_hf.metrics.average_k_accuracy.average_k_accuracy import average_k_accuracy

FOLDER = Path(avgk_hf.__file__).parent / "metrics" / "average_k_accuracy"
README = (FOLDER / "README.md").read_text()


@pytest.fixture
def load(tmp_path):
    def load(path=FOLDER, **kwargs):
        return evaluate.load(str(path), **{"cache_dir": str(tmp_path / "cache"), **kwargs})

    return load


def make_data(n=60, num_labels=7, seed=0, ties=False):
    rng = np.random.default_rng(seed)
    logits = rng.normal(size=(n, num_labels)).astype(np.float32)
    return (np.round(logits) if ties else logits), rng.integers(0, num_labels - 1, n)  # one class without an image


def naive(scores, labels, k, lambda_val=None, train_counts=None):
    """Loops over images and classes, straight from the definitions."""
    n, num_labels = len(scores), len(scores[0])
    if lambda_val is None:
        ordered = sorted((value for row in scores for value in row), reverse=True)
        rank = round(k * n)
        lambda_val = float(np.float32(0.5) * (ordered[rank - 1] + ordered[rank]))
    threshold = np.float32(lambda_val)
    sets = [{j for j, value in enumerate(row) if value >= threshold} for row in scores]
    ranked = [sorted(range(num_labels), key=lambda j, row=row: (-row[j], j)) for row in scores]
    within = {
        j: np.mean([labels[i] in sets[i] for i in range(n) if labels[i] == j]) for j in sorted(set(labels.tolist()))
    }
    result = {
        "average_k_accuracy": sum(label in s for label, s in zip(labels, sets, strict=True)) / n,
        "lambda_val": lambda_val,
        "mean_set_size": sum(map(len, sets)) / n,
        "empty_sets": sum(not s for s in sets) / n,
        "top1_accuracy": sum(label == r[0] for label, r in zip(labels, ranked, strict=True)) / n,
        "topk_accuracy": sum(label in r[: int(k)] for label, r in zip(labels, ranked, strict=True)) / n,
        "macro_accuracy": np.mean(list(within.values())),
        "set_size_histogram": [sum(len(s) == size for s in sets) for size in range(max(map(len, sets)) + 1)],
    }
    if train_counts is not None:
        groups = {"few": range(20), "medium": range(20, 101), "many": range(101, 10**6)}
        for name, counts in groups.items():
            if group := [value for j, value in within.items() if train_counts[j] in counts]:
                result[f"{name}_shot_accuracy"] = np.mean(group)
    return result


def assert_close(result, expected):
    histogram = "set_size_histogram"
    assert result[histogram] == expected[histogram]
    assert {**result, histogram: 0} == pytest.approx({**expected, histogram: 0}, rel=1e-12)


@pytest.mark.parametrize("ties", [False, True])
@pytest.mark.parametrize("k", [1, 1.5, 3, 6])
def test_equals_loops(k, ties):
    scores, labels = make_data(ties=ties)
    counts = [3, 19, 20, 100, 101, 500, 50]
    assert_close(average_k_accuracy(scores, labels, k, calibrate=True), naive(scores, labels, k))
    for lambda_val in (0.3, -9.0, 9.0):  # all classes, and none
        result = average_k_accuracy(scores, labels, k, lambda_val=lambda_val, train_counts=counts)
        assert_close(result, naive(scores, labels, k, lambda_val, counts))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_logits_become_scores(kind):
    logits, labels = make_data()
    scores = torch.tensor(logits).softmax(-1) if kind == "softmax" else torch.tensor(logits).sigmoid()
    result = average_k_accuracy(logits, labels, k=2, calibrate=True, kind=kind)
    assert result == average_k_accuracy(scores, labels, k=2, calibrate=True, kind="scores")
    assert_close(result, naive(scores.numpy(), labels, 2))
    assert average_k_accuracy(logits, labels, 2, calibrate=True, kind="logit") == average_k_accuracy(
        logits, labels, 2, calibrate=True
    )


def test_every_way_in_gives_the_same(load):
    """One call, batches of any size, single images, a mixture; arrays, tensors, lists; disk and memory."""
    scores, labels = make_data(n=50)
    scores = scores.astype(np.float16).astype(np.float32)  # exact in all the types below
    arguments = {"k": 2, "lambda_val": 0.25, "kind": "softmax"}
    expected = average_k_accuracy(scores, labels, **arguments)
    scores.flags.writeable = labels.flags.writeable = False
    for metric in (load(), load(keep_in_memory=True)):
        for predictions, references in (
            (scores, labels),
            (scores.tolist(), labels.tolist()),
            (list(scores), list(labels)),
            (scores.astype(np.float64), labels.astype(np.uint8)),
            (pd.Series(list(scores)), pd.Series(labels.astype(np.uint64))),
            (torch.tensor(scores, dtype=torch.float16, requires_grad=True), torch.tensor(labels)),
            (list(torch.tensor(scores)), list(torch.tensor(labels))),
            (np.asfortranarray(scores)[::-1], labels[::-1]),
        ):
            assert metric.compute(predictions=predictions, references=references, **arguments) == expected
            assert average_k_accuracy(predictions, references, **arguments) == expected
        for size in (1, 7, 50):
            for start in range(0, 50, size):
                metric.add_batch(predictions=scores[start : start + size], references=labels[start : start + size])
            assert metric.compute(**arguments) == expected
        for i in range(50):
            metric.add(prediction=scores[i], reference=labels[i])
        assert len(metric) == 50
        assert metric.compute(**arguments) == expected
        metric.add(predictions=scores[0].tolist(), references=int(labels[0]))  # the other spelling in evaluate's docs
        metric.add_batch(predictions=scores[1:30], references=labels[1:30])
        metric.add(prediction=torch.tensor(scores[30]), reference=torch.tensor(labels[30]))
        assert metric.compute(predictions=scores[31:], references=labels[31:], **arguments) == expected


def test_bfloat16_is_scored_in_float32():
    logits, labels = make_data()
    rounded = torch.tensor(logits).bfloat16()
    expected = average_k_accuracy(rounded.float(), labels, k=2, calibrate=True, kind="softmax")
    assert average_k_accuracy(rounded, labels, k=2, calibrate=True, kind="softmax") == expected


def test_numpy_and_torch_scalars_are_numbers():
    scores, labels = make_data()
    expected = average_k_accuracy(scores, labels, k=2, lambda_val=0.5)
    assert average_k_accuracy(scores, labels, k=np.int64(2), lambda_val=torch.tensor(0.5)) == expected
    assert average_k_accuracy(scores, labels, k=2, lambda_val=np.float32(0.5)) == expected


def test_loads_from_folder_and_file(load):
    scores, labels = make_data()
    results = []
    for path in (FOLDER, FOLDER / "average_k_accuracy.py", os.path.relpath(FOLDER)):
        metric = load(path)
        assert metric.name == "average_k_accuracy" and metric.module_type == "metric"
        assert "lambda_val" in metric.inputs_description and "Garcin" in metric.citation
        assert "train_counts" in metric.compute.__doc__
        results.append(metric.compute(predictions=scores, references=labels, k=2, calibrate=True))
    assert results == [average_k_accuracy(scores, labels, k=2, calibrate=True)] * 3


def test_evaluate_combines_it_with_itself(load):
    scores, labels = make_data()
    both = evaluate.combine({"a": load(experiment_id="a"), "b": load(experiment_id="b")}, force_prefix=True)
    both.add_batch(predictions=scores[:40], references=labels[:40])
    both.add(scores[40], labels[40])
    result = both.compute(k=2, calibrate=True)
    expected = average_k_accuracy(scores[:41], labels[:41], k=2, calibrate=True)
    assert result["a_average_k_accuracy"] == result["b_average_k_accuracy"] == expected["average_k_accuracy"]


def test_two_metrics_in_one_process_do_not_mix(load):
    one, two = load(), load()  # the same experiment, and so the same file at first
    data = [make_data(seed=1), make_data(seed=2)]
    for start in range(0, 60, 20):
        for metric, (scores, labels) in zip((one, two), data, strict=True):
            metric.add_batch(predictions=scores[start : start + 20], references=labels[start : start + 20])
    for metric, (scores, labels) in zip((one, two), data, strict=True):
        assert metric.compute(k=2, calibrate=True) == average_k_accuracy(scores, labels, k=2, calibrate=True)


WORKER = """
import json, sys, time
from pathlib import Path
import numpy as np
import evaluate

path, folder, rank = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])

def make_data(seed):
    rng = np.random.default_rng(seed)
    return rng.random((300, 20), dtype=np.float32), rng.integers(0, 20, 300)

(folder / f"ready{rank}").touch()
while not (folder / f"ready{1 - rank}").exists():
    time.sleep(0.01)
metric = evaluate.load(path)  # both copy the module at this moment
results = []
for i in range(5):
    scores, labels = make_data(10 * rank + i)
    for start in range(0, 300, 50):
        metric.add_batch(predictions=scores[start : start + 50], references=labels[start : start + 50])
        time.sleep(0.005)  # so that the evaluations of the two processes overlap
    results.append(metric.compute(k=3, calibrate=True))
shared = evaluate.load(path, num_process=2, process_id=rank, experiment_id="shared")
scores, labels = make_data(rank)
shared.add_batch(predictions=scores, references=labels)
results.append(shared.compute(k=3, calibrate=True))
print(json.dumps(results))
"""


@pytest.mark.long
def test_two_processes_at_once(fresh, tmp_path):
    """Two evaluations at the same time with one cache, then one evaluation shared by both processes."""
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    for name in ("HF_MODULES_CACHE", "HF_METRICS_CACHE", "HF_EVALUATE_CACHE"):
        environment.pop(name, None)
    workers = fresh.run_together(WORKER, [[FOLDER, tmp_path, rank] for rank in range(2)], tmp_path, environment)
    results = [json.loads(worker.out.splitlines()[-1]) for worker in workers]

    def make(seed):
        rng = np.random.default_rng(seed)
        return rng.random((300, 20), dtype=np.float32), rng.integers(0, 20, 300)

    for rank in range(2):
        assert results[rank][:5] == [average_k_accuracy(*make(10 * rank + i), 3, calibrate=True) for i in range(5)]
    together = [np.concatenate(parts) for parts in zip(make(0), make(1), strict=True)]
    assert results[0][5] == average_k_accuracy(*together, 3, calibrate=True)
    assert results[1][5] is None
    assert not list((tmp_path / "home").rglob("*.arrow"))


def test_large_input_in_memory(load):
    rng = np.random.default_rng(0)
    scores, labels = rng.random((10_000, 1_000), dtype=np.float32), rng.integers(0, 1_000, 10_000)
    metric = load(keep_in_memory=True)
    for start in range(0, 10_000, 256):
        metric.add_batch(predictions=scores[start : start + 256], references=labels[start : start + 256])
    result = metric.compute(k=5, calibrate=True)
    assert result == average_k_accuracy(scores, labels, k=5, calibrate=True)
    assert result["mean_set_size"] == pytest.approx(5, abs=1e-3)
    assert sum(result["set_size_histogram"]) == 10_000
    assert (
        sum(size * count for size, count in enumerate(result["set_size_histogram"])) / 10_000
        == (result["mean_set_size"])
    )


GOOD = {"k": 2, "lambda_val": 0.5}
BAD_ARGUMENTS = [
    ({"k": 0.5, "lambda_val": 0.5}, r"k=0.5 must be a number in \[1, 7\)"),
    ({"k": 7, "lambda_val": 0.5}, r"k=7 must be a number in \[1, 7\) for 7 classes"),
    ({"lambda_val": 0.5}, "k=None must be a number"),
    ({"k": 2}, "lambda_val=None with calibrate=False: give either a number from validation.*`calibrate=True`"),
    ({"k": 2, "lambda_val": 0.5, "calibrate": True}, "lambda_val=0.5 with calibrate=True: give either"),
    ({"k": 2, "lambda_val": float("nan")}, "lambda_val=nan with calibrate=False: give either a number"),
    ({"k": 2, "lambda_val": "0.5"}, "lambda_val='0.5' with calibrate=False: give either a number"),
    ({**GOOD, "kind": "softmin"}, r"kind='softmin' is unknown; choose one of \['scores', 'softmax', 'sigmoid'"),
    ({**GOOD, "train_counts": [1, 2]}, "train_counts has 2 values for 7 classes"),
]


@pytest.mark.parametrize(("arguments", "message"), BAD_ARGUMENTS)
def test_bad_arguments_are_refused_and_keep_the_images(load, arguments, message):
    scores, labels = make_data()
    metric = load(keep_in_memory=True)
    metric.add_batch(predictions=scores, references=labels)
    with pytest.raises(ValueError, match=message):
        metric.compute(**arguments)
    assert metric.compute(**GOOD) == average_k_accuracy(scores, labels, **GOOD)
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=scores, references=labels, **arguments)
    assert len(metric) == 0
    with pytest.raises(ValueError, match=message):
        average_k_accuracy(scores, labels, **{"k": None, **arguments})


def test_misspelt_argument_is_refused_and_keeps_the_images(load):
    scores, labels = make_data()
    metric = load(keep_in_memory=True)
    metric.add_batch(predictions=scores, references=labels)
    with pytest.raises(TypeError, match="lamda_val"):
        metric.compute(k=2, lamda_val=0.5)
    assert len(metric) == 60


ROW = [0.1, 0.2, 0.7]
BAD_IMAGES = [
    ([ROW, ROW], [0, 3], r"label 3 lies outside \[0, 3\), the classes of the scores: leave out"),
    ([ROW, ROW], [-1, 2], r"label -1 lies outside \[0, 3\)"),
    ([ROW, ROW[:2]], [0, 1], r"scores of type list are no array of real numbers \(.* inhomogeneous .*\): give scores"),
    ([], [], r"scores of shape \(0,\) are empty"),
    (np.empty((0, 3)), [], r"scores of shape \(0, 3\) are empty"),
    ([[], []], [0, 0], r"scores of shape \(2, 0\) are empty"),
    ([ROW, [0.1, float("nan"), 0.7]], [0, 1], "NaN among the scores of image 1: NaN is in no set"),
    ([1, 2], [0, 1], r"scores of shape \(2,\): expected \(images, classes\)"),
    (np.float32(1), [0], r"scores of shape \(\): expected \(images, classes\)"),
    ([["a", "b"]], [0], r"scores of type list are no array of real numbers \(they are of type <U1\)"),
    ([ROW, ROW], [0], r"labels of shape \(1,\) .* for 2 images: expected one class id per image"),
    ([ROW, ROW], [[0], [1]], r"labels of shape \(2, 1\) .* for 2 images: expected one class id per image"),
    ([ROW, ROW], [0.0, 1.0], r"labels of .* type torch.float64 .* expected one class id per image, whole numbers"),
    ([ROW, ROW], [True, False], "labels of type list are no array of real numbers"),
    ([ROW, ROW], [0, None], "labels of type list are no array of real numbers"),
    ([ROW, ROW], None, "labels of type NoneType are no array of real numbers"),
    (None, [0], "scores of type NoneType are no array of real numbers"),
]


@pytest.mark.parametrize(("predictions", "references", "message"), BAD_IMAGES)
def test_bad_images_are_refused_and_not_stored(load, predictions, references, message):
    metric = load(keep_in_memory=True)
    metric.add(prediction=ROW, reference=2)
    with pytest.raises(ValueError, match=message):
        metric.add_batch(predictions=predictions, references=references)
    with pytest.raises(ValueError, match=message):
        metric.compute(predictions=predictions, references=references, **GOOD)
    assert len(metric) == 1
    assert metric.compute(**GOOD) == average_k_accuracy([ROW], [2], **GOOD)
    with pytest.raises(ValueError, match=message):
        average_k_accuracy(predictions, references, **GOOD)


@pytest.mark.parametrize("keep_in_memory", [False, True])
def test_usable_again_after_a_failure(load, keep_in_memory, tmp_path):
    """What only the computation can find: too few images for k, and infinite logits."""
    scores, labels = make_data()
    assert load().compute(predictions=scores, references=labels, **GOOD)
    metric = load(keep_in_memory=keep_in_memory)
    with pytest.raises(ValueError, match="no images"):
        metric.compute(**GOOD)
    with pytest.raises(ValueError, match=r"k=2.9 cannot be calibrated on 1 image"):
        metric.compute(predictions=[ROW], references=[2], k=2.9, calibrate=True)
    with pytest.raises(ValueError, match="NaN among the scores of images 0 to 1: NaN is in no set"):
        metric.compute(predictions=[ROW, [0, 0, float("inf")]], references=[2, 2], kind="softmax", **GOOD)
    assert not list(tmp_path.rglob("*.arrow"))
    metric.add_batch(predictions=scores, references=labels)
    with pytest.raises(ValueError, match="scores for 3 classes after scores for 7"):
        metric.add_batch(predictions=[ROW], references=[2])
    assert metric.compute(**GOOD) == average_k_accuracy(scores, labels, **GOOD)
    assert metric.compute(predictions=[ROW], references=[2], **GOOD)["average_k_accuracy"] == 1  # other classes


def test_masked_classes_are_in_no_set():
    result = average_k_accuracy([[1.0, 0.9, -np.inf]], [0], k=1, lambda_val=0.1, kind="softmax")
    assert result["set_size_histogram"] == [0, 0, 1]


def test_readme_examples_run(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    assert len(blocks) == 2
    for block in blocks:
        exec(compile(block, "README.md", "exec"), {})
    out = capsys.readouterr().out
    assert re.search(r"average-3 accuracy 0\.\d{3}, [23]\.\d\d classes", out) and "[0, 1, 1]" in out


def test_folder_is_a_space():
    front = yaml.safe_load(README.split("---")[1])
    assert front["sdk"] == "gradio" and {"evaluate", "metric"} <= set(front["tags"])
    assert (FOLDER / front["app_file"]).is_file()
    assert {"avgk_hf", "gradio"} <= set((FOLDER / "requirements.txt").read_text().split())


def test_readme_names_every_input_and_output():
    scores, labels = make_data()
    result = average_k_accuracy(scores, labels, k=2, calibrate=True, train_counts=[3, 19, 20, 100, 101, 500, 50])
    for name in (*result, "predictions", "references", "k", "calibrate", "kind", "train_counts"):
        assert f"`{name}`" in README
