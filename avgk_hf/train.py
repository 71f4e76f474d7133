"""Train a model as a recipe describes it, with one seed or several: `avgk train`, `python -m avgk_hf.train`."""

import json
import shlex
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import set_seed
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from transformers.utils import logging

from .calibration import Calibration
from .checkpoints import after_the_model, last_checkpoint, where_to_go_on
from .data import class_counts, load_splits, prepare, skip_bad_images
from .data.classes import check_new_classes
from .data.datasets import TAKE, check_split, keep_aside, take_from_train
from .data.inspection import count_images, short_form
from .features import Features, cached_features
from .files import check_output_dir, remove
from .modeling import AvgKForImageClassification
from .recipes import DataArguments, ModelArguments, describe_fields, parse_recipe
from .results import RESULTS, TRAINED
from .scope import LEAST_ASIDE, promise
from .sets import k_key
from .shell import guarded, printable, without_tokens
from .study.plots import set_size_histogram
from .study.seeds import write_report
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments

logger = logging.get_logger(__name__)
OVERWRITE = "--overwrite"  # of a command, and no field: a recipe does not say it


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
    same += ("test_time_augmentation",)
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
    same = ("dataset", "image_column", "label_column", "allow_outside")
    given = {name: getattr(data_args, name) for name in same}
    with args.main_process_first(desc="load the data"):  # the others find it in the cache
        # new classes are looked for in the splits that are used
        given |= {"config_name": data_args.dataset_config, "allow_new_classes": True}
        splits = load_splits(seed=data_args.glyphs_seed, **given)
        if data_args.validation_if_none and data_args.validation_split not in splits:
            # from here on, and in results.json, as if it had been asked for
            data_args.validation_per_class = data_args.validation_if_none
        return take_from_train(splits, data_args.validation_per_class, data_args.test_per_class, data_args.split_seed)


def load_data(
    data_args: DataArguments, args: AvgKTrainingArguments, splits: DatasetDict | None = None
) -> tuple[dict[str, Dataset], dict[str, int]]:
    """Train, validation and, where there are such, test and calibration; and how many of each were skipped.

    Args:
        data_args: Data block of the recipe.
        args: Training block.
        splits: The data, where it is loaded already.
    """
    splits = splits or load_all(data_args, args)
    names = {part: getattr(data_args, f"{part}_split") for part in ("train", "validation", "test")}
    if data_args.calibration_split not in ("none", "auto"):
        if data_args.calibration_split in names.values():
            raise ValueError(
                f"calibration_split={data_args.calibration_split!r} is used for something else: name a split of its"
                " own, or `auto`, which keeps half of validation for it."
            )
        names["calibration"] = data_args.calibration_split
    for part in (part for part in names if part != "test"):
        check_split(splits, data_args.dataset, names[part], f"`{part}_split:`", f"`{TAKE}: 20` in the recipe")
    used = {part: splits[name] for part, name in names.items() if name in splits}
    skipped = {}
    if data_args.on_bad_image == "skip":
        with args.main_process_first(desc="checking images"):  # the other processes find what datasets has kept
            for part, split in used.items():
                report, workers = args.process_index == 0, args.dataloader_num_workers
                used[part], faults = skip_bad_images(split, names[part], workers, report)
                skipped[part] = len(faults)
    if not data_args.allow_new_classes:
        check_new_classes({names[part]: split for part, split in used.items()}, names["train"])
    if data_args.calibration_split == "auto":
        halves = keep_aside(used["validation"], data_args.split_seed, LEAST_ASIDE)
        used |= {} if halves is None else dict(zip(("validation", "calibration"), halves, strict=True))
    classes = used["train"].features["label"].names
    counts = {part: class_counts(split, len(classes)) for part, split in used.items()}
    empty = [classes[i] for i in np.flatnonzero(counts["train"] == 0)]
    if empty:
        logger.warning(
            f"{len(empty)} of {len(classes)} classes have no training image, e.g. {empty[0]!r}: they cannot be learnt,"
            " and count as few shot."
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
        return cached_features(model.to(args.device), split, args.per_device_eval_batch_size)


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
    if data_args.cache_features and model_args.test_time_augmentation != "none":
        raise ValueError(
            f"cache_features keeps what the backbone says of an image, and test_time_augmentation="
            f"{model_args.test_time_augmentation!r} needs its mirror image too: leave one of them out."
        )
    set_seed(args.seed)
    model = build_model(model_args, data["train"].features["label"].names)
    trainer = AvgKTrainer(
        model=None if model_init else model,
        model_init=model_init,
        args=args,
        train_dataset=as_input(data["train"], model, data_args, args, data_args.augmentation),
        eval_dataset=as_input(data["validation"], model, data_args, args),
        dataset_name=data_args.dataset,
    )
    trainer.record = {"data": asdict(data_args)}
    return trainer


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
    if args.process_index == 0:
        print(short_form(count_images(used)))
    trainer = make_trainer(model_args, data_args, args, used)
    if args.should_save and not args.resume_from_checkpoint:
        _forget(Path(args.output_dir))
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.evaluate()
    if "calibration" in used:
        trainer.calibrate(as_input(used["calibration"], trainer.model, data_args, args, keep=False))
    if "test" in used:
        test = as_input(used["test"], trainer.model, data_args, args, keep=False)
        trainer.evaluate(test, metric_key_prefix="test")
    recipe = {**asdict(model_args), **{name: getattr(args, name) for name in TRAINED}}
    trainer.record |= {"recipe": recipe} | ({"skipped": skipped} if skipped else {})
    trainer.save_model()
    trainer.save_state()
    results = trainer.results()
    if trainer.is_world_process_zero():
        with after_the_model(args.output_dir):
            _show_results(trainer, results)
    return results


def _forget(folder: Path) -> None:
    """Remove results and checkpoints of an earlier training: the new one, if it is stopped, would go on with them."""
    for path in (folder / RESULTS, *folder.glob(f"{PREFIX_CHECKPOINT_DIR}-*")):
        remove(path)


def _show_results(trainer: AvgKTrainer, results: dict[str, Any]) -> None:
    folder, title = Path(trainer.args.output_dir), f"set sizes on test, K = {k_key(results['k'])}"
    if "test" in results:
        title = f"{folder.name}, {title}: average-K accuracy {100 * results['test']['average_k_accuracy']:.1f}%"
    if "set_sizes" in results and find_spec("matplotlib"):
        set_size_histogram({"": results["set_sizes"]["all"]}, folder / "set_sizes.png", title)
    trainer.create_model_card()
    step, state = trainer.weights_step, trainer.state
    if step != state.global_step:
        epoch = step / state.global_step * state.epoch
        name = f"eval_{trainer.args.metric_for_best_model.removeprefix('eval_')}"
        as_good = sum(entry.get(name) == state.best_metric for entry in state.log_history)
        first = f"the first of {as_good} that are the best" if as_good > 1 else "the best"
        print(f"the weights are those after epoch {epoch:.4g} of {state.epoch:.4g}, {first} on validation")
    if (approximate := promise(Calibration.of(trainer.model.config))) is not None:
        print(f"{approximate.partition(', so that')[0]} (`avgk info` says more)")


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


def _refuse_finished(args: AvgKTrainingArguments) -> None:
    """Keep what is finished, which a training that is started again by mistake would replace."""
    for folder in (args.output_dir, *(Path(args.output_dir) / f"seed-{args.seed + i}" for i in range(args.seeds))):
        if (Path(folder) / RESULTS).is_file():
            rest = ", train the seeds that are left with `--resume_from_checkpoint last`" if args.seeds > 1 else ""
            raise FileExistsError(
                f"{folder} holds a finished training, which is kept: name another folder with `--output_dir`{rest}, or"
                f" replace it with `{OVERWRITE}`."
            )
        if last_checkpoint(folder, warn=False):
            raise FileExistsError(
                f"{folder} holds a training that was stopped: go on with `--resume_from_checkpoint last`, or begin"
                f" anew with `{OVERWRITE}`."
            )


def summary(results: dict[str, Any], output_dir: str) -> str:
    """A few lines for the end of a run."""
    split = "test" if "test" in results else "validation"
    metrics = results[split]
    text = (
        f"{split} average-{k_key(results['k'])} accuracy {100 * metrics['average_k_accuracy']:.2f}%, mean set size"
        f" {metrics['mean_set_size']:.2f}, top-1 {100 * metrics['top1_accuracy']:.2f}%"
    )
    if split == "validation":
        text += "\nthey chose epoch and thresholds, so this is too good to report: `test_per_class: 5` keeps others"
    return f"{text}\nsaved to {output_dir}"


def main(arguments: list[str] | None = None) -> None:
    """Entry point of `python -m avgk_hf.train` and `avgk train`."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if "-h" in arguments or "--help" in arguments:
        print(describe_fields())
        return
    overwrite, arguments = OVERWRITE in arguments, [each for each in arguments if each != OVERWRITE]
    model_args, data_args, args = parse_recipe(arguments)
    if not overwrite and not args.resume_from_checkpoint:
        _refuse_finished(args)
    if args.world_size > 1 and args.process_index == 0:
        print(f"{args.world_size} processes train together, {args.train_batch_size} images each per step")
    again = bool(args.resume_from_checkpoint)
    try:
        if args.seeds > 1:
            text = run_seeds(arguments, keep=again)
        else:
            results = run(model_args, data_args, args)
            made, data = (shlex.quote(printable(name)) for name in (args.output_dir, data_args.dataset))
            text = f"{summary(results, args.output_dir)}\nnext: `avgk predict {made} PHOTOS --out sets.csv`"
            if "test" in results:
                split = "" if data_args.test_split == "test" else f" --split {shlex.quote(data_args.test_split)}"
                text += f", or `avgk evaluate {made} {data}{split}`"
    except KeyboardInterrupt as stop:
        resume = [] if again else ["--resume_from_checkpoint", "last"]
        command = f"`{shlex.join(['avgk', 'train', *without_tokens(arguments), *resume])}`"
        if args.world_size > 1:  # whatever started the processes
            command = "the same command" if again else f"the same command and `{shlex.join(resume)}`"
        place = f"Finished seeds and checkpoints are in {args.output_dir}; go on with {command}."
        if args.seeds == 1:
            start = f"`{shlex.join(['avgk', 'train', *without_tokens(arguments)])}`"
            place = where_to_go_on(args.output_dir, command, start if args.world_size == 1 else "the same command")
        raise type(stop)(f"training was stopped. {place}") from None
    if args.process_index == 0:
        print(text)


if __name__ == "__main__":
    sys.exit(guarded("train", main))
