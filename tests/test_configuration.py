"""The config: what it refuses, and that a calibration goes through a file and comes back whole."""

import json
import math
import re

import pytest
import torch
from asking import threshold
from transformers import AutoConfig, AutoModelForImageClassification, PreTrainedConfig

from avgk_hf import AvgKConfig, AvgKForImageClassification
from avgk_hf.calibration import Calibration, Question
from avgk_hf.checks import read_json
from avgk_hf.configuration import AUTO_MAP, CUSTOM_PIPELINES, MOST_LABELS, SHORT, check_labels, readable_json
from avgk_hf.losses import every_hyperparameter

FIELDS = {
    "architecture": "test_resnet",
    "model_args": {"in_chans": 1},
    "pretrained_cfg": {"input_size": [1, 32, 32]},
    "objective": "role",
    "k": 2,
    "hyperparameters": {"role_lambda": 0.4, "theta_lr": 0.5},
    "score": "sigmoid",
    "head": "auto",
    "train_counts": [1, 0, 3, 4, 5, 6],
}
LAMBDAS = {"ml": {3.0: 0.1, 1.5: 0.4, 2: 0.3}, "sccp": {2: 0.2, 1.5: 0.5, 3.0: 0.15}}
CHOSEN = {2: "sccp", 3.0: "ml", 1.5: "ml"}
COVERAGE = {"num_examples": 30, "lac": {"0.9": 0.1}}
RECORD = {"num_examples": 30, "split": "validation", "head": "sccp"}
CURVE = [[1.5, 0.45, 1.5, 0.5, 0.5], [3, 0.1, 3, 0.75, 0.75]]
CARRIED = ("thresholds", "heads", "calibration")


def calibrated(**fields):
    config = AvgKConfig(num_labels=6, **{**FIELDS, **fields})
    own = {k: LAMBDAS[head][k] for k, head in CHOSEN.items()}
    Calibration.store(config, own, RECORD, heads=CHOSEN, head_thresholds=LAMBDAS, coverage=COVERAGE, curve=CURVE)
    return config


def test_a_calibration_is_stored_as_plain_text_and_numbers():
    config = calibrated()
    assert list(config.thresholds.items()) == [("1.5", 0.4), ("2", 0.2), ("3", 0.1)]  # ascending
    assert list(config.heads.items()) == [("1.5", "ml"), ("2", "sccp"), ("3", "ml")]
    ascending = {"ml": [("1.5", 0.4), ("2", 0.3), ("3", 0.1)], "sccp": [("1.5", 0.5), ("2", 0.2), ("3", 0.15)]}
    assert {head: list(values.items()) for head, values in config.calibration["head_thresholds"].items()} == ascending
    found = Calibration.of(config)
    assert (found.coverage, found.curve, found.source) == (COVERAGE, CURVE, RECORD)
    assert (found.threshold(), found.threshold(3), found.head(), found.head(3)) == (0.2, 0.1, "sccp", "ml")
    config.head = "ml"
    Calibration.store(config, {2: 1}, {"num_examples": 7})
    assert config.thresholds == {"2": 1.0} and type(config.thresholds["2"]) is float
    assert config.heads == {} and config.calibration == {"num_examples": 7}
    config = calibrated()
    Calibration.drop(config)
    fresh = AvgKConfig(num_labels=6)
    assert all(getattr(config, name) == getattr(fresh, name) for name in CARRIED)


def test_every_field_comes_back_from_a_file(tmp_path):
    config = calibrated()
    config.save_pretrained(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["calibration.json", "config.json"]
    for loaded in (AvgKConfig.from_pretrained(tmp_path), AutoConfig.from_pretrained(tmp_path)):
        for name in (*FIELDS, *CARRIED):
            assert getattr(loaded, name) == getattr(config, name), name
    config.save_pretrained(tmp_path / "a" / "b")
    found = AvgKConfig.from_pretrained(tmp_path / "a", subfolder="b")
    assert (found.thresholds, found.calibration) == (config.thresholds, config.calibration)
    (tmp_path / "a" / "b" / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"b.config\.json must hold a mapping"):
        AvgKConfig.from_pretrained(tmp_path / "a", subfolder="b")
    loaded, unused = AvgKConfig.from_pretrained(tmp_path, k=3, theta_lr=2, return_unused_kwargs=True, other=1)
    assert (loaded.k, unused) == (3, {"other": 1})
    assert loaded.hyperparameters == {"role_lambda": 0.4, "theta_lr": 2}
    loaded = AvgKConfig.from_pretrained(tmp_path, objective="epr", beta=0.3)
    assert (loaded.objective, loaded.hyperparameters) == ("epr", {"beta": 0.3})


def test_a_name_that_is_no_folder_is_left_to_transformers(monkeypatch):
    asked, config = [], AvgKConfig()
    take = classmethod(lambda *args, **kwargs: asked.append((args, kwargs)) or config)
    monkeypatch.setattr(PreTrainedConfig, "from_pretrained", take)
    assert AvgKConfig.from_pretrained("some/repo", revision="x") is config
    assert asked == [((AvgKConfig, "some/repo"), {"revision": "x"})]


def test_what_other_readers_need_is_written_though_it_is_the_default(tmp_path):
    AvgKConfig(num_labels=6).save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    stated = {"architecture": "resnet18", "pretrained_cfg": {}, "image_processor_type": "TimmWrapperImageProcessor"}
    stated |= {"hyperparameters": {"alpha": 1.0, "candidate_scope": "global"}}
    stated |= {"objective": "avgk", "k": 5, "score": "softmax", "head": "auto", "sccp_head": True, "thresholds": {}}
    assert {name: written[name] for name in stated} == stated
    assert not every_hyperparameter() & set(written)  # each loss has its own, in their place
    assert (written["auto_map"], written["custom_pipelines"]) == (AUTO_MAP, CUSTOM_PIPELINES)
    loaded = AvgKConfig.from_pretrained(tmp_path)  # this package serves, not the code beside the file
    assert not hasattr(loaded, "auto_map") and not hasattr(loaded, "custom_pipelines")


def test_json_for_a_person():
    """A field on one line if it is short, in the letters that people write; what is long on several, in order."""
    content = {"z": {"b": 1, "a": "é"}, "a": [["x" * 40, {"k": ["y" * 40, "y" * 40, "y" * 40]}], "x" * 90]}
    text = readable_json(content)
    assert json.loads(text) == content
    assert text.splitlines() == [
        "{",
        '  "a": [',
        "    [",
        f'      "{"x" * 40}",',
        "      {",
        '        "k": [',
        *[f'          "{"y" * 40}"{comma}' for comma in (",", ",", "")],
        "        ]",
        "      }",
        "    ],",
        f'    "{"x" * 90}"',
        "  ],",
        '  "z": {"a": "é", "b": 1}',
        "}",
    ]
    for length, lines in ((SHORT, 3), (SHORT + 1, 5)):
        field = ["x" * (length - len('[""]'))]
        assert len(readable_json({"field": field}).splitlines()) == lines


def test_what_is_written_and_how(tmp_path):
    """Defaults of transformers are left out unless asked for, and so is a base model that there is none of."""
    config = AvgKConfig(num_labels=6, base_model="timm/resnet18.a1_in1k")
    assert json.loads(config.to_json_string())["base_model"] == config.base_model
    assert "base_model" not in json.loads(AvgKConfig(num_labels=6).to_json_string())
    assert "return_dict" not in json.loads(config.to_json_string())
    assert "return_dict" in json.loads(config.to_json_string(use_diff=False))
    config.to_json_file(tmp_path / "other.json")
    assert AvgKConfig.from_json_file(tmp_path / "other.json").base_model == config.base_model
    with pytest.raises(ConnectionError):  # what transformers takes is handed on, and there is no network here
        config.save_pretrained(str(tmp_path / "pushed"), push_to_hub=True, repo_id="someone/trees")


def test_a_file_is_replaced_only_when_the_new_one_is_complete(tmp_path, monkeypatch):
    AvgKConfig(num_labels=6, k=3).save_pretrained(tmp_path)
    before = (tmp_path / "config.json").read_text()
    broken = AvgKConfig(num_labels=6, k=2)
    monkeypatch.setattr(AvgKConfig, "to_json_string", lambda *args, **kwargs: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        broken.save_pretrained(tmp_path)
    assert (tmp_path / "config.json").read_text() == before
    monkeypatch.undo()
    AvgKConfig(num_labels=6).to_json_file(tmp_path / "all.json", use_diff=False)
    written = json.loads((tmp_path / "all.json").read_text())
    assert "return_dict" in written and written["hyperparameters"]["alpha"] == 1.0
    AvgKConfig(num_labels=6).to_json_file(tmp_path / "all.json")
    assert "return_dict" not in json.loads((tmp_path / "all.json").read_text())


def test_other_classes_drop_what_was_calibrated(tmp_path):
    """By their number or their names; the same names keep it."""
    calibrated().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    names = dict(enumerate("abcdefg"))
    for changed in ({"num_labels": 7}, {"id2label": names, "label2id": {}}, {"num_labels": 6, "id2label": names}):
        for config in (AvgKConfig.from_pretrained(tmp_path, **changed), AvgKConfig.from_dict(written, **changed)):
            assert config.num_labels == 7 and config.train_counts is None
            assert all(not getattr(config, name) for name in CARRIED)
            assert all(getattr(config, name) == FIELDS[name] for name in ("k", "objective", "hyperparameters", "head"))
    config = AvgKConfig.from_pretrained(tmp_path, id2label=dict(enumerate("abcdef")))
    assert config.train_counts is None and all(not getattr(config, name) for name in CARRIED)
    for same in ({}, {"num_labels": 6}, {"id2label": {i: f"LABEL_{i}" for i in range(6)}}):
        config = AvgKConfig.from_pretrained(tmp_path, **same)
        assert config.train_counts == FIELDS["train_counts"] and config.thresholds["2"] == 0.2
    # without class names in the file there is nothing to compare with
    bare = {name: value for name, value in written.items() if name not in ("id2label", "label2id", "train_counts")}
    assert AvgKConfig.from_dict(bare, num_labels=7).thresholds == written["thresholds"]


WEIGHTS = {"alpha": "avgk", "beta": "epr", "epsilon": "topk", "role_lambda": "role", "theta_lr": "role"}


@pytest.mark.parametrize("field", WEIGHTS)
def test_a_weight_is_a_finite_number_from_zero(field):
    """Given by its own name, or among the hyperparameters."""
    for value in (0, 0.0, 3, 1e300):
        for given in ({field: value}, {"hyperparameters": {field: value}}):
            assert AvgKConfig(objective=WEIGHTS[field], **given).hyperparameters[field] == value
    message = rf"config\.hyperparameters\['{field}'\]=.* must be a finite number >= 0"
    for value in (-1e-9, math.inf, -math.inf, math.nan, 10**400, "1"):
        for given in ({field: value}, {"hyperparameters": {field: value}}):
            with pytest.raises(ValueError, match=message):
                AvgKConfig(objective=WEIGHTS[field], **given)
    for value in (None, True):
        with pytest.raises(ValueError, match=message):
            AvgKConfig(objective=WEIGHTS[field], **{field: value})
        with pytest.raises(ValueError, match=rf"config\.hyperparameters=.*'{field}': {value}.* is of the wrong type"):
            AvgKConfig(objective=WEIGHTS[field], hyperparameters={field: value})


def test_a_hyperparameter_of_another_loss_is_refused():
    refused = r"config\.hyperparameters\['{}'\] is no hyperparameter of {}Loss\. {}"
    for given in ({"beta": 0.1}, {"hyperparameters": {"beta": 0.1}}):
        with pytest.raises(ValueError, match=refused.format("beta", "AvgK", "It has alpha, candidate_scope.")):
            AvgKConfig(**given)
        with pytest.raises(ValueError, match=refused.format("beta", "CrossEntropy", "It has none.")):
            AvgKConfig(objective="ce", **given)
    with pytest.raises(ValueError, match=refused.format("aplha", "AvgK", "Did you mean 'alpha'?")):
        AvgKConfig(hyperparameters={"aplha": 0.1})
    with pytest.raises(ValueError, match=r"config\.aplha is no field of AvgKConfig\. Did you mean 'alpha'\?"):
        AvgKConfig(aplha=0.1)


def test_remote_code_keeps_plain_hyperparameters(monkeypatch):
    """Without the package there is no loss to ask: numbers and words pass, nothing else."""
    monkeypatch.setattr("avgk_hf.configuration.INSTALLED", False)
    given = {"gamma": 0.5, "scope": "local"}
    config = AvgKConfig(objective="theirs", hyperparameters=given)
    assert (config.objective, config.hyperparameters) == ("theirs", given)
    for value in (math.nan, math.inf, 10**400, "two\nlines", "x" * 101):
        with pytest.raises(ValueError, match=r"hyperparameters\['gamma'\]=.* must be a finite number or a word"):
            AvgKConfig(objective="theirs", hyperparameters={"gamma": value})
    for value in (None, True, [1], {"a": 1}):
        with pytest.raises(ValueError, match=r"config\.hyperparameters=.* is of the wrong type"):
            AvgKConfig(objective="theirs", hyperparameters={"gamma": value})


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"k": 0.5}, r"k=0\.5 must be a number from 1 to below"),
        ({"objective": "CE"}, r"config\.objective='CE' is unknown; choose one of \['ce', 'avgk', 'an', 'epr'"),
        (
            {"hyperparameters": {"candidate_scope": "world"}},
            r"config\.hyperparameters\['candidate_scope'\]='world' is unknown; .*\['global', 'local'\]",
        ),
        ({"score": "max"}, r"config\.score='max' is unknown; choose one of \['softmax', 'sigmoid', 'logit'\]"),
        ({"head": "both"}, r"config\.head='both' is unknown; choose one of \['ml', 'sccp', 'mean', 'auto'\]"),
        ({"base_model": "../models"}, r"config\.base_model='\.\./models' must be a Hub id, `user/name`"),
        ({"train_counts": [1] * 5}, r"config\.train_counts has 5 values for 6 classes"),
        ({"train_counts": [1] * 5 + [-1]}, r"config\.train_counts=\[1, .*-1\] must hold whole numbers >= 0"),
        ({"train_counts": [1] * 5 + [True]}, r"config\.train_counts=.* is of the wrong type"),
        ({"thresholds": {"2": 1.5}}, r"config\.thresholds\['2'\]=1\.5 is no probability"),
        ({"thresholds": {"6": 0.5}}, r"config\.thresholds has the key '6'"),
        (
            {"calibration": {"head_thresholds": {"auto": {"2": 0.5}}}},
            r"calibration\.head_thresholds has the key",
        ),
        (
            {"calibration": {"head_thresholds": {"ml": {"2": 1.5}}}},
            r"calibration\.head_thresholds\['ml'\]\['2'\]=1\.5 is no probability",
        ),
        (
            {"calibration": {"head_thresholds": {"ml": {"6": 0.5}}}},
            r"calibration\.head_thresholds\['ml'\] has the key '6'",
        ),
        (
            {"calibration": {"coverage": {"lac": {"0.9": 1.5}}}},
            r"calibration\.coverage\['lac'\]\['0\.9'\]=1\.5 is",
        ),
        (
            {"calibration": {"coverage": {"class_counts": [1] * 5}}},
            r"calibration\.coverage\['class_counts'\] must hold 6",
        ),
        ({"head": "auto", "thresholds": {"2": 0.5}}, "head='auto', and no head was chosen"),
        ({"head": "auto", "thresholds": {"2": 0.5}, "heads": {"2": "auto"}}, r"config\.heads\['2'\]='auto'; choose"),
        ({"treshold": {}}, r"config\.treshold is no field of AvgKConfig\. Did you mean 'thresholds'\?"),
        ({"Objective": "ce"}, r"config\.Objective is no field of AvgKConfig\. Did you mean 'objective'\?"),
        ({"num_label": 6}, r"config\.num_label is no field of AvgKConfig\. Did you mean 'num_labels'\?"),
        ({"id2lable": {}}, r"config\.id2lable is no field of AvgKConfig\. Did you mean 'id2label'\?"),
        ({"label2ids": {}}, r"config\.label2ids is no field of AvgKConfig\. Did you mean 'label2id'\?"),
        ({"sccp_head": 1}, r"config\.sccp_head=1 is of the wrong type"),
    ],
)
def test_a_bad_field_is_refused_by_name(fields, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        AvgKConfig(**{"num_labels": 6, **fields})
    written = {**AvgKConfig(num_labels=6).to_dict(), **fields}
    with pytest.raises(ValueError, match=rf"^{message}"):
        AvgKConfig.from_dict(written)
    (tmp_path / "config.json").write_text(json.dumps(written))
    for load in (AvgKConfig.from_pretrained, AutoConfig.from_pretrained):
        with pytest.raises(ValueError, match=rf"config\.json: .*{message}") as error:
            load(tmp_path)
        assert str(error.value).startswith(str(tmp_path)) and "\n" not in str(error.value)


def test_another_score_drops_what_was_calibrated(tmp_path):
    """And what the score implies; the rest stays, as it does with another objective."""
    calibrated().save_pretrained(tmp_path)
    written = json.loads((tmp_path / "config.json").read_text())
    assert written["score"] == "sigmoid" and written["problem_type"] == "multi_label_classification"
    for config in (
        AvgKConfig.from_pretrained(tmp_path, score="softmax"),
        AvgKConfig.from_dict(written, score="softmax"),
    ):
        assert config.score == "softmax" and config.problem_type is None
        assert all(not getattr(config, name) for name in CARRIED)
        assert all(getattr(config, name) == FIELDS[name] for name in ("k", "objective", "hyperparameters", "head"))
    assert AvgKConfig.from_pretrained(tmp_path, score="sigmoid").thresholds == written["thresholds"]
    unstated = {name: value for name, value in written.items() if name not in ("score", "problem_type")}
    assert AvgKConfig.from_dict(unstated, score="softmax").thresholds == written["thresholds"]  # the default
    other = AvgKConfig.from_pretrained(tmp_path, objective="epr", beta=0.3)
    assert (other.architecture, other.k, other.thresholds) == ("test_resnet", 2, written["thresholds"])


def test_what_is_left_out_of_a_file_is_said(monkeypatch):
    said = []
    for name in ("warning", "warning_once"):
        monkeypatch.setattr(f"avgk_hf.configuration.logger.{name}", said.append)
    AvgKConfig.from_dict({"colour": "red", "_private": 1, "use_cache": False})
    assert said == ["config.colour is no field of AvgKConfig and is left out."]
    stored = {"num_labels": 6, "id2label": {str(i): f"LABEL_{i}" for i in range(6)}, "thresholds": {"2": 0.1}}
    stored |= {"head": "ml", "train_counts": [1] * 6}
    said.clear()
    assert AvgKConfig.from_dict(stored).train_counts == [1] * 6 and not said
    fresh = {**stored, "thresholds": {}}
    assert AvgKConfig.from_dict(fresh, id2label=dict(enumerate("abcdef"))).train_counts is None and not said
    AvgKConfig.from_dict(stored, id2label=dict(enumerate("abcdef")))
    assert said == ["the classes or the score are not those that were calibrated: thresholds are dropped."]


def test_labels_and_types_of_a_file_are_checked():
    """As transformers would take them: a number that makes as many labels, a list for a mapping, any name of torch."""
    for name in ("num_labels", "num_classes"):
        for wrong in (-1, True, "6", 6.0, MOST_LABELS + 1):
            with pytest.raises(ValueError, match=rf"num_labels={wrong!r} must be a whole number of at most"):
                check_labels({name: wrong})
    for name in ("id2label", "label2id"):
        with pytest.raises(ValueError, match=rf"config\.{name} must be a mapping, but is of type list"):
            check_labels({name: ["oak"]})
    check_labels({"num_labels": MOST_LABELS, "num_classes": 0, "id2label": {}, "label2id": None})
    for refused in ({"num_labels": -1}, {"id2label": ["oak"]}):
        with pytest.raises(ValueError, match=r"num_labels=-1 must be|config\.id2label must be"):
            AvgKConfig.from_dict(refused)
    with pytest.raises(ValueError, match="num_labels=-1 must be a whole number"):
        AvgKConfig(num_labels=-1)
    for field in ("dtype", "torch_dtype"):
        for wrong in ("os", "float8", 3):
            with pytest.raises(ValueError, match=rf"config\.dtype={wrong!r} is unknown"):
                AvgKConfig(**{field: wrong})
        assert AvgKConfig(**{field: "bfloat16"}).dtype == AvgKConfig(**{field: torch.bfloat16}).dtype == torch.bfloat16


def test_what_is_fine():
    config = AvgKConfig(num_labels=6, something_else=3, output_hidden_states=True)  # as transformers does
    assert AvgKConfig(heading=1).heading == 1  # not near enough to a field
    assert config.something_else == 3 and config.output_hidden_states
    assert threshold(AvgKConfig(num_labels=6, score="logit", head="ml", thresholds={"2": -3.5}), 2) == -3.5
    logit = AvgKConfig(
        num_labels=6,
        score="logit",
        calibration={"head_thresholds": {"ml": {"2": -3.5}}, "coverage": {"lac": {"0.9": -3.5}}},
    )
    found = Calibration.of(logit)
    assert found.thresholds["ml"][2] == found.coverage["lac"]["0.9"] == -3.5
    assert AvgKConfig(sccp_head=False).head == "ml"  # there is nothing to choose
    assert AvgKConfig(score="sigmoid").problem_type == "multi_label_classification"
    assert AvgKConfig().problem_type is None
    assert AvgKConfig(num_labels=2, train_counts=[0, 0]).train_counts == [0, 0]


def test_a_json_file_that_is_no_mapping_is_refused_by_name(tmp_path):
    path = tmp_path / "config.json"
    with pytest.raises(FileNotFoundError, match=r"config\.json is missing\."):
        read_json(path)
    for content, reason in (('{"k": ', "is not valid JSON"), ("[1]", "must hold a mapping, but holds list")):
        path.write_text(content)
        for load in (read_json, lambda path: AvgKConfig.from_pretrained(path.parent)):
            with pytest.raises(ValueError, match=rf"config\.json {reason}"):
                load(path)
    path.write_bytes('{"name": "é"}'.encode())
    assert read_json(path) == {"name": "é"}


@pytest.mark.parametrize("classes", [6, 1081])
def test_a_config_can_be_read(classes, make_model, tmp_path):
    """Few lines besides those of transformers, whatever the number of classes; what grows with it lies beside."""
    model = make_model(num_labels=classes, k=2, head="auto")
    ks = (1, 1.5, 2, 3, 5)
    lambdas = {head: {k: 0.5 / k for k in ks} for head in ("ml", "sccp", "mean")}
    part = {"own": {str(j): 0.25 for j in range(classes)}, "pooled": 0.25, "pooled_from": "all"}
    coverage = {"lac": {"0.9": 0.25}, "class_counts": [9] * classes, "per_class": {"0.9": part}}
    source = {"num_examples": 31112, "dataset": "plantnet-300K", "split": "validation", "date": "2026-11-17"}
    curve = [[k, 0.5 / k, k, 0.5, 0.5] for k in ks]
    heads = dict.fromkeys(ks, "mean")
    Calibration.store(
        model.config, lambdas["mean"], {**source, "step": 117210, "head": "mean"}, heads, lambdas, coverage, curve
    )
    model.config.train_counts = [7] * classes
    model.save_pretrained(tmp_path)
    text = (tmp_path / "config.json").read_text()
    of_transformers = {*PreTrainedConfig().to_dict(), "id2label", "label2id", "auto_map", "custom_pipelines"}
    own, counted = 0, ""
    for line in text.splitlines()[1:-1]:
        name = re.match(r'  "(\w+)":', line)
        counted = name[1] if name else counted
        own += counted not in of_transformers
    assert own <= 40, text
    assert json.loads(text)["thresholds"] == {"1": 0.5, "1.5": 0.5 / 1.5, "2": 0.25, "3": 0.5 / 3, "5": 0.1}
    for loaded in (AvgKForImageClassification, AutoModelForImageClassification):
        config = loaded.from_pretrained(tmp_path).config
        assert config.calibration == model.config.calibration and config.train_counts == [7] * classes
    (tmp_path / "calibration.json").unlink()  # the thresholds are in config.json
    bare = AvgKForImageClassification.from_pretrained(tmp_path).config
    assert threshold(bare, 2) == 0.25 and bare.train_counts is None
    with pytest.raises(ValueError, match="not calibrated for any coverage"):
        Calibration.of(bare).answer(Question(coverage=0.9))


@pytest.mark.parametrize(
    "counts", ["x", 3, [1, 2], [-1] * 6, [1.5] * 6, [True] * 6, [[1]] * 6, ["<img>"] * 6, {"a": 1}]
)
def test_training_counts_beside_a_config_are_checked(counts, tmp_path):
    """They come with a stranger's model, and stand in its card."""
    calibrated().save_pretrained(tmp_path)
    details = json.loads((tmp_path / "calibration.json").read_text())
    (tmp_path / "calibration.json").write_text(json.dumps({**details, "train_counts": counts}))
    with pytest.raises(ValueError, match=r"calibration\.json: train_counts") as refused:
        AvgKConfig.from_pretrained(tmp_path)
    assert "\n" not in str(refused.value)
