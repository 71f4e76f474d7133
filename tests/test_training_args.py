"""Every argument of transformers' Trainer is honoured or refused, and the docs say which."""

import inspect
from collections import Counter
from dataclasses import dataclass, fields
from pathlib import Path

import pytest
import torch
from transformers import Trainer, TrainingArguments, ViTImageProcessor

from avgk_hf import AvgKTrainingArguments
from avgk_hf.cli import main
from avgk_hf.training_args import HONOURED, REFUSED

DOCS = (Path(__file__).parent.parent / "docs" / "trainer.md").read_text(encoding="utf-8")


def unlisted(arguments: type, trainer: type) -> set[str]:
    """The fields and arguments that stand in neither table."""
    names = {item.name for item in fields(arguments)} | set(inspect.signature(trainer.__init__).parameters)
    return names - {"self"} - {name for group in HONOURED.values() for name in group} - set(REFUSED)


def test_every_argument_is_honoured_or_refused():
    missing = unlisted(TrainingArguments, Trainer)
    assert not missing, f"transformers has new arguments: put {sorted(missing)} into HONOURED or REFUSED."
    counts = Counter(name for group in HONOURED.values() for name in group)
    assert not [name for name, count in counts.items() if count > 1]


def test_a_new_argument_is_named():
    @dataclass
    class NewArguments(TrainingArguments):
        shiny_field: bool = False

    class NewTrainer(Trainer):
        def __init__(self, model, shiny_argument=None):
            pass

    assert unlisted(NewArguments, NewTrainer) == {"shiny_field", "shiny_argument"}


REFUSED_VALUES = {
    "compute_loss_func": lambda outputs, labels, num_items_in_batch: outputs.logits.sum(),
    "label_smoothing_factor": 0.1,
    "prediction_loss_only": True,
    "include_for_metrics": ["inputs"],
    "logging_nan_inf_filter": True,
    "label_names": ["species"],
    "hub_strategy": "checkpoint",
    "train_sampling_strategy": "group_by_length",
    "length_column_name": "size",
    "activation_checkpointing_kwargs": {"use_reentrant": False},
    "gradient_checkpointing_kwargs": {"use_reentrant": False},
    "parallelism_config": object(),
    "average_tokens_across_devices": False,
    "include_num_input_tokens_seen": "all",
    "neftune_noise_alpha": 5.0,
    "use_cache": True,
    "use_liger_kernel": True,
    "liger_kernel_config": {"rope": True},
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_honoured_is_refused_by_its_name(name, make_trainer):
    value = {name: REFUSED_VALUES[name]}
    of_trainer = name not in {item.name for item in fields(TrainingArguments)}
    message = rf"^{name}=.* is not honoured, so it is refused: .{{10,}}\. Leave it out\.$"
    with pytest.raises(ValueError, match=message):
        make_trainer(**({"given": value} if of_trainer else value))
    assert set(REFUSED_VALUES) == set(REFUSED)


@pytest.mark.parametrize("strategy", ["checkpoint", "all_checkpoints"])
def test_a_hub_strategy_that_would_upload_pickles_is_refused(strategy, recipe, capsys):
    """Through the command too."""
    assert main(["train", str(recipe), "--push_to_hub", "true", "--hub_strategy", strategy]) == 2
    assert f"hub_strategy='{strategy}' is not honoured" in capsys.readouterr().err


def test_the_docs_hold_the_tables():
    for about, names in HONOURED.items():
        assert f"| {about} | {', '.join(f'`{name}`' for name in names)} |\n" in DOCS, about
    for name, (taken, reason) in REFUSED.items():
        assert f"| `{name}` | {', '.join(f'`{value!r}`' for value in taken)} | {reason} |\n" in DOCS, name


@pytest.mark.parametrize(
    ("metric", "greater"),
    [
        *(("average_k_accuracy", True), ("eval_top1_accuracy", True), ("coverage_0.9", True), ("f1", True)),
        *(("loss", False), ("eval_loss", False), ("mean_set_size@3", False), ("coverage_0.9_size", False)),
        *(("eval_empty_sets", False), ("average_k_accuracy@1.5", True)),
    ],
)
def test_a_metric_says_which_way_is_better(metric, greater, tmp_path):
    args = {"output_dir": str(tmp_path), "metric_for_best_model": metric}
    assert AvgKTrainingArguments(**args).greater_is_better is greater
    assert AvgKTrainingArguments(**args, greater_is_better=not greater).greater_is_better is not greater
    assert AvgKTrainingArguments(str(tmp_path)).greater_is_better is True


def test_arguments_that_exclude_each_other(make_trainer, make_model, tmp_path):
    model = make_model(objective="role")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.ConstantLR(optimizer)
    for message, kwargs in {
        "without the parameters of objective 'role'": {"model": model, "given": {"optimizers": (optimizer, None)}},
        "without decay_all": {"decay_all": True, "given": {"optimizers": (optimizer, None)}},
        "without lr_milestones": {"lr_milestones": [1], "given": {"optimizers": (optimizer, schedule)}},
        "pass that too": {"given": {"preprocess_logits_for_metrics": print}},
        "ViTImageProcessor would be saved and not be used": {"given": {"processing_class": ViTImageProcessor()}},
        "counts evaluations": {"early_stopping_patience": 2, "eval_strategy": "no", "load_best_model_at_end": False},
    }.items():
        with pytest.raises(ValueError, match=message):
            make_trainer(**kwargs)
