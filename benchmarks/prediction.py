"""What a set costs beyond the model: from the logits of one image to its classes, for every kind of question."""

from collections.abc import Iterator
from functools import partial
from types import SimpleNamespace

import torch
from transformers import PreTrainedConfig

from avgk_hf.calibration import Calibration, Question
from avgk_hf.scores import head_logits, head_scores
from avgk_hf.statistics import SetStatistics

from .measure import Table, progress, times

NUM_LABELS = 1_081
QUESTIONS = {
    "K = 5, which was calibrated": Question(k=5, min_size=1),
    "K = 3.7, between two that were": Question(k=3.7, min_size=1),
    "coverage 0.9, LAC": Question(coverage=0.9, min_size=1),
    "coverage 0.9, LAC with thresholds per class": Question(coverage=0.9, per_class=True, min_size=1),
    "coverage 0.9, RAPS": Question(coverage=0.9, method="raps", min_size=1),
    "cumulative probability 0.8, at most 5 classes": Question(cumulative=0.8, min_size=1, max_size=5),
}


def run() -> Iterator[Table]:
    """One row for every question."""
    progress(f"prediction, {NUM_LABELS} classes")
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, NUM_LABELS, (4_000,), generator=generator)
    logits = 2 * torch.randn(4_000, NUM_LABELS, generator=generator)
    logits[torch.arange(4_000), labels] += 6 + 8 * torch.rand(4_000, generator=generator)  # from hopeless to clear
    statistics = SetStatistics([1, 2, 5, 10], 4_000, mass=True)
    statistics.update(logits.softmax(1), labels)
    config = PreTrainedConfig(num_labels=NUM_LABELS)
    coverage = statistics.coverage([0.9], per_class=True, k=5)
    Calibration.store(config, statistics.stream.compute(), coverage=coverage, curve=statistics.curve())
    sizes = (logits.softmax(1) >= Calibration.of(config).threshold(5)).sum(1)
    image = int((sizes == 5).nonzero()[0])  # neither clear nor hopeless
    output = SimpleNamespace(logits=logits[image : image + 1], sccp_logits=None)

    def predict(question: Question) -> list[list[int]]:
        """As the pipeline and `predict_sets` do for every image."""
        calibration = Calibration.of(config)
        answer = calibration.answer(question)
        return answer.classes(head_scores(*head_logits(output), answer.head, calibration.score))

    table = Table(
        "Time of a set",
        f"Microseconds from the logits of one image, which gets 5 classes at K = 5, L = {NUM_LABELS}, to the classes"
        " of its set: the config's fields are looked at, the question is looked up, softmax, comparison, ranking. One"
        " thread, CPU time, the best of 11 rounds.",
    )
    measured = times({name: partial(predict, question) for name, question in QUESTIONS.items()})
    for name, seconds in measured.items():
        table.add(name, 1e6 * min(seconds), "<= 20")
    yield table
