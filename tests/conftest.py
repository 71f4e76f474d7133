"""Small real data and models shared by the tests; nothing here needs a network.

What takes seconds to import is imported where it is used, because the process that only hands tests to others reads
this file too, before they begin.
"""

import gc
import os
import signal
from pathlib import Path

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("HF_DATASETS_OFFLINE", "1")

import numpy as np
import pytest
from filelock import FileLock
from forked import TENSORS, Forks
from PIL import Image

# a shell ignores Ctrl-C for what it runs in the background, and so would every process that the tests start
signal.signal(signal.SIGINT, signal.default_int_handler)
THREADS = os.environ.get("OMP_NUM_THREADS", "1")  # tiny models: threads wait for each other; test-portable asks for 2

CLASSES = ["ash", "beech", "cedar", "elm", "fir", "oak"]

# whole files go to one of two processes, so the longest come first; before them those that fork this process, because
# autograd cannot be forked any more after a training with gradient checkpointing (test_trainer) or compilation
LONGEST = """test_sweep test_compare test_faults test_security test_export test_app test_trainer test_readme
    test_recipes test_hub test_auto test_processes""".split()
# all but these are run by `make test-portable` too: their tests compare no numbers, or only whether two processes of
# one machine give the same; single tests among them that do have the mark `numbers`
NO_NUMBERS = """test_app test_archives test_auto test_bad_input test_classes test_cli test_configuration test_docs
    test_endpoint test_hooks test_hub test_layers test_mistakes test_predict test_readme test_report test_security
    test_streams test_tables test_training_args"""


def pytest_collection_finish():
    gc.freeze()  # accelerate collects garbage after every training, and most of the heap are imported modules


def pytest_unconfigure():
    gc.unfreeze()


def pytest_collection_modifyitems(items):
    import torch

    torch.set_num_threads(int(THREADS))
    for item in items:
        if item.path.stem not in NO_NUMBERS.split():
            item.add_marker("numbers")
    items.sort(key=lambda item: LONGEST.index(item.path.stem) if item.path.stem in LONGEST else len(LONGEST))


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
    from transformers import ViTConfig, ViTForImageClassification, ViTImageProcessor

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


def crossed(firsts, seconds) -> list:
    """Parameters: all pairs, of which those that try no value for the first time are left to `make test-portable`."""
    firsts, seconds = list(firsts), list(seconds)
    return [
        pytest.param(first, second, marks=() if first == firsts[0] or second == seconds[0] else pytest.mark.long)
        for first in firsts
        for second in seconds
    ]


def made_once(tmp_path_factory, name, make) -> Path:
    """A folder that the first process of a test run makes and all of them read; tests change copies of it."""
    shared = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:  # each worker has a folder of its own inside that of the run
        shared = shared.parent
    with FileLock(shared / f"{name}.lock"):
        if not (shared / f"{name}.done").exists():
            make(shared / name)
            (shared / f"{name}.done").touch()
    return shared / name


@pytest.fixture(scope="session")
def image_folder(tmp_path_factory):
    """An image folder with 6 classes: 72 training, 30 validation and 30 test images."""

    def make(folder):
        write_images(folder / "train", dict(zip(CLASSES, [30, 14, 10, 8, 6, 4], strict=True)), seed=0)
        write_images(folder / "validation", dict.fromkeys(CLASSES, 5), seed=1)
        write_images(folder / "test", dict.fromkeys(CLASSES, 5), seed=2)

    return made_once(tmp_path_factory, "trees", make)


@pytest.fixture(scope="session")
def trained_run(tmp_path_factory, image_folder):
    """A finished run of two epochs with two checkpoints, calibrated for K = 1, 2 and 3."""

    from avgk_hf.cli import main

    def make(folder):
        folder.mkdir()
        (folder / "recipe.yaml").write_text(RECIPE.format(dataset=image_folder, output=folder / "run"))
        assert main(["train", str(folder / "recipe.yaml")]) == 0

    return made_once(tmp_path_factory, "trained", make) / "run"


@pytest.fixture(scope="session")
def forks(tmp_path_factory):
    """Runs programs in new processes that have imported what others publish, and not this package."""
    home = {"HF_HOME": str(tmp_path_factory.mktemp("home")), "HF_HUB_OFFLINE": "1"}
    with Forks({**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent), **home}) as forks:
        yield forks


@pytest.fixture(scope="session")
def fresh():
    """Runs programs in new processes, in any environment: they import what reads it themselves."""
    own = {"PYTHONPATH": str(Path(__file__).parent.parent), "OMP_NUM_THREADS": THREADS}
    with Forks({**os.environ, **own}, TENSORS) as forks:
        yield forks


@pytest.fixture(scope="session")
def splits(image_folder):
    from avgk_hf import load_splits

    return load_splits(str(image_folder))


@pytest.fixture
def make_model():
    import torch

    from avgk_hf import AvgKForImageClassification

    def make(name: str = "test_resnet", **kwargs):
        torch.manual_seed(0)
        if "num_labels" not in kwargs:
            kwargs = {"id2label": dict(enumerate(CLASSES)), **kwargs}
        kwargs = {"k": 2, "image_size": 32, **kwargs}
        return AvgKForImageClassification.from_timm(name, **kwargs)

    return make


@pytest.fixture
def make_trainer(splits, make_model, tmp_path):
    """An AvgKTrainer on the image folder; keyword arguments are training arguments, `given` are the Trainer's own."""
    from avgk_hf import AvgKTrainer, AvgKTrainingArguments, prepare

    def make(model=None, callbacks=None, given=None, **kwargs):
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
        own = {name: prepare(splits[name], model.config) for name in ("train", "validation")}
        own = {"train_dataset": own["train"], "eval_dataset": own["validation"], "callbacks": callbacks}
        return AvgKTrainer(
            model=model, args=AvgKTrainingArguments(**{**defaults, **kwargs}), **{**own, **(given or {})}
        )

    return make


RECIPE = """\
# model
model: test_resnet
image_size: 32
objective: avgk
k: 2
head: ml  # one head for all K, so that sets grow with K

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
