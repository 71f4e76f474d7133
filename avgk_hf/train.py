"""Train a model as a recipe describes it, with one seed or several: `avgk train`, `python -m avgk_hf.train`."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import set_seed
from transformers.utils import logging

from . import __version__
from .checkpoints import where_to_go_on
from .data import class_counts, load_splits, prepare, skip_bad_images
from .data.classes import check_new_classes
from .features import Features, cached_features
from .files import check_output_dir, write_text
from .model_card import hyperparameters, plain_metrics
from .modeling import AvgKForImageClassification
from .recipes import DataArguments, ModelArguments, describe_fields, parse_recipe
from .sets import k_key
from .shell import guarded, without_tokens
from .statistics import SHOTS, SetStatistics
from .study.plots import set_size_histogram
from .study.seeds import RESULTS, write_report
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments

logger = logging.get_logger(__name__)
# the training arguments that the weights depend on, besides the seed
TRAINED = ("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
TRAINED += ("optim", "optim_args", "learning_rate", "lr_scheduler_type", "lr_milestones", "lr_gamma", "warmup_steps")
TRAINED += ("weight_decay", "decay_all", "max_grad_norm", "bf16", "fp16", "early_stopping_patience")
TRAINED += ("metric_for_best_model", "ema_decay")


def build_model(arguments: ModelArguments, names: list[str]) -> AvgKForImageClassification:
    """The model that the recipe describes, for classes of these names."""
    try:
        model_args = json.loads(arguments.model_args or "{}")
    except (ValueError, RecursionError):
        model_args = None
    if not isinstance(model_args, dict):
        raise ValueError(
            f"model_args={arguments.model_args[:80]!r} is not a mapping in JSON, e.g. `model_args: {{}}`."
        )
    if arguments.in_chans != 3:
        model_args["in_chans"] = arguments.in_chans
    same = ("objective", "pretrained", "checkpoint", "image_size", "hyperparameters", "score", "head")
    model = AvgKForImageClassification.from_timm(
        arguments.model,
        id2label=dict(enumerate(names)),
        k=int(arguments.k) if float(arguments.k).is_integer() else arguments.k,
        model_args=model_args,
        **{name: getattr(arguments, name) for name in same},
    )
    if arguments.freeze_backbone:
        model.freeze_backbone()
    return model.to(memory_format=torch.channels_last) if arguments.channels_last else model


def load_all(data_args: DataArguments, args: AvgKTrainingArguments) -> DatasetDict:
    """All splits of the dataset that the recipe names."""
    same = ("dataset", "image_column", "label_column", "validation_per_class", "split_seed", "allow_outside")
    given = {name: getattr(data_args, name) for name in same}
    with args.main_process_first(desc="load the data"):  # the others find it in the cache
        # new classes are looked for in the splits that are used
        given |= {"config_name": data_args.dataset_config, "allow_new_classes": True}
        return load_splits(seed=data_args.glyphs_seed, **given)


def load_data(
    data_args: DataArguments, args: AvgKTrainingArguments, splits: DatasetDict | None = None
) -> tuple[dict[str, Dataset], dict[str, int]]:
    """Train, validation and, where there is one, test; and how many images of each were skipped.

    Args:
        data_args: Data block of the recipe.
        args: Training block.
        splits: The data, where it is loaded already.
    """
    splits = splits or load_all(data_args, args)
    names = {part: getattr(data_args, f"{part}_split") for part in ("train", "validation", "test")}
    for part in ("train", "validation"):
        if names[part] not in splits:
            raise ValueError(
                f"the dataset {data_args.dataset!r} has no split {names[part]!r}, only {list(splits)}; name the right"
                f" one with `{part}_split:`."
            )
    used = {part: splits[name] for part, name in names.items() if name in splits}
    skipped = {}
    if data_args.on_bad_image == "skip":
        with args.main_process_first(desc="checking images"):  # the other processes find what datasets has kept
            for part, split in used.items():
                used[part], skipped[part] = skip_bad_images(
                    split, names[part], args.dataloader_num_workers, report=args.process_index == 0
                )
    if not data_args.allow_new_classes:
        check_new_classes({names[part]: split for part, split in used.items()}, names["train"])
    classes = used["train"].features["label"].names
    counts = {part: class_counts(split, len(classes)) for part, split in used.items()}
    empty = [classes[i] for i in np.flatnonzero(counts["train"] == 0)]
    if empty:
        logger.warning(
            f"{len(empty)} of {len(classes)} classes have no training image, e.g. {empty[0]!r}: they count as few"
            " shot."
        )
    return used, skipped


def as_input(
    split: Dataset,
    model: AvgKForImageClassification,
    data_args: DataArguments,
    args: AvgKTrainingArguments,
    augmentation: str = "none",
    keep: bool = True,
) -> Dataset | Features:
    """A split as the model takes it: images, kept in memory where the recipe says so, or their features."""
    if not data_args.cache_features:
        return prepare(split, model.config, augmentation, keep and data_args.cache_images)
    with args.main_process_first(desc="compute features"):  # the others find them
        return cached_features(model.to(args.device), split, args.per_device_train_batch_size)


def make_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: AvgKTrainingArguments,
    data: dict[str, Dataset],
    model_init: Callable[[Any], AvgKForImageClassification] | None = None,
) -> AvgKTrainer:
    """The trainer that the recipe describes, on what `load_data` gave; `model_init` builds the models of a search."""
    if data_args.cache_images and args.dataloader_num_workers:
        raise ValueError(
            f"cache_images keeps images in this process, but dataloader_num_workers={args.dataloader_num_workers}"
            " processes read them: set `dataloader_num_workers: 0`."
        )
    if data_args.cache_features and not model_args.freeze_backbone:
        raise ValueError("cache_features is for a backbone that does not learn: set `freeze_backbone: true` too.")
    set_seed(args.seed)
    model = build_model(model_args, data["train"].features["label"].names)
    return AvgKTrainer(
        model=None if model_init else model,
        model_init=model_init,
        args=args,
        train_dataset=as_input(data["train"], model, data_args, args, data_args.augmentation),
        eval_dataset=as_input(data["validation"], model, data_args, args),
        # a local folder goes into config and card by its name only: they are made to be shared
        dataset_name=Path(data_args.dataset).name if Path(data_args.dataset).exists() else data_args.dataset,
    )


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: AvgKTrainingArguments,
    splits: DatasetDict | None = None,
) -> dict[str, Any]:
    """Train, calibrate on validation, report on test, and save everything to `args.output_dir`.

    Returns:
        What is written to results.json: the metrics of each split, the set sizes on test, and how many images were
        skipped.
    """
    if args.should_save:
        check_output_dir(args.output_dir)
    used, skipped = load_data(data_args, args, splits)
    trainer = make_trainer(model_args, data_args, args, used)
    config = trainer.model.config
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    results: dict[str, Any] = {
        "dataset": trainer.dataset_name,
        "data": asdict(data_args),
        "objective": model_args.objective,
        "k": config.k,
        "seed": args.seed,
        "hyperparameters": hyperparameters(config, args),
        "recipe": {**asdict(model_args), **{name: getattr(args, name) for name in TRAINED}},
        "versions": {"avgk_hf": __version__, **{name: version(name) for name in ("torch", "timm", "transformers")}},
        "validation": plain_metrics(trainer.evaluate(), "eval_"),
    }
    if skipped:
        results["skipped"] = skipped
    if "test" in used:
        test = as_input(used["test"], trainer.model, data_args, args, keep=False)
        results["test"] = plain_metrics(trainer.evaluate(test, metric_key_prefix="test"), "test_")
        results["set_sizes"] = set_size_counts(trainer.statistics(config.k), config.k, config.train_counts)
    trainer.save_model()
    trainer.save_state()
    if trainer.is_world_process_zero():
        _write_results(trainer, results)
    return results


def _write_results(trainer: AvgKTrainer, results: dict[str, Any]) -> None:
    folder, title = Path(trainer.args.output_dir), f"Set sizes on test, K = {k_key(results['k'])}"
    try:
        if "set_sizes" in results and find_spec("matplotlib"):
            set_size_histogram({results["objective"]: results["set_sizes"]["all"]}, folder / "set_sizes.png", title)
        write_text(folder / RESULTS, json.dumps(results, indent=2, ensure_ascii=False) + "\n")
        trainer.create_model_card()
    except OSError as error:
        raise OSError(
            f"the results could not be written to {folder} ({error.strerror}), the model was. Free some space."
            f" {where_to_go_on(folder)}"
        ) from error


def run_seeds(arguments: list[str], keep: bool = False) -> str:
    """Train once for every seed, in `output_dir/seed-N`, and report mean and interval over them.

    Args:
        arguments: As of `parse_recipe`.
        keep: Whether a seed that is finished already is left as it is.

    Returns:
        The report as Markdown; report.md and report.json are written to `output_dir`.
    """
    _, data_args, args = parse_recipe(arguments)
    folders, splits = [], None
    if args.should_save:
        check_output_dir(args.output_dir)
    for seed in range(args.seed, args.seed + args.seeds):
        folders.append(Path(args.output_dir) / f"seed-{seed}")
        if keep and (folders[-1] / RESULTS).is_file():
            continue
        own = ["--seeds", "1", "--seed", str(seed), "--output_dir", str(folders[-1])]
        splits = splits or load_all(data_args, args)
        results = run(*parse_recipe([*arguments, *own]), splits)
        if args.process_index == 0:
            print(f"seed {seed}: {summary(results, str(folders[-1]))}")
    return write_report(folders, args.output_dir) if args.process_index == 0 else ""


def set_size_counts(statistics: SetStatistics, k: float, train_counts: list[int]) -> dict[str, list[int]]:
    """How many images of an evaluation got a set of 0, 1, 2, ... classes, for all classes and by shot."""
    sizes = statistics.set_sizes(k)
    of_class = np.asarray(train_counts)[statistics.labels]  # (n,), training images of each image's class
    counts = {"all": np.bincount(sizes).tolist()}
    for name, (low, high) in SHOTS.items():
        group = (of_class >= low) & (of_class < high)
        counts[name] = np.bincount(sizes[group]).tolist()
    return counts


def summary(results: dict[str, Any], output_dir: str) -> str:
    """A few lines for the end of a run."""
    split = "test" if "test" in results else "validation"
    metrics = results[split]
    return (
        f"{split} average-{k_key(results['k'])} accuracy {100 * metrics['average_k_accuracy']:.2f}%, mean set size"
        f" {metrics['mean_set_size']:.2f}, top-1 {100 * metrics['top1_accuracy']:.2f}%\nsaved to {output_dir}"
    )


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `python -m avgk_hf.train` and `avgk train`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "-h" in arguments or "--help" in arguments:
        print(describe_fields())
        return
    model_args, data_args, args = parse_recipe(arguments)
    if args.world_size > 1 and args.process_index == 0:
        print(f"{args.world_size} processes train together, {args.train_batch_size} images each per step")
    again = bool(args.resume_from_checkpoint)
    try:
        if args.seeds > 1:
            text = run_seeds(arguments, keep=again)
        else:
            text = summary(run(model_args, data_args, args), args.output_dir)
    except KeyboardInterrupt as stop:
        resume = [] if again else ["--resume_from_checkpoint", "last"]
        command = f"`{shlex.join(['avgk', 'train', *without_tokens(arguments), *resume])}`"
        if args.world_size > 1:  # whatever started the processes
            command = "the same command" if again else f"the same command and `{shlex.join(resume)}`"
        place = f"Finished seeds and checkpoints are in {args.output_dir}; go on with {command}."
        if args.seeds == 1:
            place = where_to_go_on(args.output_dir, command)
        raise type(stop)(f"training was stopped. {place}") from None
    if args.process_index == 0:
        print(text)


if __name__ == "__main__":
    sys.exit(guarded("train", main))
