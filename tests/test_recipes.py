"""The recipes: each states its protocol as its README does, and trains."""

import json
import math
import re
import shutil
from pathlib import Path

import pytest
import timm
import torch
import yaml
from datasets import Image
from transformers import TrainerCallback

from archives import SPECIES, write_cifar, write_cub, write_plantnet
from avgk_hf import AvgKForImageClassification, AvgKTrainer, load_splits, prepare
from avgk_hf.losses import every_hyperparameter
from avgk_hf.recipes import parse_recipe
from avgk_hf.study.spec import plan, read_comparison
from avgk_hf.train import build_model, load_data, main

ROOT = Path(__file__).parent.parent
LOSSES = ("an", "avgk", "ce", "epr", "role", "topk")
RECIPES = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.stem in (*LOSSES, "frozen"))
PAPER = [path for path in RECIPES if path.parent.name in ("cifar100", "plantnet300k")]
PHOTOGRAPHS = [path for path in RECIPES if path.parent.name in ("small", "cub200", "folder")]
STATED = {  # what each protocol table has to hold
    "model", "augmentation", "num_train_epochs", "per_device_train_batch_size", "optim", "optim_args", "learning_rate",
    "lr_milestones", "lr_gamma", "weight_decay", "decay_all", "max_grad_norm", "metric_for_best_model"
}  # fmt: skip


TINY = ("--validation_per_class", "1", "--image_size", "32", "--model")


def identity(path: Path) -> str:
    return f"{path.parent.name}/{path.stem}"


def tables(readme: Path) -> list[list[list[str]]]:
    """The Markdown tables of a file: rows of cells, the header first."""
    blocks = re.findall(r"(?:^\|.*\n)+", readme.read_text(), flags=re.MULTILINE)
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in block.splitlines() if "|---" not in line]
        for block in blocks
    ]


def table(readme: Path, *header: str) -> list[list[str]]:
    return next(found[1:] for found in tables(readme) if found[0][: len(header)] == list(header))


def test_both_experiments_are_complete():
    names = {
        folder: {path.stem for path in PAPER if path.parent.name == folder} for folder in ("cifar100", "plantnet300k")
    }
    assert names["cifar100"] == {"ce", "avgk", "an", "epr", "role", "topk"}
    assert names["plantnet300k"] == names["cifar100"] - {"role"}
    for path in PAPER:
        readme = path.with_name("README.md")
        assert path.stem == yaml.safe_load(path.read_text())["objective"]
        for header in (("recipe", "loss", "hyperparameters"), ("recipe", "loss")):
            assert any(f"]({path.name})" in row[0] for row in table(readme, *header)), f"{path} is not in {header}"
        assert all(row[-1] == "not run here" for row in tables(readme)[2][1:])


@pytest.mark.parametrize("path", PAPER, ids=identity)
def test_protocol_is_that_of_the_readme(path):
    readme = path.with_name("README.md")
    stated = {row[0].strip("`"): yaml.safe_load(row[1].strip("`")) for row in table(readme, "field", "value")}
    assert set(stated) >= STATED | (
        {"k", "validation_per_class"} if path.parent.name == "cifar100" else {"pretrained"}
    )
    own = next(row for row in table(readme, "recipe", "loss", "hyperparameters") if f"]({path.name})" in row[0])
    stated |= {key: value for text in re.findall("`(.*?)`", own[2]) for key, value in yaml.safe_load(text).items()}
    blocks = parse_recipe([str(path)])
    for name, value in stated.items():
        read = next(getattr(block, name) for block in blocks if hasattr(block, name))
        assert getattr(read, "value", read) == value, name
    # a hyperparameter stands in the recipes of its own loss only
    others = every_hyperparameter() - set(stated)
    assert not others & set(yaml.safe_load(path.read_text()))
    model_args, _, args = blocks
    assert model_args.score == "softmax" and yaml.safe_load(path.read_text())["head"] == "ml"
    assert args.load_best_model_at_end
    assert args.eval_strategy == args.save_strategy == "epoch" and args.greater_is_better


@pytest.mark.parametrize("folder", ["cifar100", "plantnet300k"])
def test_commands_name_files_that_exist(folder):
    text = (ROOT / "recipes" / folder / "README.md").read_text()
    commands = re.findall(r"^accelerate launch .*$", text, flags=re.MULTILINE)
    assert commands
    for command in commands:
        words = command.split()
        assert words[:6] == [
            "accelerate", "launch", "--config_file", "recipes/accelerate_configs/one_gpu.yaml", "-m", "avgk_hf.train"
        ]  # fmt: skip
        # the stock Trainer would take all GPUs that it sees, and multiply the batch size
        assert yaml.safe_load((ROOT / words[3]).read_text())["gpu_ids"] == "0"
        parse_recipe([str(ROOT / words[6]), *words[7:]])
    if folder == "plantnet300k":
        assert [re.findall(r"--k (\d+)", command) for command in commands] == [[], ["2"], ["3"], ["5"], ["10"]]


@pytest.fixture(scope="module")
def data(tmp_path_factory, image_folder):
    """By recipe folder: a small copy of its dataset, and what else has to be small."""
    root = tmp_path_factory.mktemp("data")
    write_cifar(root / "cifar-100-python", train=3)
    write_plantnet(root / "plantnet_300K")
    write_cub(root / "CUB_200_2011")
    shutil.copytree(image_folder, root / "trees", ignore=shutil.ignore_patterns("validation"))
    torch.manual_seed(0)
    timm.models.save_for_hf(timm.create_model("test_resnet"), root / "tiny", safe_serialization=True)
    timm.models.save_for_hf(timm.create_model("resnet18.tv_in1k"), root / "resnet18", safe_serialization=True)
    # the Hub's copy: parquet files with its columns
    for split, rows in load_splits(str(root / "cifar-100-python")).items():
        rows = rows.rename_columns({"image": "img", "label": "fine_label"}).remove_columns("index")
        place = root / "cifar100" / "cifar100"
        place.mkdir(parents=True, exist_ok=True)
        rows.add_column("coarse_label", [0] * len(rows)).to_parquet(place / f"{split}-00000-of-00001.parquet")
    return {
        "glyphs": ["--dataset", str(image_folder), "--k", "2", "--calibrate_k", "1"],
        "cifar100": ["--dataset", str(root / "cifar100"), "--validation_per_class", "1"],
        "plantnet300k": ["--dataset", str(root / "plantnet_300K"), "--model", str(root / "resnet18")],
        "small": ["--dataset", str(root / "cifar100"), "--validation_per_class", "1"],
        "cub200": ["--dataset", str(root / "CUB_200_2011"), *TINY, str(root / "tiny"), "--calibrate_k", "1", "2"],
        "folder": ["--dataset", str(root / "trees"), *TINY, str(root / "tiny")],
    }


# of the paper's recipes, which differ in the loss only, `make test` takes those of AVG-K
LONG = [path for path in PAPER if path.stem != "avgk"]
LONG += [path for path in PHOTOGRAPHS if path.stem == "ce"]


@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=pytest.mark.long) if path in LONG else path for path in RECIPES], ids=identity
)
def test_every_recipe_trains(path, data, tmp_path, monkeypatch):
    """Two steps on small data, through the same code; the blocks stand in their order."""
    text = path.read_text()
    assert text.index("# model") < text.index("# data") < text.index("# training")
    small = ["--output_dir", str(tmp_path / "run"), "--max_steps", "2", "--disable_tqdm", "true"]
    if path in PAPER:
        small += ["--per_device_train_batch_size", "4", "--dataloader_pin_memory", "false"]
        if identity(path) == "cifar100/ce":  # through a worker process, as on a large machine; its end takes seconds
            small += ["--dataloader_num_workers", "1"]
        else:
            small += ["--dataloader_num_workers", "0", "--dataloader_persistent_workers", "false"]
    if path in PHOTOGRAPHS:
        small += ["--per_device_train_batch_size", "4", "--dataloader_num_workers", "0"]
        monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    often = [f"--{what}_{how}" for what in ("eval", "save") for how in ("strategy=steps", "steps=2")]
    main([str(path), *data[path.parent.name], *small, *often])
    model = AvgKForImageClassification.from_pretrained(tmp_path / "run")
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["objective"] == ("ce" if path.stem == "frozen" else path.stem)
    if path.parent.name == "cifar100":
        assert model.config.architecture == "densenet40_40_cifar" and model.config.train_counts == [2] * 12
        assert set(model.config.thresholds) == {"1", "2", "3", "5", "10"}
        assert model.config.calibration["num_examples"] == 12 and model.config.calibration["split"] == "validation"
    elif path.parent.name == "plantnet300k":
        assert model.config.architecture == "resnet18" and model.config.train_counts == [3] * 11 + [4]
        assert list(model.config.id2label.values()) == [SPECIES[i] for i in sorted(SPECIES)]
        assert model.config.pretrained_cfg["crop_pct"] == 0.875
        assert {f"average_k_accuracy@{k}" for k in (2, 3, 10)} < set(results["test"])
        assert "few_shot_accuracy@10" in results["test"] and set(model.config.thresholds) == {"2", "3", "5", "10"}
    elif path in PHOTOGRAPHS:
        assert model.config.head == ("auto" if path.stem == "avgk" else "ml")  # of one head there is no choice
        assert "5" in model.config.thresholds and "test" in results
        assert len(list((tmp_path / "cache" / "avgk_features").glob("*"))) == (3 if path.stem == "frozen" else 0)


@pytest.mark.parametrize("path", sorted((ROOT / "recipes").rglob("compare*.yaml")), ids=identity)
def test_every_comparison_can_be_planned(path, tmp_path):
    """Its recipe is beside it, and every loss takes what is searched for it."""
    comparison = read_comparison(str(path), output_dir=str(tmp_path))
    runs = plan(comparison)
    finals = [run for run in runs if run.phase == "final"]
    assert {run.loss for run in finals} == set(comparison.losses)
    tuned = any(comparison.searched(loss) for loss in comparison.losses)
    assert (len(finals) < len(runs)) == tuned
    for loss in comparison.losses:  # fewer than the budget only where there are no more
        tried = len(comparison.configurations(loss))
        assert tried == min(comparison.budget, math.prod(map(len, comparison.searched(loss).values())))


def test_folder_recipes_take_validation_where_there_is_none(image_folder, tmp_path):
    """And an image that cannot be read is left out of the split it is in, and of no other."""
    without = shutil.copytree(image_folder, tmp_path / "trees", ignore=shutil.ignore_patterns("validation"))
    (without / "train" / "ash" / "broken.png").write_bytes(b"none")
    for folder, taken, number in ((image_folder, None, 30), (without, 5, 5 + 5 + 5 + 4 + 3 + 2)):
        given = ["--dataset", str(folder), "--output_dir", str(tmp_path / "run")]
        _, data_args, args = parse_recipe([str(ROOT / "recipes" / "folder" / "ce.yaml"), *given])
        used, skipped = load_data(data_args, args)
        assert len(used["validation"]) + skipped["validation"] == number and data_args.validation_per_class == taken
        stored = {name: used[name].cast_column("image", Image(decode=False))["image"] for name in used}
        paths = {name: {row["path"] for row in rows} for name, rows in stored.items()}
        assert not paths["train"] & paths["validation"] and len({part._fingerprint for part in used.values()}) == 3
        assert len(paths["train"] | paths["validation"]) == 72 + (0 if taken else 30) and sum(skipped.values()) < 2


def test_cifar_from_the_archive_is_the_same_data(data):
    """All copies of CIFAR-100 give the same images in the same order, and the same split."""
    folder = Path(data["cifar100"][1])
    copies = [
        load_splits(str(folder), None, "img", "fine_label", validation_per_class=1),
        load_splits(str(folder.with_name("cifar-100-python")), None, "img", "fine_label", validation_per_class=1),
    ]
    for split in ("train", "validation", "test"):
        a, b = (
            [row["image"]["bytes"] for row in copy[split].cast_column("image", Image(decode=False))] for copy in copies
        )
        assert a == b and list(copies[0][split]["label"]) == list(copies[1][split]["label"])
        assert list(copies[0][split]["index"]) == list(range(len(a)))


@pytest.mark.parametrize("name", ["cifar100/role", "plantnet300k/avgk"])
def test_the_optimizer_is_the_papers(name, data, tmp_path):
    """Momentum, Nesterov and weight decay reach every parameter, and the rates are right at each border."""
    folder, _, stem = name.partition("/")
    path = str(ROOT / "recipes" / folder / f"{stem}.yaml")
    arguments = ["--output_dir", str(tmp_path), "--dataloader_pin_memory", "false"]
    model_args, data_args, args = parse_recipe([path, *data[folder], *arguments])
    splits = load_splits(data_args.dataset, None, data_args.image_column, data_args.label_column)
    model = build_model(model_args, splits["train"].features["label"].names)
    train = prepare(splits["train"], model.config, data_args.augmentation)
    trainer = AvgKTrainer(model=model, args=args, train_dataset=train, eval_dataset=train)
    optimizer = trainer.create_optimizer()
    decayed = [p for group in optimizer.param_groups if group["weight_decay"] == 1e-4 for p in group["params"]]
    assert type(optimizer) is torch.optim.SGD and {id(p) for p in decayed} == {id(p) for p in model.parameters()}
    assert all(group["nesterov"] and group["momentum"] == 0.9 for group in optimizer.param_groups)
    first, borders = {"cifar100": (0.1, (150, 225)), "plantnet300k": (0.002, (25,))}[folder]
    per_epoch = {"cifar100": 704, "plantnet300k": 7623}[folder]  # of 45,000 images in 64s, and of 243,916 in 32s
    trainer._steps_per_epoch = per_epoch
    rate = trainer.create_scheduler(per_epoch * int(args.num_train_epochs)).lr_lambdas[0]
    for i, epoch in enumerate(borders):
        assert first * rate(epoch * per_epoch - 1) == pytest.approx(first / 10**i, rel=1e-12)
        assert first * rate(epoch * per_epoch) == pytest.approx(first / 10 ** (i + 1), rel=1e-12)
    assert {group["lr"] for group in optimizer.param_groups} == {first}


class Rates(TrainerCallback):
    """The learning rate of every step, as the optimizer sees it."""

    def __init__(self):
        self.seen = []

    def on_pre_optimizer_step(self, args, state, control, optimizer=None, **kwargs):
        self.seen.append((state.global_step, optimizer.param_groups[0]["lr"]))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_milestones_hold_at_the_epochs_borders(accumulation, make_trainer, tmp_path):
    """72 images in 16s are 5 batches an epoch, the last of 8; two at a time, 3 steps. Also after resuming."""
    per_epoch = {1: 5, 2: 3}[accumulation]
    options = {"num_train_epochs": 4, "lr_milestones": [1, 3], "gradient_accumulation_steps": accumulation}
    options |= {"learning_rate": 0.04, "eval_strategy": "no", "load_best_model_at_end": False}
    expected = [(step, 0.04 * 0.1 ** ((step >= per_epoch) + (step >= 3 * per_epoch))) for step in range(4 * per_epoch)]
    whole = Rates()
    make_trainer(callbacks=[whole], **options).train()
    assert [step for step, _ in whole.seen] == [step for step, _ in expected]
    assert [rate for _, rate in whole.seen] == pytest.approx([rate for _, rate in expected], rel=1e-12)
    for epochs_done in (1, 2):  # at a border, and between two
        rest = Rates()
        checkpoint = tmp_path / "run" / f"checkpoint-{epochs_done * per_epoch}"
        make_trainer(callbacks=[rest], **options).train(resume_from_checkpoint=str(checkpoint))
        assert rest.seen == whole.seen[epochs_done * per_epoch :]


def test_milestones_of_another_kind_are_refused(recipe, make_trainer):
    for values, message in (
        ({"lr_milestones": [3, 1]}, "in ascending order"),
        ({"lr_milestones": [0]}, "in ascending order"),
        ({"lr_milestones": 5}, "lr_milestones=5 must be a list of epochs"),
        ({"lr_milestones": ["x"]}, "must be a list of epochs"),
        ({"lr_milestones": [2], "lr_gamma": 0.0}, "lr_gamma=0.0 must be a number greater than 0"),
        ({"lr_milestones": [2], "warmup_steps": 5}, "leave one of them out"),
    ):
        with pytest.raises(ValueError, match=message):
            make_trainer(**values)
    assert make_trainer(lr_milestones=(1, 2)).args.lr_milestones == (1, 2)
    args = parse_recipe([str(recipe), "--lr_milestones", "1", "1.5", "--lr_gamma", "0.5"])[2]
    assert (args.lr_milestones, args.lr_gamma, args.decay_all) == ([1.0, 1.5], 0.5, False)


def test_missing_data_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(FileNotFoundError, match="plantnet_300K': there is no such folder"):
        main([str(ROOT / "recipes" / "plantnet300k" / "ce.yaml")])
