"""The model card: what it says, and that the cards in model_cards are what the template gives."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from asking import Config
from huggingface_hub import ModelCard
from transformers import TrainerCallback

from avgk_hf.cli import main
from avgk_hf.model_card import CardCallback, card_of_run, render_card

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


class Spoiler(TrainerCallback):
    """Makes the model answer with the same class always, from the second step on."""

    def on_step_end(self, args, state, control, model, **kwargs):
        with torch.no_grad():
            model.ml_head.bias[0] += 50.0 * (state.global_step == 2)


def test_a_card_shows_the_best_evaluation(make_trainer, make_model):
    """Those of the weights that it goes with, not the last one; also when the training was taken up again."""
    options = {"max_steps": 2, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options |= {"metric_for_best_model": "loss", "greater_is_better": False, "calibrate_k": []}

    def trained(checkpoint=None):
        trainer = make_trainer(model=make_model(objective="ce"), callbacks=[Spoiler()], **options)
        trainer.train(checkpoint)
        best, last = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
        assert best["eval_loss"] < last["eval_loss"] - 10 and trainer.state.best_global_step == 1
        trainer.create_model_card()
        card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
        results, calibration = card.content.split("## Results")[1].split("## Calibration")
        assert f"| {best['eval_lambda_val']:.6f} |" in results and f"| {last['eval_lambda_val']:.6f} |" not in results
        assert "On validation, with" in results and "after 1 training steps" in calibration
        shown = {result.metric_type: result.metric_value for result in card.data.eval_results}
        assert shown == {name: round(best[f"eval_{name}"], 4) for name in shown} and len(shown) == 3
        assert {result.dataset_split for result in card.data.eval_results} == {"validation"}
        return trainer.state.best_model_checkpoint

    trained(trained())


def test_the_best_evaluation_is_found_by_its_step():
    """That of the weights which the thresholds belong to; those on other splits have no step."""
    log = [{"step": 2, "eval_average_k_accuracy": 0.5, "eval_runtime": 1.0}, {"step": 2, "loss": 3.0}]
    state, card = SimpleNamespace(global_step=3, log_history=log), CardCallback()
    card.on_train_begin(None, state, None)
    card.on_evaluate(None, state, None, metrics={"eval_loss": 1.0, "eval_average_k_accuracy": 0.6, "epoch": 1.0})
    card.on_evaluate(None, state, None, metrics={"test_loss": 2.0, "test_average_k_accuracy": 0.7})
    test = {"test": {"loss": 2.0, "average_k_accuracy": 0.7}}
    for record, expected in (
        ({"step": 2}, {"validation": {"average_k_accuracy": 0.5}, **test}),
        ({"step": 3}, {"validation": {"loss": 1.0, "average_k_accuracy": 0.6}, **test}),
        ({"step": 4}, test),
        ({}, test),
        (None, test),
    ):
        assert card.results(Config(num_labels=3, calibration=record)) == expected


def test_a_run_without_results_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no results.json"):
        card_of_run(tmp_path)
