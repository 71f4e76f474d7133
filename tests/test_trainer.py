"""The real Trainer on a small image folder: what it reports, stores, restores and leaves alone."""

import copy
import datetime
import json
from pathlib import Path

import pytest
import torch
from accelerate.data_loader import DataLoaderShard
from safetensors.torch import load_file, save_file
from transformers import DefaultDataCollator, EarlyStoppingCallback, TrainerCallback, ViTForImageClassification

from avgk_hf import AvgKConfig, AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments, prepare, weights
from avgk_hf.calibration import DETAILS, Calibration
from avgk_hf.scores import HEADS, head_logits, head_scores
from avgk_hf.sets import average_k_threshold, predict_sets
from conftest import CLASSES, save_vit

NOISE = ("runtime", "per_second", "preparation_time", "epoch")


def all_scores(model, dataset):
    """The n x L scores and the labels, by a plain loop."""
    rows = [dataset[i] for i in range(len(dataset))]
    return model.scores(torch.stack([row["pixel_values"] for row in rows])), torch.tensor([r["labels"] for r in rows])


def test_evaluate_calibrates_every_k_in_one_pass(make_trainer, make_model):
    trainer = make_trainer(model=make_model(head="ml"))
    metrics = trainer.evaluate()
    scores, labels = all_scores(trainer.model, trainer.eval_dataset)
    for k, suffix in ((2, ""), (1, "@1"), (1.5, "@1.5"), (3, "@3")):
        lambda_val = average_k_threshold(scores, k)
        sets = predict_sets(scores, lambda_val)
        assert metrics[f"eval_lambda_val{suffix}"] == pytest.approx(lambda_val, rel=1e-5)
        accuracy = sets.gather(1, labels[:, None]).float().mean().item()
        assert metrics[f"eval_average_k_accuracy{suffix}"] == pytest.approx(accuracy)
        assert metrics[f"eval_mean_set_size{suffix}"] == pytest.approx(k, abs=1e-6)
        assert metrics[f"eval_empty_sets{suffix}"] == pytest.approx((sets.sum(1) == 0).float().mean().item())
    assert metrics["eval_top1_accuracy"] == pytest.approx((scores.argmax(1) == labels).float().mean().item())
    top2 = (scores.topk(2).indices == labels[:, None]).any(1).float().mean().item()
    assert metrics["eval_topk_accuracy"] == pytest.approx(top2)
    assert {"eval_few_shot_accuracy", "eval_medium_shot_accuracy", "eval_macro_accuracy"} <= set(metrics)

    config = trainer.model.config
    assert list(config.thresholds) == ["1", "1.5", "2", "3"]
    assert config.thresholds["2"] == metrics["eval_lambda_val"]
    assert config.train_counts == [30, 14, 10, 8, 6, 4]
    record = config.calibration
    assert (record["num_examples"], record["split"], record["step"]) == (30, "validation", 0)


def test_evaluation_loss_is_the_mean_over_images(make_trainer, make_model):
    """The last batch is smaller, and must not weigh as much as the others."""
    trainer = make_trainer(model=make_model(objective="ce"))
    scores, labels = all_scores(trainer.model, trainer.eval_dataset)
    expected = -scores.gather(1, labels[:, None]).log().mean().item()
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-5)


def test_test_data_never_change_the_thresholds(make_trainer, splits):
    trainer = make_trainer()
    test = prepare(splits["test"], trainer.model.config)
    with pytest.raises(ValueError, match="no thresholds"):
        trainer.evaluate(test)
    trainer.evaluate()
    thresholds = dict(trainer.model.config.thresholds)
    metrics = trainer.evaluate(test, calibrate=False, metric_key_prefix="test")
    assert metrics["test_lambda_val"] == thresholds["2"]
    assert trainer.evaluate(test, metric_key_prefix="test")["test_mean_set_size"] == metrics["test_mean_set_size"]
    scores, labels = all_scores(trainer.model, test)
    sets = predict_sets(scores, thresholds["2"])
    assert metrics["test_average_k_accuracy"] == pytest.approx(sets.gather(1, labels[:, None]).float().mean().item())
    assert metrics["test_mean_set_size"] == pytest.approx(sets.float().sum(1).mean().item())

    output = trainer.predict(test)
    assert output.predictions == trainer.model.predict_sets(torch.stack([row["pixel_values"] for row in test]))
    assert output.label_ids.tolist() == labels.tolist()
    assert output.metrics["test_average_k_accuracy"] == metrics["test_average_k_accuracy"]
    assert trainer.model.config.thresholds == thresholds


def test_predict_works_without_labels(make_trainer, splits):
    class Unlabelled(torch.utils.data.Dataset):
        def __init__(self, dataset):
            self.dataset = dataset

        def __len__(self):
            return len(self.dataset)

        def __getitem__(self, i):
            return {"pixel_values": self.dataset[i]["pixel_values"]}

    trainer = make_trainer()
    trainer.evaluate()
    test = prepare(splits["test"], trainer.model.config)
    output = trainer.predict(Unlabelled(test))
    assert output.predictions == trainer.predict(test).predictions
    assert output.label_ids is None


def test_evaluation_never_holds_the_score_matrix(make_model, splits, tmp_path):
    """With 2,000 classes and K = 1, what is kept is a small part of n x L."""
    model = make_model(num_labels=2000, k=1)
    args = AvgKTrainingArguments(str(tmp_path), per_device_eval_batch_size=3, disable_tqdm=True)
    trainer = AvgKTrainer(model, args, eval_dataset=prepare(splits["validation"], model.config))
    trainer.evaluate()
    statistics = trainer.statistics()
    kept = len(statistics.stream._held) + sum(column.numel() for column in statistics._columns.values())
    assert kept <= 2 * (30 + 1) + 5 * 30 < 30 * 2000 / 100


class Recorder(TrainerCallback):
    """Remembers the metrics of every evaluation."""

    def __init__(self):
        self.metrics = []

    def on_evaluate(self, args, state, control, metrics, **kwargs):
        self.metrics.append({"step": state.global_step, **metrics})


class Spoiler(TrainerCallback):
    """Makes the model useless after the second epoch, so that an earlier checkpoint is the best."""

    def on_step_end(self, args, state, control, model, **kwargs):
        if state.epoch > 2:
            torch.nn.init.normal_(model.ml_head.weight)


def test_best_checkpoint_keeps_its_own_threshold(make_trainer):
    recorder = Recorder()
    trainer = make_trainer(callbacks=[recorder, Spoiler()], num_train_epochs=3, learning_rate=0.3)
    trainer.train()
    best = max(recorder.metrics, key=lambda m: m["eval_average_k_accuracy"])
    assert trainer.state.best_metric == best["eval_average_k_accuracy"]
    folder = Path(trainer.state.best_model_checkpoint)
    saved = AvgKConfig.from_pretrained(folder)
    assert saved.thresholds["2"] == best["eval_lambda_val"]
    assert saved.calibration["step"] == best["step"] == int(folder.name.split("-")[1])
    assert best["step"] != trainer.state.global_step, "the best checkpoint is the last: this test shows nothing"

    assert trainer.model.config.thresholds == saved.thresholds
    assert trainer.model.config.calibration == saved.calibration
    stored = AvgKForImageClassification.from_pretrained(folder).state_dict()
    assert all(torch.equal(value, stored[key]) for key, value in trainer.model.state_dict().items())
    assert trainer.evaluate()["eval_lambda_val"] == pytest.approx(saved.thresholds["2"], rel=1e-6)
    # a calibration afterwards is of these weights, not of the last step
    assert trainer.model.config.calibration["step"] == best["step"] == trainer.weights_step
    trainer.args.load_best_model_at_end = False
    trainer.train()
    assert trainer.weights_step == trainer.state.global_step


class Forgetter(TrainerCallback):
    """Clears the calibration after the last checkpoint, so that what is there later comes from one."""

    def on_save(self, args, state, control, model, **kwargs):
        if state.global_step == state.max_steps:
            Calibration.drop(model.config)


def test_a_checkpoint_brings_back_its_whole_calibration(make_trainer, make_model):
    """Into the model that trained, as the best one, and into a new one that goes on from it."""
    options = {"max_steps": 1, "eval_strategy": "steps", "save_strategy": "steps", "eval_steps": 1, "save_steps": 1}
    options |= {"calibrate_coverage": [0.5, 0.9], "calibrate_per_class": True}
    trainer = make_trainer(model=make_model(head="auto"), callbacks=[Forgetter()], **options)
    trainer.train()
    checkpoint = trainer.state.best_model_checkpoint
    again = make_trainer(model=make_model(head="auto"), **{**options, "load_best_model_at_end": False})
    again.train(resume_from_checkpoint=checkpoint)  # which had ended
    saved, details = (
        json.loads((Path(checkpoint) / f"{name}.json").read_text()) for name in ("config", "calibration")
    )
    saved["calibration"] |= {name: details[name] for name in DETAILS}
    for name in ("thresholds", "heads", "calibration"):
        assert saved[name], name
        assert getattr(trainer.model.config, name) == getattr(again.model.config, name) == saved[name], name
    assert {"lac", "aps", "raps", "per_class"} <= set(details["coverage"])


def test_thresholds_are_dropped_when_the_weights_change(make_trainer):
    trainer = make_trainer(eval_strategy="no", save_strategy="no", load_best_model_at_end=False, max_steps=1)
    trainer.evaluate()
    assert trainer.model.config.thresholds
    trainer.train()
    assert trainer.model.config.thresholds == {} and trainer.model.config.calibration is None


def test_resume_restores_weights_and_thresholds(make_trainer):
    trainer = make_trainer(save_total_limit=3)
    trainer.train()
    first = sorted(Path(trainer.args.output_dir).glob("checkpoint-*"))[0]
    again = make_trainer()
    again._load_from_checkpoint(str(first))
    assert again.model.config.thresholds == AvgKConfig.from_pretrained(first).thresholds != {}
    again = make_trainer()
    result = again.train(resume_from_checkpoint=str(first))
    assert result.global_step == trainer.state.global_step
    assert all(torch.equal(a, b) for a, b in zip(trainer.model.parameters(), again.model.parameters(), strict=True))


def test_a_checkpoint_that_does_not_fit_is_refused(make_trainer, make_model, tmp_path):
    make_model(objective="ce").save_pretrained(tmp_path / "one-head")
    with pytest.raises(ValueError, match=r"does not fit the model: missing \['sccp_head"):
        make_trainer()._load_from_checkpoint(str(tmp_path / "one-head"))


def test_early_stopping_watches_average_k_accuracy(make_trainer):
    trainer = make_trainer(callbacks=[EarlyStoppingCallback(2)], num_train_epochs=9, learning_rate=0.0)
    trainer.train()
    assert trainer.args.metric_for_best_model == "average_k_accuracy"
    assert trainer.state.epoch == 3


def test_early_stopping_patience_is_the_trainers_own(make_trainer):
    """Without the command, and not beside a callback that does the same."""
    trainer = make_trainer(early_stopping_patience=1, num_train_epochs=9, learning_rate=0.0)
    trainer.train()
    assert trainer.state.epoch == 2
    with pytest.raises(ValueError, match="early_stopping_patience=1 and an EarlyStoppingCallback: leave one"):
        make_trainer(callbacks=[EarlyStoppingCallback(2)], early_stopping_patience=1)


class Worse(TrainerCallback):
    """Makes the model sure of one class, and surer still, in the first step of the second and of the third epoch."""

    def on_step_end(self, args, state, control, model, **kwargs):
        with torch.no_grad():
            model.ml_head.bias[0] += 50.0 * (state.global_step in (6, 11))


def test_the_best_loss_is_the_lowest(make_trainer, make_model):
    """The first checkpoint is kept, and early stopping sees that nothing gets better."""
    fields = {"metric_for_best_model": "eval_loss", "early_stopping_patience": 2, "learning_rate": 0.0}
    trainer = make_trainer(make_model(objective="ce"), callbacks=[Worse()], num_train_epochs=9, **fields)
    trainer.train()
    losses = [entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry]
    assert trainer.state.best_metric == min(losses) == losses[0] < losses[1] - 1 < losses[2] - 2
    assert trainer.state.epoch == len(losses) == 3
    assert trainer.evaluate()["eval_loss"] == pytest.approx(losses[0], rel=1e-5)


class Rows(torch.utils.data.Dataset):
    """A dataset of other people: plain rows, whose labels have any name, or none."""

    def __init__(self, dataset, name="labels", label=None):
        self.dataset, self.name, self.label = dataset, name, label

    def __len__(self):
        return len(self.dataset)

    def __getitem__(self, i):
        row = self.dataset[i]
        labels = {self.name: row["labels"] if self.label is None else self.label} if self.name else {}
        return {"pixel_values": row["pixel_values"], **labels}


class Stream(torch.utils.data.IterableDataset):
    def __iter__(self):
        raise AssertionError("nothing may be read of it")


@pytest.mark.parametrize("name", ["label", "label_ids"])
def test_labels_may_be_called_label(name, make_trainer):
    """As with the collator of transformers, which may be given too; of it, `label_ids` must be lists."""
    expected = make_trainer(num_train_epochs=1)
    other = {f"{part}_dataset": Rows(getattr(expected, f"{part}_dataset"), name) for part in ("train", "eval")}
    collators = [{}, {"data_collator": DefaultDataCollator()}][: 1 + (name == "label")]
    losses = set()
    for trainer in (expected, *(make_trainer(num_train_epochs=1, given=other | given) for given in collators)):
        trainer.train()
        losses |= {entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry}
    assert len(losses) == 1


@pytest.mark.parametrize("label", [-1, -100])
def test_a_negative_label_is_none(label, make_trainer, splits):
    """Refused with what to do, wherever it comes from."""
    trainer = make_trainer()
    trainer.evaluate()
    message = rf"outside \[0, 6\).*: {label}\. A negative label stands for none: leave such images out"
    for dataset in (trainer.eval_dataset, trainer.train_dataset):
        with pytest.raises(ValueError, match=message):
            trainer.evaluate(Rows(dataset, label=label), metric_key_prefix="test")
    with pytest.raises(ValueError, match=message):
        make_trainer(given={"train_dataset": Rows(trainer.train_dataset, label=label)}).train()
    stored = splits["train"].remove_columns("label").add_column("label", [label] * len(splits["train"]))
    with pytest.raises(
        ValueError, match=f"row 0: the label {label} lies outside .*-1 stands for no label: leave such"
    ):
        make_trainer(given={"train_dataset": prepare(stored, trainer.model.config)})


def test_a_foreign_model_is_refused(tmp_path):
    save_vit(tmp_path / "vit")
    vit = ViTForImageClassification.from_pretrained(tmp_path / "vit")
    args = AvgKTrainingArguments(str(tmp_path / "run"))
    message = "a model of class {}: AvgKTrainer trains an AvgKForImageClassification.*avgk_hf.calibrate"
    for given in ({"model": vit}, {"model_init": lambda: vit}):
        with pytest.raises(ValueError, match=message.format("ViTForImageClassification")):
            AvgKTrainer(args=args, **given)
    with pytest.raises(ValueError, match=message.format("Linear")):
        AvgKTrainer(torch.nn.Linear(2, 2), args)


def test_a_stream_has_no_number_of_images(make_trainer):
    """Refused before training begins, and as other data."""
    with pytest.raises(ValueError, match="eval_dataset of type Stream has no length, and thresholds depend on"):
        make_trainer(given={"eval_dataset": Stream()})
    trainer = make_trainer()
    trainer.evaluate()
    for door in (trainer.evaluate, trainer.predict):
        with pytest.raises(ValueError, match="the dataset to evaluate of type Stream has no length"):
            door(Stream())


def test_evaluations_of_other_data_leave_validation_alone(make_trainer, splits):
    """Without labels, several at once, and with prefixes of any kind: thresholds, record and card stay."""
    trainer = make_trainer()
    trainer.evaluate()
    before, config = copy.deepcopy(trainer.model.config.to_dict()), trainer.model.config
    record = trainer.card.results(config)
    test = prepare(splits["test"], config)
    expected = {name: value for name, value in trainer.evaluate(test).items() if not name.endswith(NOISE)}
    unlabelled = trainer.evaluate(Rows(test, None), metric_key_prefix="field")
    assert unlabelled["field_mean_set_size"] == expected["eval_mean_set_size"]
    assert unlabelled["field_empty_sets@3"] == expected["eval_empty_sets@3"]
    assert not [name for name in unlabelled if "accuracy" in name or "loss" in name]
    several = trainer.evaluate({"a": test, "b_c": Rows(test, None)})
    assert several["eval_b_c_mean_set_size"] == several["eval_a_mean_set_size"] == expected["eval_mean_set_size"]
    for prefix in ("eval_test", "test_set", "eval"):
        metrics = trainer.evaluate(test, metric_key_prefix=prefix)
        for name, value in expected.items():
            assert metrics[f"{prefix}_{name.removeprefix('eval_')}"] == value
    assert trainer.model.config.to_dict() == before
    assert trainer.card.results(config)["validation"] == record["validation"]
    trainer.create_model_card()
    card = (Path(trainer.args.output_dir) / "README.md").read_text()
    accuracy = record["validation"]["average_k_accuracy"]
    assert "On validation, with" in card and f"| {accuracy:.2%} |" in card
    with pytest.raises(ValueError, match=r"calibrate=True: thresholds come from one dataset, not from \['a'\]"):
        trainer.evaluate({"a": test}, calibrate=True)


def test_validation_without_labels_is_refused(make_trainer):
    trainer = make_trainer()
    with pytest.raises(ValueError, match=r"no `labels`, only \['pixel_values'\]: neither training nor calibration"):
        make_trainer(given={"eval_dataset": Rows(trainer.eval_dataset, None)}).evaluate()


def test_hidden_states_of_the_config_are_not_asked_for(make_trainer, make_model):
    """Some backbones have none, and nobody here reads them."""
    model = make_model()
    model.config.output_hidden_states, model.backbone.forward_intermediates = True, None
    trainer = make_trainer(model=model, max_steps=1)
    trainer.train()
    metrics = trainer.evaluate()
    assert metrics["eval_mean_set_size"] == pytest.approx(2, abs=1e-6)
    assert trainer.predict(trainer.eval_dataset).metrics["test_loss"] == pytest.approx(metrics["eval_loss"])


def test_loaders_of_an_evaluation(make_trainer, splits):
    """Every image once, in order and of the dataset that was asked for, whatever training does."""
    trainer = make_trainer(
        dataloader_num_workers=1, dataloader_persistent_workers=True, dataloader_in_order=False,
        dataloader_drop_last=True, accelerator_config={"dispatch_batches": True},
    )  # fmt: skip
    test = prepare(splits["test"], trainer.model.config)
    validation = trainer.get_eval_dataloader()
    assert trainer.get_eval_dataloader() is validation and validation.dataset is trainer.eval_dataset
    loader = trainer.get_eval_dataloader(test)
    assert loader.dataset is test and loader.in_order and not loader.drop_last
    assert isinstance(loader, DataLoaderShard)
    assert not trainer.get_train_dataloader().in_order and trainer.args.dataloader_drop_last


def test_gradient_accumulation_does_not_change_the_scale(make_trainer, make_model):
    """One update from 4 x 4 images equals one from 16; no BatchNorm, so nothing else can differ."""
    updates = []
    for batch, steps in ((16, 1), (4, 4)):
        model = make_model("test_vit", objective="ce")
        before = model.ml_head.weight.detach().clone()
        make_trainer(
            model=model,
            max_steps=1,
            per_device_train_batch_size=batch,
            gradient_accumulation_steps=steps,
            eval_strategy="no",
            save_strategy="no",
            load_best_model_at_end=False,
            max_grad_norm=0,
        ).train()
        updates.append(model.ml_head.weight.detach() - before)
    assert updates[0].abs().max() > 1e-5
    assert torch.allclose(*updates, atol=1e-7)


@pytest.mark.parametrize(
    ("how", "logged"),
    [
        ({"logging_strategy": "steps", "logging_steps": 2, "logging_first_step": True}, [1, 2, 4]),
        ({"logging_strategy": "epoch"}, [3, 5]),
        ({"logging_strategy": "no"}, []),
    ],
    ids=["steps", "epochs", "never"],
)
def test_the_norm_of_gradients_is_computed_where_it_is_logged(make_trainer, monkeypatch, how, logged):
    """3 steps in an epoch, ended in the middle of the second, without clipping, which would need every norm."""
    how |= {"per_device_train_batch_size": 24, "max_steps": 5, "max_grad_norm": 0}
    trainer = make_trainer(**how, eval_strategy="no", save_strategy="no", load_best_model_at_end=False)
    asked, clip = [], trainer.accelerator.clip_grad_norm_

    def recorded(*args):
        asked.append(trainer.state.global_step + 1)
        return clip(*args)

    monkeypatch.setattr(trainer.accelerator, "clip_grad_norm_", recorded)
    trainer.train()
    lines = {entry["step"]: entry["grad_norm"] for entry in trainer.state.log_history if "loss" in entry}
    assert asked == list(lines) == logged
    assert all(norm > 0 for norm in lines.values())


def test_equal_seeds_give_equal_numbers(make_trainer):
    runs = []
    for _ in range(2):
        recorder = Recorder()
        make_trainer(callbacks=[recorder], seed=3).train()
        noise = ("runtime", "per_second", "preparation_time")
        runs.append([{k: v for k, v in m.items() if not k.endswith(noise)} for m in recorder.metrics])
    assert runs[0] == runs[1]


def test_bad_input_is_refused(make_trainer, make_model, splits, tmp_path):
    model, args = make_model(), AvgKTrainingArguments(str(tmp_path), calibrate_k=[7])
    with pytest.raises(ValueError, match=r"k=7 must be a number in \[1, 6\)"):
        AvgKTrainer(model, args)
    args = AvgKTrainingArguments(str(tmp_path))
    empty = prepare(splits["train"].select([]), model.config)
    with pytest.raises(ValueError, match="train_dataset is empty"):
        AvgKTrainer(model, args, train_dataset=empty)
    with pytest.raises(ValueError, match="one validation set"):
        AvgKTrainer(model, args, eval_dataset={"a": empty})
    with pytest.raises(ValueError, match=r"label 3 lies outside \[0, 3\).*`num_labels=6`"):
        AvgKTrainer(make_model(num_labels=3), args, train_dataset=prepare(splits["train"], model.config))


def test_saved_run_is_json_and_safetensors(make_trainer):
    trainer = make_trainer()
    trainer.train()
    trainer.save_model()
    config = json.loads((Path(trainer.args.output_dir) / "config.json").read_text())
    assert config["model_type"] == "avgk" and config["k"] == 2 and len(config["thresholds"]) == 4
    assert (Path(trainer.args.output_dir) / "model.safetensors").is_file()


def head_accuracies(model, dataset, k):
    """Average-K accuracy and threshold of each head on a dataset, by a plain loop."""
    rows = [dataset[i] for i in range(len(dataset))]
    labels = torch.tensor([row["labels"] for row in rows])
    with torch.no_grad():
        output = model.eval()(torch.stack([row["pixel_values"] for row in rows]))
    result = {}
    for head in HEADS:
        scores = head_scores(*head_logits(output), head)
        lambda_val = average_k_threshold(scores, k)
        result[head] = (predict_sets(scores, lambda_val).gather(1, labels[:, None]).float().mean().item(), lambda_val)
    return result


def test_every_head_is_scored_in_the_same_pass(make_trainer, make_model, splits):
    trainer = make_trainer(model=make_model(head="ml"))
    metrics = trainer.evaluate()
    config = trainer.model.config
    for k, suffix in ((2, ""), (3, "@3")):
        for head, (accuracy, lambda_val) in head_accuracies(trainer.model, trainer.eval_dataset, k).items():
            assert metrics[f"eval_average_k_accuracy_{head}{suffix}"] == pytest.approx(accuracy)
            assert config.calibration["head_thresholds"][head][str(k)] == pytest.approx(lambda_val, rel=1e-5)
    assert metrics["eval_average_k_accuracy"] == metrics["eval_average_k_accuracy_ml"]
    assert config.heads == {} and config.thresholds == config.calibration["head_thresholds"]["ml"]
    test = trainer.evaluate(prepare(splits["test"], config), metric_key_prefix="test")
    assert {f"test_average_k_accuracy_{head}" for head in HEADS} <= set(test)


def test_what_a_calibration_stores(make_trainer, make_model, splits):
    """For a fixed head, for one that is chosen, and where there is only one."""
    for fields in ({"head": "sccp"}, {"head": "auto"}, {"objective": "ce"}):
        trainer = make_trainer(model=make_model(**fields), calibrate_coverage=[0.9, 0.5], calibrate_per_class=True)
        trainer.dataset_name = "trees"
        trainer.evaluate()
        config = trainer.model.config
        head = config.heads["2"] if config.head == "auto" else config.head
        statistics = trainer.evaluation.statistics[head]  # of the head that answers for the model's own K
        found = Calibration.of(config)
        assert found.source == {
            "num_examples": 30,
            "dataset": "trees",
            "split": "validation",
            "date": datetime.datetime.now(datetime.timezone.utc).date().isoformat(),
            "step": 0,
            "prevalence_from": "train",
            "selection": "trees validation",
            "chosen": ["checkpoint", "head"] if config.head == "auto" and config.sccp_head else ["checkpoint"],
            "head": head,
        }
        assert found.curve == statistics.curve()
        assert found.coverage == statistics.coverage([0.5, 0.9], True, 2) and found.coverage["k_reg"] == 2
        assert set(found.thresholds) == (set(HEADS) if config.sccp_head else {"ml"})
        assert set(config.heads) == ({"1", "1.5", "2", "3"} if config.head == "auto" else set())
        for key, lambda_val in config.thresholds.items():
            answers = trainer.evaluation.statistics[config.heads.get(key, head)]
            assert lambda_val == answers.compute()[float(key)]["lambda_val"]
    part = torch.utils.data.Subset(trainer.eval_dataset, range(20))  # which does not say what it is
    for dataset, n, split in ((part, 20, "validation"), (prepare(splits["test"], config), 30, "test")):
        trainer.evaluate(dataset, calibrate=True)
        assert (config.calibration["num_examples"], config.calibration["split"]) == (n, split)


def test_single_head_models_report_one_accuracy(make_trainer, make_model):
    metrics = make_trainer(model=make_model(objective="ce")).evaluate()
    assert not any(name.startswith("eval_average_k_accuracy_") for name in metrics)


def test_auto_keeps_the_best_head_of_each_k(make_trainer, make_model, splits, tmp_path):
    model = make_model(head="auto")
    # heads that are right about different images: each K may prefer another one
    torch.manual_seed(5)
    torch.nn.init.normal_(model.ml_head.weight)
    torch.nn.init.normal_(model.sccp_head.weight)
    trainer = make_trainer(model=model)
    metrics = trainer.evaluate()
    config = model.config
    for key, k in (("1", 1), ("1.5", 1.5), ("2", 2), ("3", 3)):
        accuracies = head_accuracies(model, trainer.eval_dataset, k)
        best = max(accuracies.values())[0]
        assert accuracies[config.heads[key]][0] == pytest.approx(best)
        assert config.thresholds[key] == config.calibration["head_thresholds"][config.heads[key]][key]
    assert metrics["eval_average_k_accuracy"] == max(metrics[f"eval_average_k_accuracy_{head}"] for head in HEADS)
    assert len(set(config.heads.values())) > 1, "one head is best for every K: this test shows little"

    chosen = dict(config.heads)
    test = prepare(splits["test"], config)
    output = trainer.predict(test)
    assert config.heads == chosen  # the choice never sees test data
    model.save_pretrained(tmp_path / "auto")
    loaded = AvgKForImageClassification.from_pretrained(tmp_path / "auto")
    pixels = torch.stack([row["pixel_values"] for row in test])
    assert loaded.predict_sets(pixels) == output.predictions
    with torch.no_grad():
        logits = loaded.eval()(pixels)
    for k in (1, 3):
        scores = head_scores(*head_logits(logits), chosen[str(k)])
        mask = predict_sets(scores, config.thresholds[str(k)])
        assert [sorted(s) for s in loaded.predict_sets(pixels, k=k)] == [m.nonzero()[:, 0].tolist() for m in mask]


def test_best_checkpoint_is_chosen_by_the_head_in_force(make_trainer, make_model):
    recorder = Recorder()
    trainer = make_trainer(model=make_model(head="sccp"), callbacks=[recorder], num_train_epochs=3)
    trainer.train()
    assert trainer.state.best_metric == max(m["eval_average_k_accuracy_sccp"] for m in recorder.metrics)


def test_role_trains_its_label_estimates(make_trainer, make_model, tmp_path, caplog):
    trainer = make_trainer(
        model=make_model(objective="role", theta_lr=10.0),
        optim_args="momentum=0.9",
        max_grad_norm=0,
        save_total_limit=5,
    )
    before = trainer.criterion.theta.detach().clone()
    trainer.train()
    groups = trainer.optimizer.param_groups
    assert groups[-1]["params"][0] is trainer.criterion.theta
    assert groups[-1]["initial_lr"] == 10 * groups[0]["initial_lr"] and groups[-1]["weight_decay"] == 0
    assert trainer.criterion.theta.shape == (72, 6) and trainer.criterion.seen.all()
    assert not torch.equal(before, trainer.criterion.theta)

    first, last = sorted(Path(trainer.args.output_dir).glob("checkpoint-*"), key=lambda p: int(p.name.split("-")[1]))
    assert (first / "objective.safetensors").is_file()
    trainer.save_model(tmp_path / "saved")
    assert not (tmp_path / "saved" / "objective.safetensors").exists()
    assert not any("theta" in key for key in AvgKForImageClassification.from_pretrained(last).state_dict())

    again = make_trainer(
        model=make_model(objective="role", theta_lr=10.0),
        optim_args="momentum=0.9",
        max_grad_norm=0,
        save_total_limit=5,
    )
    assert not torch.equal(again.criterion.theta, trainer.criterion.theta)
    again.train(resume_from_checkpoint=str(first))
    assert torch.equal(again.criterion.theta, trainer.criterion.theta)
    assert torch.equal(again.model.ml_head.weight, trainer.model.ml_head.weight)


def test_role_states_its_memory(make_trainer, make_model, monkeypatch, capsys):
    from avgk_hf import training_args as module

    said = []
    monkeypatch.setattr(module.logger, "warning", said.append)
    make_trainer(model=make_model(objective="role"), optim_args="momentum=0.9")
    assert said == [
        "role: its state for 72 images x 6 classes, the gradient and 1 optimizer state(s) take 0.00 GiB on every"
        " process."
    ]
    monkeypatch.setattr(module, "LARGE_STATE", 72 * 6 * 4 * 3 - 1)
    make_trainer(model=make_model(objective="role"), optim_args="momentum=0.9")
    assert "more than 2 GiB: the objectives ce, avgk, an, epr, topk need none of it" in said[-1]
    make_trainer(model=make_model(objective="ce"))
    assert len(said) == 2


@pytest.mark.parametrize("objective", ["an", "epr", "topk"])
def test_baselines_train_and_calibrate(objective, make_trainer, make_model):
    score = "logit" if objective == "topk" else "softmax"
    trainer = make_trainer(model=make_model(objective=objective, score=score), num_train_epochs=1)
    trainer.train()
    assert trainer.model.config.thresholds
    assert trainer.state.log_history[-1]["train_loss"] > 0


def test_bf16_autocast(make_trainer):
    trainer = make_trainer(bf16=True, use_cpu=True, num_train_epochs=1)
    trainer.train()
    assert next(trainer.model.parameters()).dtype == torch.float32
    assert trainer.evaluate()["eval_mean_set_size"] == pytest.approx(2, abs=1e-6)


def test_gradient_checkpointing_through_the_trainer(make_trainer, make_model):
    weights = []
    for checkpointing in (False, True):
        trainer = make_trainer(
            model=make_model("test_vit"), gradient_checkpointing=checkpointing, num_train_epochs=1, seed=1
        )
        trainer.train()
        weights.append(trainer.model.ml_head.weight.detach())
    assert torch.allclose(*weights, atol=1e-5)


@pytest.mark.long
def test_torch_compile(make_trainer, tmp_path):
    """Tracing, checkpoints and thresholds; the backend without code generation keeps this short."""
    trainer = make_trainer(torch_compile=True, torch_compile_backend="aot_eager", num_train_epochs=1)
    trainer.train()
    assert trainer.model.config.thresholds
    trainer.save_model(tmp_path / "saved")
    loaded = AvgKForImageClassification.from_pretrained(tmp_path / "saved")
    assert loaded.config.thresholds == trainer.model.config.thresholds
    assert torch.equal(loaded.ml_head.weight, trainer.model.ml_head.weight)


def test_frozen_backbone_trains_the_heads_only(make_trainer, make_model):
    model = make_model().freeze_backbone()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    make_trainer(model=model, num_train_epochs=1).train()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed == {"ml_head.weight", "ml_head.bias", "sccp_head.weight", "sccp_head.bias"}


def test_lora_on_the_backbone(make_trainer, make_model, tmp_path):
    peft = pytest.importorskip("peft")
    base = make_model("test_vit")
    before = base.backbone.blocks[0].attn.qkv.weight.detach().clone()
    config = peft.LoraConfig(target_modules=["qkv", "proj"], modules_to_save=["ml_head", "sccp_head"], r=4)
    model = peft.get_peft_model(base, config)
    trainer = make_trainer(model=model, learning_rate=0.5)
    trainer.train()
    best = Path(trainer.state.best_model_checkpoint)
    assert (best / "adapter_model.safetensors").is_file() and not (best / "model.safetensors").exists()
    assert AvgKConfig.from_pretrained(best).thresholds == model.config.thresholds != {}
    merged = model.merge_and_unload()
    assert isinstance(merged, AvgKForImageClassification)
    assert not torch.equal(merged.backbone.blocks[0].attn.qkv.weight, before)
    merged.save_pretrained(tmp_path / "merged")
    loaded = AvgKForImageClassification.from_pretrained(tmp_path / "merged")
    pixels = torch.stack([row["pixel_values"] for row in trainer.eval_dataset])
    assert loaded.predict_sets(pixels) == trainer.predict(trainer.eval_dataset).predictions


def test_thresholds_come_back_with_an_adapter(make_trainer, make_model, monkeypatch):
    """Through peft's own door; those of the base are not for the weights that the adapter makes."""
    peft = pytest.importorskip("peft")
    lora = peft.LoraConfig(target_modules=["qkv", "proj"], modules_to_save=["ml_head", "sccp_head"], r=4)
    names = dict(enumerate(CLASSES))
    fields = {"id2label": names, "num_labels": None}
    trainer = make_trainer(model=peft.get_peft_model(make_model("test_vit", **fields), lora), learning_rate=0.5)
    trainer.train()
    trainer.save_model()
    folder, config = trainer.args.output_dir, trainer.model.config
    base = make_model("test_vit", **fields, head="mean")
    Calibration.store(base.config, {2: 0.5})
    loaded = peft.PeftModel.from_pretrained(base, folder)
    for name in ("thresholds", "heads", "head", "calibration", "train_counts"):
        assert getattr(loaded.config, name) == getattr(config, name), name
    pixels = torch.stack([row["pixel_values"] for row in trainer.eval_dataset])
    assert loaded.predict_sets(pixels) == trainer.predict(trainer.eval_dataset).predictions
    other = make_model("test_vit", id2label=names | {0: "yew"}, num_labels=None)  # thresholds belong to the classes
    assert peft.PeftModel.from_pretrained(other, folder).config.thresholds == {}
    peft.get_peft_model(make_model("test_vit", **fields), lora).save_pretrained(Path(folder) / "bare")
    base = make_model("test_vit", **fields)
    Calibration.store(base.config, {2: 0.5})
    base.load_adapter(folder)  # transformers' own door, which keeps none
    assert base.config.thresholds == {}
    path = Path(folder) / "adapter_model.safetensors"
    tensors = load_file(path)
    for content in (b"[3]", b'{"k":', b'{"head": "both"}', b'{"thresholds": {"2": 7}}', b'{"id2label": 3}'):
        save_file({**tensors, "base_model.model.calibration": torch.tensor([*content], dtype=torch.uint8)}, path)
        with pytest.raises(ValueError, match="the calibration in the adapter is damaged"):
            peft.PeftModel.from_pretrained(make_model("test_vit", **fields), folder)
    monkeypatch.setattr(weights, "MOST_BYTES", 10)
    for tensor in (torch.zeros(4), torch.tensor([*b'{"k": 2, "x": 1}'], dtype=torch.uint8)):  # no text, and too much
        save_file({**tensors, "base_model.model.calibration": tensor}, path)
        with pytest.raises(ValueError, match=r"the calibration in the adapter is damaged \(\d+ numbers of type"):
            peft.PeftModel.from_pretrained(make_model("test_vit", **fields), folder)
    Calibration.store((bare := make_model("test_vit", **fields)).config, {2: 0.5})
    assert peft.PeftModel.from_pretrained(bare, Path(folder) / "bare").config.thresholds == {}  # it was not calibrated


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("head", ["ml_head", "sccp_head"])
def test_logits_that_are_not_finite_stop_calibration_and_evaluation(make_trainer, splits, value, head):
    """With batch, images and a hint; no threshold of NaN is stored, and one that was stored stays."""
    trainer = make_trainer()
    weight = getattr(trainer.model, head).weight
    images = iter(range(0, 30, 7))

    def spoil(module, arguments, output):
        return output.index_fill(0, torch.tensor([2]), value) if next(images) == 14 else output

    handle = getattr(trainer.model, head).register_forward_hook(spoil)
    message = r"batch 2 of the evaluation: the logits of image\(s\) 16 are NaN or infinite.*learning rate.*float32"
    with pytest.raises(ValueError, match=message):
        trainer.evaluate()
    assert trainer.model.config.thresholds == {} and weight.isfinite().all()
    handle.remove()
    trainer.evaluate()
    stored = dict(trainer.model.config.thresholds)
    images = iter(range(0, 30, 7))
    getattr(trainer.model, head).register_forward_hook(spoil)
    with pytest.raises(ValueError, match=message):
        trainer.evaluate(prepare(splits["test"], trainer.model.config))
    assert trainer.model.config.thresholds == stored


def test_what_a_card_is_not_made_from_is_refused(make_trainer):
    for call in ("create_model_card", "push_to_hub"):
        with pytest.raises(ValueError, match="license='mit': the card is made from config and results; leave it out"):
            getattr(make_trainer(), call)(license="mit")
