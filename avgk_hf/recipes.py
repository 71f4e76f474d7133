"""Train one model from a recipe: `avgk train recipes/glyphs/avgk.yaml --k 3`.

A recipe is a YAML file whose keys are the fields of `ModelArguments`, `DataArguments` and `AvgKTrainingArguments`;
every one can be overridden on the command line. The same file runs on several processes with
`accelerate launch -m avgk_hf.train recipes/glyphs/avgk.yaml`.
"""

import difflib
import json
import math
import shlex
import sys
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field, fields, make_dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from datasets import Dataset, DatasetDict
from transformers import EarlyStoppingCallback, HfArgumentParser, set_seed
from transformers.hf_argparser import HfArg
from transformers.utils import logging

from . import __version__
from .backbones import MOST_CHANNELS, MOST_SIDE
from .checkpoints import where_to_go_on
from .checks import check_choice
from .data import class_counts, load_splits, prepare, skip_bad_images
from .data.datasets import ON_BAD_IMAGE
from .data.transforms import AUGMENTATIONS
from .files import check_output_dir, write_text
from .losses import LOSSES, every_hyperparameter
from .model_card import hyperparameters, plain_metrics
from .modeling import AvgKForImageClassification
from .plain_yaml import load_yaml
from .sets import HEADS, SCORES, check_k, k_key
from .shell import MASK, is_secret, without_tokens
from .statistics import SHOTS, SetStatistics
from .study.seeds import RESULTS, write_report
from .trainer import AvgKTrainer
from .training_args import AvgKTrainingArguments

logger = logging.get_logger(__name__)
RANGES = {"image_size": (1, MOST_SIDE), "in_chans": (1, MOST_CHANNELS)}
RANGES |= {"validation_per_class": (1, math.inf), "glyphs_seed": (0, math.inf)}
MOST_COMBINATIONS = 100_000  # of a search
METRICS = ("loss", "average_k_accuracy", *(f"average_k_accuracy_{head}" for head in HEADS), "lambda_val")
METRICS += ("mean_set_size", "empty_sets", "top1_accuracy", "topk_accuracy", "macro_accuracy")
METRICS += tuple(f"{name}_shot_accuracy" for name in SHOTS)
# the training arguments that the weights depend on, besides the seed
TRAINED = ("num_train_epochs", "max_steps", "per_device_train_batch_size", "gradient_accumulation_steps", "world_size")
TRAINED += ("optim", "optim_args", "learning_rate", "lr_scheduler_type", "lr_milestones", "lr_gamma", "warmup_steps")
TRAINED += ("weight_decay", "decay_all", "max_grad_norm", "bf16", "fp16", "early_stopping_patience")
TRAINED += ("metric_for_best_model",)


@dataclass
class ModelArguments:
    """The model block of a recipe."""

    model: str = HfArg(help="A timm model name, a local timm folder, or hf_hub:<repo id>.")
    pretrained: bool | None = HfArg(default=None, help="Load the backbone's pretrained weights.")
    checkpoint: str | None = HfArg(default=None, help="A .safetensors file with the backbone's weights.")
    image_size: int | None = HfArg(default=None, help="Side of the square input.")
    in_chans: int = HfArg(default=3, help="Channels of the input: 3 for colour, 1 for grey.")
    model_args: str | None = HfArg(
        default=None, help="Arguments that shape the timm model, as JSON or a YAML mapping."
    )
    freeze_backbone: bool = HfArg(default=False, help="Train the heads only.")
    channels_last: bool = HfArg(
        default=False, help="Lay tensors out channels last, usually faster for convolutional backbones."
    )
    objective: str = HfArg(default="avgk", help="The loss to train with.", metadata={"choices": LOSSES})
    k: float = HfArg(default=5, help="Average set size K, in [1, number of classes).")
    score: str = HfArg(default="softmax", help="What is thresholded.", metadata={"choices": list(SCORES)})
    head: str = HfArg(default="ml", help="Which head answers.", metadata={"choices": [*HEADS, "auto"]})

    def __post_init__(self) -> None:
        """Refuse a value that could only fail later, by the field's name."""
        _check_fields(self)
        check_k(self.k)
        LOSSES[self.objective].complete(self.hyperparameters)

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Those of the objective."""
        return {name: value for name, value in vars(self).items() if name in LOSSES[self.objective].hyperparameters}

    def __reduce__(self) -> tuple:
        return _restore, (vars(self),)  # the workers of a comparison make the class themselves


def model_arguments(objective: str) -> type[ModelArguments]:
    """The model block with the hyperparameters of one objective as further fields."""
    own = []
    for name, item in LOSSES[objective].hyperparameters.items():
        metadata = {"help": item.help, "choices": item.choices}
        own.append((name, str if item.choices else float, field(default=item.default, metadata=metadata)))
    return make_dataclass("ModelArguments", own, bases=(ModelArguments,))


def _restore(values: dict[str, Any]) -> ModelArguments:
    return model_arguments(values["objective"])(**values)


@dataclass
class DataArguments:
    """The data block of a recipe."""

    dataset: str = HfArg(
        help="glyphs, a folder of images or parquet, a saved dataset, an unpacked archive, or a Hub id."
    )
    dataset_config: str | None = HfArg(default=None, help="Configuration of a Hub dataset.")
    image_column: str = HfArg(default="image", help="Column that holds the images.")
    label_column: str = HfArg(default="label", help="Column that holds the classes.")
    train_split: str = HfArg(default="train", help="Split to train on.")
    validation_split: str = HfArg(default="validation", help="Split that chooses and calibrates.")
    test_split: str = HfArg(default="test", help="Split to report on; left out where it is missing.")
    validation_per_class: int | None = HfArg(
        default=None, help="Take this many validation images of each class from train."
    )
    split_seed: int = HfArg(default=0, help="Which images `validation_per_class` takes.")
    glyphs_seed: int = HfArg(default=0, help="Seed of the generated images, for `dataset: glyphs`.")
    augmentation: str = HfArg(
        default="none", help="Random changes to training images.", metadata={"choices": list(AUGMENTATIONS)}
    )
    cache_images: bool = HfArg(
        default=False, help="Keep images in memory as tensors; the same results, sooner. Needs augmentation none."
    )
    on_bad_image: str = HfArg(
        default="error",
        help="Refuse an image that cannot be read, or leave it out and count it.",
        metadata={"choices": list(ON_BAD_IMAGE)},
    )
    allow_outside: bool = HfArg(
        default=False, help="Let the dataset point out of itself: links, paths of images, addresses in its README."
    )

    def __post_init__(self) -> None:
        """Refuse a value that could only fail later, by the field's name."""
        _check_fields(self)
        if self.cache_images and self.augmentation != "none":
            raise ValueError(
                f"cache_images keeps images as they are, but augmentation={self.augmentation!r} makes new ones every"
                " epoch: leave one of them out."
            )


def _check_fields(block: Any) -> None:
    """Refuse values of another type or range than the field's, a choice that is not offered, and what is no name."""
    kinds = {"str": str, "int": int, "float": (int, float), "bool": bool}
    for item in fields(block):
        name, value = item.name, getattr(block, item.name)
        kind = str(getattr(item.type, "__name__", item.type)).partition(" | ")[0]
        if value is None and item.default is None:
            continue
        if not isinstance(value, kinds[kind]) or (isinstance(value, bool) and kind != "bool"):
            raise ValueError(f"{name}={value!r} must be of type {kind}; set `{name}:` in the recipe.")
        if item.metadata.get("choices"):
            check_choice(name, value, item.metadata["choices"])
        if kind == "str" and (not value.strip() or not value.isprintable()):
            raise ValueError(f"{name}={value!r} is empty or holds control characters; write a plain name.")
        least, most = RANGES.get(name, (-math.inf, math.inf))
        if kind == "int" and not least <= value <= most:
            raise ValueError(f"{name}={value!r} must be a whole number in [{least}, {most}], e.g. `{name}: 3`.")


Arguments = tuple[ModelArguments, DataArguments, AvgKTrainingArguments]


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(f"{message} (`avgk train --help` explains the fields)")


def parse_recipe(arguments: list[str]) -> Arguments:
    """Read a recipe and the overrides that follow it.

    Args:
        arguments: The recipe's path, then `--field value` pairs.
    """
    if not arguments or arguments[0].startswith("-"):
        raise ValueError("name a recipe, e.g. `avgk train recipes/glyphs/avgk.yaml --k 3`.")
    path, overrides = Path(arguments[0]), arguments[1:]
    recipe = read_recipe(path)
    objective = _objective(recipe, overrides)
    blocks = (model_arguments(objective), DataArguments, AvgKTrainingArguments)
    known = {item.name for block in blocks for item in fields(block) if item.init}
    flags = [text[2:].split("=")[0].replace("-", "_") for text in overrides if text.startswith("--")]
    for name, place in [*((str(key), str(path)) for key in recipe), *((flag, "the command line") for flag in flags)]:
        if name not in known and not (name.startswith("no_") and name[3:] in known):
            if name in every_hyperparameter():
                own = ", ".join(LOSSES[objective].hyperparameters) or "none"
                raise ValueError(
                    f"{name!r} in {place} is no hyperparameter of objective {objective!r}, which has {own}."
                )
            near = difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else " `avgk train --help` lists the fields."
            raise ValueError(f"unknown field {name!r} in {place}.{hint}")
    for name, value in recipe.items():
        _check_value(name, value, path)
    parser = _Parser(blocks, allow_abbrev=False)
    next(action for action in parser._actions if action.dest == "calibrate_coverage").nargs = "*"  # empty for none
    parsed = parser.parse_args_into_dataclasses([*_as_flags(recipe), *overrides], look_for_args_file=False)
    best = parsed[2].metric_for_best_model
    if best and best.removeprefix("eval_").partition("@")[0] not in METRICS:
        near = difflib.get_close_matches(best.removeprefix("eval_"), METRICS, n=1)
        hint = f"Did you mean {near[0]!r}?" if near else f"Choose one of {', '.join(METRICS)}."
        raise ValueError(f"metric_for_best_model={best!r} is no metric of an evaluation. {hint}")
    return parsed


def _objective(recipe: dict[str, Any], overrides: list[str]) -> str:
    """The objective that is asked for; where it is not the recipe's, the recipe's hyperparameters are not for it."""
    parser = _Parser((), allow_abbrev=False, add_help=False)
    parser.add_argument("--objective", choices=LOSSES, default=ModelArguments.objective)
    own = _as_flags({"objective": recipe.get("objective")})
    stated, asked = (parser.parse_known_args(flags)[0].objective for flags in (own, [*own, *overrides]))
    for name in LOSSES[stated].hyperparameters if asked != stated else ():
        recipe.pop(name, None)
    return asked


def read_recipe(path: Path) -> dict[str, Any]:
    """The `key: value` pairs of a recipe file."""
    if not path.is_file():
        raise FileNotFoundError(f"there is no recipe {str(path)!r}; name a YAML file.")
    try:
        recipe = load_yaml(path.read_text(encoding="utf-8"))
    except ValueError as error:  # also of a file that is not UTF-8
        raise ValueError(f"{path} is not valid YAML: {error}") from None
    if not isinstance(recipe, dict):
        found = "nothing" if recipe is None else type(recipe).__name__
        raise ValueError(f"{path} must hold `key: value` pairs, but holds {found}. See recipes/glyphs/avgk.yaml.")
    return recipe


def check_combinations(place: str, values: Iterable[list[Any]]) -> None:
    """Refuse more combinations than can be listed, let alone trained."""
    number = math.prod(map(len, values))
    if number > MOST_COMBINATIONS:
        raise ValueError(f"{place}: {number} combinations are more than {MOST_COMBINATIONS}; search fewer values.")


def _check_value(name: str, value: Any, path: Path) -> None:
    """Refuse what a flag cannot carry: a mapping or list where one value is wanted, and control characters."""
    own = {item.name: item.type for block in (ModelArguments, DataArguments) for item in fields(block)}
    types = {item.name: str(item.type) for item in fields(AvgKTrainingArguments)} | {"model_args": "dict"}
    remedy, shown = f"write `{name}: VALUE` in {path}", MASK if is_secret(name) else repr(value)
    if isinstance(value, str) and not value.isprintable():
        raise ValueError(f"{name}={shown} holds control characters; {remedy}.")
    if isinstance(value, (list, dict)) and type(value).__name__ not in types.get(name, ""):
        wanted = "a list" if "list" in types.get(name, "") else "one value"
        raise ValueError(f"{name}={shown} is a {type(value).__name__}, but takes {wanted}; {remedy}.")
    if isinstance(value, bool) and own.get(name) in (str, str | None) and name != "model_args":
        raise ValueError(f"{name}={value!r} must be text, not a truth value; {remedy}, with quotes if it is a name.")


def _as_flags(recipe: dict[str, Any]) -> list[str]:
    """The recipe as command line arguments, so that one parser checks both."""
    flags = []
    for name, value in recipe.items():
        if value is None or (value == [] and name != "calibrate_coverage"):
            continue
        if isinstance(value, list):
            flags += [f"--{name}", *(json.dumps(item) if isinstance(item, bool) else str(item) for item in value)]
        else:  # in one word, because a value may begin with a dash
            flags.append(f"--{name}={json.dumps(value) if isinstance(value, (dict, bool)) else value}")
    return flags


def build_model(arguments: ModelArguments, names: list[str]) -> AvgKForImageClassification:
    """The model that the recipe describes, for classes of these names."""
    try:
        model_args = json.loads(arguments.model_args or "{}")
    except (ValueError, RecursionError) as error:
        raise ValueError(f"model_args={arguments.model_args[:80]!r} is not a mapping in JSON: {error}") from None
    if not isinstance(model_args, dict):
        raise ValueError(f"model_args={arguments.model_args!r} is not a mapping in JSON, e.g. `model_args: {{}}`.")
    if arguments.in_chans != 3:
        model_args["in_chans"] = arguments.in_chans
    k = int(arguments.k) if float(arguments.k).is_integer() else arguments.k
    model = AvgKForImageClassification.from_timm(
        arguments.model,
        id2label=dict(enumerate(names)),
        k=k,
        objective=arguments.objective,
        pretrained=arguments.pretrained,
        checkpoint=arguments.checkpoint,
        image_size=arguments.image_size,
        model_args=model_args,
        hyperparameters=arguments.hyperparameters,
        score=arguments.score,
        head=arguments.head,
    )
    if arguments.freeze_backbone:
        model.freeze_backbone()
    return model.to(memory_format=torch.channels_last) if arguments.channels_last else model


def load_all(data_args: DataArguments, args: AvgKTrainingArguments) -> DatasetDict:
    """All splits of the dataset that the recipe names."""
    with args.main_process_first(desc="load the data"):  # the others find it in the cache
        return load_splits(
            data_args.dataset,
            data_args.dataset_config,
            data_args.image_column,
            data_args.label_column,
            data_args.glyphs_seed,
            data_args.validation_per_class,
            data_args.split_seed,
            allow_outside=data_args.allow_outside,
        )


def load_data(
    data_args: DataArguments, args: AvgKTrainingArguments, splits: DatasetDict | None = None
) -> tuple[dict[str, Dataset], dict[str, int]]:
    """The data that the recipe describes.

    Args:
        data_args: Data block of the recipe.
        args: Training block.
        splits: The data, where it is loaded already.

    Returns:
        Train, validation and, where there is one, test; and how many images of each were skipped.
    """
    splits = splits or load_all(data_args, args)
    for option in ("train_split", "validation_split"):
        if getattr(data_args, option) not in splits:
            raise ValueError(
                f"the dataset {data_args.dataset!r} has no split {getattr(data_args, option)!r}, only {list(splits)};"
                f" name the right one with `{option}:`."
            )
    names = {part: getattr(data_args, f"{part}_split") for part in ("train", "validation", "test")}
    used = {part: splits[name] for part, name in names.items() if name in splits}
    skipped = {}
    if data_args.on_bad_image == "skip":
        with args.main_process_first(desc="checking images"):  # the other processes find what datasets has kept
            for part, split in used.items():
                used[part], skipped[part] = skip_bad_images(
                    split, names[part], args.dataloader_num_workers, report=args.process_index == 0
                )
    classes = used["train"].features["label"].names
    counts = {part: class_counts(split, len(classes)) for part, split in used.items()}
    empty = [classes[i] for i in np.flatnonzero(counts["train"] == 0)]
    if empty:
        logger.warning(
            f"{len(empty)} of {len(classes)} classes have no training image, e.g. {empty[0]!r}: they count as few"
            " shot."
        )
    return used, skipped


def make_trainer(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: AvgKTrainingArguments,
    data: dict[str, Dataset],
    model_init: Callable[[Any], AvgKForImageClassification] | None = None,
) -> AvgKTrainer:
    """The trainer that the recipe describes.

    Args:
        model_args: Model block of the recipe.
        data_args: Data block.
        args: Training block.
        data: Train and validation, as `load_data` gives them.
        model_init: In a hyperparameter search, what builds the model of a trial.
    """
    if data_args.cache_images and args.dataloader_num_workers:
        raise ValueError(
            f"cache_images keeps images in this process, but dataloader_num_workers={args.dataloader_num_workers}"
            " processes read them: set `dataloader_num_workers: 0`."
        )
    classes = data["train"].features["label"].names
    set_seed(args.seed)
    model = build_model(model_args, classes)
    patience = args.early_stopping_patience
    return AvgKTrainer(
        model=None if model_init else model,
        model_init=model_init,
        args=args,
        train_dataset=prepare(data["train"], model.config, data_args.augmentation, data_args.cache_images),
        eval_dataset=prepare(data["validation"], model.config, keep=data_args.cache_images),
        # a local folder goes into config and card by its name only: they are made to be shared
        dataset_name=Path(data_args.dataset).name if Path(data_args.dataset).exists() else data_args.dataset,
        callbacks=[EarlyStoppingCallback(patience)] if patience else None,
    )


def run(
    model_args: ModelArguments,
    data_args: DataArguments,
    args: AvgKTrainingArguments,
    splits: DatasetDict | None = None,
) -> dict[str, Any]:
    """Train, calibrate on validation, report on test, and save everything to `args.output_dir`.

    Args:
        model_args: Model block of the recipe.
        data_args: Data block.
        args: Training block.
        splits: The data, where it is loaded already.

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
        test = prepare(used["test"], config)
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
            from .study.plots import set_size_histogram

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


def describe_fields() -> str:
    """The help text: what a recipe may hold."""
    lines = ["usage: avgk train RECIPE [--field value ...]", "", (__doc__ or "").strip()]
    stock = {f.name for f in fields(AvgKTrainingArguments.__mro__[1])}
    blocks = {
        "model": fields(ModelArguments),
        **{f"model, with objective {name}": fields(model_arguments(name)) for name in LOSSES},
        "data": fields(DataArguments),
        "training": [f for f in fields(AvgKTrainingArguments) if f.name not in stock],
    }
    shared = {f.name for f in blocks["model"]}
    for title, block in blocks.items():
        block = [f for f in block if title == "model" or f.name not in shared]
        lines += ["", f"{title}:"] if block else []
        for item in block:
            choices = item.metadata.get("choices")
            text = item.metadata["help"] + (f" One of {', '.join(choices)}." if choices else "")
            lines.append(f"  {item.name:24}{text}")
    lines += [
        "",
        "and every field of transformers.TrainingArguments, among them:",
        "  output_dir, num_train_epochs, per_device_train_batch_size, learning_rate, lr_scheduler_type, optim,",
        "  weight_decay, seed, eval_strategy, save_strategy, load_best_model_at_end, bf16, report_to,",
        "  dataloader_num_workers, resume_from_checkpoint, push_to_hub",
    ]
    return "\n".join(lines)


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
        if args.seeds > 1:
            place = f"Finished seeds and checkpoints are in {args.output_dir}; go on with {command}."
        else:
            place = where_to_go_on(args.output_dir, command)
        raise type(stop)(f"training was stopped. {place}") from None
    if args.process_index == 0:
        print(text)
