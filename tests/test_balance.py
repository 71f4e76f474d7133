"""Balances: what rare classes gain, from the definition to every door that a set comes out of."""

import copy
import json
import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from asking import Config, answer, resolve
from transformers import PreTrainedConfig, TimmWrapperImageProcessor, pipeline

from avgk_hf import AvgKConfig, AvgKForImageClassification, SetSizeMonitor, load_splits
from avgk_hf.app.answers import Answers
from avgk_hf.app.page import build_page
from avgk_hf.calibration import Calibration, Question
from avgk_hf.classifiers import load_classifier
from avgk_hf.cli import main
from avgk_hf.collecting import Evaluation
from avgk_hf.commands.demo import find_recipe
from avgk_hf.conformal import question_name
from avgk_hf.details import load_details, save_details
from avgk_hf.evaluation import calibrate, evaluate
from avgk_hf.export import export_onnx, exportable
from avgk_hf.metrics.average_k_accuracy.average_k_accuracy import average_k_accuracy
from avgk_hf.model_card import render_card
from avgk_hf.recipes import parse_recipe
from avgk_hf.records import LEAST_PREVALENCE
from avgk_hf.scope import GRID, Balancing, given_prevalence
from avgk_hf.scores import answering_logits, balance_weights, normalised, score, smoothed_prevalence
from avgk_hf.sets import average_k_threshold
from avgk_hf.statistics import MeanScores, SetStatistics, class_means
from avgk_hf.study.balances import COVERAGES, chosen, measure_balances
from avgk_hf.study.spec import plan, read_comparison, run_path
from avgk_hf.training_args import AvgKTrainingArguments
from avgk_hf.weights import CALIBRATION, take_calibration, with_calibration
from conftest import CLASSES, save_vit

COUNTS = [30, 14, 10, 8, 6, 4]
NUMBER, L = 200, 6


def drawn(n=NUMBER, seed=0, prevalence=None, sharp=1.0):
    """Logits (n, L), of both heads, and labels that are drawn from the softmax of the first: what it says is true."""
    generator = torch.Generator().manual_seed(seed)
    shares = torch.tensor(smoothed_prevalence(COUNTS) if prevalence is None else prevalence)
    logits = sharp * torch.randn(n, len(shares), generator=generator) + shares.log()
    labels = torch.multinomial(logits.softmax(1), 1, generator=generator)[:, 0]
    return logits, logits + torch.randn(n, len(shares), generator=generator), labels


def config_of(**fields):
    return AvgKConfig(**{"num_labels": L, "k": 2, "train_counts": COUNTS, **fields})


def collected(config, logits, second, labels, ks=(1, 2, 3), levels=(0.9,), batch=64, **how):
    """An evaluation of these logits, batch by batch."""
    found = Evaluation(config, len(logits), list(ks), True, levels, **how)
    for i in range(0, len(logits), batch):
        output = SimpleNamespace(logits=logits[i : i + batch], sccp_logits=second[i : i + batch])
        found.update(output, labels[i : i + batch], i)
    return found


def stored_config():
    config = config_of()
    logits, second, labels = drawn()
    collected(config, logits, second, labels, per_class=True).store(dataset="drawn")
    return config, logits, second, labels


@pytest.fixture
def stored():
    """A config that was calibrated on drawn logits, and these."""
    return stored_config()


@pytest.fixture(scope="module")
def stored_once():
    return stored_config()[0]


# ------------------------------------------------------------------------------------------------------ definition


@pytest.mark.parametrize("balance", [0, 0.3, 0.5, 1])
def test_weights_are_those_of_the_definition(balance):
    """p w is p / prevalence^balance up to one factor, w in (0, 1]; a class without images counts as one."""
    counts = [0, 3, 1000, 12]
    prevalence = [(count + 1) / (sum(counts) + len(counts)) for count in counts]
    assert smoothed_prevalence(counts) == pytest.approx(prevalence) and sum(prevalence) == pytest.approx(1)
    weights = balance_weights(prevalence, balance)
    assert weights.dtype == torch.float32 and weights.max() == 1 and weights.min() > 0
    factors = [weight * share**balance for weight, share in zip(weights.tolist(), prevalence, strict=True)]
    assert factors == pytest.approx([factors[0]] * 4, rel=1e-6)


@pytest.mark.parametrize("kind", ["softmax", "sigmoid"])
@pytest.mark.parametrize("head", ["ml", "sccp", "mean"])
def test_answering_logits_order_classes_as_balanced_scores_do(kind, head):
    logits, second, _ = drawn(50)
    logits[0], logits[1] = 60.0, -60.0  # and stay finite
    weights = balance_weights(smoothed_prevalence(COUNTS), 1)
    of_head = {"ml": score(logits, kind), "sccp": score(second, kind)}
    of_head["mean"] = (of_head["ml"] + of_head["sccp"]) / 2
    found = score(answering_logits(logits, second, head, kind, weights), kind)
    wanted = of_head[head] * weights
    wanted = normalised(wanted) if kind == "softmax" else wanted
    assert torch.allclose(found, wanted, atol=1e-6) and found.isfinite().all()
    assert torch.equal(answering_logits(logits, second, "ml", kind), logits)


def test_normalised_scores_sum_to_one():
    """Alike for torch, by which a calibration counts, and numpy, by which a question is answered."""
    scores = drawn(100)[0].softmax(1) * balance_weights(smoothed_prevalence(COUNTS), 1)
    scores[:, 2] = -math.inf  # a class that is left out
    found = normalised(scores)
    assert found.clamp(min=0).sum(1).tolist() == pytest.approx([1] * 100) and found[:, 2].isneginf().all()
    assert np.array_equal(np.stack([normalised(row) for row in scores.numpy()]), found.numpy())
    assert np.array_equal(normalised(scores.numpy()), found.numpy())


def test_what_each_end_is_best_in():
    """Probabilities that are true: balance 0 is best for all images, 1 for the mean over classes, as theory has it."""
    logits, _, labels = drawn(60_000, prevalence=[0.6, 0.25, 0.1, 0.03, 0.015, 0.005])
    prevalence = logits.softmax(1).mean(0).tolist()
    micro, macro = {}, {}
    for balance in GRID:
        scores = logits.softmax(1) * balance_weights(prevalence, balance)
        inside = scores >= average_k_threshold(scores, 2)
        correct = inside.gather(1, labels[:, None])[:, 0].numpy()
        assert inside.sum().item() == pytest.approx(2 * len(labels), abs=2)  # K on average
        micro[balance] = correct.mean()
        macro[balance] = class_means(correct, labels.numpy(), L)["macro_accuracy"]
    assert sorted(micro, key=micro.get, reverse=True) == sorted(macro, key=macro.get) == list(GRID)
    assert micro[0] - micro[1] > 0.05 and macro[1] - macro[0] > 0.05


# ----------------------------------------------------------------------------------------------------- calibration


def test_one_pass_gives_the_thresholds_of_every_balance(stored):
    """As brute force over the whole matrix has them, for every head and K, in float32."""
    config, logits, second, labels = stored
    plain = {"ml": logits.softmax(1), "sccp": second.softmax(1)}
    plain["mean"] = (plain["ml"] + plain["sccp"]) / 2
    found = Calibration.of(config)
    assert found.balance == 0 and found.balances == [0, 0.5, 1]
    assert found.source["prevalence_from"] == "train" and found.prevalence == smoothed_prevalence(COUNTS)
    for balance in found.balances:
        view, weights = found.at(balance), balance_weights(smoothed_prevalence(COUNTS), balance)
        for head, scores in plain.items():
            for k in (1, 2, 3):
                assert view.head_threshold(head, k) == average_k_threshold(scores * weights, k)
        for k in (1, 2, 3):  # the best head for each balance by itself
            correct = {
                head: ((scores * weights).gather(1, labels[:, None])[:, 0] >= view.head_threshold(head, k)).sum()
                for head, scores in plain.items()
            }
            assert view.head(k) == max(correct, key=correct.get)
        rows = [row for row in found.tradeoff if row[:2] == [2, balance]]
        scores = plain[view.head(2)] * weights
        correct = (scores.gather(1, labels[:, None])[:, 0] >= view.threshold(2)).numpy()
        means = class_means(correct, labels.numpy(), L, COUNTS)
        assert rows == [[2, balance, correct.mean(), means["macro_accuracy"], means["few_shot_accuracy"], rows[0][5]]]
    assert [row[1] for row in found.tradeoff if row[0] == 2] == list(GRID)


def test_the_softmax_is_computed_once(monkeypatch):
    calls = []
    monkeypatch.setattr("avgk_hf.scores.SCORES", {"softmax": lambda logits: calls.append(1) or logits.softmax(-1)})
    collected(config_of(), *drawn(), batch=100).store()
    assert len(calls) == 2 * 2  # two heads, two batches, five balances


def test_questions_are_answered_with_balanced_scores(stored):
    """Sizes, coverages by every method, sums and bounds, against loops over the definition."""
    config, logits, second, labels = stored
    weights = balance_weights(smoothed_prevalence(COUNTS), 0.5)
    view = Calibration.of(config).at(0.5)
    scores = view.scores(logits, second, view.head())
    plain = Calibration.of(config).at(0).scores(logits, second, view.head())
    assert torch.equal(scores, plain * weights) and torch.equal(view.balanced(plain), scores)
    sets = answer(scores, config, k=2, balance=0.5)
    assert torch.equal(sets, scores >= view.threshold(2))
    assert sets.sum() == 2 * NUMBER
    shares = normalised(scores).double().numpy()
    order = np.argsort(-shares, axis=1, kind="stable")
    before = np.take_along_axis(shares, order, 1).cumsum(1)
    before = np.concatenate([np.zeros((NUMBER, 1)), before[:, :-1]], 1)
    mass = np.empty_like(before)
    np.put_along_axis(mass, order, before, 1)
    own = mass[np.arange(NUMBER), labels]
    limit = np.sort(own)[math.ceil(0.9 * (NUMBER + 1)) - 1]
    found = answer(scores, config, coverage=0.9, method="aps", balance=0.5).numpy()
    assert np.array_equal(found, mass <= limit + 1e-12)
    found = answer(scores, config, cumulative=0.8, balance=0.5).numpy()
    assert np.array_equal(found, mass < 0.8)
    true = np.sort(scores.gather(1, labels[:, None])[:, 0].numpy())[::-1]
    lac = answer(scores, config, coverage=0.9, balance=0.5)
    assert torch.equal(lac, scores >= float(true[math.ceil(0.9 * (NUMBER + 1)) - 1]))
    assert (
        resolve(config, k=2, balance=0.5, min_size=1).classes(scores)[0]
        == scores[0].sort(descending=True)[1].tolist()[: max(1, sets[0].sum())]
    )


def test_what_is_not_recorded_is_refused(stored):
    config = stored[0]
    with pytest.raises(ValueError, match=r"balance=0.3 is not recorded, only 0, 0.5, 1.*calibrate.*--balance 0.3"):
        resolve(config, balance=0.3)
    for wrong in (-0.1, 1.5, "half", True, math.nan):
        with pytest.raises(ValueError, match=r"balance=.* must be a number in \[0, 1\]"):
            Question(balance=wrong)
    logit = config_of(score="logit", head="ml")
    collected(logit, *drawn(), levels=()).store()
    assert Calibration.of(logit).balances == [0]
    with pytest.raises(ValueError, match=r"balance=0.5 is for probabilities, and score='logit' gives none"):
        resolve(logit, balance=0.5)
    with pytest.raises(ValueError, match=r"balance=0.5 is for probabilities"):
        Balancing.of(logit, 0.5)
    with pytest.raises(ValueError, match=r"balance=auto needs to know how frequent the classes are"):
        Balancing.of(config_of(train_counts=None), "auto")
    assert Balancing.of(config_of(train_counts=None)).all == [0]
    for wrong in ([1, 2], [1, 0, 1, 1, 1, 1], [1, math.inf, 1, 1, 1, 1]):
        with pytest.raises(ValueError, match="prevalence must hold 6 numbers above 0"):
            given_prevalence(wrong, 6)


def test_it_is_kept_carried_and_dropped(stored, tmp_path):
    """In files, in a copy, in an adapter, and with one head; another model's weights lose it."""
    config, logits, second, _ = stored
    config.calibration = {**config.calibration, "balance": 0.5}
    config.save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["calibration"]["balance"] == 0.5 and "balances" not in written["calibration"]
    assert written["thresholds"] == config.thresholds  # of balance 0
    loaded = AvgKConfig.from_pretrained(tmp_path)
    found = Calibration.of(loaded)
    assert found.balance == 0.5 and loaded.calibration == config.calibration
    assert found.answer(Question()).lambda_val == found.at(0.5).threshold(2) != found.at(0).threshold(2)
    assert found.at(0).answer(Question()).lambda_val == found.at(0).threshold(2)

    other = config_of()
    Calibration.carry(loaded, other)
    assert Calibration.of(other).balances == [0, 0.5, 1]
    tensor = with_calibration(loaded)[f"base_model.model.{CALIBRATION}"]
    model = SimpleNamespace(config=config_of(), peft_config={})
    take_calibration(model, {CALIBRATION: tensor}, "")
    assert Calibration.of(model.config).at().threshold(3) == found.threshold(3)

    view = found.at(1)
    lambdas = {k: view.head_threshold("sccp", k) for k in (1, 2, 3)}
    fixed = config_of(head="sccp")
    collected(fixed, logits, second, stored[3]).store()
    Calibration.keep_head(fixed, "sccp")
    kept = Calibration.of(fixed).at(1)
    assert {k: kept.threshold(k) for k in (1, 2, 3)} == lambdas and kept.levels() == [0.9] and kept.curve
    Calibration.drop(other)
    assert Calibration.of(other).balances == [0] and other.calibration is None

    (tmp_path / "calibration.json").unlink()
    lost = AvgKConfig.from_pretrained(tmp_path)
    with pytest.raises(
        ValueError, match=r"own balance is 0.5, and what was calibrated for it is not in calibration.js"
    ):
        resolve(lost, k=2)
    assert resolve(lost, k=2, balance=0).lambda_val == found.at(0).threshold(2)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"prevalence": [0.2] * 5}, "calibration.prevalence must hold 6 numbers"),
        ({"prevalence": [0.2] * 5 + [0]}, "calibration.prevalence must hold 6 numbers"),
        ({"prevalence": [0.2] * 5 + [1e-300]}, "calibration.prevalence must hold 6 numbers"),
        ({"prevalence": [0.2] * 5 + [math.nan]}, "calibration.prevalence must hold 6 numbers"),
        ({"prevalence": None}, "calibration.prevalence must hold 6 numbers"),
        ({"prevalence": [0.2] * 5 + [1.5]}, "calibration.prevalence must hold 6 numbers"),
        ({"balances": {"1.5": {}}}, "^calibration.balances has the key '1.5', which is no balance"),
        ({"balances": {"0.5": 3}}, "must hold thresholds"),
        ({"balances": {"0": {}}}, "key '0', which is no balance"),
        ({"balances": {str(i / 100): {} for i in range(1, 40)}}, "at most 20 balances"),
        ({"balances": {"0.5": {"thresholds": {"2": 0.1}, "code": 1}}}, "no other than"),
        ({"balances": {"0.5": {"thresholds": {}}}}, "must hold thresholds"),
        ({"balances": {"0.5": {"thresholds": {"2": 7}}}}, r"balances\['0.5'\].thresholds\['2'\]=7 is no probability"),
        ({"balances": {"0.5": {"thresholds": {"2": math.inf}}}}, "is not a finite number"),
        ({"balances": {"0.5": {"thresholds": {"2": 0.1}, "head": "x"}}}, "must be heads"),
        ({"balances": {"0.5": {"thresholds": {"2": 0.1}, "curve": [[1]]}}}, "curve is damaged"),
        ({"balances": {"0.5": {"thresholds": {"2": 0.1}, "coverage": {"lac": {"2": 1}}}}}, "no coverage level"),
        ({"tradeoff": [[1, 2]]}, "tradeoff is damaged"),
        ({"tradeoff": [[1, 0, "a", 0, 0, 0]]}, "tradeoff is damaged"),
        ({"tradeoff": [[1, 0, 0.5, 0.5, "a", 1]]}, "tradeoff is damaged"),
        ({"tradeoff": [[1, 0, 0.5, None, 0.5, 1]]}, "tradeoff is damaged"),
        ({"balance": 2}, r"\['balance'\]=2 must be a number in \[0, 1\]"),
    ],
)
def test_damaged_records_are_refused(stored_once, change, message):
    config = stored_once
    record = {**copy.deepcopy(config.calibration), **change}
    with pytest.raises(ValueError, match=message):
        Calibration.of(Config(num_labels=L, k=2, thresholds=config.thresholds, calibration=record))


def test_the_largest_records_that_are_taken():
    """Twenty balances, shares up to both ends, and no few-shot accuracy where no class has few images."""
    part, rows = {"thresholds": {"2": 0.1}}, [[2, 0, 0.5, 0.5, None, 2]]
    balances = {f"{i / 20:g}": part for i in range(1, 21)}
    shares = [1, LEAST_PREVALENCE, 0.5, 0.5, 0.5, 0.5]
    fields = {"thresholds": {"2": 0.1}, "balances": balances, "prevalence": shares, "tradeoff": rows}
    found = Calibration.of(Config(num_labels=L, k=2, **fields))
    assert len(found.balances) == 21 and found.at(1).threshold(2) == 0.1 and found.tradeoff == rows


def test_auto_gives_up_what_it_may():
    """The largest balance that costs so many points at the model's own K; 0 points cost nothing."""
    config, (logits, second, labels) = config_of(head="ml"), drawn(500)
    found = collected(config, logits, second, labels, balancing=Balancing.of(config, "auto", give_up=100))
    assert found.store().balance == found.balance == 1.0
    accuracy = {row[1]: row[2] for row in found.tradeoff() if row[0] == 2}
    for points in (0, 1, 2, 5):
        found.balancing = Balancing.of(config, "auto", give_up=points)
        allowed = [b for b in GRID if round(100 * (accuracy[0] - accuracy[b]), 6) <= points]
        assert found.store().balance == max(allowed) and max(allowed) in Calibration.of(config).balances
        assert (
            found.metrics()["average_k_accuracy"] == accuracy[max(allowed)]
        )  # what is reported is of the own balance
        assert resolve(config, coverage=0.9, method="raps").normalise == bool(max(allowed))
    for wrong in (-1, 101, math.nan, "x"):
        with pytest.raises(ValueError, match=r"give_up=.* must be percentage points"):
            Balancing(give_up=wrong)


def test_the_best_head_is_best_in_what_is_asked():
    """A head that is good for the rare class only: macro takes it, micro does not."""
    labels = torch.tensor([0] * 90 + [1] * 10)
    good, other = torch.zeros(100, 3), torch.zeros(100, 3)
    good[:, 0], good[labels == 1, 2] = 4.0, 5.0  # all of class 0, none of class 1
    other[labels == 1, 1], other[:40, 0], other[40:90, 2] = 4.0, 4.0, 4.0
    for by, head in (("micro", "ml"), ("macro", "sccp")):
        config = AvgKConfig(num_labels=3, k=1)
        collected(config, good, other, labels, ks=[1], levels=(), balancing=Balancing(select_by=by)).store()
        assert Calibration.of(config).head(1) == head
    assert AvgKTrainingArguments("none", select_by="macro").metric_for_best_model == "macro_accuracy"
    with pytest.raises(ValueError, match="select_by='macro' and metric_for_best_model='loss' say different things"):
        AvgKTrainingArguments("none", select_by="macro", metric_for_best_model="loss")
    with pytest.raises(ValueError, match="select_by='best' is unknown"):
        AvgKTrainingArguments("none", select_by="best")


def test_mean_scores_do_not_depend_on_batches():
    scores = drawn(100)[0].softmax(1)
    whole, parts = MeanScores(), MeanScores()
    whole.update(scores)
    for rows in scores.flip(0).split(7):
        parts.update(rows)
    assert whole.prevalence() == parts.prevalence() == pytest.approx(scores.double().mean(0).tolist(), abs=1e-8)


# -------------------------------------------------------------------------------------------------------- coverage


def long_tail(n, generator):
    """Exchangeable images of 10 classes with a long tail."""
    shares = torch.tensor([2.0**-j for j in range(10)])
    labels = torch.multinomial(shares, n, replacement=True, generator=generator)
    logits = torch.randn(n, 10, generator=generator) + shares.log()
    logits[torch.arange(n), labels] += 3
    return logits.softmax(1), labels, shares / shares.sum()


def test_prevalence_adjusted_lac_keeps_the_guarantee_and_covers_the_tail():
    """Over 100 random splits the coverage is that of its law, and the mean over classes is higher than that of LAC."""
    generator, hits, macro = torch.Generator().manual_seed(0), [], {0: [], 1: []}
    for _ in range(100):
        scores, labels, prevalence = long_tail(99 + 400, generator)
        for balance in (0, 1):
            own = scores * balance_weights(prevalence.tolist(), balance)
            stats = SetStatistics([1], 99)
            stats.update(own[:99], labels[:99])
            config = Config(num_labels=10, coverage=stats.coverage([0.9], False, 1))
            hit = answer(own[99:], config, coverage=0.9).gather(1, labels[99:, None])[:, 0].numpy()
            macro[balance].append(class_means(hit, labels[99:].numpy(), 10)["macro_accuracy"])
            if balance:
                hits.append(hit.mean())
    # the coverage given the calibration is Beta(90, 10), of mean 0.9; in 400 images its standard deviation is 0.034
    assert abs(np.mean(hits) - 0.9) < 4.5 * 0.034 / math.sqrt(100)
    assert np.mean(macro[1]) - np.mean(macro[0]) > 0.1


def test_thresholds_between_that_of_all_and_those_per_class():
    """w q_y + (1 - w) q, class by class; and at least 1 - 2 (1 - c) is covered."""
    generator, covered = torch.Generator().manual_seed(0), []
    for _ in range(40):
        scores, labels, _ = long_tail(300 + 400, generator)
        stats = SetStatistics([1], 300)
        stats.update(scores[:300], labels[:300])
        config = Config(num_labels=10, coverage=stats.coverage([0.9], True, 1))
        record = config.coverage["per_class"]["0.9"]
        for weight in (0.25, 0.5):
            found = answer(scores[300:], config, coverage=0.9, per_class=weight)
            for j in range(10):
                own = record["own"].get(str(j), record["pooled"])
                between = np.float32(weight * own + (1 - weight) * config.coverage["lac"]["0.9"])
                assert torch.equal(found[:, j], scores[300:, j] >= between)
        covered.append(found.gather(1, labels[300:, None]).float().mean().item())
    assert np.mean(covered) > 0.8


def test_the_worst_tenth_of_the_classes():
    labels = torch.arange(20).repeat_interleave(4)
    stats = SetStatistics([1], 80, {1: 0.5}, answers={"best": resolve(Config(num_labels=20), lambda_val=0.5)})
    scores = torch.zeros(80, 20).scatter(1, labels[:, None], 1.0)
    scores[:3, 0] = 0.0  # of class 0 one of four is covered, of class 1 two
    scores[4:6, 1] = 0.0
    stats.update(scores, labels)
    found = stats.answered()["best"]
    assert found["worst_class"] == 0.25 and found["worst_decile"] == (0.25 + 0.5) / 2
    assert found["mean_class"] == pytest.approx((18 + 0.75) / 20)
    few = SetStatistics([1], 80, {1: 0.5}, answers={"best": resolve(Config(num_labels=20), lambda_val=0.5)})
    few.update(scores[:12], labels[:12])
    assert few.answered()["best"]["worst_decile"] == 0.25  # of three classes one at least


# ---------------------------------------------------------------------------------------------------- every door


@pytest.fixture(scope="module")
def model():
    """A small model of six trees with counts and a calibration on random images; its own balance is 0.5."""
    torch.manual_seed(0)
    labels = dict(enumerate(CLASSES))
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32).eval()
    model.config.train_counts = COUNTS
    pixels = torch.randn(60, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        output = model(pixels)
    spread = [6 * (part - part.mean(0)) for part in (output.logits, output.sccp_logits)]  # sets of different sizes
    for head, part in ((model.ml_head, output.logits), (model.sccp_head, output.sccp_logits)):
        head.weight.data *= 6
        head.bias.data = 6 * (head.bias.data - part.mean(0))
    labels = torch.multinomial(spread[0].softmax(1), 1, generator=torch.Generator().manual_seed(1))[:, 0]
    balancing = Balancing.of(model.config, 0.5)
    collected(model.config, *spread, labels, per_class=True, balancing=balancing).store(dataset="noise")
    return model


@pytest.fixture
def pixels():
    return torch.randn(8, 3, 32, 32, generator=torch.Generator().manual_seed(2))


def test_the_model_answers_with_its_own_balance(model, pixels):
    """`logits`, and so the stock pipeline, order classes as the sets do; every balance is that of the definition."""
    found = Calibration.of(model.config)
    weights = balance_weights(smoothed_prevalence(COUNTS), 0.5)
    with torch.no_grad():
        output = model(pixels)
    plain = found.at(0).scores(output.ml_logits, output.sccp_logits, found.head())
    assert torch.allclose(output.logits.softmax(1), normalised(plain * weights), atol=1e-6)
    sets = model.predict_sets(pixels)
    assert sets == model.predict_sets(pixels, balance=0.5) != model.predict_sets(pixels, balance=0)
    for row, classes in zip(output.logits, sets, strict=True):
        assert classes == row.argsort(descending=True, stable=True).tolist()[: len(classes)]
    assert torch.equal(model.scores(pixels), plain * weights)
    head = found.at(0).head()
    of_zero = found.at(0).scores(output.ml_logits, output.sccp_logits, head)
    assert torch.equal(model.scores(pixels, balance=0), of_zero)
    assert model.predict_sets(pixels, balance=0) == resolve(model.config, balance=0).classes(of_zero)
    model.train()
    try:
        assert model(pixels).ml_logits is None  # a loss sees the head itself
    finally:
        model.eval()


def test_the_pipeline_and_its_monitor(model):
    import PIL.Image

    image = PIL.Image.fromarray(np.random.default_rng(0).integers(0, 255, (32, 32, 3), np.uint8))
    processor = TimmWrapperImageProcessor(model.config.pretrained_cfg)
    made = {"model": model, "image_processor": processor}
    classify = pipeline("average-k-image-classification", balance=1, **made)
    one = classify(image)
    assert classify.monitor.num_images == 1 and classify(image, balance=0) != one
    assert classify.monitor.num_images == 1  # another balance is another question
    assert classify(image, k=3)[: len(one)] == one  # keeps its balance
    scores = [each["score"] for each in one]
    assert scores == sorted(scores, reverse=True)
    with pytest.raises(ValueError, match=r"balance=0.7 is not recorded"):
        pipeline("average-k-image-classification", balance=0.7, **made)
    monitor = SetSizeMonitor.from_config(model.config, 2, balance=1)
    assert monitor.k == 2 and monitor.max_size <= L
    stock = pipeline("image-classification", **made)
    best = [each["label"] for each in stock(image, top_k=6)]
    of_set = [each["label"] for each in pipeline("average-k-image-classification", **made)(image)]
    assert best[: len(of_set)] == of_set


def test_the_exported_graph_is_balanced(model, pixels, tmp_path):
    """The weights are constants of it, and its metadata says which balance it is of."""
    import onnxruntime

    for balance in (None, 0, 1):
        found = exportable(model, balance=balance)(pixels, torch.tensor(0.0))[0]
        assert torch.allclose(found, model.scores(pixels, balance=balance), atol=1e-6)
    report = export_onnx(model, tmp_path / "onnx", balance=1)
    view = Calibration.of(model.config).at(1)
    assert report["balance"] == 1 and report["thresholds"]["2"] == view.threshold(2)
    session = onnxruntime.InferenceSession(tmp_path / "onnx" / "model.onnx")
    assert json.loads(session.get_modelmeta().custom_metadata_map["balance"]) == 1
    asked = {"pixel_values": pixels.numpy(), "lambda_val": np.array(report["thresholds"]["2"], np.float32)}
    sets = [row.nonzero()[0].tolist() for row in session.run(["set"], asked)[0]]
    assert [sorted(classes) for classes in model.predict_sets(pixels, balance=1, min_size=1)] == sets


def test_the_page_has_a_second_slider(model, pixels):
    answers = Answers(model)
    scores = answers.scores(pixels[0])
    for balance in (0, 0.5, 1):
        classes = answers.image_set(scores, k=2, balance=balance)[0]
        assert classes == model.predict_sets(pixels[:1], balance=balance, min_size=1)[0]
    html = answers.html(scores, k=2, balance=1)[0]
    assert "balance 1" in html and "mean over classes" in html
    parts = [part["props"] for part in build_page(answers, "trees").config["components"]]
    slider = next(part for part in parts if part.get("elem_id") == "avgk-balance")
    assert (slider["minimum"], slider["maximum"], slider["value"], slider["step"]) == (0, 1, 0.5, 0.5)


def test_the_card_shows_the_tradeoff(model, tmp_path):
    text = str(render_card("trees", model.config, {}, {}))
    rows = [line for line in text.splitlines() if line.startswith(("| 1 | 0", "| 2 | 0", "| 3 | 0", "| 2 | 1"))]
    row = next(row for row in Calibration.of(model.config).tradeoff if row[:2] == [2, 0.5])
    assert f"| 2 | 0.5 | {row[2]:.2%} | {row[3]:.2%} | {row[4]:.2%} | {row[5]:.2f} |" in rows
    assert "this model's own is 0.5" in text and "those of the training images" in text


def test_the_metric_takes_a_balance():
    logits, _, labels = drawn()
    prevalence = smoothed_prevalence(COUNTS)
    scores = logits.softmax(1) * balance_weights(prevalence, 0.5)
    asked = {"k": 2, "kind": "softmax", "calibrate": True, "train_counts": COUNTS}
    found = average_k_accuracy(logits, labels, **asked, balance=0.5, prevalence=prevalence)
    assert found["lambda_val"] == average_k_threshold(scores, 2)
    correct = (scores.gather(1, labels[:, None])[:, 0] >= found["lambda_val"]).numpy()
    assert found["macro_accuracy"] == class_means(correct, labels.numpy(), L)["macro_accuracy"]
    counts = [1 + count for count in COUNTS]
    assert average_k_accuracy(logits, labels, **asked, balance=0.5, prevalence=counts) == found
    for wrong, message in (
        ({"balance": 0.5}, "belong together"),
        ({"prevalence": counts}, "belong together"),
        ({"balance": 0.5, "prevalence": counts, "kind": "logit"}, "is for probabilities"),
        ({"balance": 2, "prevalence": counts}, r"must be a number in \[0, 1\]"),
        ({"balance": 1, "prevalence": [1]}, "6 numbers above 0"),
    ):
        with pytest.raises(ValueError, match=message):
            average_k_accuracy(logits, labels, **{**asked, **wrong})


# --------------------------------------------------------------------------------------- commands, trainer, study


def test_the_commands(model, image_folder, tmp_path, capsys):
    """Calibrate with a balance, evaluate and predict with another; pictures and what is printed."""
    folder, picture = tmp_path / "model", tmp_path / "curve.png"
    model.save_pretrained(folder)
    asked = ["calibrate", str(folder), str(image_folder), "--k", "1", "3", "--balance", "auto", "--give-up", "100"]
    assert main([*asked, "--per-class", "--select-by", "macro", "--plot", str(picture)]) == 0
    printed = capsys.readouterr().out
    assert "the model's own is 1;" in printed and "frequencies of classes: of the training" in printed
    table = printed.partition("accuracy by balance, K = 2\n")[2].splitlines()
    assert [line.split()[0] for line in table[:6]] == ["balance", "0", "0.25", "0.5", "0.75", "1"]
    assert picture.is_file() and (tmp_path / "curve_balance.png").is_file()
    loaded = AvgKForImageClassification.from_pretrained(folder)
    found = Calibration.of(loaded.config)
    assert found.balance == 1 and found.balances == [0, 0.5, 1]
    test = load_splits(str(image_folder))["test"]
    for balance in (0, 0.5, 1):
        out = tmp_path / "metrics.json"
        command = ["evaluate", str(folder), str(image_folder), "--balance", str(balance), "--out", str(out)]
        assert main([*command, "--per-class-weight", "0.5"]) == 0
        metrics = json.loads(out.read_text())
        again = evaluate(loaded, test, balance=balance, per_class=0.5)
        assert {name: again[name] for name in again if name != "loss"}.items() <= metrics.items()
        assert metrics["lambda_val"] == found.at(balance).threshold(2)
        assert "coverage_per_class_0.5_0.9" in metrics
    capsys.readouterr()
    image = next((image_folder / "test" / "oak").iterdir())
    sets = {}
    for balance in ("0", "1"):
        assert main(["predict", str(folder), str(image), "--balance", balance, "--json"]) == 0
        sets[balance] = json.loads(capsys.readouterr().out)[0]["set"]
    assert sets["0"] != sets["1"]
    assert main(["predict", str(folder), str(image), "--balance", "0.3"]) != 0
    assert "--balance 0.3" in capsys.readouterr().err


def test_a_classifier_that_knows_no_counts(image_folder, tmp_path, capsys):
    """Nothing but 0, unless it is told how frequent classes are, by a dataset or a file, or asked for a balance."""
    save_vit(tmp_path / "vit")
    command = ["calibrate", str(tmp_path / "vit"), str(image_folder), "--k", "1", "2", "--out", str(tmp_path / "out")]
    assert main(command) == 0
    assert "no balance but 0" in capsys.readouterr().out
    assert Calibration.of(load_classifier(str(tmp_path / "out")).config).balances == [0]

    (tmp_path / "counts.csv").write_text("".join(f"{n},{c}\n" for n, c in zip(CLASSES, COUNTS, strict=True)))
    of_file = [0.5, 0.2, 0.1, 0.1, 0.05, 0.05]
    (tmp_path / "shares.json").write_text(json.dumps(dict(zip(CLASSES, of_file, strict=True))))
    shares = dict.fromkeys((str(image_folder), str(tmp_path / "counts.csv")), smoothed_prevalence(COUNTS))
    shares[str(tmp_path / "shares.json")] = of_file
    for given, prevalence in shares.items():
        assert main([*command, "--prevalence", given, "--balance", "0.7"]) == 0
        found = Calibration.of(load_classifier(str(tmp_path / "out")).config)
        assert found.prevalence == pytest.approx(prevalence) and found.source["prevalence_from"] == "given"
        assert found.balances == [0, 0.5, 0.7, 1] and found.balance == 0.7
    capsys.readouterr()
    (tmp_path / "counts.csv").write_text("oak,many\n")
    assert main([*command, "--prevalence", str(tmp_path / "counts.csv")]) != 0
    assert "must hold a number of images" in capsys.readouterr().err
    (tmp_path / "shares.json").write_text('{"oak": 0.5}')
    assert main([*command, "--prevalence", str(tmp_path / "shares.json")]) != 0
    assert "has no share above 0" in capsys.readouterr().err

    model = load_classifier(str(tmp_path / "vit"))
    validation = load_splits(str(image_folder))["validation"]
    calibrate(model, validation, [1, 2], balance=1)
    found = Calibration.of(model.config)
    assert found.source["prevalence_from"] == "estimated" and found.balance == 1 and len(found.prevalence) == 6
    assert sum(found.prevalence) == pytest.approx(1)
    calibrate(model, validation, [1, 2])  # what it was: its own balance, and the frequencies
    again = Calibration.of(model.config)
    assert again.source["prevalence_from"] == "estimated" and again.balance == 1
    assert again.prevalence == found.prevalence
    with pytest.raises(ValueError, match="give_up says how to calibrate"):
        evaluate(model, validation, give_up=1)


def test_a_recipe_has_a_balance(make_trainer, tmp_path):
    """The trainer calibrates with it, evaluates with it, and refuses what cannot be; a recipe says it by its name."""
    trainer = make_trainer(balance="auto", give_up=100, load_best_model_at_end=False)
    metrics = trainer.evaluate()
    found = Calibration.of(trainer.model.config)
    assert found.balance == 1 and metrics["eval_lambda_val"] == found.at(1).threshold(2)
    row = next(row for row in found.tradeoff if row[:2] == [2, 1])
    assert row[2:4] == [metrics["eval_average_k_accuracy"], metrics["eval_macro_accuracy"]]
    again = trainer.evaluate(trainer.eval_dataset, calibrate=False)
    assert again["eval_macro_accuracy"] == metrics["eval_macro_accuracy"]
    recipe = str(find_recipe("glyphs/ce.yaml"))
    _, _, args = parse_recipe([recipe, "--balance", "0.5", "--select_by", "macro", "--output_dir", str(tmp_path)])
    assert args.balance == 0.5 and args.metric_for_best_model == "macro_accuracy"
    for wrong in ("2", "much", "nan"):
        with pytest.raises(ValueError, match=r"balance=.* must be a number in \[0, 1\], or 'auto'"):
            AvgKTrainingArguments(str(tmp_path), balance=wrong)


def test_a_comparison_measures_balances(tmp_path):
    """The balance that auto takes is chosen on validation; runs with balances have other names than those without."""
    grid = {}
    for balance, accuracy in zip(GRID, (0.9, 0.899, 0.896, 0.894, 0.8), strict=True):
        of_head = {"average_k_accuracy": accuracy, "few_shot_accuracy": balance}
        worse = {"average_k_accuracy": accuracy - 0.1, "few_shot_accuracy": 0.0}
        parts = {"ml": {"2": of_head}, "sccp": {"2": worse}}
        grid[f"{balance:g}"] = {"validation": parts, "test": parts}
    assert chosen(grid, 2, "ml", "auto")["balance"] == chosen(grid, 2, "auto", "auto")["balance"] == 0.5
    assert [chosen(grid, 2, head, 1)["few_shot_accuracy"] for head in ("sccp", "auto")] == [0, 1]
    path = str(find_recipe("glyphs/compare_balance.yaml"))
    comparison = read_comparison(path, output_dir=str(tmp_path))
    runs = plan(comparison)
    further = {"losses": {"ce": {}, "avgk": {}}, "output_dir": str(tmp_path)}
    final = {(run.loss, run.k, run.ks) for run in plan(read_comparison(path, **further)) if run.phase == "final"}
    assert final == {("ce", None, (2, 3, 5, 10)), ("avgk", 3, (2, 3, 5, 10))}  # one training for all K
    name = run_path(comparison, runs[0])
    comparison.balances = []
    assert run_path(comparison, runs[0]) != name
    for wrong in ([0.3], "auto", [None]):
        with pytest.raises(ValueError, match=r"balances=.* must be a list, each among"):
            read_comparison(path, output_dir=str(tmp_path), balances=wrong)


def test_what_a_run_of_a_comparison_measures(make_trainer, splits):
    """Every balance of the grid and every way to cover the tail, as calibrating and evaluating by hand give them."""
    trainer = make_trainer(given={"train_dataset": None})
    trainer.model.config.train_counts = COUNTS
    found = measure_balances(trainer, splits["test"], [1, 2])
    model = trainer.model
    assert not model.config.thresholds and list(found["grid"]) == [f"{balance:g}" for balance in GRID]
    calibrate(model, splits["validation"], [1, 2], per_class=True, batch_size=7)
    for balance in (0, 0.5, 1):
        head = Calibration.of(model.config).at(balance).head()
        metrics = evaluate(model, splits["test"], [1, 2], batch_size=7, balance=balance)
        own = found["grid"][f"{balance:g}"]["test"][head]["2"]
        assert own == {name: metrics[name] for name in own}
    for name, question in COVERAGES.items():
        asked = {"balance": 0, **question}
        metrics = evaluate(model, splits["test"], [1, 2], batch_size=7, coverage=[0.9], **asked)
        named = f"coverage_{question_name(0.9, per_class=question.get('per_class', False))}"
        assert found["coverage"][name]["coverage"] == metrics[named]
        assert found["coverage"][name]["size"] == metrics[f"{named}_size"]


def test_sets_of_some_classes_only():
    """What is left out has the score -inf, with every head and balance, and K counts the others."""
    config = PreTrainedConfig(num_labels=4)
    calibration = Calibration.store(config, {1: 0.3, 1.5: 0.2}, {"classes": [1, 3]})
    assert calibration.classes == [1, 3] and calibration.num_answers == 2
    one, other = torch.tensor([[5.0, 1.0, 4.0, 0.0]]), torch.tensor([[0.0, 2.0, 9.0, 3.0]])
    of_heads = {"ml": one[:, [1, 3]].softmax(1), "sccp": other[:, [1, 3]].softmax(1)}
    of_heads["mean"] = (of_heads["ml"] + of_heads["sccp"]) / 2
    for head, expected in of_heads.items():
        scores = calibration.scores(one, other, head)
        assert torch.equal(scores[:, [1, 3]], expected) and (scores[:, [0, 2]] == -torch.inf).all()
    assert calibration.answer(Question(k=1)).classes(calibration.scores(one)) == [[1]]
    one[0, 0] = math.nan  # of a class that nobody asks for
    assert calibration.answer(Question(k=1)).classes(calibration.scores(one)) == [[1]]
    with pytest.raises(ValueError, match=r"k=2 must be a number in \[1, 2\) for 2 classes"):
        calibration.answer(Question(k=2))
    for damaged in ([3, 1], [4], [1, 1], [], "13", [True]):
        with pytest.raises(ValueError, match=r"calibration\.classes must list ids below 4 in ascending order"):
            Calibration.store(config, {1: 0.3}, {"classes": damaged})


def test_details_are_those_of_the_folder_that_is_meant(tmp_path):
    """Of a subfolder too; what was loaded before stays, and arguments of others are left out."""
    for place, share in (("", 0.25), ("sub", 0.5)):
        config = PreTrainedConfig(num_labels=3)
        Calibration.store(config, {1: 0.4, 2: 0.3}, coverage={"num_examples": 9, "lac": {"0.9": share}})
        (tmp_path / place).mkdir(exist_ok=True)
        config.save_pretrained(tmp_path / place)
        save_details(config, tmp_path / place)
    for given, share in (({}, 0.25), ({"subfolder": "sub", "device_map": "cpu", "token": None}, 0.5)):
        config = PreTrainedConfig(num_labels=3)
        Calibration.store(config, {1: 0.4, 2: 0.3})
        load_details(config, tmp_path, **given)
        assert Calibration.of(config).coverage["lac"] == {"0.9": share}
        load_details(config, tmp_path, subfolder="" if given else "sub")
        assert Calibration.of(config).coverage["lac"] == {"0.9": share}


def test_details_of_a_model_on_the_hub(tmp_path):
    """Out of the cache of the Hub, of the revision that is asked for; a model that is not there has none."""
    for revision, share in (("a" * 40, 0.25), ("b" * 40, 0.5)):
        config = PreTrainedConfig(num_labels=3)
        Calibration.store(config, {1: 0.4, 2: 0.3}, coverage={"num_examples": 9, "lac": {"0.9": share}})
        snapshot = tmp_path / "models--someone--trees" / "snapshots" / revision
        for folder in (snapshot, snapshot / "sub"):
            config.save_pretrained(folder)
        save_details(config, snapshot if share == 0.25 else snapshot / "sub")
    (tmp_path / "models--someone--trees" / "refs").mkdir()
    (tmp_path / "models--someone--trees" / "refs" / "main").write_text("a" * 40)

    def found(name="someone/trees", **given):
        config = PreTrainedConfig(num_labels=3)
        Calibration.store(config, {1: 0.4, 2: 0.3})
        load_details(config, name, cache_dir=tmp_path, **given)
        return Calibration.of(config).coverage.get("lac", {}).get("0.9")

    assert found() == found(revision="a" * 40, token=None, device_map="cpu") == 0.25
    assert found(revision="b" * 40, subfolder="sub") == 0.5
    known = tmp_path / "models--someone--trees" / ".no_exist" / ("b" * 40)
    known.mkdir(parents=True)
    (known / "calibration.json").touch()  # what the Hub was asked for before, and does not have
    assert found(revision="b" * 40) is found(subfolder="sub") is found("someone/else") is None


def test_details_of_classifiers_that_say_little(tmp_path):
    """Without thresholds, or without config.json beside; what is damaged is refused with the name of the file."""
    bare = PreTrainedConfig(num_labels=3)
    bare.train_counts = [5, 1, 0]
    save_details(bare, tmp_path)
    assert json.loads((tmp_path / "calibration.json").read_text()) == {"num_labels": 3, "train_counts": [5, 1, 0]}
    config = PreTrainedConfig(num_labels=3)
    load_details(config, tmp_path)
    assert config.train_counts == [5, 1, 0] and not hasattr(config, "calibration")
    fewer = PreTrainedConfig(num_labels=2)
    load_details(fewer, tmp_path)
    assert not hasattr(fewer, "train_counts")
    for further, message in (
        ({"code": 1}, "has the unknown field 'code': calibrate again"),
        ({"train_counts": [1]}, "train_counts has 1 values for 3 classes"),
        ({"prevalence": [1]}, "calibration.prevalence must hold 3 numbers"),
    ):
        (tmp_path / "calibration.json").write_text(json.dumps({"num_labels": 3, **further}))
        config = PreTrainedConfig(num_labels=3)
        Calibration.store(config, {1: 0.4, 2: 0.3})
        with pytest.raises(ValueError, match=rf"calibration\.json:? {message}"):
            load_details(config, tmp_path)
    save_details(PreTrainedConfig(num_labels=3), tmp_path)  # nothing to keep: one that is out of date goes
    assert not list(tmp_path.iterdir())
    save_details(PreTrainedConfig(num_labels=3), tmp_path)


def test_one_head_is_kept_for_every_balance():
    """With the frequencies, what each balance is worth, and the model's own balance; config.json has balance 0."""
    config = config_of(head="sccp")
    collected(config, *drawn(), balancing=Balancing.of(config, 0.5)).store(dataset="drawn")
    before = Calibration.of(config)
    lambdas = {b: {k: before.at(b).threshold(k) for k in (1, 2, 3)} for b in (0, 0.5, 1)}
    Calibration.keep_head(config, "sccp")
    after = Calibration.of(config)
    assert after.balance == 0.5 and after.source == {**before.source, "head": "ml"}
    assert {b: {k: after.at(b).threshold(k) for k in (1, 2, 3)} for b in after.balances} == lambdas
    assert config.thresholds == {str(k): value for k, value in lambdas[0].items()}
    assert (after.prevalence, after.tradeoff) == (before.prevalence, before.tradeoff)
    for balance in (0, 0.5, 1):
        assert after.at(balance).coverage == before.at(balance).coverage != {}
        assert (after.at(balance).source_head, after.at(balance).head()) == ("ml", "ml")
    about = Config(num_labels=6, k=2, head="sccp", heads={}, thresholds={}, calibration={"dataset": "drawn"})
    Calibration.keep_head(about, "sccp")
    assert about.calibration == {"dataset": "drawn", "head": "ml"}  # what is known of the images stays
