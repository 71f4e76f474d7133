"""The model: any timm backbone, exact save and load, sets, and clear refusals."""

import json
import os
import re
import socket

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification

from avgk_hf import AvgKConfig, AvgKForImageClassification
from avgk_hf.calibration import Calibration
from avgk_hf.losses import LOSSES, make_loss
from avgk_hf.scores import answering_logits, head_logits, score

BACKBONES = ["test_resnet", "test_vit", "test_convnext", "test_efficientnet"]
IMAGES = torch.rand(4, 3, 32, 32, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("name", BACKBONES)
def test_save_and_load_give_identical_logits(name, make_model, tmp_path):
    model = make_model(name).eval()
    Calibration.store(model.config, {2: 0.1234567, 1.5: 0.3}, {"num_examples": 30, "split": "validation"})
    model.save_pretrained(tmp_path)
    loaded = AvgKForImageClassification.from_pretrained(tmp_path).eval()
    assert (tmp_path / "model.safetensors").is_file()
    before, after = model(IMAGES), loaded(IMAGES)
    assert torch.equal(before.logits, after.logits) and torch.equal(before.sccp_logits, after.sccp_logits)
    assert model.state_dict().keys() == loaded.state_dict().keys()
    buffers = dict(loaded.named_buffers())
    assert all(torch.equal(value, buffers[key]) for key, value in model.named_buffers())
    assert loaded.config.thresholds == {"1.5": 0.3, "2": 0.1234567}
    assert loaded.config.calibration == model.config.calibration
    assert loaded.predict_sets(IMAGES) == model.predict_sets(IMAGES)


def test_non_persistent_buffers_survive_loading(make_model, tmp_path):
    """Such buffers are in no checkpoint; without care from_pretrained leaves them uninitialised."""
    name = "levit_128s"
    assert any(m._non_persistent_buffers_set for m in timm.create_model(name, num_classes=0).modules())
    model = make_model(name, image_size=None).eval()
    model.save_pretrained(tmp_path)
    loaded = AvgKForImageClassification.from_pretrained(tmp_path).eval()
    assert all(torch.equal(a, b) for a, b in zip(model.buffers(), loaded.buffers(), strict=True))
    images = torch.rand(2, 3, 224, 224)
    assert torch.equal(model(images).logits, loaded(images).logits)
    assert "_fresh" not in loaded.__dict__


def test_auto_classes_load_a_saved_model(make_model, tmp_path):
    model = make_model().eval()
    model.save_pretrained(tmp_path)
    assert isinstance(AutoConfig.from_pretrained(tmp_path), AvgKConfig)
    loaded = AutoModelForImageClassification.from_pretrained(tmp_path).eval()
    assert torch.equal(loaded(IMAGES).logits, model(IMAGES).logits)
    processor = AutoImageProcessor.from_pretrained(tmp_path)
    assert processor([IMAGES[0].numpy()])["pixel_values"].shape == (1, 3, 32, 32)


def test_weights_of_a_local_timm_folder(tmp_path):
    original = timm.create_model("test_resnet", num_classes=17, in_chans=1)
    timm.models.save_for_hf(original, tmp_path / "timm", model_args={"in_chans": 1}, safe_serialization=True)
    for name in (str(tmp_path / "timm"), f"local-dir:{tmp_path / 'timm'}"):
        model = AvgKForImageClassification.from_timm(name, num_labels=5, k=2)
        assert model.config.architecture == "test_resnet" and model.config.model_args["in_chans"] == 1
        own = model.backbone.state_dict()
        assert all(torch.equal(value, own[key]) for key, value in original.state_dict().items() if key in own)
    assert str(tmp_path) not in json.dumps(model.config.to_dict())  # no path of this machine in a saved model


def test_weights_of_a_hub_id(fresh, tmp_path):
    """From the Hub's cache, in a new process, because the place of the cache is read on import."""
    original = timm.create_model("test_resnet", num_classes=17)
    repo = tmp_path / "home" / "hub" / "models--someone--tiny"
    timm.models.save_for_hf(original, repo / "snapshots" / ("0" * 40), safe_serialization=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    code = (
        "from avgk_hf import AvgKForImageClassification as Model\n"
        "model = Model.from_timm('hf_hub:someone/tiny', num_labels=5, k=2)\n"
        "assert model.config.base_model == 'someone/tiny' and 'someone' not in str(model.config.pretrained_cfg)\n"
        f"model.save_pretrained({str(tmp_path / 'saved')!r})"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = fresh.run(code, folder=tmp_path, env=environment)
    assert done.code == 0, done.err
    loaded = AvgKForImageClassification.from_pretrained(tmp_path / "saved")
    assert loaded.config.architecture == "test_resnet"
    assert torch.equal(loaded.backbone.conv1[0].weight, original.conv1[0].weight)


def test_weights_of_a_safetensors_file(tmp_path):
    original = timm.create_model("test_resnet")
    save_file(original.state_dict(), tmp_path / "weights.safetensors")
    checkpoint = str(tmp_path / "weights.safetensors")
    model = AvgKForImageClassification.from_timm("test_resnet", num_labels=5, k=2, checkpoint=checkpoint)
    assert torch.equal(model.backbone.conv1[0].weight, original.conv1[0].weight)
    model.save_pretrained(tmp_path / "model")
    assert set(load_file(tmp_path / "model" / "model.safetensors")) == set(model.state_dict())
    with pytest.raises(ValueError, match=r"weights.pth.*is not a .safetensors file"):
        AvgKForImageClassification.from_timm("test_resnet", 5, k=2, checkpoint=str(tmp_path / "weights.pth"))
    with pytest.raises(ValueError, match=r"weights.safetensors' names weights, and pretrained=False asks for none"):
        AvgKForImageClassification.from_timm("test_resnet", 5, k=2, checkpoint=checkpoint, pretrained=False)


@pytest.mark.parametrize("name", ["resnet18", "hf_hub:someone/tiny"])
def test_weights_out_of_reach_end_in_a_sentence_at_once(name, fresh, tmp_path):
    """Not after a minute of retries: in a new process, because the Hub's address is read on import."""
    free = socket.socket()
    free.bind(("127.0.0.1", 0))  # bound, but nobody listens
    code = f"import avgk_hf\navgk_hf.AvgKForImageClassification.from_timm({name!r}, 5, k=2, pretrained=True)"
    foreign = re.compile("HF_|HUGGING|TRANSFORMERS_|.*_PROXY$", re.IGNORECASE)
    environment = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    environment |= {"HF_HOME": str(tmp_path), "HF_ENDPOINT": f"http://127.0.0.1:{free.getsockname()[1]}"}
    found = fresh.run(code, folder=tmp_path, env=environment)
    free.close()
    assert "is not in the cache, and the Hub cannot be reached" in found.err.splitlines()[-1]
    assert "`checkpoint=`" in found.err.splitlines()[-1] and "Retrying" not in found.err


def test_init_keeps_timm_weights_and_fresh_heads_differ(make_model):
    torch.manual_seed(3)
    reference = timm.create_model("test_resnet", num_classes=0)
    torch.manual_seed(3)
    model = AvgKForImageClassification.from_timm("test_resnet", num_labels=6, k=2)
    assert torch.equal(model.backbone.conv1[0].weight, reference.conv1[0].weight)
    assert not torch.equal(model.ml_head.weight, model.sccp_head.weight)


@pytest.mark.parametrize("in_chans", [1, 3])
def test_grey_and_colour_input(in_chans, make_model):
    model = make_model(model_args={"in_chans": in_chans}).eval()
    grey = torch.rand(2, 1, 32, 32)
    assert model.config.pretrained_cfg["input_size"] == [in_chans, 32, 32]
    as_grey, as_colour = model(grey).logits, model(grey.expand(-1, 3, -1, -1)).logits
    assert as_grey.shape == (2, 6)
    assert torch.allclose(as_grey, as_colour, atol=1e-5)


@pytest.mark.parametrize("objective", LOSSES)
def test_forward_with_labels_trains_in_a_plain_loop(objective, make_model):
    model = make_model(objective=objective).train()
    assert (model.sccp_head is not None) == (objective == "avgk")
    if objective == "role":  # it needs the number of training images, which only the trainer knows
        with pytest.raises(ValueError, match="train with `AvgKTrainer`"):
            model(IMAGES, labels=torch.tensor([0, 1, 2, 5]))
        return
    labels = torch.tensor([0, 1, 2, 5])
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    losses = []
    for _ in range(8):
        output = model(IMAGES, labels=labels)
        losses.append(output.loss.item())
        optimizer.zero_grad()
        output.loss.backward()
        optimizer.step()
    assert losses[-1] < losses[0]
    if objective != "topk":  # it draws noise
        expected = make_loss(model.config)
        output = model(IMAGES, labels=labels)
        assert output.loss.item() == pytest.approx(expected(output, labels).item())


def test_tuple_output_and_hidden_states(make_model):
    model = make_model().eval()
    logits, sccp_logits = model(IMAGES, return_dict=False)
    output = model(IMAGES, output_hidden_states=True)
    assert torch.allclose(output.logits, logits, atol=1e-6) and sccp_logits.shape == (4, 6)
    assert len(output.hidden_states) > 1


def test_half_precision_model_accepts_float_images(make_model):
    model = make_model().eval().to(torch.bfloat16)
    assert model.scores(IMAGES).dtype == torch.float32


def test_predict_sets(make_model):
    model = make_model().train()
    scores = model.scores(IMAGES)
    Calibration.store(model.config, {2: float(scores.max()), 3: 0.0}, {})
    assert model.training  # prediction leaves the mode as it was
    sets = model.predict_sets(IMAGES)
    assert sorted(len(s) for s in sets) == [0, 0, 0, 1]
    assert all(len(s) == 6 for s in model.predict_sets(IMAGES, k=3))
    assert model.predict_sets(IMAGES, lambda_val=2.0, min_size=1) == scores.argmax(1)[:, None].tolist()
    best_first = model.predict_sets(IMAGES, k=3)[0]
    assert best_first == scores[0].argsort(descending=True).tolist()


def test_uncalibrated_model_and_unknown_k_are_refused(make_model):
    model = make_model()
    with pytest.raises(ValueError, match=r"no thresholds.*`avgk calibrate MODEL DATASET`"):
        model.predict_sets(IMAGES)
    Calibration.store(model.config, {2: 0.1, 3: 0.05}, {})
    with pytest.raises(ValueError, match=r"no threshold is stored for k=1.5.*calibrated for k in 2, 3.*--k 1.5"):
        model.predict_sets(IMAGES, k=1.5)
    with pytest.raises(ValueError, match=r"k=6 must be a number in \[1, 6\)"):
        model.predict_sets(IMAGES, k=6)


def test_drop_sccp_head(make_model, tmp_path):
    model = make_model().eval()
    Calibration.store(model.config, {2: 0.1}, {})
    sets = model.predict_sets(IMAGES)
    assert model.drop_sccp_head() is model
    model.save_pretrained(tmp_path)
    loaded = AvgKForImageClassification.from_pretrained(tmp_path)
    assert loaded.sccp_head is None and loaded.predict_sets(IMAGES) == sets
    assert not any("sccp" in key for key in load_file(tmp_path / "model.safetensors"))
    with pytest.raises(ValueError, match="head='sccp'"):
        make_model(head="sccp").drop_sccp_head()


def test_drop_unused_head(make_model):
    def calibrated(head, heads):
        model = make_model(head=head).eval()
        scores = {k: model.config.head if head != "auto" else heads[k] for k in (2, 3)}
        Calibration.store(model.config, {2: 0.17, 3: 0.1}, {}, heads=scores if head == "auto" else None)
        return model

    for head, heads, kept in (
        ("ml", {}, "ml"),
        ("sccp", {}, "sccp"),
        ("auto", {2: "ml", 3: "ml"}, "ml"),
        ("auto", {2: "sccp", 3: "sccp"}, "sccp"),
        ("auto", {2: "sccp", 3: "ml"}, None),
        ("mean", {}, None),
    ):
        model = calibrated(head, heads)
        sets = [model.predict_sets(IMAGES, k=k) for k in (2, 3)]
        weight = {"ml": model.ml_head.weight, "sccp": model.sccp_head.weight}.get(kept)
        assert model.drop_unused_head() is model
        assert (model.sccp_head is None) == (kept is not None) == (not model.config.sccp_head)
        if kept:
            assert torch.equal(model.ml_head.weight, weight) and model.config.head == "ml"
        assert [model.predict_sets(IMAGES, k=k) for k in (2, 3)] == sets


def test_a_head_that_stays_keeps_what_was_calibrated_for_it(make_model):
    """Its thresholds by its own name, and curve and coverage where they are its own."""
    lambdas = {"ml": {2: 0.3, 3: 0.1}, "sccp": {2: 0.2, 3: 0.02}}
    coverage, curve = {"num_examples": 30, "lac": {"0.9": 0.1}}, [[2, 0.2, 2, 1, 1], [3, 0.02, 3, 1, 1]]

    def model(head, recorded="sccp", heads=None):
        found, record = make_model(head="auto"), {"num_examples": 30, "head": recorded}
        chosen = heads or {2: "sccp", 3: "ml"}
        own = {k: lambdas[head][k] for k, head in chosen.items()}
        Calibration.store(found.config, own, record, chosen, lambdas, coverage, curve)
        found.config.head = head
        return found

    for head, recorded in (("ml", "ml"), ("ml", "sccp"), ("sccp", "ml"), ("sccp", "sccp")):
        kept = model(head, recorded).drop_unused_head().config
        own = {f"{k}": value for k, value in lambdas[head].items()}
        assert (kept.thresholds, kept.head, kept.heads, kept.sccp_head) == (own, "ml", {}, False)
        details = {"coverage": coverage, "curve": curve} if head == recorded else {}
        assert kept.calibration == {"num_examples": 30, "head": "ml", **details}
    assert model("ml").drop_sccp_head().config.thresholds == {"2": 0.3, "3": 0.1}
    assert Calibration.of(model("ml", "ml").drop_sccp_head().config).coverage == coverage
    both = model("auto")
    assert (
        both.drop_unused_head() is both
        and both.sccp_head is not None
        and both.config.heads == {"2": "sccp", "3": "ml"}
    )
    for head in ("auto", "sccp", "mean"):
        with pytest.raises(
            ValueError, match=f"the SCCP head answers for this model \\(head='{head}'\\); it must stay"
        ):
            model(head).drop_sccp_head()
    assert model("auto", "ml", {2: "ml", 3: "ml"}).drop_sccp_head().config.thresholds == {"2": 0.3, "3": 0.1}
    assert make_model().drop_sccp_head().config.calibration is None
    single = make_model(objective="ce")
    assert single.drop_unused_head() is single and single.sccp_head is None and single.config.head == "ml"


def test_logits_are_those_of_the_head_that_answers(make_model):
    """Of a calibrated model that is not in training; the losses see both heads as before."""
    model, pixels, labels = make_model().eval(), torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 5])
    before = model(pixels, labels)
    assert before.ml_logits is None and model.config.head == "auto"
    for head, expected in (("sccp", before.sccp_logits), ("mean", None), ("ml", before.logits)):
        Calibration.store(model.config, {2: 0.2}, heads={2: head})
        output = model.eval()(pixels, labels)
        assert torch.equal(output.loss, before.loss) and torch.equal(output.sccp_logits, before.sccp_logits)
        assert all(map(torch.equal, head_logits(output), (before.logits, before.sccp_logits)))
        assert expected is None or torch.equal(output.logits, expected)
        assert torch.allclose(output.logits.softmax(-1), model.scores(pixels), atol=1e-6)
        assert (output.ml_logits is None) == (head == "ml")
    compiled = torch.compile(model.eval(), backend="eager", fullgraph=True)
    for head in ("sccp", "ml", "mean"):
        Calibration.store(model.config, {2: 0.2}, heads={2: head})
        assert torch.allclose(compiled(pixels).logits, model(pixels).logits)
    for output in (model.train()(pixels), model(pixels, labels)):  # of the mean nothing is computed in training
        assert output.ml_logits is None and torch.equal(output.logits, model.ml_head(model.backbone(pixels)))


@pytest.mark.parametrize("kind", ["softmax", "sigmoid", "logit"])
def test_the_score_of_the_mean_logits_is_the_mean_of_the_scores(kind):
    """Also where the heads contradict each other, and in half precision."""
    for size, dtype in ((1.0, torch.float32), (1e4, torch.float32), (30.0, torch.bfloat16)):
        one, other = (size * torch.randn(2, 50, 7)).to(dtype)
        expected = (score(one, kind) + score(other, kind)) / 2
        assert torch.allclose(score(answering_logits(one, other, "mean", kind), kind), expected, atol=1e-6)


def test_one_head_has_nothing_to_choose(make_model, tmp_path):
    model = make_model(objective="ce", head="auto")
    assert model.config.head == "ml" == AvgKConfig(sccp_head=False).head and AvgKConfig().head == "auto"
    Calibration.store(model.config, {2: 0.1})
    model.save_pretrained(tmp_path)
    assert AvgKForImageClassification.from_pretrained(tmp_path).config.heads == {}
    assert len(model.predict_sets(torch.zeros(2, 3, 32, 32))) == 2


def test_a_head_that_is_not_trained_cannot_answer(make_model):
    with pytest.raises(ValueError, match="head='sccp' needs the SCCP head, which objective='ce' does not train"):
        make_model(objective="ce", head="sccp")


def test_another_number_of_classes_drops_the_thresholds(make_model, tmp_path):
    model = make_model(train_counts=[1, 2, 3, 4, 5, 6])
    Calibration.store(model.config, {2: 0.1}, {})
    model.save_pretrained(tmp_path)
    loaded = AvgKForImageClassification.from_pretrained(tmp_path, num_labels=9, ignore_mismatched_sizes=True)
    assert loaded.ml_head.out_features == 9
    assert loaded.config.thresholds == {} and loaded.config.train_counts is None


def test_a_model_for_two_classes_is_offered_a_k_that_it_can_have(make_model, tmp_path):
    make_model(k=2).save_pretrained(tmp_path)
    two = {"num_labels": 2, "ignore_mismatched_sizes": True}
    with pytest.raises(ValueError, match=r"k=2 must be a number in \[1, 2\) for 2 classes.*e\.g\. `k=1`\.$"):
        AvgKForImageClassification.from_pretrained(tmp_path, **two)
    assert AvgKForImageClassification.from_pretrained(tmp_path, k=1, **two).config.k == 1


@pytest.mark.parametrize("load", [AvgKForImageClassification, AutoModelForImageClassification, AvgKConfig])
def test_other_class_names_of_the_same_number_drop_the_thresholds(make_model, tmp_path, load):
    """And the training counts; the same names keep them."""
    names = dict(enumerate(["ash", "beech", "cedar", "elm", "fir", "oak"]))
    model = make_model(id2label=names, num_labels=None, train_counts=[1, 2, 3, 4, 5, 6])
    Calibration.store(model.config, {2: 0.1}, {"num_examples": 9}, coverage={"lac": {"0.9": 0.1}})
    model.save_pretrained(tmp_path)
    for labels in (names, names | {5: "yew"}):
        loaded = load.from_pretrained(tmp_path, id2label=labels)
        config = getattr(loaded, "config", loaded)
        assert config.id2label == labels
        kept = (config.thresholds, config.heads, config.calibration, config.train_counts)
        if labels is names:
            assert kept == ({"2": 0.1}, {"2": "ml"}, model.config.calibration, [1, 2, 3, 4, 5, 6])
        else:
            assert kept == ({}, {}, None, None)


@pytest.mark.parametrize("k", [0, 0.9, 6, 100])
def test_k_outside_the_range_is_refused_when_the_model_is_built(k):
    with pytest.raises(ValueError, match=rf"k={k} must be a number in \[1, 6\) for 6 classes"):
        AvgKForImageClassification.from_timm("test_resnet", num_labels=6, k=k)
    with pytest.raises(ValueError, match=rf"k={k} must be a number (in \[1, 6\)|from 1 to below)"):
        AvgKForImageClassification(AvgKConfig(architecture="test_resnet", num_labels=6, k=k))


def test_unknown_names_are_refused_with_near_ones():
    with pytest.raises(ValueError, match=r"'resnet81' is neither a timm model.*Did you mean resnet18"):
        AvgKForImageClassification.from_timm("resnet81", num_labels=6, k=2)
    with pytest.raises(ValueError, match=r"'some/folder' is neither a timm model nor a local folder"):
        AvgKForImageClassification.from_timm("some/folder", num_labels=6, k=2)
    with pytest.raises(ValueError, match="pass `num_labels=` or `id2label=`"):
        AvgKForImageClassification.from_timm("test_resnet", k=2)


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("thresholds", {"2": float("nan")}, r"config.thresholds\['2'\]=nan is not a finite number"),
        ("thresholds", {"2": float("inf")}, r"config.thresholds\['2'\]=inf"),
        ("thresholds", {"10": 0.1}, "config.thresholds has the key '10'"),
        ("thresholds", {"0.5": 0.1}, "config.thresholds has the key '0.5'"),
        ("thresholds", {"two": 0.1}, "config.thresholds has the key 'two'"),
        ("thresholds", {"2": "0.1"}, "thresholds"),
        ("objective", "hinge", r"config.objective='hinge' is unknown; choose one of \['ce', 'avgk'"),
        ("score", "softmin", "config.score='softmin' is unknown"),
        ("head", "both", "config.head='both' is unknown"),
        ("calibration", {"head_thresholds": {"both": {"2": 0.1}}}, "calibration.head_thresholds has the key 'both'"),
        (
            "calibration",
            {"head_thresholds": {"ml": {"2": float("nan")}}},
            r"head_thresholds\['ml'\]\['2'\]=nan",
        ),
        ("hyperparameters", {"alpha": float("inf")}, r"config.hyperparameters\['alpha'\]=inf"),
        ("alpha", -1.0, r"config.hyperparameters\['alpha'\]=-1.0"),
        ("train_counts", [1, 2], "config.train_counts has 2 values for 6 classes"),
    ],
)
def test_bad_config_fields_are_refused_by_name(field, value, message):
    with pytest.raises(Exception, match=message):
        AvgKConfig(num_labels=6, **{field: value})


def test_gradient_checkpointing_gives_the_same_gradients(make_model):
    """And blocks are computed a second time for the backward pass, which is what saves their memory."""
    labels = torch.tensor([0, 1, 2, 5])
    gradients, passes = [], []
    for checkpointing in (False, True):
        model = make_model("test_vit").train()
        if checkpointing:
            model.gradient_checkpointing_enable()
        model.backbone.blocks[0].attn.register_forward_hook(lambda *_, seen=checkpointing: passes.append(seen))
        model(IMAGES, labels=labels).loss.backward()
        gradients.append(model.backbone.patch_embed.proj.weight.grad)
    assert torch.allclose(*gradients, atol=1e-6)
    assert passes == [False, True, True]
