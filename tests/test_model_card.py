"""The model card: what it says, and that the cards in model_cards are what the template gives."""

from pathlib import Path

import pytest
from huggingface_hub import ModelCard

from avgk_hf.cli import main
from avgk_hf.model_card import card_of_run, render_card

CARDS = sorted((Path(__file__).parent.parent / "model_cards").glob("*/README.md"))


def test_the_cards_of_the_demo_are_kept():
    assert [path.parent.name for path in CARDS] == ["glyphs-avgk", "glyphs-ce"]


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_kept_cards_are_what_the_template_gives(path, tmp_path, capsys):
    assert main(["card", str(path.parent), "--out", str(tmp_path / "card.md")]) == 0
    assert (tmp_path / "card.md").read_text() == path.read_text()


@pytest.mark.parametrize("path", CARDS, ids=lambda path: path.parent.name)
def test_a_card_says_what_users_need(path):
    card = ModelCard.load(path)
    results = {(result.metric_type, result.metric_name): result for result in card.data.eval_results}
    for k in (1, 2, 3, 5, 10):
        assert 0 < results["average_k_accuracy", f"average-{k} accuracy"].metric_value <= 1
        assert results["mean_set_size", f"mean set size for K = {k}"].metric_value == pytest.approx(k, rel=0.05)
    assert ("top1_accuracy", "top-1 accuracy") in results
    assert {result.dataset_split for result in results.values()} == {"test"}
    for part in (
        'pipeline("average-k-image-classification"',
        'pipeline("image-classification"',
        "few shot | medium shot | many shot",
        "### Set sizes",
        "on 2000 images (dataset glyphs,\nsplit validation)",
        "## Limits",
        "learning rate | 0.1",
        "arXiv:2303.18118",
    ):
        assert part in card.content, part


def test_a_card_without_results_says_so(make_model):
    model = make_model()
    card = render_card("someone/new", model.config, {}, {"k": "2"})
    assert "has not been evaluated" in card.content and "has no thresholds yet" in card.content
    assert "someone/new" in card.content and card.data.eval_results is None


def test_a_run_without_results_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no results.json"):
        card_of_run(tmp_path)
