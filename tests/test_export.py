"""ONNX graphs give the sets that PyTorch gives, and need nothing of this package."""

import ast
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from avgk_hf import AvgKForImageClassification, load_splits
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import load_classifier, model_scores, transform_for
from avgk_hf.cli import main
from avgk_hf.data.glyphs import CHARACTERS, class_name, draw
from avgk_hf.evaluation import calibrate
from avgk_hf.export import export_onnx, exportable
from avgk_hf.recipes import parse_recipe
from avgk_hf.sets import average_k_threshold, predict_sets
from avgk_hf.train import build_model
from conftest import CLASSES, save_vit, write_images

ROOT = Path(__file__).parent.parent
KS = (1, 2, 5)
PIXELS = 300


def classifier(name):
    """A model with scores that are spread out, and 300 drawn images for it; the glyphs model is trained a little."""
    torch.manual_seed(0)
    rng = np.random.default_rng(0)
    if name == "glyphs":
        names = [class_name(character) for character in CHARACTERS]
        model = build_model(parse_recipe([str(ROOT / "recipes/glyphs/avgk.yaml")])[0], names)
    else:
        model = AvgKForImageClassification.from_timm(name, num_labels=20, k=2, image_size=32)
    transform = transform_for(model)

    def drawn(number):
        labels = rng.integers(0, model.config.num_labels, number)
        return torch.stack([transform.image(draw(CHARACTERS[j], rng)) for j in labels]), torch.from_numpy(labels)

    pixels, _ = drawn(PIXELS)
    if name == "glyphs":
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        model.train()
        for _ in range(30):
            images, labels = drawn(32)
            model(images, labels=labels).loss.backward()
            optimizer.step()
            optimizer.zero_grad()
    else:
        for module in model.modules():  # an untrained BatchNorm would leave all images nearly alike
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = None
        model.train()(pixels)
        with torch.no_grad():
            for head in (model.ml_head, model.sccp_head):
                torch.nn.init.normal_(head.weight)
            model.ml_head.weight *= 1.5 / model.eval()(pixels).logits.std()
    scores = model.scores(pixels)
    ks = {*KS, model.config.k}
    Calibration.store(model.config, {k: average_k_threshold(scores, k) for k in ks}, {"num_examples": PIXELS})
    return model, pixels, scores


@pytest.fixture(scope="module", params=["test_resnet", "test_vit", "glyphs"])
def exported(request, tmp_path_factory):
    model, pixels, scores = classifier(request.param)
    folder = tmp_path_factory.mktemp("export") / request.param
    report = export_onnx(model, folder)
    return model, pixels, scores, folder, report


def session(path):
    return onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])


def run(graph, pixels, lambda_val, batch_size):
    parts = [
        graph.run(None, {"pixel_values": batch.numpy(), "lambda_val": np.array(lambda_val, np.float32)})
        for batch in pixels.split(batch_size)
    ]
    return [np.concatenate(part) for part in zip(*parts, strict=True)]


def test_the_same_sets_as_torch(exported):
    """For every image, K and batch size: torch's scores up to rounding, and the rule applied to the graph's own.

    Which of two equally good classes stands at a threshold is a matter of rounding, and so of the processor; that the
    sets follow from the scores is not.
    """
    model, pixels, scores, folder, _ = exported
    graph = session(folder / "model.onnx")
    for k in KS:
        lambda_val = Calibration.of(model.config).threshold(k)
        for batch_size in (1, 7, 64) if k == 2 else (64,):
            found, sets = run(graph, pixels, lambda_val, batch_size)
            assert (found.dtype, sets.dtype, found.shape) == (np.float32, bool, tuple(scores.shape))
            assert np.abs(found - scores.numpy()).max() < 1e-5
            assert np.array_equal(sets, predict_sets(torch.from_numpy(found), lambda_val, min_size=1).numpy())
            assert len(set(sets.sum(1))) > 1  # sets of several sizes
            undecided = (scores - lambda_val).abs() < 1e-5
            plain = predict_sets(torch.from_numpy(found), lambda_val)
            assert ((plain == predict_sets(scores, lambda_val)) | undecided).all()
            assert undecided.float().mean() < 0.01  # of nearly all classes the graph decides as torch does
    assert (scores.amax(1) < Calibration.of(model.config).threshold(1)).any()  # empty sets got their best class


def test_threshold_is_an_input(exported):
    _, pixels, scores, folder, _ = exported
    graph = session(folder / "model.onnx")
    assert run(graph, pixels[:9], 0.0, 9)[1].all()
    best = run(graph, pixels[:9], 2.0, 9)[1]
    assert best.sum() == 9 and np.array_equal(best.argmax(1), scores[:9].argmax(1).numpy())


def test_file_says_what_it_is(exported):
    model, _, _, folder, report = exported
    proto = onnx.load(folder / "model.onnx")
    onnx.checker.check_model(proto, full_check=True)
    assert [tensor.name for tensor in proto.graph.input] == ["pixel_values", "lambda_val"]
    assert [tensor.name for tensor in proto.graph.output] == ["scores", "set"]
    shape = proto.graph.input[0].type.tensor_type.shape.dim
    assert shape[0].dim_param == "batch" and [d.dim_value for d in shape[1:]] == report["inputs"]["pixel_values"][1:]
    about = {
        name: json.loads(v) for name, v in session(folder / "model.onnx").get_modelmeta().custom_metadata_map.items()
    }
    assert about["thresholds"] == model.config.thresholds and about["k"] == model.config.k
    assert about["id2label"] == {str(i): name for i, name in model.config.id2label.items()}
    assert (about["score"], about["head"]) == ("softmax", "ml")
    assert about["opset"] == report["opset"] == proto.opset_import[0].version
    assert about["preprocessing"] == json.loads((folder / "preprocessor_config.json").read_text())
    assert about["preprocessing"]["pretrained_cfg"] == model.config.pretrained_cfg
    assert report == json.loads((folder / "export.json").read_text())
    assert report["bytes"]["model.onnx"] == (folder / "model.onnx").stat().st_size
    # the SCCP head is not in the file
    names = {tensor.name for tensor in proto.graph.initializer}
    assert sum(tuple(t.dims) == tuple(model.ml_head.weight.shape) for t in proto.graph.initializer) == 1, names
    assert str(folder).encode() not in (folder / "model.onnx").read_bytes()
    assert str(ROOT).encode() not in (folder / "model.onnx").read_bytes()


def test_torch_export_of_the_same_graph(exported):
    model, pixels, scores, _, _ = exported
    module, lambda_val = exportable(model), torch.tensor(Calibration.of(model.config).threshold(2))
    inputs = pixels[:2], lambda_val
    program = torch.export.export(module, inputs, dynamic_shapes=({0: torch.export.Dim("batch")}, None))
    assert not any("sccp" in name for name in program.state_dict)
    for size in (1, 7, 64):
        found, sets = program.module()(pixels[:size], lambda_val)
        assert torch.allclose(found, scores[:size], atol=1e-5)
        assert torch.equal(sets, predict_sets(found, lambda_val.item(), min_size=1))
    assert model.sccp_head is not None and model.ml_head.weight.requires_grad  # a copy was exported


OTHER_SCORES = [
    pytest.param(head, kind, marks=pytest.mark.long) for head, kind in (("sccp", "sigmoid"), ("ml", "logit"))
]


@pytest.mark.parametrize(("head", "kind"), [("mean", "softmax"), *OTHER_SCORES])
def test_graph_follows_head_and_score(make_model, tmp_path, head, kind):
    """On images that are wider than high, and on grey ones."""
    model = make_model(head=head, score=kind, model_args={"in_chans": 1 + 2 * (kind != "logit")})
    model.config.pretrained_cfg["input_size"] = [1 + 2 * (kind != "logit"), 32, 48]
    Calibration.store(model.config, {1: 0.3, 4: 0.1}, {})
    report = export_onnx(model, tmp_path, k=2.0)
    about = session(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    assert json.loads(about["k"]) == 2 and list(json.loads(about["thresholds"])) == ["1", "2", "4"]
    pixels = torch.randn(50, *model.config.pretrained_cfg["input_size"])
    lambda_val = report["thresholds"]["2"]
    expected = model.scores(pixels)
    found, sets = run(session(tmp_path / "model.onnx"), pixels, lambda_val, 16)
    assert np.allclose(found, expected.numpy(), atol=1e-5) and report["largest_difference"] < 1e-5
    assert np.array_equal(sets, predict_sets(torch.from_numpy(found), lambda_val, min_size=1).numpy())


def test_a_k_in_between_is_written_too(make_model, tmp_path):
    model = make_model()
    Calibration.store(model.config, {1: 0.4, 4: 0.1}, {})
    report = export_onnx(model, tmp_path, k=2.5)
    about = session(tmp_path / "model.onnx").get_modelmeta().custom_metadata_map
    asked, thresholds = json.loads(about["k"]), json.loads(about["thresholds"])
    assert asked == 2.5 and list(thresholds) == ["1", "2.5", "4"]
    assert thresholds["2.5"] == report["thresholds"]["2.5"] == Calibration.of(model.config).threshold(2.5)


def test_auto_heads_export_one_head(make_model, tmp_path):
    model = make_model(head="auto")
    Calibration.store(model.config, {1: 0.3, 2: 0.2, 3: 0.1}, {}, heads={1: "ml", 2: "sccp", 3: "sccp"})
    (tmp_path / "model.int8.onnx").write_bytes(b"of another model")
    report = export_onnx(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "preprocessor_config.json", "export.json"}
    assert report["head"] == "sccp" and set(report["thresholds"]) == {"2", "3"}
    assert report["left_out"] == {"1": "its head is 'ml'"}
    pixels = torch.randn(4, 3, 32, 32)
    found, _ = run(session(tmp_path / "model.onnx"), pixels, 0.2, 4)
    assert np.allclose(found, model.scores(pixels, k=2).numpy(), atol=1e-5)
    assert not np.allclose(found, model.scores(pixels, k=1).numpy(), atol=1e-4)


def test_half_precision_is_exported_in_float32(make_model, tmp_path, caplog):
    """Whose thresholds are those of other scores, which is said."""
    model = make_model().to(torch.bfloat16)
    Calibration.store(model.config, {2: 0.2}, {})
    report = export_onnx(model, tmp_path)
    assert {p.dtype for p in exportable(model).parameters()} == {torch.float32} and model.dtype == torch.bfloat16
    pixels = torch.randn(3, 3, 32, 32, generator=torch.Generator().manual_seed(0))
    found, _ = run(session(tmp_path / "model.onnx"), pixels, 0.2, 3)
    assert report["largest_difference"] == pytest.approx(np.abs(found - model.scores(pixels).numpy()).max(), rel=0.1)
    assert "computes in bfloat16 and the graph in float32" in caplog.text and "calibrate and export in" in caplog.text


@pytest.fixture(scope="module")
def saved(tmp_path_factory, splits):
    """A calibrated model in a folder."""
    torch.manual_seed(0)
    labels = dict(enumerate(CLASSES))
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32, head="ml")
    model.config.pretrained_cfg["crop_pct"] = 0.9
    torch.nn.init.normal_(model.ml_head.weight, std=3)
    calibrate(model, splits["validation"], [1, 2])
    folder = tmp_path_factory.mktemp("export") / "saved"
    model.save_pretrained(folder)
    return folder


WITHOUT_PACKAGE = """
import sys
for name in ("avgk_hf", "torch", "transformers", "timm", "onnx"):
    sys.modules[name] = None  # any import of it fails
"""
PAGE = (ROOT / "docs" / "deploy.md").read_text(encoding="utf-8")
SNIPPET = next(b for b in re.findall(r"```python\n(.*?)```", PAGE, flags=re.DOTALL) if "onnxruntime" in b)


@pytest.fixture(scope="module")
def graph_of_saved(saved, tmp_path_factory):
    folder = tmp_path_factory.mktemp("graph") / "onnx"
    assert main(["export", str(saved), "--onnx", "--out", str(folder)]) == 0
    return folder


@pytest.mark.parametrize(("size", "grey"), [((32, 32), True), ((57, 40), False), ((33, 80), False)], ids=str)
def test_the_page_without_the_package(saved, graph_of_saved, make_model, tmp_path, capsys, size, grey):
    """What docs/deploy.md shows, with onnxruntime, numpy and Pillow alone, gives the sets of `avgk predict`."""
    if grey:
        model = make_model(model_args={"in_chans": 1})
        Calibration.store(model.config, {2: 0.17}, {})
        saved = tmp_path / "grey"
        model.save_pretrained(saved)
        assert main(["export", str(saved), "--onnx", "--out", str(tmp_path / "runs/plants/onnx")]) == 0
    else:
        shutil.copytree(graph_of_saved, tmp_path / "runs/plants/onnx")
    noise = np.random.default_rng(0).integers(0, 255, (8, 8, 3), dtype=np.uint8)
    Image.fromarray(noise).resize(size, Image.Resampling.BICUBIC).save(tmp_path / "image.jpg", quality=95)
    code = WITHOUT_PACKAGE + SNIPPET + "\nprint(json.dumps(scores[0].tolist()))"
    command, environment = [sys.executable, "-c", code], {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    names, scores = done.stdout.splitlines()
    model, image = load_classifier(str(saved)), str(tmp_path / "image.jpg")
    expected = model_scores(model, transform_for(model).image(image)[None])[0]
    assert json.loads(scores) == pytest.approx(expected.tolist(), abs=1e-5)
    capsys.readouterr()
    assert main(["predict", str(saved), image, "--json"]) == 0
    found = {item["label"] for item in json.loads(capsys.readouterr().out)[0]["set"]}
    assert found == set(ast.literal_eval(names))


def test_the_command_measures_what_it_writes(saved, image_folder, tmp_path, capsys):
    picture = tmp_path / "export.svg"
    options = ["--onnx", "--int8", "--dataset", str(image_folder), "--plot", str(picture)]
    assert main(["export", *options, str(saved)]) == 0
    printed = capsys.readouterr().out
    report = json.loads((saved / "onnx" / "export.json").read_text())
    for name in ("model.onnx", "model.int8.onnx"):
        size = (saved / "onnx" / name).stat().st_size
        assert report["bytes"][name] == size and f"{saved / 'onnx' / name}: {size / 1e6:.2f} MB" in printed
        assert name in picture.read_text()
    assert report["bytes"]["model.int8.onnx"] < 0.5 * report["bytes"]["model.onnx"]
    assert f"opset {report['opset']}" in printed and "thresholds for K in 1, 2" in printed
    assert (report["split"], report["num_images"]) == ("test", 30)

    # what is measured of the graph is what `avgk evaluate` measures of the model
    assert main(["evaluate", str(saved), str(image_folder), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    plain, small = (report["measured"][name] for name in ("model.onnx", "model.int8.onnx"))
    assert plain["average_k_accuracy@2"] == pytest.approx(metrics["average_k_accuracy"])
    assert plain["mean_set_size@1"] == pytest.approx(metrics["mean_set_size@1"])
    # and of the 8-bit graph what its own scores give
    model = load_classifier(str(saved))
    dataset, transform = load_splits(str(image_folder))["test"], transform_for(model)
    pixels = torch.stack([transform.image(row["image"]) for row in dataset])
    scores, _ = run(session(saved / "onnx" / "model.int8.onnx"), pixels, 0.0, 30)
    sets, labels = scores >= np.float32(Calibration.of(model.config).threshold(2)), np.array(dataset["label"])
    assert small["mean_set_size@2"] == pytest.approx(sets.sum(1).mean(), abs=0.05)
    assert small["average_k_accuracy@2"] == pytest.approx(sets[np.arange(30), labels].mean(), abs=0.04)
    for name, difference in report["int8_difference"].items():
        assert difference == pytest.approx(small[name] - plain[name])
    share = report["bytes"]["model.int8.onnx"] / report["bytes"]["model.onnx"]
    accuracy, size = (report["int8_difference"][f"{name}@1"] for name in ("average_k_accuracy", "mean_set_size"))
    words = f"{100 * share:.0f}% of the size; average-1 accuracy {100 * accuracy:+.2f}, mean set size {size:+.3f}"
    assert f"8 bit against float: {words}" in printed


def test_int8_graph_keeps_what_the_file_says(saved, splits, tmp_path, capsys):
    assert (
        main(["export", str(saved), "--onnx", "--int8", "--out", str(tmp_path / "o"), "--opset", "18", "--json"]) == 0
    )
    report = json.loads(capsys.readouterr().out)
    assert report["opset"] == 18 and "measured" not in report
    graphs = [session(tmp_path / "o" / name) for name in ("model.onnx", "model.int8.onnx")]
    plain, small = (graph.get_modelmeta().custom_metadata_map for graph in graphs)
    assert plain == small
    kinds = {node.op_type for node in onnx.load(tmp_path / "o" / "model.int8.onnx").graph.node}
    assert {"ConvInteger", "MatMulInteger"} <= kinds and not kinds & {"Conv", "Gemm", "MatMul"}
    model = load_classifier(str(saved))
    transform = transform_for(model)
    pixels = torch.stack([transform.image(row["image"]) for row in splits["test"]])
    scores = [run(graph, pixels, 0.1, 8)[0] for graph in graphs]
    assert 1e-6 < np.abs(scores[0] - scores[1]).mean() < 0.05


def test_a_graph_leaves_out_the_same_classes(make_model, tmp_path, capsys):
    model = make_model()
    names = dict(zip(CLASSES[:4], ("n4", "n3", "n2", "n1"), strict=True))
    write_images(tmp_path / "some" / "validation", dict.fromkeys(CLASSES[:4], 5))
    for name in CLASSES:
        folder = tmp_path / "some" / "validation" / name
        folder.rename(folder.with_name(names[name])) if name in names else folder.rmdir()
    torch.nn.init.normal_(model.ml_head.weight, std=3)
    labels = {new: old for old, new in names.items()}
    calibrate(model, load_splits(str(tmp_path / "some"))["validation"], [2], labels=labels, classes_from_dataset=True)
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "names.json").write_text(json.dumps(labels))
    command = ["export", str(tmp_path / "model"), "--onnx", "--label-map", str(tmp_path / "names.json"), "--json"]
    assert main(command) == 2
    assert "name one with --dataset" in capsys.readouterr().err
    assert main([*command, "--dataset", str(tmp_path / "some"), "--split", "validation"]) == 0
    report = json.loads(capsys.readouterr().out)
    (measured,) = report["measured"].values()
    assert report["largest_difference"] < 1e-4 and measured["mean_set_size@2"] == pytest.approx(2, abs=0.1)
    pixels = torch.randn(5, 3, 32, 32)
    scores, sets = run(session(tmp_path / "model" / "onnx" / "model.onnx"), pixels, report["thresholds"]["2"], 5)
    assert np.isneginf(scores[:, 4:]).all() and not sets[:, 4:].any()
    assert scores == pytest.approx(model_scores(model, pixels).numpy(), abs=1e-4)


def test_foreign_classifiers_export_too(tmp_path, splits, capsys):
    torch.manual_seed(0)
    save_vit(tmp_path / "vit")
    model = load_classifier(str(tmp_path / "vit"))
    calibrate(model, splits["validation"], [1, 2])
    report = export_onnx(model, tmp_path / "onnx", int8=True)
    assert report["inputs"]["pixel_values"] == ["batch", 3, 32, 32] and report["k"] == 1
    pixels = torch.randn(20, 3, 32, 32)
    lambda_val = model.config.thresholds["2"]
    expected = model_scores(model, pixels)
    found, sets = run(session(tmp_path / "onnx" / "model.onnx"), pixels, lambda_val, 7)
    assert np.allclose(found, expected.numpy(), atol=1e-5)
    assert np.array_equal(sets, predict_sets(torch.from_numpy(found), lambda_val, min_size=1).numpy())
    about = json.loads((tmp_path / "onnx" / "preprocessor_config.json").read_text())
    assert about["size"]["height"] == 32 and about["image_mean"]


def test_what_cannot_be_exported_is_refused(saved, make_model, image_folder, tmp_path, capsys, monkeypatch):
    def refused(*arguments):
        assert main(["export", *map(str, arguments), "--onnx"]) == 2
        return capsys.readouterr().err

    make_model().save_pretrained(tmp_path / "new")
    assert "avgk calibrate MODEL DATASET" in refused(tmp_path / "new")
    assert "no threshold is stored for k=3" in refused(saved, "--k", 3)
    (tmp_path / "file").write_text("")
    assert "cannot be written to (Not a directory); choose another `--out`" in refused(
        saved, "--out", tmp_path / "file" / "x"
    )
    assert "has no split 'dev'" in refused(saved, "--dataset", image_folder, "--split", "dev")
    assert "opset 7 cannot be had" in refused(saved, "--opset", 7, "--out", tmp_path / "o")
    assert not (tmp_path / "o").exists()  # nothing half written
    assert "name a folder for the exported model with --out" in refused("someone/model")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "needs onnxscript" in (text := refused(saved)) and "pip install 'avgk_hf[onnx]'" in text
    with pytest.raises(SystemExit):
        main(["export", str(saved)])


def test_a_foreign_model_from_nowhere_is_refused(tmp_path):
    save_vit(tmp_path)
    model = load_classifier(str(tmp_path))
    model.config.thresholds, model.config._name_or_path, model.name_or_path = {"1": 0.5}, "", ""
    with pytest.raises(ValueError, match="its preprocessing is not known: save it"):
        export_onnx(model, tmp_path / "onnx")
