"""The private methods of transformers' Trainer that this package overrides: few, named, and still what they were."""

import inspect
import re

import pytest
from transformers import Trainer

from avgk_hf import AvgKTrainer
from avgk_hf.checkpoints import HOOKS, CheckpointTrainer

# hook: its parameters, the method that calls it, and how; what our override takes for granted
RELIED_ON = {
    "_save_checkpoint": (["model", "trial"], "_maybe_log_save_evaluate", "self._save_checkpoint(model, trial)"),
    "_load_from_checkpoint": (
        ["resume_from_checkpoint", "model"],
        "train",
        "self._load_from_checkpoint(resume_from_checkpoint)",
    ),
    "_get_grad_norm": (["model", "grad_norm"], "_run_epoch", "self._get_grad_norm(model, grad_norm=grad_norm)"),
    "_load_best_model": ([], "_finalize_training", "self._load_best_model()"),
}
# what our override relies on inside the stock method, or in the one that calls it: in this order
INSIDE = {
    "_save_checkpoint": [
        "self._get_output_dir(",  # follows args.output_dir, which points aside meanwhile
        "self.save_model(output_dir, _internal_call=True)",
        "self.state.best_model_checkpoint = ",
        "self._save_rng_state(output_dir)",
        "self.state.save_to_json(",
        "if self.args.push_to_hub:",  # off meanwhile
    ],
    "_get_output_dir": ["self.args.output_dir"],
    "_inner_training_loop": [  # no epoch for what had ended; the seed of an epoch before its workers start
        "num_train_epochs,",
        "num_update_steps_per_epoch,",
        "max_steps,",
        "self.set_initial_training_values(",
        "self._init_training_state(",
        "self.callback_handler.on_train_begin(",
        "in range(epochs_trained, num_train_epochs)",
        "self.callback_handler.on_epoch_begin(",
        "self._run_epoch(",
    ],
    "_finalize_training": ["self._load_best_model()", "self.callback_handler.on_train_end("],
    "get_eval_dataloader": ["self._get_dataloader("],
    "get_test_dataloader": ["self._get_dataloader("],
    "_get_dataloader": ["self.args.dataloader_drop_last", "self.accelerator.prepare("],
}


def changed(hook: str, what: str) -> str:
    reason = HOOKS.get(hook, "CheckpointTrainer goes by its order")
    return f"transformers changed Trainer.{hook} ({reason}): {what}; mend avgk_hf/checkpoints.py."


@pytest.mark.parametrize("hook", HOOKS)
def test_a_hook_is_what_it_was(hook):
    parameters, caller, call = RELIED_ON[hook]
    stock = getattr(Trainer, hook, None)
    assert stock is not None, changed(hook, "it is gone")
    assert list(inspect.signature(stock).parameters)[1:] == parameters, changed(hook, "it takes other parameters")
    own = inspect.signature(getattr(CheckpointTrainer, hook))
    assert list(own.parameters)[1:] == parameters, changed(hook, "ours takes other parameters")
    called = hasattr(Trainer, caller) and call in inspect.getsource(getattr(Trainer, caller))
    assert called, changed(hook, f"`{call}` is not in Trainer.{caller} any more")


@pytest.mark.parametrize("name", INSIDE)
def test_the_stock_method_does_what_ours_goes_by(name):
    assert hasattr(Trainer, name), changed(name, "it is gone")
    source, position = inspect.getsource(getattr(Trainer, name)), 0
    for text in INSIDE[name]:
        found = source.find(text, position)
        assert found >= 0, changed(name, f"`{text}` is not in it, or not where it was")
        position = found


def overridden(cls: type) -> set[str]:
    """The private methods of Trainer that a class or one between it and Trainer has anew."""
    own = cls.__mro__[: cls.__mro__.index(Trainer)]
    names = {name for base in own for name in vars(base)}
    return {name for name in names if re.match("_(?!_)", name) and hasattr(Trainer, name)}


def test_no_other_private_method_is_overridden():
    assert overridden(AvgKTrainer) == overridden(CheckpointTrainer) == set(HOOKS) and len(HOOKS) <= 4
    assert all(re.fullmatch(r"[^\n]{20,100}", reason) for reason in HOOKS.values())

    class Another(AvgKTrainer):
        def _get_output_dir(self, trial):
            return super()._get_output_dir(trial)

    assert overridden(Another) - set(HOOKS) == {"_get_output_dir"}, "this test sees nothing"


@pytest.mark.parametrize("hook", HOOKS)
def test_a_change_is_named(hook, monkeypatch):
    """A hook that is gone, takes other arguments, or is called from elsewhere fails by its name and reason."""
    monkeypatch.setattr(Trainer, hook, lambda self, something_else: None)
    with pytest.raises(AssertionError, match=rf"Trainer\.{hook} \({HOOKS[hook]}\): it takes other parameters"):
        test_a_hook_is_what_it_was(hook)
    monkeypatch.delattr(Trainer, hook)
    with pytest.raises(AssertionError, match=rf"Trainer\.{hook} \({HOOKS[hook]}\): it is gone"):
        test_a_hook_is_what_it_was(hook)
    monkeypatch.undo()
    monkeypatch.setattr(Trainer, RELIED_ON[hook][1], test_no_other_private_method_is_overridden)
    with pytest.raises(AssertionError, match=rf"Trainer\.{hook} .* any more"):
        test_a_hook_is_what_it_was(hook)
