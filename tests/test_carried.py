"""What an evaluation is about and whose classes are meant, asked directly: no model, no training."""

import json
import logging

import numpy as np
import pytest
import torch
from datasets import ClassLabel, Dataset, Features, Value
from transformers import PreTrainedConfig

from avgk_hf import AvgKConfig
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import write_config
from avgk_hf.collecting import Evaluation
from avgk_hf.data.classes import align_classes, match_classes
from avgk_hf.data.datasets import TAKE
from avgk_hf.modeling import AvgKOutput
from avgk_hf.scope import Balancing, check_asked, choices, evaluated_levels, evaluated_sizes, stored_thresholds
from avgk_hf.scores import balance_weights

TREES = {0: "ash", 1: "beech", 2: "elm", 3: "oak"}


def config_of(own_k=None, head="ml", **stored):
    """A config of four classes that holds what is given."""
    how = {"id2label": TREES, "label2id": {name: i for i, name in TREES.items()}}
    config = (
        PreTrainedConfig(**how) if own_k is None else AvgKConfig(architecture="test_resnet", k=own_k, head=head, **how)
    )
    if stored:
        Calibration.store(config, **stored)
    return config


def labelled(names, labels):
    """Rows without images, which are not looked at."""
    features = Features(image=Value("string"), label=ClassLabel(names=names), index=Value("int64"))
    rows = {"image": [""] * len(labels), "label": labels, "index": list(range(len(labels)))}
    return Dataset.from_dict(rows, features=features)


def test_the_sizes_of_an_evaluation():
    stored = config_of(2, thresholds={1: 0.5, 2: 0.3, 3: 0.1})
    assert evaluated_sizes(stored, [], False, True, None, 4) == [2, 1, 3]  # its own first, then all that are recorded
    assert evaluated_sizes(stored, [3], False, True, None, 4) == [2, 3]
    assert evaluated_sizes(stored, [3], False, False, None, 4) == [3]  # without labels only what is asked
    assert evaluated_sizes(stored, [], False, False, 1, 4) == [1]  # and what is watched
    assert evaluated_sizes(stored, [np.float64(2), 2.0], False, True, 2, 4) == [2]  # each once
    foreign = config_of()
    assert evaluated_sizes(foreign, [1, 2], True, True, None, 4) == [1, 2]
    with pytest.raises(ValueError, match="name the average set sizes to calibrate for"):
        evaluated_sizes(foreign, [], True, True, None, 4)
    with pytest.raises(ValueError, match="this model has no thresholds"):
        evaluated_sizes(foreign, [], False, True, None, 4)
    with pytest.raises(ValueError, match=r"k=3 must be a number in \[1, 3\)"):
        evaluated_sizes(stored, [3], True, True, None, 3)  # of classes that sets are restricted to


def test_the_levels_of_an_evaluation():
    coverage = {"lac": {"0.5": 0.4, "0.9": 0.2}, "aps": {"0.9": 0.95}}
    stored = config_of(2, thresholds={2: 0.3}, coverage=coverage)
    how = {"method": "lac", "per_class": False}
    assert evaluated_levels(stored, None, True, 1000, **how) == [0.9, 0.95, 0.99]
    assert evaluated_levels(stored, None, True, 19, **how) == [0.9, 0.95]  # as many images as each takes
    assert evaluated_levels(stored, None, True, 18, **how) == [0.9]
    assert evaluated_levels(stored, [0.5], True, 18, **how) == [0.5]
    with pytest.raises(ValueError, match=r"0\.99"):
        evaluated_levels(stored, [0.99], True, 18, **how)
    with pytest.raises(ValueError, match="coverage=2"):
        evaluated_levels(stored, [2], True, 1000, **how)
    assert evaluated_levels(stored, None, False, 18, **how) == [0.5, 0.9]
    assert evaluated_levels(stored, None, False, 18, "aps", False) == [0.9]
    assert evaluated_levels(stored, [np.float64(0.5)], False, 18, **how) == [0.5]
    with pytest.raises(ValueError, match=r"coverage=0\.8 is not recorded"):
        evaluated_levels(stored, [0.8], False, 18, **how)
    with pytest.raises(ValueError, match=r"coverage=0\.9 is not recorded with method='raps'"):
        evaluated_levels(stored, None, False, 18, "raps", False)
    with pytest.raises(ValueError, match=r"coverage=0\.9 is not recorded per class"):
        evaluated_levels(stored, None, False, 18, "lac", True)
    assert evaluated_levels(config_of(2, thresholds={2: 0.3}), None, False, 18, **how) == []


def test_the_levels_of_a_balance():
    part = {"thresholds": {2: 0.2}, "coverage": {"lac": {"0.8": 0.1}}}
    prevalence = [0.4, 0.3, 0.2, 0.1]
    coverage = {"lac": {"0.9": 0.2}}
    stored = config_of(2, thresholds={2: 0.3}, coverage=coverage, balances={1.0: part}, prevalence=prevalence)
    assert evaluated_levels(stored, None, False, 18, "lac", False, 1) == [0.8]
    assert evaluated_levels(stored, None, False, 18, "lac", False, None) == [0.9]


def test_stored_thresholds_of_every_head():
    heads = {"ml": {1: 0.6, 3: 0.2}, "sccp": {1: 0.5, 2: 0.4, 3: 0.1}, "mean": {2: 0.3}}
    answers = {1: "ml", 2: "sccp", 3: "sccp"}
    stored = config_of(2, "auto", thresholds={k: heads[h][k] for k, h in answers.items()}, heads=answers,
                       head_thresholds=heads)  # fmt: skip
    found = stored_thresholds(Calibration.of(stored), ("ml", "sccp", "mean"), [1, 2, 3])
    assert list(found) == ["ml", "sccp", "mean"]
    assert found["sccp"] == heads["sccp"] and found["mean"] == {2: 0.3}  # in the range that each was calibrated for
    assert found["ml"].keys() == {1, 2, 3} and 0.2 < found["ml"][2] < 0.6
    only = config_of(2, thresholds={1: 0.6, 2: 0.3})
    assert stored_thresholds(Calibration.of(only), ("ml", "sccp"), [1, 2]) == {"ml": {1: 0.6, 2: 0.3}}


@pytest.mark.parametrize(
    ("asked", "words"),
    [
        ((True, False, False, False, ["give_up"]), "give_up says how to calibrate"),
        ((True, True, True, False), "a monitor compares other images"),
        ((False, True, False, False), "calibrate on labelled ones"),
        ((False, False, False, True), "no coverage can be measured"),
    ],
)
def test_what_one_evaluation_cannot_be_asked(asked, words):
    with pytest.raises(ValueError, match=words):
        check_asked(*asked)


def test_what_one_evaluation_can_be_asked():
    for asked in ((True, True, False, True, ["give_up"]), (True, False, True, True), (False, False, True, False)):
        assert check_asked(*asked) is None


def test_where_choices_were_made():
    """On the images of the calibration, or on others; the record of the checkpoint's stays."""
    before = Calibration.of(config_of(2, thresholds={2: 0.3}, source={"selection": "trees validation"}))
    same = choices(before, {"dataset": "trees", "split": "validation"}, ["head"])
    assert same == {"chosen": ["checkpoint", "head"], "selection": "trees validation"}
    others = choices(before, {"dataset": "trees", "split": "test"}, [])
    assert others == {"selection": "trees validation"}
    new = {"dataset": "trees", "split": "test", "selection": "trees test"}
    assert choices(before, new, []) == {"chosen": ["checkpoint"], "selection": "trees test"}
    taken = {"dataset": "trees", "per_class": 3, "seed": 0}
    took = Calibration.of(config_of(2, thresholds={2: 0.3}, source={"taken": taken}))
    assert choices(took, {"dataset": "trees", "split": "test"}, []) == {"taken": taken}  # stays, or is replaced
    assert choices(took, {"taken": {**taken, "seed": 1}}, []) == {"taken": {**taken, "seed": 1}}
    none = Calibration.of(config_of(2, thresholds={2: 0.3}))
    assert choices(none, {"dataset": None, "split": None}, []) == {}


def test_classes_that_sets_may_hold(caplog):
    caplog.set_level(logging.WARNING)
    config = config_of(thresholds={1: 0.5})
    some = labelled(["oak", "ash"], [0, 1, 0])
    aligned, answering = align_classes(some, config)
    assert (list(aligned["label"]), answering) == ([3, 0, 3], None)
    assert "the dataset has 2 of the model's 4 classes" in caplog.text
    caplog.clear()
    aligned, answering = align_classes(some, config, calibrate=True, restrict=True)
    assert (list(aligned["label"]), answering) == ([3, 0, 3], [0, 3]) and not caplog.text
    assert align_classes(some, config, calibrate=True)[1] is None and "2 of the model's 4" in caplog.text
    caplog.clear()
    restricted = config_of(thresholds={1: 0.5}, source={"classes": [0, 1]})
    assert align_classes(some, restricted)[1] == [0, 1]
    assert "1 of the dataset's 2 classes are none of the 2 that the model was calibrated for" in caplog.text
    assert align_classes(labelled(list(TREES.values()), [0]), config)[1] is None
    for dataset, how, words in (
        (some, {"restrict": True}, "calibrate with it, and evaluate afterwards"),
        (labelled(list(TREES.values()), [0]), {"calibrate": True, "restrict": True}, "it has all 4 of the model"),
        (some.remove_columns("label"), {"labels": "position"}, "there are no classes to match"),
    ):
        with pytest.raises(ValueError, match=words):
            align_classes(dataset, config, **how)
    unlabelled = some.remove_columns("label")
    assert align_classes(unlabelled, restricted) == (unlabelled, [0, 1])
    assert align_classes(unlabelled, restricted, calibrate=True) == (unlabelled, None)


def test_the_models_id_of_each_class():
    config = config_of()
    assert match_classes(["x", "y"], config, "position") == [0, 1]
    assert match_classes(["x", "oak"], config, {"x": "elm"}) == [2, 3]
    assert match_classes(["x"], config, {"x": "elm", "of another dataset": "oak"}) == [2]
    assert match_classes(["ash", "beech"], config) == [0, 1]
    assert match_classes(["0", "1"], PreTrainedConfig(num_labels=3)) == [0, 1]  # LABEL_0, LABEL_1
    for names, labels, words in (
        (["a"] * 5, "position", "the dataset has 5 classes and the model 4"),
        (["x"], "order", "labels='order'"),
        (["x"], "name", "'x'"),
        (["x", "oak"], {"z": "elm"}, "the label map has 'z', which is no class of the dataset"),
        (["x", "oak"], {"x": "larch"}, "larch"),
    ):
        with pytest.raises(ValueError, match=words):
            match_classes(names, config, labels)


def test_what_the_trainer_says_of_its_images(make_trainer):
    """Which were taken from train, and which chose the checkpoint."""
    trainer = make_trainer()
    trainer.record["data"] = {TAKE: 3, "split_seed": 7}
    trainer.evaluate()
    record, name = trainer.model.config.calibration, trainer.dataset_name
    assert record["taken"] == {"dataset": name, "per_class": 3, "seed": 7}
    assert (record["split"], record["selection"], record["step"]) == ("validation", f"{name} validation", 0)
    trainer.calibrate(trainer.eval_dataset)
    assert trainer.model.config.calibration["split"] == "validation"  # what the images say themselves
    other = make_trainer(load_best_model_at_end=False)
    other.evaluate()
    assert not {"taken", "selection"} & set(other.model.config.calibration)


def collected(config, ks=(1, 2), **how):
    """What an evaluation finds in 40 images of which the ML head knows most and the SCCP head little."""
    generator = torch.Generator().manual_seed(0)
    labels = torch.randint(0, 4, (40,), generator=generator)
    sccp, noise = torch.randn(2, 40, 4, generator=generator)
    output = AvgKOutput(logits=noise + 3 * torch.eye(4)[labels], sccp_logits=sccp)
    evaluation = Evaluation(config, 40, list(ks), **how)
    for first in (0, 25):
        part = AvgKOutput(**{name: value[first : first + 25] for name, value in output.items()})
        evaluation.update(part, labels[first : first + 25], first, torch.tensor(0.5))
    evaluation.merge("cpu")
    return evaluation, output, labels


def two_heads(**stored):
    """Calibrated by hand: the SCCP head answers for K = 2, and with balance 1 for every K."""
    heads = {"ml": {1: 0.5, 2: 0.1}, "sccp": {1: 0.6, 2: 0.2}, "mean": {1: 0.5, 2: 0.15}}
    part = {"thresholds": {1: 0.3, 2: 0.05}, "heads": {1: "sccp", 2: "sccp"}, "head": "sccp"}
    config = config_of(
        *(2, "auto"),
        thresholds={1: 0.5, 2: 0.2},
        heads={1: "ml", 2: "sccp"},
        head_thresholds=heads,
        balances={1.0: part},
        prevalence=[0.4, 0.3, 0.2, 0.1],
        **stored,
    )
    config.train_counts = [40, 30, 20, 10]
    return config


def test_heads_are_chosen_or_kept():
    """On new images the best is taken, unless what was chosen on others stays: for each balance that was recorded."""
    config = two_heads(source={"dataset": "trees"})
    new, _, _ = collected(config, calibrate=True)
    assert [new.answering_head(k) for k in (1, 2)] == ["ml", "ml"] == [new.best_head(k, 1.0) for k in (1, 2)]
    assert new.answering_head(2, 1.0) == "ml" and new.loss_sum == 0.5 * 40 and new.labelled
    kept, _, _ = collected(config, calibrate=True, keep_heads=True)
    assert [kept.answering_head(k) for k in (1, 2)] == ["ml", "sccp"]
    assert [kept.answering_head(k, 1.0) for k in (1, 2)] == ["sccp", "sccp"]
    assert [kept.answering_head(k, 0.25) for k in (1, 2)] == ["ml", "sccp"]  # none was recorded: that of balance 0
    record = kept.store(dataset="others", split="new")
    assert config.heads == {"1": "ml", "2": "sccp"} and "chosen" not in record.source
    assert [record.at(1).head(k) for k in (1, 2)] == ["sccp", "sccp"]
    assert record.thresholds.keys() == {"ml", "sccp", "mean"}
    assert new.store(dataset="others", split="new").source["chosen"] == ["head"]
    assert config.heads == {"1": "ml", "2": "ml"}


def test_an_evaluation_has_the_balance_that_is_asked_for():
    config = two_heads()
    for balance, head, lambda_val in ((None, "sccp", 0.2), (0, "sccp", 0.2), (1, "sccp", 0.05)):
        found, output, labels = collected(config, [2], balance=balance)
        assert found.balance == (balance or 0) and found.answer.head == head and not found.calibrate
        scores = output.sccp_logits.softmax(-1)
        scores = scores * balance_weights([0.4, 0.3, 0.2, 0.1], 1) if balance else scores
        sets = scores >= lambda_val
        metrics = found.metrics()
        assert metrics["mean_set_size"] == pytest.approx(sets.sum(1).float().mean().item())
        assert metrics["average_k_accuracy"] == pytest.approx(sets[range(40), labels].float().mean().item())
    for own in (0.0, 0.5):  # to calibrate, the model's own
        balancing = Balancing.of(config, own)
        assert collected(config, calibrate=True, balancing=balancing)[0].balance == own
    assert collected(config, calibrate=True, balancing=Balancing.of(config, "auto"))[0].balance == 0
    given = {"ml": {2: 0.1}}
    evaluation, output, _ = collected(config, [2], thresholds=given)
    assert evaluation.lambdas() == given and evaluation.balance == 0


def test_an_evaluation_has_the_classes_of_the_calibration():
    restricted = config_of(2, thresholds={1: 0.5, 2: 0.3}, source={"classes": [0, 1, 3]})
    assert Evaluation(restricted, 4, [2]).classes == [0, 1, 3]
    assert Evaluation(restricted, 4, [2], calibrate=True).classes is None
    assert Evaluation(restricted, 4, [2], calibrate=True, classes=[1, 2, 3]).classes == [1, 2, 3]
    assert Evaluation(restricted, 1, [2]).num_examples == 1
    record = collected(restricted, calibrate=True, classes=[1, 2, 3])[0].store()
    assert record.source["classes"] == [1, 2, 3] == record.classes
    assert "head_thresholds" not in restricted.calibration or len(restricted.calibration["head_thresholds"]) > 1
    assert "classes" not in collected(restricted, calibrate=True)[0].store().source
    with pytest.raises(ValueError, match="is empty"):
        Evaluation(restricted, 0, [2])


def test_the_config_file_of_another_class_stays_small(tmp_path):
    """What grows with the classes goes to calibration.json, and nothing else is added."""
    config = config_of(thresholds={1: 0.5}, source={"split": "new"}, curve=[[1, 0.5, 1.0, 0.8, 0.8]])
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    write_config(config, tmp_path / "config.json")
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == {
        "model_type": "vit",
        "thresholds": {"1": 0.5},
        "calibration": {"split": "new"},
        "score": "softmax",
    }
