"""Both pipelines, with the package and, as remote code, without it."""

import json
import logging
import re
import threading
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_layers import remote_files
from transformers import AutoModelForImageClassification, pipeline

from avgk_hf import AvgKForImageClassification
from avgk_hf.calibration import Calibration
from avgk_hf.cli import main
from avgk_hf.data.transforms import ImageTransform
from avgk_hf.sets import average_k_threshold
from conftest import CLASSES, save_vit

TASK = "average-k-image-classification"


@pytest.fixture(scope="module")
def images(image_folder):
    return [str(image_folder / "test" / name / "0.png") for name in ("ash", "cedar", "oak", "elm")]


def calibrated(folder, images, **kwargs):
    """A saved model with thresholds for K = 2 and 2.5 from these very images, and the sets it has to give."""
    torch.manual_seed(0)
    labels = dict(enumerate(CLASSES))
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32, **kwargs)
    for head in filter(None, (model.ml_head, model.sccp_head)):
        torch.nn.init.normal_(head.weight)
    transform = ImageTransform(model.config)
    pixels = torch.stack([transform.image(path) for path in images])
    scores = model.scores(pixels)
    Calibration.store(
        model.config, {k: average_k_threshold(scores, k) for k in (2, 2.5)}, {"num_examples": len(images)}
    )
    model.save_pretrained(folder)
    sets = {k: model.predict_sets(pixels, k=k, min_size=1) for k in (2, 2.5)}
    expected = {k: [[labels[j] for j in classes] for classes in found] for k, found in sets.items()}
    return model, scores, expected


@pytest.fixture(scope="module")
def saved(tmp_path_factory, images):
    folder = tmp_path_factory.mktemp("pipelines") / "model"
    return folder, *calibrated(folder, images)


def names(answer):
    return [[item["label"] for item in found] for found in answer]


def test_stock_pipeline_gives_the_scores_that_are_thresholded(saved, images, caplog):
    folder, model, scores, _ = saved
    with caplog.at_level(logging.WARNING):
        classify = pipeline("image-classification", model=str(folder))
    assert "not supported" not in caplog.text
    answers = classify(images, top_k=6)
    for answer, row in zip(answers, scores, strict=True):
        assert [item["score"] for item in answer] == pytest.approx(row.sort(descending=True).values.tolist(), abs=1e-6)
        assert answer[0]["label"] == model.config.id2label[row.argmax().item()]
    assert len(classify(images[0])) == 5 and len(classify(images[0], top_k=99)) == 6


def test_stock_pipeline_applies_the_sigmoid_where_the_config_says_so(images, tmp_path):
    _, scores, _ = calibrated(tmp_path, images, score="sigmoid")
    answer = pipeline("image-classification", model=str(tmp_path))(images[0], top_k=6)
    assert [item["score"] for item in answer] == pytest.approx(
        scores[0].sort(descending=True).values.tolist(), abs=1e-6
    )


def test_set_pipeline(saved, images):
    folder, _, _, expected = saved
    classify = pipeline(TASK, model=str(folder))
    for k in (2, 2.5):
        assert names(classify(images, k=k)) == expected[k]
        assert names(classify(images, k=k, batch_size=3)) == expected[k]
        assert names(classify((path for path in images), k=k)) == expected[k]
    answer = classify(images[0], k=2.5)
    assert [item["label"] for item in answer] == expected[2.5][0]  # one image, one list
    assert [item["score"] for item in answer] == sorted((item["score"] for item in answer), reverse=True)
    assert names(classify([Image.open(path) for path in images])) == expected[2]
    assert len({len(found) for found in expected[2.5]}) > 1  # 10 classes for 4 images: not all sets are alike


def test_set_pipeline_follows_the_head_that_was_chosen(saved, images, tmp_path):
    model = AvgKForImageClassification.from_pretrained(saved[0])
    model.config.head = "auto"
    Calibration.store(model.config, {2: 0.2, 2.5: 0.15, 3: 0.1}, {}, heads={2: "sccp", 2.5: "mean", 3: "ml"})
    model.save_pretrained(tmp_path)
    transform = ImageTransform(model.config)
    pixels = torch.stack([transform.image(path) for path in images])
    classify = pipeline(TASK, model=str(tmp_path))
    answers = {}
    for k in (2, 2.5, 3):
        expected = [[CLASSES[j] for j in found] for found in model.predict_sets(pixels, k=k, min_size=1)]
        answers[k] = classify(images, k=k)
        assert names(answers[k]) == expected
    assert len({answer[0][0]["score"] for answer in answers.values()}) == 3  # three heads, three scores


@pytest.mark.parametrize("score", ["softmax", "sigmoid", "logit"])
@pytest.mark.parametrize("head", ["ml", "sccp", "mean"])
def test_stock_doors_give_the_classes_in_the_order_of_the_sets(images, tmp_path, head, score):
    """Of the head that answers for the model's own K, whichever it is; loaded by the Auto class, too."""
    model, *_ = calibrated(tmp_path, images, score=score)
    Calibration.store(model.config, {1: 0.3, 2: 0.2}, heads={1: "ml", 2: head})
    model.save_pretrained(tmp_path)
    everything = {"lambda_val": 0.0 if score != "logit" else -1e6}
    sets = pipeline(TASK, model=str(tmp_path))(images, **everything)
    stock = pipeline("image-classification", model=str(tmp_path))(images, top_k=6)
    assert names(stock) == names(sets) and {len(found) for found in sets} == {6}
    if score != "logit":  # of which the stock pipeline makes probabilities
        wanted = [item["score"] for found in sets for item in found]
        assert [item["score"] for found in stock for item in found] == pytest.approx(wanted, abs=1e-6)
    transform = ImageTransform(model.config)
    pixels = torch.stack([transform.image(path) for path in images])
    with torch.no_grad():
        logits = AutoModelForImageClassification.from_pretrained(tmp_path).eval()(pixels).logits
    assert [[CLASSES[j] for j in row] for row in logits.argsort(descending=True).tolist()] == names(sets)


def test_a_sigmoid_model_that_is_loaded_with_the_softmax(images, tmp_path):
    """In both pipelines; its thresholds were those of the sigmoid."""
    calibrated(tmp_path / "sigmoid", images, score="sigmoid")
    model = AvgKForImageClassification.from_pretrained(tmp_path / "sigmoid", score="softmax")
    assert model.config.thresholds == {} and model.config.calibration is None
    model.save_pretrained(tmp_path / "softmax")
    answer = pipeline("image-classification", model=str(tmp_path / "softmax"))(images[0], top_k=6)
    assert sum(item["score"] for item in answer) == pytest.approx(1)
    with pytest.raises(ValueError, match=r"config\.score='cosine' is unknown"):
        AvgKForImageClassification.from_pretrained(tmp_path / "sigmoid", score="cosine")


def test_set_pipeline_on_a_dataset(saved, splits):
    folder = saved[0]
    classify = pipeline(TASK, model=str(folder), k=2.5)
    test = splits["test"].select(range(5))
    assert names(classify(test)) == names([classify(row["image"]) for row in test])


def test_set_pipeline_fetches_an_address(saved, images):
    """From a server on loopback; one that has no such image ends in a sentence."""
    folder, _, _, expected = saved
    handler = partial(SimpleHTTPRequestHandler, directory=str(Path(images[0]).parent))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url, sets = f"http://127.0.0.1:{server.server_port}", pipeline(TASK, model=folder)
        assert names(sets([f"{url}/0.png"])) == expected[2][:1]
        with pytest.raises(OSError, match=r"none.png cannot be loaded as an image \(HTTP Error 404"):
            sets(f"{url}/none.png")
        server.shutdown()


def test_set_pipeline_bounds(saved, images):
    classify = pipeline(TASK, model=str(saved[0]))
    assert [len(found) for found in classify(images, lambda_val=0.0)] == [6] * 4
    assert [len(found) for found in classify(images, lambda_val=0.0, max_size=2)] == [2] * 4
    assert [len(found) for found in classify(images, lambda_val=2.0)] == [1] * 4
    assert [len(found) for found in classify(images, lambda_val=2.0, min_size=0)] == [0] * 4
    assert [len(found) for found in classify(images, lambda_val=2.0, min_size=3)] == [3] * 4
    with pytest.raises(ValueError, match="max_size=1 is below min_size=2"):
        classify(images[0], min_size=2, max_size=1)
    with pytest.raises(ValueError, match="no threshold is stored for k=4"):
        classify(images[0], k=4)


def test_set_pipeline_refuses_an_uncalibrated_model(make_model, tmp_path):
    make_model().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"no thresholds.*`avgk calibrate MODEL DATASET`"):
        pipeline(TASK, model=str(tmp_path))
    assert pipeline(TASK, model=str(tmp_path), lambda_val=0.1) is not None


def test_grey_models_and_images(tmp_path):
    torch.manual_seed(0)
    model = AvgKForImageClassification.from_timm(
        "test_resnet", num_labels=6, k=2, image_size=32, model_args={"in_chans": 1}
    )
    rng, transform = np.random.default_rng(0), ImageTransform(model.config)
    image = Image.fromarray(rng.integers(0, 255, (32, 32), dtype=np.uint8))
    scores = model.scores(transform.image(image)[None])
    Calibration.store(model.config, {2: 0.0}, {})
    model.save_pretrained(tmp_path)
    for task, options in (("image-classification", {"top_k": 6}), (TASK, {})):
        answer = pipeline(task, model=str(tmp_path))(image, **options)
        found = [item["score"] for item in answer]
        assert found == pytest.approx(scores[0].sort(descending=True).values.tolist(), abs=1e-5)
    image, sets = Image.fromarray(rng.integers(0, 255, (40, 50, 3), dtype=np.uint8)), pipeline(TASK, str(tmp_path))
    assert torch.equal(sets.preprocess(image)["pixel_values"][0], transform.image(image)), "not as in training"


WITHOUT_PACKAGE = """
import json, logging, sys
sys.modules["avgk_hf"] = None  # any import of it fails
import torch
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, pipeline

folder, *images = sys.argv[1:]
config = AutoConfig.from_pretrained(folder, trust_remote_code=True)
model = AutoModelForImageClassification.from_pretrained(folder, trust_remote_code=True).eval()
processor = AutoImageProcessor.from_pretrained(folder, trust_remote_code=True)
assert type(model).__module__.startswith("transformers_modules"), type(model).__module__
try:
    model(torch.zeros(2, 3, 32, 32), labels=torch.tensor([0, 1]))
except ImportError as error:
    loss_error = str(error)
stock = pipeline("image-classification", model=folder, trust_remote_code=True)
sets = pipeline("average-k-image-classification", model=folder, trust_remote_code=True)
model.save_pretrained(folder + "-again")
again = pipeline("average-k-image-classification", model=folder + "-again", trust_remote_code=True)
print(json.dumps({
    "thresholds": config.thresholds,
    "loss_error": loss_error,
    "top1": [answer[0] for answer in stock(images)],
    "sets": {k: sets(images, k=k) for k in (2, 2.5)},
    "again": again(images, k=2.5),
}))
"""


def test_remote_code_without_the_package(saved, images, forks, tmp_path):
    folder, model, scores, expected = saved
    files = {path.name for path in folder.iterdir()}
    assert {path for path in files if path.endswith(".py")} == {f"{name}.py" for name in remote_files()}
    status, out, err = forks.run(WITHOUT_PACKAGE, folder, *images, folder=tmp_path)
    assert status == 0, err
    assert "not supported" not in err
    answer = json.loads(out.splitlines()[-1])
    assert answer["thresholds"] == model.config.thresholds
    assert "pip install avgk_hf" in answer["loss_error"]
    assert [item["score"] for item in answer["top1"]] == pytest.approx(scores.amax(1).tolist(), abs=1e-6)
    for k in (2, 2.5):
        assert names(answer["sets"][str(k)]) == expected[k]
    assert names(answer["again"]) == expected[2.5]


FOREIGN_WITHOUT_PACKAGE = """
import json, sys
sys.modules["avgk_hf"] = None  # any import of it fails
from transformers import AutoModelForImageClassification, pipeline
model, sets, *images = sys.argv[1:]
exec(sets)  # as the card says it
assert type(sets.model).__module__.startswith("transformers."), type(sets.model)
assert type(sets).__module__.startswith("transformers_modules"), type(sets)
assert type(pipeline(model=model, trust_remote_code=True)) is type(sets)  # the only one that the config names
stock = pipeline("image-classification", model=model)
print(json.dumps([sets(images, k=2.5), sets(images, coverage=0.8, method="aps"), stock(images, top_k=1)]))
"""


def test_a_calibrated_classifier_without_the_package(images, image_folder, forks, tmp_path):
    """The code stands beside the weights of another class, and calibration.json too; the card says how to use it."""
    torch.manual_seed(0)
    save_vit(tmp_path / "vit")
    out = tmp_path / "out"
    calibrate = ["calibrate", str(tmp_path / "vit"), str(image_folder), "--out", str(out)]
    assert main([*calibrate, "--k", "2", "3", "--coverage", "0.8"]) == 0
    needed = {path.name for path in out.glob("*.py")}
    assert {"pipeline.py", "calibration.py"} <= needed < {f"{name}.py" for name in remote_files()}
    card = (out / "README.md").read_text()
    assert "add trust_remote_code" not in card
    call = re.search("Without the package, `(sets = .*?)`", card)[1]
    status, answer, err = forks.run(FOREIGN_WITHOUT_PACKAGE, out, call, *images, folder=tmp_path)
    assert status == 0, err
    sets, stock = pipeline(TASK, model=str(out)), pipeline("image-classification", model=str(out))  # no trust needed
    expected = [sets(images, k=2.5), sets(images, coverage=0.8, method="aps"), stock(images, top_k=1)]
    assert list(map(names, json.loads(answer.splitlines()[-1]))) == list(map(names, expected))
    assert main(["calibrate", str(out), str(image_folder), "--k", "2"]) == 0  # again, where it is
    assert {path.name for path in out.glob("*.py")} == needed and "average-k" in (out / "config.json").read_text()


def test_package_users_need_no_trust(saved, images):
    """The config names remote code, but the installed package serves."""
    folder = saved[0]
    config = json.loads((folder / "config.json").read_text())
    assert config["auto_map"]["AutoModelForImageClassification"] == "modeling.AvgKForImageClassification"
    assert TASK in config["custom_pipelines"]
    loaded = AutoModelForImageClassification.from_pretrained(folder)
    assert type(loaded) is AvgKForImageClassification
    assert pipeline(TASK, model=str(folder)).model.__class__ is AvgKForImageClassification
