"""The streaming threshold against sorting all scores, as the paper's algorithm is written, and against one topk."""

from collections import deque
from collections.abc import Iterable, Iterator
from types import SimpleNamespace

import torch
from torch import Tensor
from transformers import ViTConfig

from avgk_hf.collecting import Evaluation
from avgk_hf.evaluation import loop
from avgk_hf.sets import AverageKThreshold

from .measure import MIB, Table, peak_rss_growth, progress, ratio, times

K, BATCH = 5, 128
SIZES, LEVELS = (1, 2, 3, 5, 10), (0.9, 0.95, 0.99)  # of a whole calibration


def by_streaming(batches: Iterable[Tensor], num_examples: int, ks: Iterable[float] = (K,)) -> float:
    """lambda_val for the last of `ks`."""
    stream = AverageKThreshold(ks, num_examples)
    for scores in batches:
        stream.update(scores)
    return list(stream.compute().values())[-1]


def by_sorting(batches: list[Tensor]) -> float:
    """The same from all scores, concatenated and sorted."""
    scores = torch.cat(batches)
    ordered = scores.flatten().sort(descending=True).values
    rank = K * len(scores)
    return (0.5 * (ordered[rank - 1] + ordered[rank])).item()


def by_topk(batches: list[Tensor]) -> float:
    """The same from all scores, concatenated, and one topk."""
    scores = torch.cat(batches)
    ordered = scores.flatten().topk(K * len(scores) + 1).values
    return (0.5 * (ordered[-2] + ordered[-1])).item()


def logit_batches(num_examples: int, num_labels: int) -> Iterator[Tensor]:
    """Logits of n images, made batch by batch and not kept."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(BATCH, num_labels, generator=generator)
    for start in range(0, num_examples, BATCH):
        sharpness = 2 + 2 * torch.rand(1, generator=generator)  # so that no two batches are alike
        yield sharpness * logits[: num_examples - start]


def score_batches(num_examples: int, num_labels: int) -> Iterator[Tensor]:
    """The same as softmax rows."""
    return (logits.softmax(1) for logits in logit_batches(num_examples, num_labels))


def whole_calibration(num_examples: int, num_labels: int) -> ViTConfig:
    """All that `avgk calibrate` computes of a classifier of another class, from logits in place of images."""
    config = ViTConfig(num_labels=num_labels)
    evaluation = Evaluation(config, num_examples, SIZES, calibrate=True, levels=LEVELS)
    labels = torch.arange(BATCH) % num_labels
    batches = (
        {"logits": logits, "labels": labels[: len(logits)]} for logits in logit_batches(num_examples, num_labels)
    )
    loop([evaluation], batches, lambda batch: (SimpleNamespace(logits=batch["logits"]), None), BATCH)
    evaluation.store()
    evaluation.metrics()
    return config


def calibrate_whole(num_examples: int, num_labels: int) -> Iterator[None]:
    """For `peak_rss_growth`: the same, after a small one that pays for lazy initialisation."""
    whole_calibration(2 * BATCH, num_labels)
    yield
    whole_calibration(num_examples, num_labels)


def consume(num_examples: int, num_labels: int, calibrate: bool) -> Iterator[None]:
    """For `peak_rss_growth`: go through the batches, with or without the threshold."""
    by_streaming(score_batches(2 * BATCH, 10), 2 * BATCH)
    yield
    if calibrate:
        by_streaming(score_batches(num_examples, num_labels), num_examples)
    else:
        deque(score_batches(num_examples, num_labels), maxlen=0)


def run() -> Iterator[Table]:
    """Time, then memory."""
    num_examples, num_labels = 8_000, 1_081
    progress(f"calibration, {num_examples} x {num_labels}")
    generator = torch.Generator().manual_seed(0)
    logits = (3 * torch.randn(num_examples, num_labels, generator=generator)).split(BATCH)
    batches = [part.softmax(1) for part in logits]
    assert by_streaming(batches, num_examples) == by_sorting(batches) == by_topk(batches)
    measured = times(
        {
            "streaming": lambda: by_streaming(batches, num_examples),
            "five K": lambda: by_streaming(batches, num_examples, ks=range(1, K + 1)),
            "softmax": lambda: deque((part.softmax(1) for part in logits), maxlen=0),
            "softmax and streaming": lambda: by_streaming((part.softmax(1) for part in logits), num_examples),
            "sorting": lambda: by_sorting(batches),
            "topk": lambda: by_topk(batches),
        }
    )
    table = Table(
        "Time of the threshold",
        f"lambda_val for K = {K} from the softmax scores of n = {num_examples} images and L = {num_labels} classes in"
        f" batches of {BATCH}, against concatenating them and sorting (Algorithm 1 as it is written) or one `topk`.",
    )
    table.add("times faster than sorting", ratio(measured, "sorting", "streaming"), ">= 40")
    table.add("times faster than topk", ratio(measured, "topk", "streaming"), ">= 7")
    table.add("softmax and streaming, times softmax", ratio(measured, "softmax and streaming", "softmax"), "<= 2.75")
    table.add("K = 1, 2, 3, 4, 5, times K = 5 alone", ratio(measured, "five K", "streaming"), "<= 1.3")
    yield table

    table = Table(
        "Memory of the threshold",
        f"MiB by which calibrating for K = {K} raises the peak resident memory of a fresh process above that of a loop"
        f" that makes the same batches of {BATCH} rows and drops them. All scores would take n x L x 4 bytes.",
    )
    for num_examples, num_labels, bound in ((31_000, 1_081, "<= 13.5"), (100_000, 10_000, "<= 64")):
        progress(f"memory of calibration, {num_examples} x {num_labels}")
        bare, calibrating = (peak_rss_growth(consume, num_examples, num_labels, flag) for flag in (False, True))
        everything = 4 * num_examples * num_labels / MIB
        table.add(
            f"n = {num_examples}, L = {num_labels}, where all scores are {everything:.0f} MiB",
            (calibrating - bare) / MIB,
            bound,
        )
    yield table

    num_examples, num_labels = 1_000_000, 1_000
    progress(f"memory of a whole calibration, {num_examples} x {num_labels}")
    table = Table(
        "Memory of a whole calibration",
        f"MiB by which all that `avgk calibrate` computes for K in {SIZES} and coverages {LEVELS}, from scores that"
        f" are made in batches of {BATCH}, these included, raises the peak resident memory of a fresh process. What is"
        " held are 8 bytes for each image and unit of the largest K, and 24 for each image.",
    )
    everything, growth = (
        4 * num_examples * num_labels / MIB,
        peak_rss_growth(calibrate_whole, num_examples, num_labels),
    )
    what = f"n = {num_examples}, L = {num_labels}, where all scores are {everything:.0f} MiB"
    table.add(what, growth / MIB, "<= 300")
    yield table
