"""Trainings of which only the numbers are kept, one after the other on the same data."""

import json
from typing import Any

from datasets import Dataset, DatasetDict

from ..data.glyphs import load_glyphs
from ..recipes import Arguments, parse_recipe
from ..train import load_all, load_data, make_trainer
from ..trainer import AvgKTrainer

_loaded: dict[str, Any] = {}  # the data of the last training, which the next one usually needs again


def as_flags(values: dict[str, Any]) -> list[str]:
    """Fields of a recipe as the arguments that override them."""
    return [f"--{n}={json.dumps(v) if isinstance(v, (bool, dict)) else v}" for n, v in values.items()]


def measured_only(recipe: str, overrides: list[str], values: dict[str, Any], folder: str) -> Arguments:
    """The recipe's three blocks for a training of which only the numbers are kept; the folder gets no checkpoints."""
    own = {**values, "output_dir": folder, "save_strategy": "no", "load_best_model_at_end": False}
    model_args, data_args, args = parse_recipe([recipe, *overrides, *as_flags(own)])
    args.early_stopping_patience = None  # the number of epochs may be searched, and the best epoch counts
    return model_args, data_args, args


def load_trainer(
    arguments: Arguments, times: int = 1, tuning: bool = True, needs_test: bool = False
) -> tuple[AvgKTrainer, dict[str, Dataset]]:
    """The trainer of a recipe and its data, those of the training before where they are the same.

    Args:
        arguments: The recipe's three blocks.
        times: Of generated data, how many times the images.
        tuning: Whether the test split is left out, so that nothing can be chosen by it.
        needs_test: Whether there has to be one nevertheless.
    """
    model_args, data_args, args = arguments
    seen_by = model_args.model, model_args.image_size, model_args.in_chans, model_args.model_args
    key = json.dumps([vars(data_args), times, seen_by], sort_keys=True)
    if _loaded.get("key") != key:
        _loaded.clear()
        splits = load_glyphs(data_args.glyphs_seed, times=times) if times > 1 else load_all(data_args, args)
        _loaded.update(key=key, splits=splits, ready={})
    splits = _loaded["splits"]
    if needs_test and data_args.test_split not in splits:
        raise ValueError(
            f"the dataset {data_args.dataset!r} has no split {data_args.test_split!r}, only {list(splits)}: a"
            " comparison needs test images; name them with `test_split:`."
        )
    if tuning:
        splits = DatasetDict({name: split for name, split in splits.items() if name != data_args.test_split})
    data, _ = load_data(data_args, args, splits)
    trainer = make_trainer(*arguments, {**data, **_loaded["ready"]})
    if data_args.cache_images:  # with the tensors that they keep
        _loaded["ready"] = {"train": trainer.train_dataset, "validation": trainer.eval_dataset}
    return trainer, data
