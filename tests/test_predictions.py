"""A user's `compute_metrics` gets from AvgKTrainer what it gets from transformers' own Trainer."""

import numpy as np
import pytest
import torch
from transformers import Trainer, TrainingArguments

from avgk_hf import AvgKTrainingArguments, predictions


class Accuracy:
    """The accuracy of what it is given at once, or batch by batch."""

    def __init__(self):
        self.shapes, self.right, self.seen = [], 0, 0

    def __call__(self, prediction, compute_result=True):
        parts, labels = prediction.predictions, prediction.label_ids
        if not isinstance(parts, list):
            parts, labels = [parts], [labels]
        for scores, truth in zip(parts, labels, strict=True):
            scores = scores[0] if isinstance(scores, tuple) else scores
            self.shapes.append(tuple(scores.shape))
            best = scores.argmax(-1) if scores.ndim == 2 else scores
            self.right, self.seen = self.right + (best == truth).sum(), self.seen + len(truth)
        losses = {} if prediction.losses is None else {"losses": np.concatenate([prediction.losses]).mean()}
        return {"accuracy": self.right / self.seen, **losses} if compute_result else {}


def best_class(logits, labels):
    return logits.argmax(-1)


def two_parts(logits, labels):
    return logits[:, :3], {"best": logits.argmax(-1)}


@pytest.mark.parametrize(
    ("fields", "preprocess", "shape"),
    [
        ({}, None, (30, 6)),
        ({"include_for_metrics": ["loss"]}, None, (30, 6)),
        ({"eval_accumulation_steps": 2}, best_class, (30,)),
        ({}, two_parts, (30, 3)),
        ({"batch_eval_metrics": True}, None, (7, 6)),
        ({"eval_do_concat_batches": False}, best_class, (7,)),
    ],
)
def test_compute_metrics_is_called_as_by_trainer(fields, preprocess, shape, make_trainer, make_model, tmp_path):
    ours, stock, model = Accuracy(), Accuracy(), make_model(objective="ce")
    same = {"preprocess_logits_for_metrics": preprocess, "compute_metrics": ours}
    trainer = make_trainer(model=model, given=same, **fields)
    metrics = trainer.evaluate()
    options = {"per_device_eval_batch_size": 7, "remove_unused_columns": False, "disable_tqdm": True, **fields}
    args = TrainingArguments(str(tmp_path / "stock"), **options)
    expected = Trainer(model, args, eval_dataset=trainer.eval_dataset, **{**same, "compute_metrics": stock}).evaluate()
    assert ours.shapes == stock.shapes and ours.shapes[0] == shape
    for name in {"eval_accuracy", "eval_losses"} & set(expected):
        assert metrics[name] == pytest.approx(expected[name], rel=1e-6)
    assert preprocess is two_parts or metrics["eval_accuracy"] == pytest.approx(metrics["eval_top1_accuracy"])
    assert ("eval_losses" in metrics) == ("include_for_metrics" in fields)
    assert trainer.model.config.thresholds  # ours are there too


def test_a_model_with_two_heads_gives_one_matrix(make_trainer):
    """And both to who asks for them."""
    seen = []

    def compute(prediction):
        seen.append(prediction.predictions)
        return {"number": len(prediction.label_ids)}

    trainer = make_trainer(given={"compute_metrics": compute})
    assert trainer.evaluate()["eval_number"] == 30 and seen[0].shape == (30, 6)
    trainer.evaluate(ignore_keys=[])
    assert len(seen[1]) == 2 and np.array_equal(seen[1][0], seen[0])
    output = trainer.predict(trainer.eval_dataset)
    assert output.metrics["test_number"] == 30 and np.array_equal(seen[2], seen[0])


def test_the_best_checkpoint_may_be_that_of_a_metric_of_your_own(make_trainer):
    steps = iter([3.0, 5.0, 4.0])
    given = {"compute_metrics": lambda prediction: {"harmony": next(steps)}}
    trainer = make_trainer(given=given, num_train_epochs=3, metric_for_best_model="harmony", save_total_limit=3)
    trainer.train()
    assert trainer.state.best_metric == 5.0 and trainer.state.best_model_checkpoint.endswith("checkpoint-10")


def test_keeping_all_logits_is_said(make_trainer, monkeypatch):
    said = []
    monkeypatch.setattr(predictions.logger, "warning_once", said.append)
    make_trainer(given={"compute_metrics": Accuracy()}).evaluate()
    assert not said  # of a few images there is nothing to say
    monkeypatch.setattr(predictions, "LARGE", 0)
    for fields, preprocess in (({}, best_class), ({"batch_eval_metrics": True}, None), ({}, None)):
        assert not said
        given = {"compute_metrics": Accuracy(), "preprocess_logits_for_metrics": preprocess}
        make_trainer(given=given, **fields).evaluate()
    assert len(said) == 1 and "30 images for 6 classes" in said[0] and "preprocess_logits_for_metrics" in said[0]


def test_what_compute_metrics_cannot_do(make_trainer, tmp_path, monkeypatch):
    trainer = make_trainer(given={"compute_metrics": lambda prediction: {"top1_accuracy": 1.0}})
    with pytest.raises(
        ValueError, match="compute_metrics returns 'eval_top1_accuracy', which is a metric of AvgKTrainer"
    ):
        trainer.evaluate()
    monkeypatch.setattr(AvgKTrainingArguments, "world_size", 2)
    with pytest.raises(ValueError, match=r"batch_eval_metrics=True .* 2 processes"):
        make_trainer(given={"compute_metrics": Accuracy()}, batch_eval_metrics=True)


def test_images_without_labels_have_no_metrics_of_yours(make_trainer):
    trainer = make_trainer(given={"compute_metrics": Accuracy()})
    trainer.evaluate()
    pixels = [{"pixel_values": row["pixel_values"]} for row in trainer.eval_dataset]
    metrics = trainer.evaluate(pixels, metric_key_prefix="field")
    assert "field_mean_set_size" in metrics and "field_accuracy" not in metrics


def test_the_stock_trainer_gets_one_matrix_too(make_model, make_trainer, tmp_path):
    model, accuracy = make_model(), Accuracy()
    args = TrainingArguments(str(tmp_path / "stock"), remove_unused_columns=False, disable_tqdm=True)
    data = make_trainer(model=model).eval_dataset
    with torch.no_grad():
        Trainer(model, args, eval_dataset=data, compute_metrics=accuracy).evaluate()
    assert accuracy.shapes == [(30, 6)]
