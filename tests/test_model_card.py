"""The model card: what it says, and that the cards in model_cards are what the template gives."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from asking import Config
from hub_server import card_errors
from huggingface_hub import ModelCard
from transformers import TrainerCallback, ViTConfig

from avgk_hf import AvgKForImageClassification
from avgk_hf.calibration import Calibration
from avgk_hf.cli import main
from avgk_hf.model_card import CardCallback, card_of_run, render_card
from conftest import CLASSES

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
    rows = [line.split("|")[1:4] for line in card.text.split("## Results")[1].splitlines() if line.startswith("| ")]
    shown = {k.strip(): (float(accuracy.strip(" %")), float(size)) for k, accuracy, size in rows[1:6]}
    assert list(shown) == ["1", "2", "3", "5", "10"]
    for k, (accuracy, size) in shown.items():
        assert 0 < accuracy <= 100 and size == pytest.approx(float(k), rel=0.05)
    assert card.data.eval_results is None  # glyphs are not on the Hub
    for part in (
        'pipeline("average-k-image-classification"',
        'pipeline("image-classification"',
        "few shot | medium shot | many shot",
        "### Set sizes",
        "on 2000 images (dataset glyphs,\nsplit validation)",
        "Top-1 accuracy: ",
        "## Limits",
        "<summary>The 120 classes and their training images</summary>\n\n| class | training images |",
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
        trainer.dataset_name = "someone/trees"
        trainer.train(checkpoint)
        best, last = (entry for entry in trainer.state.log_history if "eval_loss" in entry)
        assert best["eval_loss"] < last["eval_loss"] - 10 and trainer.state.best_global_step == 1
        trainer.create_model_card()
        card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
        results, calibration = card.content.split("## Results")[1].split("## Calibration")
        assert f"| {best['eval_lambda_val']:.6f} |" in results and f"| {last['eval_lambda_val']:.6f} |" not in results
        assert "On validation, with" in results and "after 1 training steps" in calibration
        shown = {result.metric_type: result.metric_value for result in card.data.eval_results}
        shown["top1_accuracy"] = shown.pop("accuracy")
        assert shown == {name: round(best[f"eval_{name}"], 4) for name in shown} and len(shown) == 3
        assert {result.dataset_split for result in card.data.eval_results} == {"validation"}
        return trainer.state.best_model_checkpoint

    trained(trained())


def test_the_best_evaluation_is_found_by_its_step():
    """That of the weights which the thresholds belong to; those on other splits have no step."""
    log = [{"step": 2, "eval_average_k_accuracy": 0.5, "eval_runtime": 1.0}, {"step": 2, "loss": 3.0}]
    state, card = SimpleNamespace(global_step=3, log_history=log), CardCallback()
    card.on_train_begin(None, state, None)
    calibrated, other = SimpleNamespace(calibrate=True), SimpleNamespace(calibrate=False, labelled=True)
    other.size_counts = lambda: {"all": [1, 2]}
    card.record("eval", {"eval_loss": 1.0, "eval_average_k_accuracy": 0.6, "epoch": 1.0}, calibrated, step=3)
    card.record("test", {"test_loss": 2.0, "test_average_k_accuracy": 0.7}, other, step=3)
    assert card.set_sizes == {"all": [1, 2]}
    test = {"test": {"loss": 2.0, "average_k_accuracy": 0.7}}
    for record, expected in (
        ({"step": 2}, {"validation": {"average_k_accuracy": 0.5}, **test}),
        ({"step": 3}, {"validation": {"loss": 1.0, "average_k_accuracy": 0.6}, **test}),
        ({"step": 4}, test),
        ({}, test),
        (None, test),
    ):
        assert card.results(Config(calibration=record, num_labels=6)) == expected


METRICS = {"average_k_accuracy": 0.5, "mean_set_size": 2.0, "lambda_val": 0.1, "top1_accuracy": 0.4}


def metadata(card):
    """What the Hub reads of a card, which it accepts."""
    assert card_errors(str(card)) == []
    return ModelCard(str(card)).data.to_dict()


def test_a_card_is_found_by_what_is_known(make_model):
    """Data, results and base model by their Hub ids; other names stand in the text only."""
    model = make_model()
    Calibration.store(model.config, {2: 0.1})
    found = metadata(render_card("someone/new", model.config, {"test": METRICS}, {}, "someone/trees"))
    assert found["datasets"] == ["someone/trees"] and found["metrics"] == ["accuracy"]
    result = found["model-index"][0]["results"][0]
    assert result["dataset"] == {"name": "someone/trees", "type": "someone/trees", "split": "test"}
    types = {metric["name"]: metric["type"] for metric in result["metrics"]}
    assert types == {
        "average-2 accuracy": "average_k_accuracy",
        "mean set size for K = 2": "mean_set_size",
        "top-1 accuracy": "accuracy",
    }
    assert not {"base_model", "base_model_relation", "license"} & set(found)  # of weights that were not loaded
    for name in ("trees", None, "../trees", "a/b/c", "x" * 99 + "/y"):
        card = render_card("new", model.config, {"test": METRICS}, {}, name)
        assert not {"datasets", "model-index", "model_name"} & set(metadata(card)) and "50.00%" in card.text


@pytest.mark.parametrize(
    ("license", "expected"),
    [
        ("mit", {"license": "mit"}),
        ("dinov3-license", {"license": "other", "license_name": "dinov3-license"}),
        *((wrong, {}) for wrong in ("unknown", "x\ny", "", None, 3, ["mit"])),
    ],
)
def test_where_a_model_comes_from(license, expected, make_model):
    """Base model, relation and license, of what was trained here, of an adapter, and of what was calibrated only."""
    config = make_model(base_model="timm/test_resnet.r160_in1k").config
    config.pretrained_cfg = {**config.pretrained_cfg, "license": license}
    for options, relation in (({}, "finetune"), ({"adapter": True}, "adapter"), ({"calibrated_only": True}, None)):
        found = metadata(render_card("someone/new", config, {}, {}, "someone/trees", **options))
        assert (found["base_model"], found.get("base_model_relation")) == ("timm/test_resnet.r160_in1k", relation)
        assert {name: found[name] for name in found if name.startswith("license")} == expected
        assert ("datasets" in found) == (relation is not None)
        assert found["library_name"] == ("peft" if relation == "adapter" else "transformers")
    config.name_or_path = "someone/older"  # loaded from there, and trained further
    assert metadata(render_card("someone/new", config, {}, {}))["base_model"] == "someone/older"
    assert "base_model" not in metadata(render_card("someone/older", config, {}, {}))


def test_a_base_model_that_is_no_hub_id_is_refused(make_model):
    with pytest.raises(ValueError, match=r"config.base_model='x\\ny' must be a Hub id, `user/name`, or be left out"):
        make_model(base_model="x\ny")


def test_the_card_of_a_folder_that_looks_like_a_hub_id(make_model, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    make_model().save_pretrained("runs/trees")
    model = AvgKForImageClassification.from_pretrained("runs/trees")
    assert model.config.name_or_path == "runs/trees"
    assert "base_model" not in metadata(render_card("new", model.config, {}, {}))


def test_the_card_of_an_adapter(make_trainer, make_model, tmp_path):
    peft = pytest.importorskip("peft")
    base = make_model("test_vit", base_model="timm/test_vit.r160_in1k")
    lora = peft.LoraConfig(target_modules=["qkv"], modules_to_save=["ml_head", "sccp_head"], r=2)
    trainer = make_trainer(model=peft.get_peft_model(base, lora), max_steps=1)
    trainer.create_model_card()
    card = ModelCard.load(Path(trainer.args.output_dir) / "README.md")
    found = metadata(card)
    assert (found["base_model"], found["base_model_relation"]) == ("timm/test_vit.r160_in1k", "adapter")
    assert "an adapter of peft" in card.text and "`merge_and_unload()`" in card.text


def test_a_trained_card_lists_the_classes_with_their_counts(trained_run):
    card = ModelCard.load(trained_run / "README.md")
    metadata(card)
    folded = card.text.split("<details>\n")[1].split("</details>")[0]
    rows = [tuple(cell.strip() for cell in line.split("|")[1:3]) for line in folded.splitlines() if line[:1] == "|"]
    assert rows[2:] == list(zip(CLASSES, map(str, [30, 14, 10, 8, 6, 4]), strict=True))
    assert card_of_run(trained_run).content == card.content


def test_classes_of_another_model_and_very_many(make_model, monkeypatch):
    """Without counts the names stand alone; a name stays a name; a long list ends."""
    labels = {0: "</details> | *oak*", 1: "elm", 2: "fir\n\n# ash"}
    config = ViTConfig(id2label=labels, label2id={name: i for i, name in labels.items()})
    card = render_card("new", config, {}, {}, calibrated_only=True).text
    assert "| class |\n|---|\n| \\</details\\> \\| \\*oak\\* |\n| elm |\n| fir \\# ash |\n\n</details>" in card
    assert '[{"label": "</details> | *oak*", "score": ...}' in card
    monkeypatch.setattr("avgk_hf.model_card.MOST_CLASSES", 2)
    card = render_card("new", config, {}, {}, calibrated_only=True).text
    assert "| elm |\n\nThe others are in config.json.\n\n</details>" in card and "ash" not in card


def test_the_snippet_of_a_card_runs(trained_run, image_folder, monkeypatch, capsys):
    """From the folder that holds the model, with an image in its place, as the card says."""
    code = (trained_run / "README.md").read_text().split("```python\n")[1].split("```\n")[0]
    monkeypatch.chdir(trained_run.parent)
    image = str(image_folder / "test" / "oak" / "0.png")
    assert '"IMAGE"  # in its place' in code
    exec(code.replace('"IMAGE"', repr(image)), {})
    sets, scores = map(eval, capsys.readouterr().out.splitlines())
    assert {item["label"] for item in sets} <= set(CLASSES) and len(scores) == 5
    assert '{"label": "ash", ' in code


def test_a_run_without_results_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"holds no results.json"):
        card_of_run(tmp_path)
