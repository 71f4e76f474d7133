"""Features of a frozen backbone are computed once, and heads trained on them are the same to the last bit."""

import json

import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from avgk_hf import load_splits
from avgk_hf.features import Features, cache_folder, cached_features
from avgk_hf.recipes import parse_recipe
from avgk_hf.train import load_data, main, make_trainer
from conftest import CLASSES, write_images


@pytest.fixture
def cache(tmp_path, monkeypatch):
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    return lambda: sorted(cache_folder().glob("*.safetensors"))


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Splits that fill their batches of 12, because a smaller batch can round differently."""
    root = tmp_path_factory.mktemp("even")
    for split, number in (("train", 8), ("validation", 4), ("test", 2)):
        write_images(root / split, dict.fromkeys(CLASSES, number), seed=number)
    return root


@pytest.fixture
def recipe(tmp_path, folder):
    fields = {
        **{"model": "test_resnet", "image_size": 32, "freeze_backbone": True, "objective": "avgk", "k": 2},
        **{"dataset": str(folder), "cache_features": True},
        **{"output_dir": str(tmp_path / "run"), "num_train_epochs": 2, "per_device_train_batch_size": 12},
        **{"per_device_eval_batch_size": 12, "optim": "sgd", "learning_rate": 0.5, "eval_strategy": "epoch"},
        **{"save_strategy": "no", "disable_tqdm": True, "calibrate_k": [1, 3], "dataloader_pin_memory": False},
    }
    path = tmp_path / "recipe.yaml"
    path.write_text(yaml.safe_dump(fields))
    return path


def test_the_same_to_the_last_bit(recipe, tmp_path, cache):
    results, weights = {}, {}
    for kept in ("true", "false"):
        place = tmp_path / kept
        main([str(recipe), "--cache_features", kept, "--output_dir", str(place)])
        results[kept] = json.loads((place / "results.json").read_text())
        weights[kept] = load_file(place / "model.safetensors")
    assert len(cache()) == 3  # one file for each split
    assert all(torch.equal(weights["true"][name], weights["false"][name]) for name in weights["true"])
    for split in ("validation", "test"):
        with_cache, without = results["true"][split], results["false"][split]
        assert {n: v for n, v in with_cache.items() if "second" not in n and "runtime" not in n} == {
            n: v for n, v in without.items() if "second" not in n and "runtime" not in n
        }


def test_a_file_is_found_again_and_anything_else_makes_a_new_one(folder, make_model, cache, monkeypatch):
    split = load_splits(str(folder))["validation"]
    model = make_model().freeze_backbone()
    first = cached_features(model, split, 12)
    (path,) = cache()
    monkeypatch.setattr("avgk_hf.features._compute", None)  # nothing is computed again
    again = cached_features(model, split, 12)
    assert torch.equal(again.features, first.features) and torch.equal(again.labels, torch.tensor(split["label"]))
    monkeypatch.undo()
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", path.parent.parent)

    with torch.no_grad():
        next(model.backbone.parameters()).view(-1)[0] += 1e-3
    changed = cached_features(model, split, 12)
    assert len(cache()) == 2 and not torch.equal(changed.features, first.features)
    model.config.pretrained_cfg = {**model.config.pretrained_cfg, "mean": [0.4, 0.5, 0.5]}
    assert not torch.equal(cached_features(model, split, 12).features, changed.features) and len(cache()) == 3
    cached_features(model, split.select(range(12)), 12)
    cached_features(model.to(memory_format=torch.channels_last), split, 12)
    assert len(cache()) == 5

    # a file that is cut off, or not of these features, is not believed
    for damage in (
        lambda: path.write_bytes(path.read_bytes()[:100]),
        lambda: save_file({"features": torch.zeros(2, 3)}, path),
    ):
        damage()
        model = make_model().freeze_backbone()
        assert torch.equal(cached_features(model, split, 12).features, first.features)
        assert torch.equal(load_file(path)["features"], first.features)


def test_a_batch_is_rows_of_the_matrix(folder, make_model, cache):
    features = cached_features(make_model().freeze_backbone(), load_splits(str(folder))["validation"], 12)
    assert isinstance(features, Features) and len(features) == 24
    batch = features.__getitems__([3, 0])
    assert torch.equal(batch["features"], features.features[[3, 0]]) and batch["index"].tolist() == [3, 0]
    assert features[3]["labels"] == batch["labels"][0]


def test_what_learns_or_changes_is_refused(recipe, folder, make_model, cache):
    with pytest.raises(ValueError, match="freeze_backbone: true"):
        cached_features(make_model(), load_splits(str(folder))["validation"])
    blocks = parse_recipe([str(recipe), "--freeze_backbone", "false"])
    with pytest.raises(ValueError, match="cache_features is for a backbone that does not learn"):
        make_trainer(*blocks, load_data(*blocks[1:])[0])
    with pytest.raises(ValueError, match="augmentation='timm' makes new ones"):
        parse_recipe([str(recipe), "--augmentation", "timm"])


def test_only_what_learns_is_walked_through(make_model):
    """A frozen backbone stays in evaluation mode, and the heads are in whichever is asked for."""
    model = make_model()
    assert model.learning() is model
    model.freeze_backbone().train()
    assert model.training and model.ml_head.training and model.sccp_head.training
    assert not any(module.training for module in model.backbone.modules())
    model(torch.randn(2, 3, 32, 32)).logits.sum().backward()
    assert model.ml_head.weight.grad is not None
    model.zero_grad()
    assert all(parameter.grad is None for parameter in model.parameters())
    model.eval()
    assert not any(module.training for module in model.modules())
