"""The moving average of the weights: what it is, and that it is evaluated, saved and resumed."""

import pytest
import torch
from safetensors.torch import load_file
from transformers import TrainerCallback

from avgk_hf.averaging import LAST_WEIGHTS
from avgk_hf.hub import NOT_PUSHED


class Watch(TrainerCallback):
    """Averages by hand, and keeps what is evaluated."""

    def __init__(self, decay):
        self.decay, self.by_hand, self.own, self.evaluated = decay, None, [], []

    def on_train_begin(self, args, state, control, model, **kwargs):
        self.by_hand = {name: tensor.clone() for name, tensor in model.state_dict().items()}

    def on_step_end(self, args, state, control, model, **kwargs):
        t = state.global_step - 1
        decay = min(self.decay, 1 - (1 + t) ** (-2 / 3)) if t else 0.0
        for name, tensor in model.state_dict().items():
            mean = decay * self.by_hand[name].double() + (1 - decay) * tensor.double()
            self.by_hand[name] = mean.to(tensor.dtype) if tensor.is_floating_point() else tensor.clone()
        self.own.append(model.ml_head.weight.detach().clone())

    def on_evaluate(self, args, state, control, model, **kwargs):
        self.evaluated.append({name: tensor.clone() for name, tensor in model.state_dict().items()})


def near(one, other):
    return all(torch.allclose(one[name].double(), other[name].double(), atol=1e-5) for name in one)


def test_the_average_is_evaluated_and_saved_and_training_is_not_changed(make_trainer, tmp_path):
    watch = Watch(0.9)
    trainer = make_trainer(callbacks=[watch], ema_decay=0.9, load_best_model_at_end=False)
    trainer.train()
    assert near(watch.by_hand, watch.evaluated[-1]) and not near(watch.evaluated[0], watch.evaluated[1])
    final = {name: tensor.clone() for name, tensor in trainer.model.state_dict().items()}
    assert all(torch.equal(final[name], watch.evaluated[-1][name]) for name in final)
    folder = tmp_path / "run" / "checkpoint-10"
    saved, last = load_file(folder / "model.safetensors"), load_file(folder / LAST_WEIGHTS)
    assert torch.equal(saved["ml_head.weight"], final["ml_head.weight"])
    assert torch.equal(last["ml_head.weight"], watch.own[-1]) and not torch.equal(
        last["ml_head.weight"], final["ml_head.weight"]
    )
    metrics = trainer.evaluate()  # after training: the average is in the model, once
    logged = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert metrics["eval_loss"] == logged[-2]
    assert LAST_WEIGHTS in NOT_PUSHED

    plain = Watch(0.9)
    make_trainer(callbacks=[plain], save_strategy="no", load_best_model_at_end=False).train()
    assert all(torch.equal(one, other) for one, other in zip(plain.own, watch.own, strict=True))


def test_a_resumed_training_ends_with_the_same_average(make_trainer, tmp_path):
    whole = make_trainer(ema_decay=0.95, output_dir=str(tmp_path / "whole"), load_best_model_at_end=False)
    whole.train()
    again = make_trainer(ema_decay=0.95, output_dir=str(tmp_path / "again"), load_best_model_at_end=False)
    again.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    weights = whole.model.state_dict()
    assert all(torch.equal(tensor, weights[name]) for name, tensor in again.model.state_dict().items())
    with pytest.raises(ValueError, match="was written with ema_decay: set it"):
        make_trainer().train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))
    (tmp_path / "whole" / "checkpoint-5" / LAST_WEIGHTS).unlink()
    with pytest.raises(ValueError, match="was written without ema_decay"):
        make_trainer(ema_decay=0.95).train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoint-5"))


def test_the_best_checkpoint_is_an_average_too(make_trainer):
    watch = Watch(0.9)
    trainer = make_trainer(callbacks=[watch], ema_decay=0.9)
    trainer.train()
    best = watch.evaluated[trainer.state.best_global_step // 5 - 1]
    assert all(torch.equal(tensor, best[name]) for name, tensor in trainer.model.state_dict().items())


@pytest.mark.parametrize("bad", [0, 1, 1.5, -0.1, "much"])
def test_other_decays_are_refused(bad, make_trainer):
    with pytest.raises((ValueError, TypeError), match="ema_decay"):
        make_trainer(ema_decay=bad)
