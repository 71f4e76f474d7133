"""A recipe describes one training: `avgk train recipes/glyphs/avgk.yaml --k 3`.

It is a YAML file whose keys are the fields of `ModelArguments`, `DataArguments` and `AvgKTrainingArguments`; every one
can be overridden on the command line. The same file runs on several processes with
`accelerate launch -m avgk_hf.train recipes/glyphs/avgk.yaml`.
"""

import difflib
import json
import math
import re
from collections.abc import Iterable
from dataclasses import MISSING, Field, dataclass, field, fields, make_dataclass
from pathlib import Path
from typing import Any, NoReturn

from transformers import HfArgumentParser, TrainingArguments
from transformers.hf_argparser import HfArg

from .backbones import MOST_CHANNELS, MOST_SIDE
from .checks import check_choice
from .data.datasets import ON_BAD_IMAGE
from .data.transforms import AUGMENTATIONS
from .losses import LOSSES, every_hyperparameter
from .plain_yaml import read_recipe
from .scores import HEADS, SCORES, VIEWS
from .sets import check_k
from .shell import MASK, is_secret, number_remedy
from .training_args import HONOURED, AvgKTrainingArguments, check_metric

MOST_COMBINATIONS = 100_000  # of a search
RANGES = {"image_size": (1, MOST_SIDE), "in_chans": (1, MOST_CHANNELS)}
RANGES |= dict.fromkeys(("test_per_class", "validation_per_class", "validation_if_none"), (1, math.inf))
OTHERWISE = {  # what people call a field
    "out": "output_dir",
    "epochs": "num_train_epochs",
    "batch_size": "per_device_train_batch_size",
    "lr": "learning_rate",
}
RANGES |= {"glyphs_seed": (0, math.inf)}


@dataclass
class ModelArguments:
    """The model block of a recipe."""

    model: str = HfArg(help="A timm model name, a local timm folder, or hf_hub:<repo id>.")
    pretrained: bool | None = HfArg(default=None, help="Load the backbone's pretrained weights.")
    checkpoint: str | None = HfArg(default=None, help="A .safetensors file with the backbone's weights.")
    image_size: int | None = HfArg(default=None, help="Side of the square input.")
    in_chans: int = HfArg(default=3, help="Channels of the input: 3 for colour, 1 for grey.")
    model_args: str | None = HfArg(default=None, help="Arguments that shape the timm model, as JSON or a mapping.")
    freeze_backbone: bool = HfArg(default=False, help="Train the heads only.")
    channels_last: bool = HfArg(default=False, help="Lay tensors out channels last, faster for most convolutions.")
    objective: str = HfArg(default="avgk", help="The loss to train with.", metadata={"choices": LOSSES})
    k: float = HfArg(default=5, help="Average set size K, in [1, number of classes).")
    score: str = HfArg(default="softmax", help="What is thresholded.", metadata={"choices": list(SCORES)})
    head: str = HfArg(default="auto", help="Which head answers.", metadata={"choices": [*HEADS, "auto"]})
    test_time_augmentation: str = HfArg(
        default="none",
        help="What else counts in an image's scores: its mirror image, at twice the cost.",
        metadata={"choices": list(VIEWS)},
    )

    def __post_init__(self) -> None:
        """Refuse a value that could only fail later, by the field's name."""
        _check_fields(self)
        self.k = check_k(self.k)
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
        help="glyphs, a folder of images or parquet, a saved dataset, an archive's folder, or a Hub id."
    )
    dataset_config: str | None = HfArg(default=None, help="Configuration of a Hub dataset.")
    image_column: str = HfArg(default="image", help="Column that holds the images.")
    label_column: str = HfArg(default="label", help="Column that holds the classes.")
    train_split: str = HfArg(default="train", help="Split to train on.")
    validation_split: str = HfArg(default="validation", help="Split that chooses and calibrates.")
    test_split: str = HfArg(default="test", help="Split to report on; left out where it is missing.")
    validation_per_class: int | None = HfArg(default=None, help="Validation images of each class to take from train.")
    validation_if_none: int | None = HfArg(
        default=None, help="The same, but only where the dataset has no validation split."
    )
    test_per_class: int | None = HfArg(default=None, help="Test images of each class to take from train.")
    split_seed: int = HfArg(default=0, help="Which images these take.")
    calibration_split: str = HfArg(
        default="none",
        help="Split to calibrate on at the end; auto keeps half of validation for it, from 1,000 images on; or none.",
    )
    glyphs_seed: int = HfArg(default=0, help="Seed of the generated images, for `dataset: glyphs`.")
    augmentation: str = HfArg(
        default="none", help="Random changes to training images.", metadata={"choices": list(AUGMENTATIONS)}
    )
    cache_images: bool = HfArg(default=False, help="Keep small images in memory, as they are before they are changed.")
    cache_features: bool = HfArg(
        default=False, help="Compute the features of a frozen backbone once, and keep them in a file."
    )
    on_bad_image: str = HfArg(
        default="error",
        help="Refuse an image that cannot be read, or leave it out and count it.",
        metadata={"choices": list(ON_BAD_IMAGE)},
    )
    allow_outside: bool = HfArg(
        default=False, help="Let the dataset point out of itself: links, paths of images, addresses in its README."
    )
    allow_new_classes: bool = HfArg(
        default=False, help="Let validation and test have classes without a training image."
    )

    def __post_init__(self) -> None:
        """Refuse a value that could only fail later, by the field's name."""
        _check_fields(self)
        if self.cache_features and self.augmentation != "none":
            raise ValueError(
                f"cache_features keeps what the backbone says of an image, but"
                f" augmentation={self.augmentation!r} makes new ones every epoch: leave one of them out."
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
        """What argparse says, with the field by its name, and what may be meant."""
        message = re.sub(r"^argument --(\w+)[^:]*: ", r"\1: ", message)
        if value := re.search(r"invalid \w+ value: '(.*)'", message):
            message += number_remedy(value[1])
        elif value := re.search(r"invalid choice: '(.*?)' \(choose from (.*)\)", message):
            near = difflib.get_close_matches(value[1].lower(), re.findall(r"[\w.]+", value[2]), n=1)
            message += f"; did you mean {near[0]!r}?" if near else ""
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
    for text in overrides:
        if re.fullmatch(r"-[A-Za-z]\w*", text):
            raise ValueError(f"there is no option {text}; did you mean -{text}?")
    flags = [text[2:].split("=")[0].replace("-", "_") for text in overrides if text.startswith("--")]
    for name, place in [*((str(key), str(path)) for key in recipe), *((flag, "the command line") for flag in flags)]:
        if name not in known and not (name.startswith("no_") and name[3:] in known):
            if name in every_hyperparameter():
                own = ", ".join(LOSSES[objective].hyperparameters) or "none"
                raise ValueError(
                    f"{name!r} in {place} is no hyperparameter of objective {objective!r}, which has {own}."
                )
            near = [OTHERWISE[name]] if name in OTHERWISE else []
            near = near or difflib.get_close_matches(name.lower(), sorted(known), n=1, cutoff=0.5)
            hint = f" Did you mean {near[0]!r}?" if near else " `avgk train --help` lists the fields."
            raise ValueError(f"unknown field {name!r} in {place}.{hint}")
    for name, value in recipe.items():
        _check_value(name, value, path)
    parser = _Parser(blocks, allow_abbrev=False)
    next(action for action in parser._actions if action.dest == "calibrate_coverage").nargs = "*"  # empty for none
    parsed = parser.parse_args_into_dataclasses([*_as_flags(recipe), *overrides], look_for_args_file=False)
    check_metric(parsed[2].metric_for_best_model)
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


def describe_fields() -> str:
    """The help text: what a recipe may hold, and what counts where it holds nothing."""
    stock = {item.name: item for item in fields(TrainingArguments)}
    training = {item.name: item for item in fields(AvgKTrainingArguments)}
    own = len(fields(ModelArguments))
    blocks = {
        "model": fields(ModelArguments),
        **{f"model, with objective {name}": fields(model_arguments(name))[own:] for name in LOSSES},
        "data": fields(DataArguments),
        "training": [item for name, item in training.items() if name not in stock],
    }
    for title, names in HONOURED.items():
        if not title.startswith(("arguments of", "for scripts")):
            blocks[f"training, {title} (as in transformers)"] = [training[name] for name in names if name in training]
    lines = ["usage: avgk train RECIPE [--field value ...] [--overwrite]", "", (__doc__ or "").strip(), ""]
    lines.append("A finished training in output_dir is kept, unless --overwrite is given.")
    lines.append("After each field: what it does, and its default in brackets. docs/trainer.md says what is refused.")
    for title, block in blocks.items():
        lines += ["", f"{title}:"] if block else []
        lines += [_described(item, stock.get(item.name)) for item in block]
    return "\n".join(lines)


def _described(item: Field, stock: Field | None) -> str:
    """A field with its help, of transformers' own the first sentence, and its default, on one line."""
    choices, text = item.metadata.get("choices"), item.metadata.get("help", "")
    if stock is not None:
        text = re.split(r"\.\s+(?=[A-Z])", str(stock.metadata.get("help", "")))[0]
    text = " ".join(text.split())
    text = text.rstrip(".") + (f": {', '.join(map(str, choices))}" if choices else "")
    default = item.default if item.default_factory is MISSING else item.default_factory()
    shown = "required" if default is MISSING else "none" if default in (None, [], "") else str(default)
    return f"  {item.name:28} {text} ({shown})"
