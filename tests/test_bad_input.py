"""Bad input, generated: every case is refused in one line by this package, or gives the right answer.

The cases are made from lists of broken values, so that a new field, format or function only needs a new entry. None of
them may end in an error of a library that knows nothing of the user's file or field.
"""

import contextlib
import inspect
import io
import itertools
import json
import math
import random
import struct
import zlib
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
import yaml
from asking import threshold
from datasets import ClassLabel, Dataset, DatasetDict, Features, Value
from datasets import Image as ImageFeature
from huggingface_hub import ModelCard
from PIL import Image

import avgk_hf
from avgk_hf import AvgKConfig, AvgKForImageClassification, AvgKTrainingArguments, load_splits, prepare
from avgk_hf.calibration import DETAILS, Calibration
from avgk_hf.cli import main
from avgk_hf.data import align_labels, class_counts, open_image, skip_bad_images
from avgk_hf.data.glyphs import write_image_folder
from avgk_hf.data.transforms import ImageTransform
from avgk_hf.losses import LOSSES
from avgk_hf.metrics.average_k_accuracy.average_k_accuracy import average_k_accuracy
from avgk_hf.model_card import render_card
from avgk_hf.modeling import AvgKOutput
from avgk_hf.recipes import DataArguments, ModelArguments, model_arguments, parse_recipe
from avgk_hf.scores import check_finite, score
from avgk_hf.sets import AverageKThreshold, average_k_threshold, predict_sets, ranked_sets
from avgk_hf.statistics import SetStatistics, class_means
from avgk_hf.train import main as train
from conftest import CLASSES, RECIPE, save_vit, write_images

NAN, INF, HUGE = math.nan, math.inf, 10**400


def cases(values):
    """Put a test through generated cases, one after the other; one by one where a case changes more than a folder."""
    values = list(values)

    def decorate(test):
        wanted = inspect.signature(test).parameters
        if {"monkeypatch", "capsys"} & {*wanted}:
            return pytest.mark.parametrize("case", values, ids=[str(i) for i in range(len(values))])(test)

        def every(**fixtures):
            assert values
            for number, case in enumerate(values):
                given = dict(fixtures)
                if "tmp_path" in given:
                    given["tmp_path"] = fixtures["tmp_path"] / str(number)
                    given["tmp_path"].mkdir()
                try:
                    test(case=case, **given)
                except (Exception, pytest.fail.Exception) as error:
                    raise AssertionError(f"case {number}, {str(case)[:200]}: {error}") from error

        every.__name__, every.__doc__ = test.__name__, test.__doc__
        every.__signature__ = inspect.Signature([part for name, part in wanted.items() if name != "case"])
        return every

    return decorate


@contextlib.contextmanager
def refused(*parts):
    """The block must raise what commands show as a message: one line that holds every part."""
    with pytest.raises((ValueError, OSError)) as caught:
        yield caught
    message = str(caught.value)
    assert "\n" not in message and len(message) > 20, message
    for part in parts:
        assert str(part) in message, f"{part!r} is not in {message!r}"


# ---------------------------------------------------------------------------------------------------------- 1. images


def picture(size=(13, 9), mode="RGB", seed=0):
    rng = np.random.default_rng(seed)
    image = Image.fromarray(rng.integers(0, 256, (size[1], size[0], 3), dtype=np.uint8))
    return image if mode == "RGB" else image.convert(mode)


def encode(image, format, **options):
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def animation(format):
    frames = [picture(seed=i) for i in range(3)]
    options = {"lossless": True} if format == "WEBP" else {}
    return encode(frames[0], format, save_all=True, append_images=frames[1:], duration=50, **options)


ENCODED = {
    "jpeg": encode(picture((40, 30)), "JPEG"),
    "progressive": encode(picture((40, 30)), "JPEG", progressive=True),
    "png": encode(picture((40, 30)), "PNG"),
    "gif": encode(picture((40, 30)), "GIF"),
    "webp": encode(picture((40, 30)), "WEBP", lossless=True),
    "tiff": encode(picture((40, 30)), "TIFF"),
    "bmp": encode(picture((40, 30)), "BMP"),
    "apng": animation("PNG"),
}


@cases((name, cut) for name, data in ENCODED.items() for cut in np.linspace(0, len(data) - 1, 25).astype(int))
def test_truncated_images(case):
    name, cut = case
    try:
        found = open_image({"bytes": ENCODED[name][:cut], "path": f"cut-{name}"})
    except ValueError as error:
        with refused(f"cut-{name}", "cannot be read as an image", "replace or remove it"):
            raise error
    else:  # only what comes after the pixels was cut
        assert np.array_equal(np.asarray(found), np.asarray(open_image(ENCODED[name])))


@cases((name, seed) for name in ENCODED for seed in range(15))
def test_damaged_images_never_crash(case):
    name, seed = case
    rng = random.Random(seed)
    data = bytearray(ENCODED[name])
    for _ in range(rng.randint(1, 8)):
        data[rng.randrange(min(len(data), 200) if seed % 2 else len(data))] = rng.randrange(256)
    try:
        assert open_image(bytes(data), name=f"damaged-{seed}").mode == "RGB"
    except ValueError as error:
        with refused(f"damaged-{seed}", "cannot be read as an image"):
            raise error


def png_header(width, height):
    """A PNG of any announced size in a hundred bytes."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"\0" * 9)) + chunk(b"IEND", b"")
    )


BAD_IMAGES = {
    "zero bytes": b"",
    "one byte": b"\xff",
    "text": b"this is not a picture",
    "a page": b"<!doctype html><html><body>404</body></html>",
    "svg": b"<svg xmlns='http://www.w3.org/2000/svg'/>",
    "zip": b"PK\x03\x04" + bytes(40),
    "zeros": bytes(1000),
    "a jpeg's first bytes": b"\xff\xd8\xff\xe0\x00\x10JFIF",
    "a png's first bytes": b"\x89PNG\r\n\x1a\n",
    "a gif's first bytes": b"GIF89a",
    "1 x 20000": encode(Image.new("RGB", (1, 20000)), "PNG"),
    "20000 x 1": encode(Image.new("L", (20000, 1)), "PNG"),
    "bomb that Pillow warns of": png_header(9500, 9500),
    "bomb that Pillow refuses": png_header(30000, 30000),
    "float tiff": encode(Image.fromarray(np.ones((4, 4), np.float32)), "TIFF"),
    "32-bit tiff": encode(Image.fromarray(np.full((4, 4), 70000, np.int32)), "TIFF"),
}


@pytest.fixture(scope="module")
def saved_model(tmp_path_factory):
    """A calibrated model on disk, with its pipeline and its transform."""
    from transformers import pipeline

    torch.manual_seed(0)
    model = AvgKForImageClassification.from_timm(
        "test_resnet", id2label=dict(enumerate(CLASSES)), k=2, image_size=32, objective="ce"
    )
    torch.nn.init.normal_(model.ml_head.weight)
    Calibration.store(model.config, {2: 0.15}, {"num_examples": 1})
    folder = tmp_path_factory.mktemp("bad") / "model"
    model.save_pretrained(folder)
    classify = pipeline("average-k-image-classification", model=str(folder))
    return SimpleNamespace(
        folder=folder, model=model.eval(), classify=classify, transform=ImageTransform(model.config)
    )


@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@cases(itertools.product(BAD_IMAGES, ("path", "bytes", "dict", "transform", "pipeline", "predict")))
def test_bad_images_are_refused_at_every_door(case, saved_model, tmp_path, capsys):
    what, door = case
    path = tmp_path / "broken.jpg"
    path.write_bytes(BAD_IMAGES[what])
    named = "broken.jpg" if door in ("path", "dict", "pipeline", "predict") else "image"
    why = "limit" if "bomb" in what else "200 times the other" if "20000" in what else ""
    with refused(named, "cannot be read as an image", why):
        if door == "path":
            open_image(path)
        elif door == "bytes":
            open_image(BAD_IMAGES[what])
        elif door == "dict":
            open_image({"bytes": BAD_IMAGES[what], "path": "broken.jpg"}, "L")
        elif door == "transform":
            saved_model.transform({"image": [{"bytes": BAD_IMAGES[what], "path": None}], "index": [7]})
        elif door == "pipeline":
            saved_model.classify(str(path))
        else:
            main_refuses(["predict", str(saved_model.folder), str(path)], capsys)


def main_refuses(arguments, capsys):
    """Run a command that has to end with exit code 2 and one line, and raise that line."""
    assert main(arguments) == 2
    line = capsys.readouterr().err.strip().splitlines()[-1]
    assert line.startswith(f"avgk {arguments[0]}: ") and "Traceback" not in line
    raise ValueError(line)


@cases(
    [None, {}, {"bytes": None, "path": None}, "nowhere.png", Path("nowhere.png"), "nul\0.png", "x" * 5000, 7, [1], "."]
)
def test_what_is_no_image_at_all(case, saved_model):
    with refused():
        open_image(case)
    if isinstance(case, str):
        with refused():
            saved_model.classify(case)


def over_white(rgba):
    return np.array(
        [[[round((c * a + 255 * (255 - a)) / 255) for c in (r, g, b)] for r, g, b, a in row] for row in rgba.tolist()]
    )


def odd_images(size):
    """(name, encoded image, the RGB pixels it has to give) for every kind of image that is fine but unusual."""
    base, alpha = picture(size, seed=3), picture(size, "L", seed=4)
    rgb = np.asarray(base).astype(int)
    wide = np.random.default_rng(5).integers(0, 65536, (size[1], size[0])).astype(np.uint16)
    narrow = np.repeat(((wide.astype(int) + 128) // 257)[..., None], 3, axis=2)
    grey = base.convert("L")
    grey_rgb = np.repeat(np.asarray(grey).astype(int)[..., None], 3, axis=2)
    palette = base.quantize(16)
    clear = palette.copy()
    rgba, la = base.copy(), grey.copy()
    rgba.putalpha(alpha)
    la.putalpha(alpha)
    la_rgba = np.dstack([grey_rgb, np.asarray(alpha)])
    ids = np.asarray(palette)
    clear_rgba = np.dstack([np.asarray(palette.convert("RGB")), np.where(ids == 0, 0, 255)])
    pgm = b"P5 %d %d 65535\n" % size + wide.astype(">u2").tobytes()
    yield "rgb", encode(base, "PNG"), rgb
    yield "bmp", encode(base, "BMP"), rgb
    yield "grey", encode(grey, "PNG"), grey_rgb
    yield "bilevel", encode(base.convert("1"), "PNG"), np.asarray(base.convert("1").convert("RGB")).astype(int)
    yield "palette", encode(palette, "PNG"), np.asarray(palette.convert("RGB")).astype(int)
    yield "transparent palette", encode(clear, "PNG", transparency=0), over_white(clear_rgba)
    yield "rgba", encode(rgba, "PNG"), over_white(np.asarray(rgba).astype(int))
    yield "rgba webp", encode(rgba, "WEBP", lossless=True, exact=True), over_white(np.asarray(rgba).astype(int))
    yield "grey with alpha", encode(la, "PNG"), over_white(la_rgba)
    yield "cmyk", encode(base.convert("CMYK"), "TIFF"), rgb
    yield "16-bit png", encode(Image.fromarray(wide), "PNG"), narrow
    yield "16-bit tiff", encode(Image.fromarray(wide), "TIFF"), narrow
    yield "16-bit pgm", pgm, narrow


SIZES = [(1, 1), (1, 150), (150, 1), (2, 3), (13, 9)]


@cases((size, name, mode) for size in SIZES for name, *_ in odd_images((2, 2)) for mode in ("RGB", "L"))
def test_odd_images_give_the_right_pixels(case, saved_model):
    size, name, mode = case
    data, expected = next((data, rgb) for found, data, rgb in odd_images(size) if found == name)
    image = open_image(data, mode)
    found = np.asarray(image).astype(int)
    if mode == "L":  # Pillow's own weights, to the rounding of the steps between
        expected = np.round(expected @ [0.299, 0.587, 0.114])
    assert image.mode == mode and image.size == size and found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1 + (mode == "L")
    if mode == "RGB":
        upright = Image.fromarray(found.astype(np.uint8))
        assert torch.equal(saved_model.transform.image(data), saved_model.transform.transform(upright))
        assert saved_model.classify(Image.open(io.BytesIO(data))) == saved_model.classify(upright)


TURNS = {
    1: lambda a: a,
    2: lambda a: a[:, ::-1],
    3: lambda a: a[::-1, ::-1],
    4: lambda a: a[::-1],
    5: lambda a: a.transpose(1, 0, 2),
    6: lambda a: a.transpose(1, 0, 2)[:, ::-1],
    7: lambda a: a[::-1, ::-1].transpose(1, 0, 2),
    8: lambda a: a.transpose(1, 0, 2)[::-1],
}


@cases(itertools.product((0, *TURNS, 9, 77), ("PNG", "WEBP", "TIFF")))
def test_images_are_turned_upright(case):
    orientation, format = case
    exif = Image.Exif()
    exif[0x0112] = orientation
    data = encode(picture(), format, exif=exif, **({"lossless": True} if format == "WEBP" else {}))
    expected = TURNS.get(orientation, TURNS[1])(np.asarray(picture()))
    assert np.array_equal(np.asarray(open_image(data)), expected)


@cases([b"", b"Exif", b"Exif\0\0", b"Exif\0\0MM\0*\0\0", b"Exif\0\0II*\0" + b"\xff" * 20, b"x" * 50])
def test_broken_exif_harms_no_image(case):
    data = encode(picture(), "WEBP", lossless=True, exif=case)
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(picture()))


@cases(["GIF", "PNG", "WEBP"])
def test_the_first_frame_of_an_animation_counts(case):
    first = picture(seed=0)
    expected = np.asarray(first if case != "GIF" else Image.open(io.BytesIO(encode(first, "GIF"))).convert("RGB"))
    assert np.array_equal(np.asarray(open_image(animation(case))), expected)


WEIRD_TENSORS = {
    "an array": np.zeros((2, 3, 32, 32), np.float32),
    "a list": [[0.0]],
    "None": None,
    "no axes": torch.tensor(1.0),
    "one image": torch.rand(3, 32, 32),
    "a video": torch.rand(1, 2, 3, 32, 32),
    "bytes": torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
    "whole numbers": torch.zeros(2, 3, 32, 32, dtype=torch.int64),
    "truth values": torch.zeros(2, 3, 32, 32, dtype=torch.bool),
    "complex numbers": torch.zeros(2, 3, 32, 32, dtype=torch.complex64),
    **{f"{c} channels": torch.rand(2, c, 32, 32) for c in (0, 2, 4, 5, 32)},
    "channels last": torch.rand(2, 32, 32, 3),
    **{f"{h} x {w}": torch.rand(1, 3, h, w) for h, w in ((0, 32), (32, 0), (0, 0))},
}


@cases(WEIRD_TENSORS)
def test_weird_tensors_are_refused(case, saved_model):
    with refused("pixel_values"):
        saved_model.model.predict_sets(WEIRD_TENSORS[case])


@cases((value, row) for value in (NAN, INF, -INF) for row in range(4))
def test_nan_pixels_are_refused_by_number(case, saved_model):
    value, row = case
    pixels = torch.rand(4, 3, 32, 32)
    pixels[row, 1, 5, 6] = value
    with refused(f"image(s) {row} are NaN or infinite", "pixels", "learning rate"):
        saved_model.model.predict_sets(pixels)


def test_tensors_that_are_fine(saved_model):
    model = saved_model.model
    assert model.predict_sets(torch.rand(0, 3, 32, 32)) == []
    grey = torch.rand(2, 1, 32, 32)
    assert model.predict_sets(grey) == model.predict_sets(grey.expand(-1, 3, -1, -1))
    assert model.predict_sets(grey.double()) == model.predict_sets(grey)
    for bad in ({"k": 9}, {"k": NAN}, {"lambda_val": NAN}, {"lambda_val": "x"}, {"min_size": 7}, {"min_size": -1}):
        with refused(next(iter(bad))):
            model.predict_sets(grey, **bad)
    vit = AvgKForImageClassification.from_timm("test_vit", num_labels=6, k=2)
    Calibration.store(vit.config, {2: 0.1}, {})
    with refused("(1, 3, 33, 33) do not fit test_vit", "resize the images to 160 x 160"):
        vit.predict_sets(torch.rand(1, 3, 33, 33))


# ---------------------------------------------------------------------------------------------------------- 4. values


def reference_threshold(scores, k):
    """Algorithm 1, slow and obvious; None where no threshold exists."""
    n, num_labels = scores.shape
    ordered = sorted(scores.astype(np.float32).ravel().tolist(), reverse=True)
    if np.isnan(scores).any() or not 1 <= k < num_labels or round(k * n) + 1 > len(ordered):
        return None
    rank = round(k * n)
    lambda_val = float(np.float32(0.5) * (np.float32(ordered[rank - 1]) + np.float32(ordered[rank])))
    return lambda_val if math.isfinite(lambda_val) else None


def hand_made(seed):
    """Scores with ties, NaN, infinities or huge values, of any type, and a K that may not fit."""
    rng = np.random.default_rng(seed)
    n, num_labels = int(rng.integers(1, 9)), int(rng.integers(1, 7))
    scores = rng.random((n, num_labels)) if seed % 3 else rng.integers(-2, 3, (n, num_labels)).astype(float)
    for value in rng.choice([NAN, INF, -INF, 1e38, -1e38, 1e-45, 0.0, -0.0], size=rng.integers(0, 4)):
        scores[rng.integers(n), rng.integers(num_labels)] = value
    if seed % 7 == 0:
        scores[:] = rng.choice([INF, -INF, 0.0, NAN])
    k = [1, 1.5, 2, 2.5, num_labels - 1, num_labels, 0, NAN][rng.integers(8)]
    dtype = [np.float64, np.float32, np.float16][rng.integers(3)]
    with np.errstate(over="ignore"):
        return scores.astype(dtype).astype(np.float32), k, dtype


@pytest.mark.filterwarnings("ignore::RuntimeWarning")
@cases(range(160))
def test_thresholds_and_sets_of_hand_made_scores(case):
    scores, k, dtype = hand_made(case)
    expected = reference_threshold(scores, k)
    rng = np.random.default_rng(case)
    labels = rng.integers(0, scores.shape[1], len(scores))
    if expected is None:
        with refused():
            average_k_threshold(torch.from_numpy(scores.astype(dtype)), k)
        with refused():
            statistics = SetStatistics([k], len(scores))
            statistics.update(torch.from_numpy(scores), torch.from_numpy(labels))
            statistics.compute()
        with refused():
            average_k_accuracy(scores, labels, k=k, calibrate=True)
        return
    assert average_k_threshold(scores.astype(dtype), k) == expected
    sets = predict_sets(scores, expected)
    assert sets.tolist() == [[value >= expected for value in row] for row in scores.tolist()]
    best_first = [
        sorted((j for j in range(len(row)) if row[j] >= expected), key=lambda j: (-row[j], j))
        for row in scores.tolist()
    ]
    assert ranked_sets(torch.from_numpy(scores), sets) == best_first
    hits = [float(scores[i, label] >= expected) for i, label in enumerate(labels)]
    statistics = SetStatistics([k], len(scores))
    statistics.update(torch.from_numpy(scores), torch.from_numpy(labels))
    for result in (statistics.compute()[k], average_k_accuracy(scores, labels, k=k, calibrate=True)):
        assert result["average_k_accuracy"] == pytest.approx(np.mean(hits))
        assert result["mean_set_size"] == pytest.approx(np.mean([len(found) for found in best_first]))
        assert result["lambda_val"] == expected


NO_MATRIX = {
    "None": None,
    "text": "scores",
    "a number": 3.0,
    "a vector": torch.rand(4),
    "a cube": torch.rand(2, 3, 4),
    "ragged rows": [[1.0, 2.0], [1.0]],
    "rows of text": [["a", "b"]],
    "objects": np.array([[object(), 1]], dtype=object),
    "complex numbers": torch.zeros(2, 3, dtype=torch.complex64),
    "truth values": torch.zeros(2, 3, dtype=torch.bool),
    "times": np.zeros((2, 2), dtype="datetime64[s]"),
    "a set": {1, 2},
    "no classes": torch.rand(3, 0),
    "no images": torch.rand(0, 3),
    "nothing": torch.rand(0),
}


@cases(
    (what, name)
    for what in NO_MATRIX
    for name in ("average_k_threshold", "AverageKThreshold", "SetStatistics", "predict_sets", "metric")
    if not (name != "average_k_threshold" and name != "metric" and what in ("no images",))
    and not (name == "predict_sets" and what == "no classes")
)
def test_what_is_no_matrix_of_scores(case):
    scores = NO_MATRIX[case[0]]
    with refused():
        if case[1] == "average_k_threshold":
            average_k_threshold(scores, 1)
        elif case[1] == "AverageKThreshold":
            AverageKThreshold([1], 5).update(scores)
        elif case[1] == "SetStatistics":
            SetStatistics([1], 5, thresholds={1: 0.5}).update(scores, torch.tensor([0, 0]))
        elif case[1] == "predict_sets":
            predict_sets(scores, 0.5)
        else:
            average_k_accuracy(scores, [0, 1], k=1, lambda_val=0.5)


def test_no_images_give_no_sets():
    assert predict_sets(torch.rand(0, 3), 0.5).shape == (0, 3)
    assert ranked_sets(torch.rand(0, 3), predict_sets(torch.rand(0, 3), 0.5)) == []


BAD_NUMBERS = [NAN, "2", None, True, [2], {}, HUGE, -HUGE, 2j]


@cases(itertools.product(("k", "ks", "num_examples", "lambda_val", "thresholds", "min_size", "stats_k"), BAD_NUMBERS))
def test_arguments_that_are_no_numbers(case):
    name, value = case
    calls = {
        "k": lambda: average_k_threshold(torch.rand(5, 4), value),
        "ks": lambda: AverageKThreshold([2, value], 5),
        "num_examples": lambda: AverageKThreshold([2], value).compute(),
        "lambda_val": lambda: predict_sets(torch.rand(2, 3), value),
        "thresholds": lambda: SetStatistics([2], 5, thresholds={2: value}),
        "min_size": lambda: predict_sets(torch.rand(2, 3), 0.5, min_size=value),
        "stats_k": lambda: SetStatistics([value], 5),
    }
    with refused(repr(value)[:20] if value is not HUGE or name != "num_examples" else ""):
        calls[name]()


@cases(
    [
        torch.tensor([0, -1]),
        torch.tensor([0, 3]),
        torch.tensor([0, 2**40]),
        torch.tensor([0.0, 1.0]),
        torch.tensor([NAN, 1.0]),
        torch.tensor([True, False]),
        torch.tensor([0]),
        torch.tensor([[0], [1]]),
        torch.tensor([0, 1, 2]),
        torch.tensor(0),
        torch.tensor([]),
        torch.zeros(2, dtype=torch.complex64),
    ]
)
def test_labels_that_fit_no_scores(case):
    for thresholds in (None, {1: 0.5}):
        with refused("label"):
            SetStatistics([1], 2, thresholds).update(torch.rand(2, 3), case)
    with refused("label"):
        average_k_accuracy(torch.rand(2, 3), case, k=1, lambda_val=0.5)
    for name, loss in LOSSES.items():
        with refused("label"):
            arguments = {"num_examples": 2, "num_labels": 3} if name == "role" else {}
            arguments |= {"k": 2} if name in ("avgk", "epr", "role", "topk") else {}
            loss(**arguments)(AvgKOutput(logits=torch.rand(2, 3), sccp_logits=torch.rand(2, 3)), case)


@cases((value, seed) for value in (NAN, INF, -INF) for seed in range(20))
def test_logits_that_are_not_finite_are_named(case):
    value, seed = case
    rng = random.Random(seed)
    n, num_labels, first = rng.randint(1, 30), rng.randint(1, 8), rng.randint(0, 1000)
    logits = torch.randn(n, num_labels).to([torch.float32, torch.float16, torch.bfloat16, torch.float64][seed % 4])
    check_finite(logits, first)
    rows = sorted(rng.sample(range(n), rng.randint(1, n)))
    for row in rows:
        logits[row, rng.randrange(num_labels)] = value
    if seed % 2:  # infinities of both signs, which cancel to NaN in a sum
        logits[rows[0], 0] = -value
    numbers = ", ".join(str(first + row) for row in rows[:5]) + (", ..." if len(rows) > 5 else "")
    with refused(f"image(s) {numbers} are NaN or infinite", "lower learning rate", "float32"):
        check_finite(logits, first)
    for kind in ("softmax", "sigmoid", "logit"):
        with refused("NaN or infinite"):
            score(logits, kind)


def test_large_finite_logits_pass():
    for dtype, value in ((torch.float32, 3e38), (torch.float16, 6e4), (torch.float64, 1e308)):
        check_finite(torch.full((50, 50), value, dtype=dtype))
    with refused("score='softmin' is unknown"):
        score(torch.rand(2, 2), "softmin")


def make_loss(name, num_labels=4, **kwargs):
    known = {"avgk": {"k": 2}, "epr": {"k": 2}, "topk": {"k": 2}, "role": {"k": 2, "num_examples": 3}}.get(name, {})
    return LOSSES[name](**{**known, **({"num_labels": num_labels} if name == "role" else {}), **kwargs})


BAD_LOGITS = [
    None,
    np.zeros((3, 4), np.float32),
    torch.tensor(1.0),
    torch.rand(3),
    torch.rand(3, 4, 2),
    torch.rand(0, 4),
    torch.rand(3, 0),
    torch.zeros(3, 4, dtype=torch.int64),
    torch.zeros(3, 4, dtype=torch.bool),
    torch.zeros(3, 4, dtype=torch.complex64),
    torch.rand(2, 4),
    torch.rand(3, 1),
]


@cases(itertools.product(LOSSES, range(len(BAD_LOGITS))))
def test_losses_refuse_what_is_no_batch_of_logits(case):
    name, bad = case[0], BAD_LOGITS[case[1]]
    labels = torch.tensor([0, 1, 2])
    with refused():
        make_loss(name)(AvgKOutput(logits=bad, sccp_logits=bad), labels)


@cases((name, value, seed) for name in LOSSES for value in (NAN, INF, -INF) for seed in range(4))
def test_losses_of_logits_that_are_not_finite(case):
    """A loss shows them, because float16 training has to see an overflow, or is what a large number would give."""
    name, value, seed = case
    generator = torch.Generator().manual_seed(seed)
    logits, sccp = (torch.randn(3, 4, generator=generator).double() for _ in range(2))
    logits[seed % 3, seed], labels = value, torch.tensor([0, 1, 2])

    def compute(ml):
        torch.manual_seed(0)
        return make_loss(name)(AvgKOutput(logits=ml, sccp_logits=sccp), labels).item()

    found = compute(logits)
    large, larger = (compute(logits.nan_to_num(0).clamp(-size, size)) for size in (1e4, 1e6))
    grows = larger != pytest.approx(large, rel=1e-6)
    if math.isnan(value) or grows:
        assert not math.isfinite(found)
    else:  # the limit is finite: it is found, or shown to be lost, but never another number
        assert math.isnan(found) or found == pytest.approx(large, rel=1e-6)


HYPERPARAMETERS = [("avgk", "k"), ("avgk", "alpha"), ("epr", "k"), ("epr", "beta"), ("topk", "k"), ("topk", "epsilon")]
HYPERPARAMETERS += [("role", "k"), ("role", "role_lambda"), ("role", "theta_lr")]


@cases(itertools.product(HYPERPARAMETERS, [NAN, INF, -INF, -1, "1", None, True, HUGE]))
def test_losses_refuse_hyperparameters(case):
    (name, field), value = case
    with refused(f"{field}={value!r}"[:30]):
        make_loss(name, **{field: value})


# ------------------------------------------------------------------------------------------------ 5. configs, recipes


def misspelt(name):
    """Slips of the keyboard: a letter too few, too many, swapped, or in capitals."""
    found = {name[:i] + name[i + 1 :] for i in range(1, len(name))}
    found |= {name[:i] + name[i + 1] + name[i] + name[i + 2 :] for i in range(len(name) - 1)}
    found |= {name[: i + 1] + name[i:] for i in range(len(name))}
    return sorted(found - {name})


CONFIG_FIELDS = [name for name in AvgKConfig.__annotations__ if len(name) > 1]
OWN_TRAINING = (
    "calibrate_k",
    "calibrate_coverage",
    "calibrate_per_class",
    "coverage_method",
    "early_stopping_patience",
    "lr_milestones",
    "lr_gamma",
    "metric_for_best_model",
)
RECIPE_FIELDS = [item.name for block in (ModelArguments, DataArguments) for item in fields(block)] + list(OWN_TRAINING)
RECIPE_FIELDS += LOSSES["avgk"].hyperparameters
ALL_FIELDS = {*RECIPE_FIELDS, *(item.name for item in fields(AvgKTrainingArguments))}


def slips(names, known, number):
    """`number` misspellings of each name, none of them a name itself."""
    for name in names:
        found = [word for word in misspelt(name) if word not in known]
        yield from ((name, word) for word in random.Random(name).sample(found, min(number, len(found))))


@cases(slips([name for name in CONFIG_FIELDS if len(name) > 4], {*CONFIG_FIELDS, "threshold"}, 4))
def test_misspelt_config_fields(case):
    name, word = case
    with refused(f"config.{word} is no field", f"Did you mean {name!r}?"):
        AvgKConfig(**{word: 1})


@cases(slips([name for name in RECIPE_FIELDS if len(name) > 4], ALL_FIELDS, 5))
def test_misspelt_recipe_fields(case, tmp_path):
    name, word = case
    path = tmp_path / "recipe.yaml"
    path.write_text(f"model: test_resnet\n{word}: 1\n")
    with refused(f"unknown field {word!r} in {path}", f"Did you mean {name!r}?"):
        parse_recipe([str(path)])
    path.write_text("model: test_resnet\n")
    with refused(f"unknown field {word!r} in the command line", f"Did you mean {name!r}?"):
        parse_recipe([str(path), f"--{word}", "1"])


WEIGHTS = {"alpha": "avgk", "beta": "epr", "epsilon": "topk", "role_lambda": "role", "theta_lr": "role"}
NO_WEIGHT = [NAN, INF, -INF, -1, -1e-9, "1", None, True, [1], HUGE]
BAD_CONFIG = {
    **{name: [{name: value} for value in NO_WEIGHT] for name in WEIGHTS},
    "hyperparameters": [None, 3, "{}", [1], {"beta": 0.1}, {"candidate_scope": "world"}, {1: 0.5}],
    "k": [NAN, INF, -INF, -1, 0, 0.99, "2", None, True, [2], HUGE],
    "objective": ["", "AVGK", "hinge", None, 3, True, ["avgk"]],
    "score": ["", "Softmax", "probability", None, 3, True],
    "head": ["", "ML", "both", None, 3, True],
    "architecture": [None, 3, True, ["resnet18"]],
    "model_args": [None, 3, "{}", [1]],
    "pretrained_cfg": [None, 3, "{}", [1]],
    "image_processor_type": [None, 3],
    "sccp_head": [None, 1, "true", []],
    "train_counts": [3, "x", [1], [1] * 7, [1.5] * 6, [-1] * 6, ["a"] * 6, [None] * 6, [True] * 6],
    "calibration": [3, "x", [1]],
    "coverage": [3, "x", [1], {"lac": 3}, {"lac": {"0.9": NAN}}, {"lac": {"0.9": 2}}, {"lac": {"9": 0.5}}, {"x": {}}],
    "heads": [3, "x", [1], {"2": 3}],
    "thresholds": [
        *(3, "x", [0.5], {2: 0.5}, {"2": None}, {"2": "0.5"}, {"2": NAN}, {"2": INF}, {"2": -INF}, {"2": True}),
        *({"2": -0.001}, {"2": 1.001}, {"2": 7}, {"2": HUGE}, {"6": 0.5}, {"7": 0.5}, {"0": 0.5}, {"0.5": 0.5}),
        *({"-2": 0.5}, {"nan": 0.5}, {"inf": 0.5}, {"two": 0.5}, {"": 0.5}, {"1e400": 0.5}),
    ],
    "head_thresholds": [
        *(3, [1], {"ml": 3}, {"ml": {"2": NAN}}, {"ml": {"9": 0.5}}, {"third": {"2": 0.5}}, {"ml": {"2": -1}}),
    ],
}


@cases((field, i) for field, values in BAD_CONFIG.items() for i in range(len(values)))
def test_bad_config_values(case, tmp_path):
    field, value = case[0], BAD_CONFIG[case[0]][case[1]]
    objective = {"objective": WEIGHTS.get(field, "avgk")}
    given = {"hyperparameters" if field in WEIGHTS else field: value}
    if field in DETAILS:
        given = {"calibration": given}
    with refused(field if field != "k" else "k="):
        AvgKConfig(**{"num_labels": 6, "k": 2, **objective, **given})
    if field in WEIGHTS:  # as what users write
        with refused(field):
            AvgKConfig(num_labels=6, k=2, **objective, **value)
    good = AvgKConfig(num_labels=6, k=2, **objective).to_dict()
    if value != {2: 0.5}:  # which is right as soon as JSON has made text of the key
        (tmp_path / "config.json").write_text(json.dumps({**good, **given}))
        with refused(field if field != "k" else "k="):
            AvgKConfig.from_pretrained(tmp_path)


def test_config_values_that_are_fine():
    assert threshold(AvgKConfig(num_labels=6, score="logit", head="ml", thresholds={"2": -3.5}), 2) == -3.5
    for lambda_val in (0, 0.0, 1, 1.0, 1e-45):
        config = AvgKConfig(num_labels=6, head="ml", thresholds={"2": lambda_val, "1.5": 0.5})
        assert threshold(config, 2) == lambda_val
    assert AvgKConfig(num_labels=6, something_else=3).something_else == 3  # as transformers does
    config = AvgKConfig(num_labels=6, train_counts=[0, 1, 2, 3, 4, 5])
    assert AvgKConfig.from_dict(config.to_dict()).train_counts == [0, 1, 2, 3, 4, 5]
    with refused("two classes 'oak'"):
        AvgKForImageClassification.from_timm("test_resnet", id2label={0: "oak", 1: "oak", 2: "elm"}, k=2)


NO_NUMBER = ["many", "true", ".nan", ".inf", "-.inf", "-1", "[1, 2]", "{a: 1}", "1e999", "'-'", "2020-01-01", '"\\0"']
NO_COUNT = [*NO_NUMBER, "0", "1.5", "99999999"]
NO_TEXT = ["true", "[a]", "{a: b}", "''", "' '", '"a\\nb"', '"\\0"', '"\\e[31m"']
BAD_RECIPE = {
    "k": [*NO_NUMBER, "0", "0.5"],
    **dict.fromkeys(WEIGHTS, NO_NUMBER),
    "image_size": NO_COUNT,
    "in_chans": NO_COUNT,
    "glyphs_seed": [value for value in NO_COUNT if value not in ("0", "99999999")],
    **{
        key: ["hinge", "3", *NO_TEXT]
        for key in ("objective", "candidate_scope", "score", "head", "augmentation", "on_bad_image")
    },
    **{
        key: ["maybe", "3", "[true]", "{a: 1}", "''"]
        for key in ("pretrained", "freeze_backbone", "channels_last", "cache_images")
    },
    **dict.fromkeys(("model", "checkpoint", "dataset", "dataset_config", "image_column", "label_column"), NO_TEXT),
    **dict.fromkeys(("train_split", "validation_split", "test_split"), NO_TEXT),
    "calibrate_k": [
        "many",
        "0",
        "[0]",
        "[1, .nan]",
        "[1, two]",
        "[.inf]",
        "{a: 1}",
        "true",
        "[true]",
        "[-1]",
        "[[1]]",
    ],
    "calibrate_coverage": ["many", "0", "1", "95", "[0.9, 1.5]", "[.nan]", "{a: 1}", "true", "[true]", "[[0.9]]"],
    "calibrate_per_class": ["maybe", "3", "[true]"],
    "coverage_method": ["hinge", "3", *NO_TEXT],
    "early_stopping_patience": ["0", "-1", "1.5", "never", "true", ".nan"],
    "metric_for_best_model": ["''", "acuracy", "eval_average_k_acuracy", "3", '"\\0"'],
    "seeds": ["0", "-1", "1.5", "many", ".nan"],
    "lr_milestones": ["many", "[2, 1]", "[0, 3]", "[1, 1]", "[.nan]"],
    "lr_gamma": ["0", "-1", "many", ".nan", ".inf"],
    "validation_per_class": ["0", "-1", "1.5", "many", ".nan"],
    "calibration_split": NO_TEXT,
    "remove_unused_columns": ["maybe", "3"],
    **{
        key: ["0", "-1", "1.5", "many", ".nan"]
        for key in ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
    },
    "save_total_limit": ["0", "-1", "1.5", "many", ".nan"],
    "dataloader_num_workers": ["-1", "1.5", "many", ".nan"],
    "seed": ["-1", "1.5", "many", ".nan", str(2**32), str(2**70)],
    "data_seed": ["-1", "1.5", "many", ".nan", str(2**32), str(2**70)],
    **{
        key: ["-1", "many", ".nan", ".inf", "[1, 2]"]
        for key in ("num_train_epochs", "learning_rate", "weight_decay", "max_grad_norm")
    },
    **{key: ["0", "-1", "many", ".nan", ".inf", "[1, 2]"] for key in ("save_steps", "eval_steps", "logging_steps")},
    "warmup_steps": ["-1", "many", ".nan", "[1, 2]"],
    "optim": ["adamm", "3"],
    "optim_args": ["momentum", "momentum=0.9,nesterov", "a=b=c"],
}


@cases((field, value) for field, values in BAD_RECIPE.items() for value in values)
def test_bad_recipe_values(case, tmp_path):
    field, value = case
    lines = {"model": "test_resnet", "dataset": "glyphs", "output_dir": str(tmp_path / "run")}
    lines |= {"objective": WEIGHTS.get(field, "avgk"), field: value}
    path = tmp_path / "recipe.yaml"
    path.write_text("\n".join(f"{name}: {text}" for name, text in lines.items()))
    with refused(field if field != "k" else "k"):
        parse_recipe([str(path)])
    assert not (tmp_path / "run").exists()


BAD_YAML = {
    "empty": (b"", "holds nothing"),
    "comments only": (b"# nothing\n", "holds nothing"),
    "null": (b"null", "holds nothing"),
    "a list": (b"- model: x\n", "holds list"),
    "text": (b"just words", "holds str"),
    "a number": (b"3", "holds int"),
    "binary": (bytes(range(256)), "not valid YAML"),
    "latin-1": ("dataset: caf\xe9".encode("latin-1"), "not valid YAML"),
    "utf-16": ("model: x".encode("utf-16"), "not valid YAML"),
    "control characters": (b"model: \x01", "not valid YAML"),
    "unclosed": (b"calibrate_k: [1, 2", "not valid YAML"),
    "a tab": (b"model:\n\t- x", "not valid YAML"),
    "a key twice": (b"model: a\nk: 2\nk: 3\n", "the key 'k' occurs twice"),
    "a key twice, quoted": (b"model: a\n'k': 2\nk: 3\n", "the key 'k' occurs twice"),
    "a key twice, below": (b"model_args: {a: 1, a: 2}\n", "the key 'a' occurs twice"),
    "two documents": (b"model: a\n---\nmodel: b\n", "not valid YAML"),
    "an impossible date": (b"model: 2020-13-45\n", "not valid YAML"),
    "an object": (b"model: !!python/object/apply:os.system ['touch HACKED']\n", "not valid YAML"),
    "a new object": (b"model: !!python/object/new:os.system ['touch HACKED']\n", "not valid YAML"),
    "a name": (b"model: !!python/name:os.system\n", "not valid YAML"),
    "a module": (b"model: !!python/module:os\n", "not valid YAML"),
    "a tuple": (b"calibrate_k: !!python/tuple [1, 2]\n", "not valid YAML"),
    "an unknown tag": (b"model: !thing x\n", "not valid YAML"),
    "an unknown alias": (b"model: *nowhere\n", "not valid YAML"),
    "a list as key": (b"? [a, b]\n: 1\n", "not valid YAML"),
    "a number as key": (b"3: x\n", "unknown field '3'"),
    "no key": (b"~: x\n", "unknown field 'None'"),
    "an empty key": (b"'': x\n", "unknown field ''"),
    "a key with a newline": (b'"mo\\ndel": x\n', "unknown field"),
    "deep": (b"model: " + b"[" * 1000, "not valid YAML"),
}


@cases(BAD_YAML)
def test_bad_recipe_files(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    data, reason = BAD_YAML[case]
    path = tmp_path / "recipe.yaml"
    path.write_bytes(data)
    with refused(reason, str(path)):
        parse_recipe([str(path)])
    assert [item.name for item in tmp_path.iterdir()] == ["recipe.yaml"]  # no tag ran anything


@cases([["nowhere.yaml"], ["."], [], ["--k", "3"], ["nul\0.yaml"]])
def test_what_is_no_recipe(case):
    with refused("recipe"):
        parse_recipe(case)


@cases(
    (block, item.name, value)
    for block in (*map(model_arguments, LOSSES), DataArguments)
    for item in fields(block)
    for value in ([], {}, 2j, object)
)
def test_arguments_of_another_type_in_python(case):
    block, name, value = case
    with refused(name):
        block(**{**({"model": "x"} if issubclass(block, ModelArguments) else {"dataset": "x"}), name: value})


# -------------------------------------------------------------------------------------------------------- 3. datasets


def table(labels, images=None, **columns):
    """A dataset in memory, one tiny image for each label."""
    images = [encode(picture(seed=i), "PNG") for i in range(len(labels))] if images is None else images
    stored = [None if data is None else {"bytes": data, "path": None} for data in images]
    dataset = Dataset.from_dict({"image": stored, **columns}).cast_column("image", ImageFeature(decode=False))
    return dataset.add_column("label", labels) if isinstance(labels, list) else dataset


def classes(labels, names):
    return table(list(labels)).cast_column("label", ClassLabel(names=names))


BAD_LABELS = {
    "below 0": [0, -1],
    "floats": [0.0, 1.0],
    "NaN": [0.0, NAN],
    "missing": [0, None],
    "missing text": ["a", None],
    "all missing": [None, None],
    "truth values": [True, False],
    "lists": [[0], [1]],
    "mappings": [{"a": 1}, {"a": 2}],
    "ids of another kind": [5, 10**12],
}


@cases(itertools.product(BAD_LABELS, ("saved", "parquet")))
def test_bad_label_columns(case, tmp_path):
    dataset = table(BAD_LABELS[case[0]])
    if case[1] == "saved":
        dataset.save_to_disk(tmp_path / "data")
    else:
        (tmp_path / "data").mkdir()
        dataset.to_parquet(tmp_path / "data" / "train.parquet")
    with refused("'label'", "data"):
        load_splits(str(tmp_path / "data"))


@cases(itertools.product([[0, -1], [0, 2], [0, None], [2**40, 0]], ("count", "align", "trainer")))
def test_class_ids_outside_the_classes(case, make_trainer, saved_model, tmp_path):
    labels, door = case
    features = Features(image=ImageFeature(), label=ClassLabel(names=["ash", "elm"]), index=Value("int64"))
    plain = table(labels, index=[0, 1]).select_columns(["image", "label", "index"])
    wrong = Dataset(plain.data.table, info=plain.info.__class__(features=features))  # as a foreign file may hold it
    with refused(f"the label {next(x for x in labels if x not in (0, 1))}", "row"):
        if door == "count":
            class_counts(wrong, 2)
        elif door == "align":
            align_labels(wrong, saved_model.model.config)
        else:
            trainer = avgk_hf.AvgKTrainer
            args = AvgKTrainingArguments(output_dir=str(tmp_path), dataloader_pin_memory=False)
            model = AvgKForImageClassification.from_timm("test_resnet", num_labels=2, k=1)
            trainer(model=model, args=args, eval_dataset=prepare(wrong, model.config))


def write(folder, files):
    for name, data in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data if isinstance(data, bytes) else data.encode())


PNG = encode(picture(), "PNG")


def parquet(**splits):
    return {f"{name}.parquet": to_parquet(dataset) for name, dataset in splits.items()}


def to_parquet(dataset):
    buffer = io.BytesIO()
    dataset.to_parquet(buffer)
    return buffer.getvalue()


GOOD_PARQUET = to_parquet(classes([0, 1], ["ash", "elm"]))
BAD_FOLDERS = {
    "only text": ({"notes.txt": "hello"}, "it would be read as text"),
    "only text in classes": ({"train/ash/a.txt": "x", "train/elm/b.txt": "y"}, "it would be read as text"),
    "unknown files": ({"a.xyz": "x"}, "cannot be read"),
    "a file without name": ({"noending": "x"}, "cannot be read"),
    "hidden files": ({".hidden/a.png": PNG}, ""),
    "one class": ({"train/ash/0.png": PNG}, "does not say which class"),
    "no classes": ({"train/0.png": PNG, "train/1.png": PNG}, "does not say which class"),
    "folders of unequal depth": ({"train/ash/0.png": PNG, "train/elm/young/1.png": PNG}, "young/1.png lies deeper"),
    "a csv without images": ({"train.csv": "a,b\n1,2\n"}, "has no column 'image'"),
    "a csv without labels": ({"train.csv": "image\nx.png\n"}, "does not say which class"),
    "a csv with numbers": ({"train.csv": "image,label\n1,0\n2,1\n"}, "cannot be read"),
    "an empty csv": ({"train.csv": ""}, "cannot be read"),
    "broken json": ({"train.json": "{"}, "cannot be read"),
    "no parquet": ({"train.parquet": "hello"}, "train.parquet cannot be read as parquet"),
    "empty parquet": ({"train.parquet": b""}, "train.parquet cannot be read as parquet"),
    "one broken of two": ({"train.parquet": GOOD_PARQUET, "test.parquet": b"PAR1"}, "test.parquet cannot be read"),
    "other classes": (
        {"train.parquet": GOOD_PARQUET, "test.parquet": to_parquet(classes([0, 1], ["elm", "ash"]))},
        "have different classes",
    ),
    "a broken saved dataset": ({"dataset_info.json": "{", "state.json": "{"}, "state.json is not valid JSON"),
    "half a saved dataset": ({"dataset_dict.json": '{"splits": ["train"]}'}, "cannot be read"),
    "no dict": ({"dataset_dict.json": "[]"}, "must hold a mapping"),
    **{
        f"parquet cut at {cut}": ({"train.parquet": GOOD_PARQUET[:cut]}, "train.parquet cannot be read as parquet")
        for cut in np.linspace(1, len(GOOD_PARQUET) - 1, 20).astype(int).tolist()
    },
}


@cases(BAD_FOLDERS)
def test_bad_folders(case, tmp_path):
    files, reason = BAD_FOLDERS[case]
    write(tmp_path / "data", files)
    with refused(reason, "data"):
        load_splits(str(tmp_path / "data"))


@cases(["/nowhere/at/all", "./nowhere", "~/nowhere", "FILE", "EMPTY"])
def test_what_is_no_folder(case, tmp_path):
    (tmp_path / "data.csv").write_text("image,label\n")
    (tmp_path / "data").mkdir()
    with refused():
        load_splits({"FILE": str(tmp_path / "data.csv"), "EMPTY": str(tmp_path / "data")}.get(case, case))


def test_folders_that_are_fine(tmp_path):
    """Empty classes, stray files, classes in one split only, and classes below other folders."""
    files = {f"{split}/{name}/{i}.png": PNG for split in ("train", "test") for name in ("ash", "elm") for i in (0, 1)}
    write(tmp_path / "a", {**files, "test/oak/0.png": PNG, "README.md": "hello", "train/notes.txt": "x"})
    (tmp_path / "a" / "train" / "fir").mkdir()
    splits = load_splits(str(tmp_path / "a"), allow_new_classes=True)
    for split in splits.values():
        assert split.features["label"].names == ["ash", "elm", "oak"]
    assert class_counts(splits["train"], 3).tolist() == [2, 2, 0]
    assert class_counts(splits["test"], 3).tolist() == [2, 2, 1]
    write(tmp_path / "b", {f"train/trees/{name}/0.png": PNG for name in ("ash", "elm")})
    assert load_splits(str(tmp_path / "b"))["train"].features["label"].names == ["ash", "elm"]


@cases(range(12))
def test_splits_with_other_class_names_are_matched_by_name(case, tmp_path):
    rng = random.Random(case)
    named = {}
    for split in ("train", "test"):
        names = rng.sample(CLASSES, rng.randint(2, 6))
        labels = [rng.randrange(len(names)) for _ in range(5)]
        named[split] = (classes(labels, names), [names[label] for label in labels])
    DatasetDict({split: dataset for split, (dataset, _) in named.items()}).save_to_disk(tmp_path / "data")
    splits = load_splits(str(tmp_path / "data"), allow_new_classes=True)
    assert splits["train"].features == splits["test"].features
    for split, (_, expected) in named.items():
        names = splits[split].features["label"].names
        assert [names[label] for label in splits[split]["label"]] == expected
        assert list(splits[split]["index"]) == list(range(5))


@cases([[0, 0, 0], [7, 7, 1], [None, 1, 2], ["a", "b", "c"], [0.5, 1.5, 2.5], [2, 1, 0], [-1, 0, 1]])
def test_an_index_column_is_numbered_anew(case, tmp_path):
    table(["ash", "elm", "ash"], index=case, extra=[[1], [2], [3]], more=["x", None, "z"]).save_to_disk(tmp_path / "d")
    train = load_splits(str(tmp_path / "d"))["train"]
    assert train.column_names == ["image", "label", "index"] and list(train["index"]) == [0, 1, 2]


@cases(
    [
        ("image", "image"),
        ("picture", "label"),
        ("image", "species"),
        ("label", "image"),
        ("", "label"),
    ]
)
def test_wrong_columns(case, tmp_path):
    table(["ash", "elm"], index=[0, 1]).save_to_disk(tmp_path / "d")
    with refused("column"):
        load_splits(str(tmp_path / "d"), image_column=case[0], label_column=case[1])


def test_one_image_and_missing_images(tmp_path, saved_model):
    one = classes([0], CLASSES)
    one.save_to_disk(tmp_path / "one")
    split = load_splits(str(tmp_path / "one"))["train"]
    from avgk_hf.evaluation import calibrate

    model = AvgKForImageClassification.from_pretrained(saved_model.folder)
    metrics = calibrate(model, split, k=[1])
    scores = model.scores(prepare(split, model.config)[0]["pixel_values"][None])[0].sort(descending=True).values
    assert metrics["lambda_val@1"] == pytest.approx(((scores[0] + scores[1]) / 2).item(), abs=1e-7)
    table([0, 1], [PNG, None]).save_to_disk(tmp_path / "null")
    null = prepare(load_splits(str(tmp_path / "null"))["train"], model.config)
    assert null[0]["pixel_values"].shape == (3, 32, 32)
    with refused("image 1 is missing"):
        null[1]
    with refused("no column 'image'", "remove_unused_columns"):
        saved_model.transform({"label": [0]})


@cases(range(10))
def test_shot_means_with_classes_that_have_no_training_image(case):
    rng = np.random.default_rng(case)
    counts = rng.choice([0, 0, 1, 19, 20, 100, 101, 500], 8)
    labels, correct = rng.integers(0, 8, 40), rng.integers(0, 2, 40)
    found = class_means(correct, labels, 8, counts)
    for name, low, high in (("few", 0, 19), ("medium", 20, 100), ("many", 101, 10**9)):
        of_class = [correct[labels == c].mean() for c in range(8) if low <= counts[c] <= high and (labels == c).any()]
        assert found.get(f"{name}_shot_accuracy") == (pytest.approx(np.mean(of_class)) if of_class else None)
    with refused("train_counts"):
        class_means(correct, labels, 8, counts[:5])


# ---------------------------------------------------------------------------------------------------- 2. on_bad_image


@pytest.fixture
def spoilt(tmp_path):
    """The trees with broken images: two in train, one in validation, one in test; and no oak to train on."""
    folder = tmp_path / "trees"
    write_images(folder / "train", {**dict.fromkeys(CLASSES, 4), "oak": 0}, seed=0)
    write_images(folder / "validation", dict.fromkeys(CLASSES, 3), seed=1)
    write_images(folder / "test", dict.fromkeys(CLASSES, 3), seed=2)
    write(folder, {"train/ash/1.png": b"", "train/elm/2.png": PNG[:60], "validation/fir/0.png": "text"})
    write(folder, {"test/oak/2.png": png_header(30000, 30000)})
    return folder


def test_skipped_images_are_counted_once_and_the_rest_numbered(spoilt, monkeypatch, caplog):
    from avgk_hf.data import datasets as module

    monkeypatch.setattr(module.logger, "warning", lambda text: caplog.records.append(SimpleNamespace(text=text)))
    opened = []
    monkeypatch.setattr(module, "open_image", lambda *a, **k: opened.append(a) or open_image(*a, **k))
    train_split = load_splits(str(spoilt), allow_new_classes=True)["train"]
    kept, skipped = skip_bad_images(train_split, "train")
    assert (len(train_split), len(kept), len(skipped), len(opened)) == (20, 18, 2, 20)
    assert list(kept["index"]) == list(range(18)) and kept.features == train_split.features
    assert kept.column_names.count("index") == 1
    message = caplog.records[-1].text
    assert (
        "train: 2 of 20 images left out, which cannot be read: " in message
        and "ash/1.png" in message
        and "elm/2.png" in message
    )
    again, skipped = skip_bad_images(load_splits(str(spoilt), allow_new_classes=True)["train"], "train")
    assert (len(again), len(skipped), len(opened)) == (18, 2, 20)  # nothing was opened a second time
    assert len(skip_bad_images(train_split, "train", num_workers=2, report=False)[0]) == 18
    caplog.records.clear()
    good = kept.select(range(5))
    assert skip_bad_images(good, "good") == (good, []) and not caplog.records
    with refused("test: none of the 2 images can be read", "image 0"):
        skip_bad_images(table([0, 1], [b"", None], index=[0, 1]), "test")


@pytest.mark.numbers
def test_training_and_commands_skip_bad_images(spoilt, tmp_path, capsys, monkeypatch):
    """The numbers are those of the same data with the broken images deleted."""
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPE.format(dataset=spoilt, output=tmp_path / "run"))
    options = ["--num_train_epochs", "1", "--objective", "role", "--allow_new_classes"]
    with refused(".png cannot be read as an image"):
        train([str(recipe), *options])
    warnings = []
    monkeypatch.setattr("avgk_hf.train.logger.warning", warnings.append)
    train([str(recipe), *options, "--on_bad_image", "skip"])
    assert warnings == [
        "1 of 6 classes have no training image, e.g. 'oak': they cannot be learnt, and count as few shot."
    ]
    results = json.loads((tmp_path / "run" / "results.json").read_text())
    assert results["skipped"] == {"train": 2, "validation": 1, "test": 1}
    config, details = (
        json.loads((tmp_path / "run" / f"{name}.json").read_text()) for name in ("config", "calibration")
    )
    assert config["calibration"]["num_examples"] == 17 and sum(details["train_counts"]) == 18
    assert details["train_counts"][5] == 0

    command = ["evaluate", str(tmp_path / "run"), str(spoilt)]
    refusing = ["--on-bad-image", "error"]
    assert main([*command, *refusing]) == 2
    assert "oak" in capsys.readouterr().err
    assert main([*command, *refusing, "--workers", "1"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert (
        error.startswith("avgk evaluate: ") and "2.png cannot be read as an image" in error
    )  # from a loader's process
    assert main([*command, "--json"]) == 1  # as `avgk predict`: left out, listed, and told by the exit code
    printed = capsys.readouterr()
    metrics = json.loads(printed.out)
    assert "left out 1 of 18 images that cannot be read:\n" in printed.err
    assert "2.png cannot be read as an image" in printed.err.splitlines()[-1]
    assert metrics["skipped"] == 1 and metrics["average_k_accuracy"] == results["test"]["average_k_accuracy"]
    assert main(["calibrate", *command[1:], "--out", str(tmp_path / "again")]) == 1
    assert "1 image left out" in capsys.readouterr().out
    again = json.loads((tmp_path / "again" / "config.json").read_text())
    assert again["thresholds"]["2"] == config["thresholds"]["2"] and again["calibration"]["num_examples"] == 17

    (spoilt / "test" / "oak" / "2.png").unlink()
    assert main([*command, "--json"]) == 0
    same = json.loads(capsys.readouterr().out)
    assert same["average_k_accuracy"] == metrics["average_k_accuracy"] and "skipped" not in same

    save_vit(tmp_path / "vit")
    foreign = ["calibrate", str(tmp_path / "vit"), str(spoilt), "--k", "2", "--out", str(tmp_path / "sets")]
    assert main(foreign) == 1
    assert "1 image left out" in capsys.readouterr().out


@cases(
    [["--batch-size", "0"], ["--batch-size", "-1"], ["--workers", "-1"], ["--k", "nan"], ["--k", "6"], ["--k", "0"]]
)
def test_bad_options_of_commands(case, saved_model, image_folder, capsys):
    with refused():
        main_refuses(["calibrate", str(saved_model.folder), str(image_folder), *case], capsys)


@cases(itertools.product(("min_size", "max_size", "k", "lambda_val"), [-1, 1.5, "2", True, NAN, 99, HUGE, [2]]))
def test_bad_options_of_the_pipeline(case, saved_model):
    name, value = case
    if (name, value) in (
        ("lambda_val", -1),
        ("lambda_val", 1.5),
        ("lambda_val", 99),
        ("max_size", 99),
        ("max_size", HUGE),
    ):
        assert 1 <= len(saved_model.classify(picture(), **{name: value})) <= 6
        return
    with refused(name):
        saved_model.classify(picture(), **{name: value})


@cases(["", "{", "[]", "3", "null", '{"k": 2}', '{"dataset": "x"}', "\0"])
def test_broken_results_of_a_run(case, saved_model, tmp_path):
    from avgk_hf.commands.plot import plot_runs
    from avgk_hf.model_card import card_of_run

    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_bytes((saved_model.folder / "config.json").read_bytes())
    (tmp_path / "run" / "results.json").write_text(case)
    with refused("results.json"):
        card_of_run(tmp_path / "run")
    with refused(str(tmp_path / "run")):
        list(plot_runs([tmp_path / "run"], tmp_path / "plots"))


@cases([0, 7, 8, 100, 5000, -100, -1])
def test_truncated_weights(case, saved_model, tmp_path, capsys):
    for path in saved_model.folder.iterdir():
        data = path.read_bytes()
        (tmp_path / path.name).write_bytes(data[:case] if path.suffix == ".safetensors" else data)
    (tmp_path / "image.png").write_bytes(PNG)
    with refused(str(tmp_path), "weights"):
        main_refuses(["predict", str(tmp_path), str(tmp_path / "image.png")], capsys)


# ----------------------------------------------------------------------------------------------------------- 6. names

HOSTILE = [
    *("../../x", "/abs", "a/b", "..", ".", "", " ", "...", "a\0b", "a\nb", "a\rb", "a\x1b[31mb", "a\\b", "x" * 300),
    *("../", "./x", "a/../../b", "//", "\u2028", "~/x/y", "$HOME"),
]
ODD = [
    "~",
    "-rf",
    "--out",
    "a b",
    "a:b",
    "a|b",
    "*",
    "<script>",
    "'",
    '"',
    "é",
    "日本",
    "CON",
    "%s",
    "{x}",
    "#",
]


def tree(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@cases(HOSTILE)
def test_hostile_names_become_no_folders(case, tmp_path):
    inside = tmp_path / "deep" / "er" / "data"
    dataset = table([0, 1], index=[0, 1]).cast_column("label", ClassLabel(names=["ash", case]))
    for splits in (DatasetDict(train=dataset), DatasetDict({case: classes([0, 1], ["ash", "elm"])})):
        with refused("cannot be the name of a folder", "rename it"):
            write_image_folder(splits, inside)
    assert tree(tmp_path) == []


@cases(ODD)
def test_odd_names_become_folders_and_come_back(case, tmp_path):
    dataset = table([0, 1], index=[0, 1]).cast_column("label", ClassLabel(names=["ash", case]))
    write_image_folder(DatasetDict(train=dataset), tmp_path / "data")
    assert tree(tmp_path)[:2] == ["data", "data/train"] and len(tree(tmp_path)) == 6
    assert set(load_splits(str(tmp_path / "data"))["train"].features["label"].names) == {"ash", case}


INJECTIONS = [
    *(
        "---",
        "x\n---\ny",
        "x: y",
        "- x",
        "[x]",
        "{x: 1}",
        "!!python/object:os.system x",
        "&a *a",
        "'",
        '"',
        "`",
        "```",
    ),
    *("x\n```\n# y", "# title", "| a | b |", "<script>alert(1)</script>", "[a](http://b)", "{{ repo }}", "{% raw %}"),
    *("x\ty", "null", "true", "3", "~", "%", "x #y", "x\n\n## Results\n\nperfect", "日本", "x" * 500, "a'b\"c"),
]


@cases(INJECTIONS)
def test_hostile_names_stay_names_in_the_card(case, saved_model, tmp_path):
    config = AvgKForImageClassification.from_pretrained(saved_model.folder).config
    config.calibration = {"num_examples": 3, "dataset": case, "split": case, "date": "2024-01-01", "step": 0}
    metrics = {"average_k_accuracy": 0.5, "mean_set_size": 2.0, "lambda_val": 0.1, "top1_accuracy": 0.4}
    plain_card = render_card("model", config, {"test": metrics}, {"a": "b"}, "data").content
    repo = case.replace("/", "-")
    config.id2label = {**config.id2label, 0: case}
    render_card(repo, config, {"test": metrics}, {"a": case}, case).save(tmp_path / "README.md")
    assert tree(tmp_path) == ["README.md"]
    text = (tmp_path / "README.md").read_text()
    assert ModelCard(text).data.eval_results is None  # the name is no Hub id
    on_hub = render_card(repo, config, {"test": metrics}, {"a": case}, "someone/data").content
    front = yaml.safe_load(on_hub.split("\n---\n")[0].removeprefix("---\n"))
    assert front["model-index"][0]["name"] == repo and front["library_name"] == "transformers"

    def shape(content):
        """Headings, table rows and fences of the card's body."""
        body = content.split("\n---\n", 1)[1]
        marks = ("#", "|", "```", "---", "<", "[")
        return [
            next(mark for mark in marks if line.startswith(mark))
            for line in body.splitlines()
            if line[:1] and line.startswith(marks)
        ]

    assert shape(text) == shape(plain_card)
    code = text.split("```python\n")[1].split("```\n")[0]
    compile(code, "card", "exec")
    assert f"model = {json.dumps(repo, ensure_ascii=False)}  # " in code


@cases(["$x_$", "$\\frac", "$", "a\nb", "a\0b", "\x1b[31m", "_^{}", "日本", "x" * 300, ""])
def test_hostile_names_in_pictures(case, tmp_path):
    from avgk_hf.study.plots import accuracy_curve, contact_sheet, set_size_histogram

    contact_sheet([picture()], [[1]], [0], ["ash", case], tmp_path / "sheet.svg", columns=1, rows=1)
    set_size_histogram({case: [1, 2], "b": [3]}, tmp_path / "sizes.svg")
    accuracy_curve({case: {k: {"mean": 0.5, "half_width": None} for k in (1, 2)}}, tmp_path / "curve.svg")
    assert tree(tmp_path) == ["curve.svg", "sheet.svg", "sizes.svg"]
