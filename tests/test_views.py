"""`test_time_augmentation: flip`: scores are means over an image and its mirror image, through every door."""

import json

import numpy as np
import onnxruntime
import pytest
import torch
from PIL import Image
from transformers import pipeline

from avgk_hf import AvgKConfig, AvgKForImageClassification, calibrate, prepare
from avgk_hf.calibration import Calibration
from avgk_hf.cli import main
from avgk_hf.export import export_onnx
from avgk_hf.scores import HEADS, all_scores, head_logits, score, view_logits
from avgk_hf.sets import average_k_threshold
from conftest import save_vit

FLIP = {"test_time_augmentation": "flip"}


def spread(model):
    """The model with heads that tell random images apart."""
    for head in (model.ml_head, model.sccp_head):
        if head is not None:
            torch.nn.init.normal_(head.weight, std=0.5)
    return model.eval()


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "logit"])
def test_the_score_is_the_mean_of_both_views(kind):
    for size, dtype in ((1.0, torch.float32), (1e4, torch.float32), (30.0, torch.bfloat16)):
        one, other = (size * torch.randn(2, 50, 7)).to(dtype)
        found = view_logits(one, other, kind)
        expected = (score(one, kind) + score(other, kind)) / 2
        assert found.dtype == torch.float32 and torch.allclose(score(found, kind), expected, atol=1e-6)
        assert torch.allclose(view_logits(one, one, kind), one.float(), atol=1e-6 * size + 1e-5, rtol=1e-4)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
def test_a_model_looks_twice_and_learns_from_one_look(make_model, kind):
    plain, twice = (spread(make_model(score=kind, **further)) for further in ({}, FLIP))
    pixels, labels = torch.randn(5, 3, 32, 32), torch.tensor([0, 1, 2, 5, 5])
    with torch.no_grad():
        views = [all_scores(*head_logits(plain(each)), kind) for each in (pixels, pixels.flip(-1))]
        found = all_scores(*head_logits(twice(pixels)), kind)
        for head in HEADS:
            assert torch.allclose(found[head], (views[0][head] + views[1][head]) / 2, atol=1e-6)
            assert not torch.allclose(found[head], views[0][head], atol=1e-3)
        mirrored = twice(pixels.flip(-1))
        assert torch.allclose(mirrored.logits, twice(pixels).logits, atol=1e-5)
        symmetric = torch.cat([pixels, pixels.flip(-1)], dim=-1)
        assert torch.allclose(twice(symmetric, labels).loss, plain(symmetric, labels).loss, rtol=1e-4)
        assert len(twice(pixels, output_hidden_states=True).hidden_states) > 1
        with pytest.raises(ValueError, match="test_time_augmentation='flip' mirrors images: pass `pixel_values`"):
            twice(features=plain.features(pixels))
    assert torch.equal(twice.train()(pixels).logits, plain.train()(pixels).logits)
    assert spread(make_model(objective="ce", **FLIP))(pixels).sccp_logits is None


def test_calibrate_gives_a_model_the_second_look(make_model, splits, image_folder, tmp_path, capsys):
    """In place, with the same weights; every door then gives the sets of both views, and thresholds are theirs."""
    model = spread(make_model(head="ml"))
    model.save_pretrained(tmp_path)
    assert main(["calibrate", str(tmp_path), str(image_folder), "--k", "1", "3"]) == 0
    once = AvgKForImageClassification.from_pretrained(tmp_path)
    assert (
        main(["calibrate", str(tmp_path), str(image_folder), "--k", "1", "3", "--test-time-augmentation", "flip"]) == 0
    )
    loaded = AvgKForImageClassification.from_pretrained(tmp_path)
    assert loaded.config.test_time_augmentation == "flip" == loaded.config.calibration["test_time_augmentation"]
    images = prepare(splits["validation"], model.config)
    pixels = torch.stack([example["pixel_values"] for example in images])
    with torch.no_grad():
        expected = (once.scores(pixels) + once.scores(pixels.flip(-1))) / 2
    assert torch.allclose(loaded.scores(pixels), expected, atol=1e-6)
    for k in (1, 2, 3):
        assert loaded.config.thresholds[str(k)] == pytest.approx(average_k_threshold(expected, k), abs=1e-6)
    assert loaded.config.thresholds != once.config.thresholds
    rng = np.random.default_rng(0)
    image = Image.fromarray(rng.integers(0, 255, (32, 32, 3), dtype=np.uint8))
    sets = pipeline("average-k-image-classification", model=str(tmp_path))
    stock = pipeline("image-classification", model=str(tmp_path))
    for answer in (sets, stock):
        one, other = answer(image), answer(image.transpose(Image.Transpose.FLIP_LEFT_RIGHT))
        assert [each["label"] for each in one] == [each["label"] for each in other]
        assert [each["score"] for each in one] == pytest.approx([each["score"] for each in other], abs=1e-5)
    capsys.readouterr()
    assert main(["info", str(tmp_path)]) == 0
    assert "scores are means over an image and its mirror image" in capsys.readouterr().out
    assert main(["evaluate", str(tmp_path), str(image_folder), "--split", "validation", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["mean_set_size"] == pytest.approx(2)
    assert main(["calibrate", str(tmp_path), str(image_folder), "--test-time-augmentation", "none"]) == 0
    again = AvgKForImageClassification.from_pretrained(tmp_path).config
    assert again.test_time_augmentation == "none" and again.thresholds["2"] == once.config.thresholds["2"]


def test_thresholds_of_other_scores_do_not_answer(make_model, splits, tmp_path):
    model = spread(make_model())
    calibrate(model, splits["validation"], k=[1, 3])
    model.save_pretrained(tmp_path)
    for load in (AvgKConfig.from_pretrained, AvgKForImageClassification.from_pretrained):
        loaded = load(tmp_path, **FLIP)
        config = getattr(loaded, "config", loaded)
        assert config.test_time_augmentation == "flip" and not config.thresholds and not config.calibration
    assert load(tmp_path, test_time_augmentation="none").config.thresholds == model.config.thresholds
    model.config.test_time_augmentation = "flip"
    pixels = torch.zeros(2, 3, 32, 32)
    for ask in ({}, {"k": 2}, {"lambda_val": 0.1}, {"cumulative": 0.5}):
        with pytest.raises(ValueError, match="test_time_augmentation='flip', and the thresholds are of 'none'"):
            model.predict_sets(pixels, **ask)
    calibrate(model, splits["validation"], k=[1, 3])
    assert len(model.predict_sets(pixels)) == 2
    model.config.test_time_augmentation = "none"
    with pytest.raises(ValueError, match="test_time_augmentation='none', and the thresholds are of 'flip'"):
        model.predict_sets(pixels)
    other = make_model(**FLIP)
    with pytest.raises(ValueError, match="this model has no thresholds"):
        other.predict_sets(pixels)
    Calibration.store(other.config, {2: 0.1})
    other.config.test_time_augmentation = "none"
    with pytest.raises(ValueError, match="and the thresholds are of 'flip'"):
        Calibration.of(other.config).threshold()
    with pytest.raises(ValueError, match=r"config\.test_time_augmentation='mirror' is unknown|mirror.*flip"):
        make_model(test_time_augmentation="mirror")


def test_a_recipe_asks_for_it(image_folder, tmp_path, capsys):
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(
        f"model: test_resnet\nimage_size: 32\nobjective: ce\nk: 2\ndataset: {json.dumps(str(image_folder))}\n"
        f"output_dir: {json.dumps(str(tmp_path / 'run'))}\nmax_steps: 2\ntest_time_augmentation: flip\n"
    )
    assert main(["train", str(recipe)]) == 0
    config = AvgKConfig.from_pretrained(tmp_path / "run")
    assert config.test_time_augmentation == "flip" and Calibration.of(config).threshold() > 0
    card = (tmp_path / "run" / "README.md").read_text()
    assert "| test time | flip |" in card
    capsys.readouterr()
    assert main(["train", str(recipe), "--overwrite", "--cache_features", "true", "--freeze_backbone", "true"]) == 2
    assert "test_time_augmentation='flip' needs its mirror image too" in capsys.readouterr().err


def test_a_foreign_classifier_is_asked_as_it_is(image_folder, tmp_path, capsys):
    save_vit(tmp_path / "vit")
    command = ["calibrate", str(tmp_path / "vit"), str(image_folder), "--test-time-augmentation", "flip"]
    assert main(command) == 2
    assert "--test-time-augmentation is for models of this package" in capsys.readouterr().err


@pytest.mark.parametrize("head", ["ml", "mean"])
def test_a_graph_looks_twice_too(make_model, tmp_path, head):
    model = spread(make_model(head=head, **FLIP))
    Calibration.store(model.config, {2: 0.2})
    report = export_onnx(model, tmp_path)
    session = onnxruntime.InferenceSession(tmp_path / "model.onnx", providers=["CPUExecutionProvider"])
    pixels = torch.randn(7, 3, 32, 32)
    inputs = {"pixel_values": pixels.numpy(), "lambda_val": np.array(0.2, np.float32)}
    scores, _ = session.run(None, inputs)
    assert np.allclose(scores, model.scores(pixels).numpy(), atol=1e-5) and report["largest_difference"] < 1e-5
