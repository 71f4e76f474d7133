"""ONNX graphs give the sets that PyTorch gives, and need nothing of this package."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from PIL import Image

from avgk_hf import AvgKForImageClassification
from avgk_hf.calibrate import calibrate, load_classifier, model_scores, transform_for
from avgk_hf.cli import main
from avgk_hf.data.glyphs import CHARACTERS, class_name, draw
from avgk_hf.export import export_onnx, exportable
from avgk_hf.sets import average_k_threshold, predict_sets
from avgk_hf.train import build_model, parse_recipe
from conftest import CLASSES, save_vit

ROOT = Path(__file__).parent.parent
KS = (1, 2, 5)
PIXELS = 500


def classifier(name):
    """A model with scores that are spread out, and 500 images for it."""
    torch.manual_seed(0)
    if name == "glyphs":
        names = [class_name(character) for character in CHARACTERS]
        model = build_model(parse_recipe([str(ROOT / "recipes/glyphs/avgk.yaml")])[0], names)
        rng, transform = np.random.default_rng(0), transform_for(model)
        images = [draw(CHARACTERS[i % len(CHARACTERS)], rng) for i in range(PIXELS)]
        pixels = torch.stack([transform.image(image) for image in images])
    else:
        model = AvgKForImageClassification.from_timm(name, num_labels=20, k=2, image_size=32)
        pixels = torch.randn(PIXELS, 3, 32, 32)
    for module in model.modules():  # an untrained BatchNorm would leave all images nearly alike
        if isinstance(module, torch.nn.BatchNorm2d):
            module.momentum = None
    model.train()(pixels)
    with torch.no_grad():
        for head in (model.ml_head, model.sccp_head):
            torch.nn.init.normal_(head.weight)
        logits = model.eval()(pixels).logits
        model.ml_head.weight *= 1.5 / logits.std()
    scores = model.scores(pixels)
    ks = {*KS, model.config.k}
    model.config.set_calibration({k: average_k_threshold(scores, k) for k in ks}, {"num_examples": PIXELS})
    return model, pixels, model.scores(pixels)


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
    """For every image, K and batch size; no score is so near to a threshold that rounding could decide."""
    model, pixels, scores, folder, _ = exported
    graph = session(folder / "model.onnx")
    for k in KS:
        lambda_val = model.config.threshold(k)
        expected = predict_sets(scores, lambda_val, min_size=1)
        assert expected.sum(1).unique().numel() > 1  # sets of several sizes
        for batch_size in (1, 7, 64) if k == 2 else (64,):
            found, sets = run(graph, pixels, lambda_val, batch_size)
            assert (found.dtype, sets.dtype, found.shape) == (np.float32, bool, tuple(scores.shape))
            difference = np.abs(found - scores.numpy()).max()
            assert difference < 1e-5
            assert difference < (scores - lambda_val).abs().min(), "rounding could decide: choose another seed"
            assert np.array_equal(sets, expected.numpy())
    assert (scores.amax(1) < model.config.threshold(1)).any()  # empty sets got their best class


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
    module, lambda_val = exportable(model), torch.tensor(model.config.threshold(2))
    inputs = pixels[:2], lambda_val
    program = torch.export.export(module, inputs, dynamic_shapes=({0: torch.export.Dim("batch")}, None))
    assert not any("sccp" in name for name in program.state_dict)
    for size in (1, 7, 64):
        found, sets = program.module()(pixels[:size], lambda_val)
        assert torch.allclose(found, scores[:size], atol=1e-5)
        assert torch.equal(sets, predict_sets(scores[:size], lambda_val.item(), min_size=1))
    assert model.sccp_head is not None and model.ml_head.weight.requires_grad  # a copy was exported


@pytest.mark.parametrize(("head", "kind"), [("mean", "softmax"), ("sccp", "sigmoid"), ("ml", "logit")])
def test_module_follows_head_and_score(make_model, head, kind):
    model = make_model(head=head, score=kind)
    model.config.set_calibration({2: 0.2}, {})
    pixels = torch.randn(5, 3, 32, 32)
    scores, sets = exportable(model)(pixels, torch.tensor(0.2))
    assert torch.allclose(scores, model.scores(pixels), atol=1e-6)
    assert torch.equal(sets, predict_sets(scores, 0.2, min_size=1))


def test_auto_heads_export_one_head(make_model, tmp_path):
    model = make_model(head="auto")
    model.config.set_calibration({1: 0.3, 2: 0.2, 3: 0.1}, {}, heads={1: "ml", 2: "sccp", 3: "sccp"})
    (tmp_path / "model.int8.onnx").write_bytes(b"of another model")
    report = export_onnx(model, tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {"model.onnx", "preprocessor_config.json", "export.json"}
    assert report["head"] == "sccp" and set(report["thresholds"]) == {"2", "3"}
    assert report["left_out"] == {"1": "its head is 'ml'"}
    pixels = torch.randn(4, 3, 32, 32)
    found, _ = run(session(tmp_path / "model.onnx"), pixels, 0.2, 4)
    assert np.allclose(found, model.scores(pixels, k=2).numpy(), atol=1e-5)
    assert not np.allclose(found, model.scores(pixels, k=1).numpy(), atol=1e-4)


def test_half_precision_is_exported_in_float32(make_model):
    model = make_model().to(torch.bfloat16)
    model.config.set_calibration({2: 0.2}, {})
    assert {p.dtype for p in exportable(model).parameters()} == {torch.float32} and model.dtype == torch.bfloat16


@pytest.fixture(scope="module")
def saved(tmp_path_factory, splits):
    """A calibrated model in a folder."""
    torch.manual_seed(0)
    labels = dict(enumerate(CLASSES))
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32)
    torch.nn.init.normal_(model.ml_head.weight, std=3)
    calibrate(model, splits["validation"], [1, 2])
    folder = tmp_path_factory.mktemp("export") / "saved"
    model.save_pretrained(folder)
    return folder


WITHOUT_PACKAGE = """
import sys
for name in ("avgk_hf", "torch", "transformers", "timm", "onnx"):
    sys.modules[name] = None  # any import of it fails
import json
import numpy as np
import onnxruntime
from PIL import Image, ImageOps

path, file, k = sys.argv[1:]
session = onnxruntime.InferenceSession(path)
about = {name: json.loads(text) for name, text in session.get_modelmeta().custom_metadata_map.items()}
cfg = about["preprocessing"]["pretrained_cfg"]
filter = Image.Resampling[cfg["interpolation"].upper()]
image = ImageOps.fit(Image.open(file).convert("RGB"), cfg["input_size"][1:], filter, (1 - cfg["crop_pct"]) / 2)
pixels = ((np.asarray(image) / 255 - cfg["mean"]) / cfg["std"]).transpose(2, 0, 1)[None].astype(np.float32)
lambda_val = np.array(about["thresholds"][k], np.float32)
scores, sets = session.run(None, {"pixel_values": pixels, "lambda_val": lambda_val})
found = [{"label": about["id2label"][str(j)], "score": float(scores[0, j])} for j in np.flatnonzero(sets[0])]
print(json.dumps(found))
"""


def test_command_and_a_process_without_the_package(saved, image_folder, tmp_path, capsys):
    """`avgk export` with int8, and onnxruntime, numpy and Pillow alone give the sets of `avgk predict`."""
    picture = tmp_path / "export.png"
    assert main(["export", str(saved), "--onnx", "--int8", str(image_folder), "--plot", str(picture)]) == 0
    assert picture.read_bytes()[:4] == b"\x89PNG"
    printed = capsys.readouterr().out
    report = json.loads((saved / "onnx" / "export.json").read_text())
    for name in ("model.onnx", "model.int8.onnx"):
        size = (saved / "onnx" / name).stat().st_size
        assert report["bytes"][name] == size and f"{saved / 'onnx' / name}: {size / 1e6:.2f} MB" in printed
    assert report["bytes"]["model.int8.onnx"] < 0.5 * report["bytes"]["model.onnx"]
    assert f"opset {report['opset']}" in printed and "thresholds for K in 1, 2" in printed
    assert (report["split"], report["num_images"]) == ("test", 30)

    # what is measured of the graph is what `avgk evaluate` measures of the model
    assert main(["evaluate", str(saved), str(image_folder), "--json"]) == 0
    metrics = json.loads(capsys.readouterr().out)
    measured = report["measured"]["model.onnx"]
    assert measured["average_k_accuracy@2"] == pytest.approx(metrics["average_k_accuracy"])
    assert measured["mean_set_size@1"] == pytest.approx(metrics["mean_set_size@1"])
    assert set(report["measured"]["model.int8.onnx"]) == set(measured)
    assert abs(report["measured"]["model.int8.onnx"]["mean_set_size@2"] - 2) < 1

    path, image = saved / "onnx" / "model.onnx", image_folder / "test" / "fir" / "0.png"
    command = [sys.executable, "-c", WITHOUT_PACKAGE, str(path), str(image), "2"]
    environment = {**os.environ, "PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    found = {item["label"]: item["score"] for item in json.loads(done.stdout)}
    assert main(["predict", str(saved), str(image), "--json"]) == 0
    expected = json.loads(capsys.readouterr().out)[0]["set"]
    assert found == {item["label"]: pytest.approx(item["score"], abs=1e-5) for item in expected}


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
    assert f"{tmp_path / 'file' / 'x'} cannot be written (Not a directory): name" in refused(
        saved, "--out", tmp_path / "file" / "x"
    )
    assert "has no split 'dev'" in refused(saved, "--int8", image_folder, "--split", "dev")
    assert "opset 7 cannot be had" in refused(saved, "--opset", 7, "--out", tmp_path / "o")
    assert not list((tmp_path / "o").iterdir())  # nothing half written
    assert "name a folder for the exported model with --out" in refused("someone/model")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    assert "needs onnxscript" in (text := refused(saved)) and "pip install 'avgk_hf[onnx]'" in text
    with pytest.raises(SystemExit):
        main(["export", str(saved)])


def test_grey_square_and_colour_inputs(make_model):
    model = make_model(model_args={"in_chans": 1})
    model.config.set_calibration({2: 0.2}, {})
    image = transform_for(model).image(Image.new("RGB", (50, 40)))
    assert image.shape == (1, 32, 32)
    assert exportable(model)(image[None], torch.tensor(0.2))[0].shape == (1, 6)
