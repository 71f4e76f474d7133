"""What the same weights answer with other scores, against the definition."""

import pytest
import torch

from avgk_hf.modeling import AvgKOutput
from avgk_hf.sets import average_k_threshold
from avgk_hf.study.variants import LOGITS, OPTIONS, TEMPERATURES, chosen, mirrored, to_calibrate, to_test
from conftest import CLASSES

N, KS = 60, [1.5, 2]


@pytest.fixture
def outputs():
    """Of validation and test: logits of both heads, of images and of mirror images, and the classes."""
    torch.manual_seed(0)
    found = []
    for _ in range(2):
        labels = torch.randint(0, len(CLASSES), (N,))
        true = 3 * torch.nn.functional.one_hot(labels, len(CLASSES))
        one, other = (AvgKOutput(*(None, *(3 * torch.randn(2, N, len(CLASSES)) + true))) for _ in range(2))
        one.mirrored = other
        found.append((one, labels))
    return found


def by_hand(output, head, temperature, flip):
    views = []
    for view in (output, output.mirrored)[: 1 + flip]:
        ml, sccp = view.logits / temperature, view.sccp_logits / temperature
        of_head = {"ml": ml.softmax(1), "sccp": sccp.softmax(1), LOGITS: ((ml + sccp) / 2).softmax(1)}
        views.append(of_head[head] if head != "mean" else (of_head["ml"] + of_head["sccp"]) / 2)
    return sum(views) / len(views)


def test_every_option_is_what_it_says(outputs, make_model):
    config = make_model().config
    (validation, labels), (test, test_labels) = outputs
    calibrated = to_calibrate(config, N, KS)
    for variant in calibrated.values():
        variant.update(validation, labels, 0)
    evaluated = to_test(config, N, KS, calibrated)
    for variant in evaluated.values():
        variant.update(test, test_labels, 0)
    entries = chosen(calibrated, evaluated)
    assert set(entries) == set(OPTIONS) and all(set(of) == {"ml", "sccp", "mean", LOGITS} for of in entries.values())
    for option, (temperatures, flip) in OPTIONS.items():
        for head, of_k in entries[option].items():
            for k in KS:
                accuracy = {}
                for t in temperatures:
                    scores = by_hand(validation, head, t, flip)
                    lambda_val = average_k_threshold(scores, k)
                    accuracy[t] = (scores.gather(1, labels[:, None]) >= lambda_val).float().mean().item()
                entry = of_k[str(k)]
                t = entry["temperature"]
                assert entry["validation"] == pytest.approx(max(accuracy.values())) == pytest.approx(accuracy[t])
                lambda_val = average_k_threshold(by_hand(validation, head, t, flip), k)
                sets = by_hand(test, head, t, flip) >= lambda_val
                assert entry["test"]["mean_set_size"] == pytest.approx(sets.float().sum(1).mean().item())
                hits = sets.gather(1, test_labels[:, None]).float().mean().item()
                assert entry["test"]["average_k_accuracy"] == pytest.approx(hits)


def test_of_equally_good_temperatures_the_nearest_to_1(make_model):
    """Logits that every temperature orders alike: all are as good, and the model stays as it is."""
    config = make_model(objective="ce").config
    labels = torch.arange(N) % len(CLASSES)
    sure = AvgKOutput(logits=50.0 * torch.nn.functional.one_hot(labels, len(CLASSES)))
    found = to_calibrate(config, N, [1], flip=False)
    for variant in found.values():
        variant.update(sure, labels, 0)
    entries = chosen(found, found)
    assert set(entries) == {"none", "temperature"} and len(found) == len(TEMPERATURES)
    assert entries["temperature"]["ml"]["1"]["temperature"] == 1.0


def test_mirror_images_are_those_of_the_images(make_model):
    model, pixels = make_model().eval(), torch.randn(2, 3, 32, 32)
    with torch.no_grad(), mirrored(model):
        output = model(pixel_values=pixels)
        expected = model(pixel_values=pixels.flip(-1))
    assert torch.equal(output.mirrored.logits, expected.logits) and not torch.equal(output.logits, expected.logits)
    assert not hasattr(model(pixel_values=pixels), "mirrored")
