"""Small real data and models shared by the tests; nothing here needs a network."""

import os
import signal

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import numpy as np
import pytest
import torch
from PIL import Image
from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

from avgk_hf import AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments, load_splits, prepare

# a shell ignores Ctrl-C for what it runs in the background, and so would every process that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
torch.set_num_threads(1)  # the models are tiny, and threads only wait for each other

CLASSES = ["ash", "beech", "cedar", "elm", "fir", "oak"]


def write_images(folder, per_class: dict[str, int], seed: int = 0, size: int = 24) -> None:
    """Noisy images of one brightness per class in folder/<class>/, so that neighbouring classes are confused."""
    rng = np.random.default_rng(seed)
    for i, name in enumerate(CLASSES):
        target = folder / name
        target.mkdir(parents=True, exist_ok=True)
        for j in range(per_class.get(name, 0)):
            pixels = rng.normal(40 * i + 20, 25, (size, size, 3)).clip(0, 255).astype(np.uint8)
            Image.fromarray(pixels).save(target / f"{j}.png")


def save_vit(folder) -> None:
    """A tiny ViT of transformers itself for these classes, which knows nothing of this package."""
    labels = dict(enumerate(CLASSES))
    config = ViTConfig(
        image_size=32,
        patch_size=8,
        hidden_size=16,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=16,
        id2label=labels,
        label2id={name: i for i, name in labels.items()},
    )
    ViTForImageClassification(config).save_pretrained(folder)
    ViTImageProcessor(size={"height": 32, "width": 32}).save_pretrained(folder)


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """An image folder with 6 classes: 72 training, 30 validation and 30 test images."""
    folder = tmp_path_factory.mktemp("trees")
    write_images(folder / "train", dict(zip(CLASSES, [30, 14, 10, 8, 6, 4], strict=True)), seed=0)
    write_images(folder / "validation", dict.fromkeys(CLASSES, 5), seed=1)
    write_images(folder / "test", dict.fromkeys(CLASSES, 5), seed=2)
    return folder


@pytest.fixture(scope="session")
def splits(image_folder):
    return load_splits(str(image_folder))


@pytest.fixture
def make_model():
    def make(name: str = "test_resnet", **kwargs) -> AvgKForImageClassification:
        torch.manual_seed(0)
        kwargs = {"num_labels": len(CLASSES), "k": 2, "image_size": 32, **kwargs}
        return AvgKForImageClassification.from_timm(name, **kwargs)

    return make


@pytest.fixture
def make_trainer(splits, make_model, tmp_path):
    """An AvgKTrainer on the image folder; keyword arguments are training arguments."""

    def make(model=None, callbacks=None, **kwargs) -> AvgKTrainer:
        model = model or make_model()
        defaults = {
            "output_dir": str(tmp_path / "run"),
            "num_train_epochs": 2,
            "per_device_train_batch_size": 16,
            "per_device_eval_batch_size": 7,
            "learning_rate": 0.05,
            "optim": "sgd",
            "calibrate_k": [1, 1.5, 3],
            "eval_strategy": "epoch",
            "save_strategy": "epoch",
            "load_best_model_at_end": True,
            "dataloader_pin_memory": False,
            "disable_tqdm": True,
        }
        return AvgKTrainer(
            model=model,
            args=AvgKTrainingArguments(**{**defaults, **kwargs}),
            train_dataset=prepare(splits["train"], model.config),
            eval_dataset=prepare(splits["validation"], model.config),
            callbacks=callbacks,
        )

    return make


RECIPE = """\
# model
model: test_resnet
image_size: 32
objective: avgk
k: 2

# data
dataset: {dataset}

# training
output_dir: {output}
num_train_epochs: 2
per_device_train_batch_size: 16
learning_rate: 0.05
optim: sgd
calibrate_k: [1, 3]
eval_strategy: epoch
save_strategy: epoch
load_best_model_at_end: true
dataloader_pin_memory: false
disable_tqdm: true
seed: 1
"""


@pytest.fixture
def recipe(image_folder, tmp_path):
    path = tmp_path / "recipe.yaml"
    path.write_text(RECIPE.format(dataset=image_folder, output=tmp_path / "run"))
    return path
