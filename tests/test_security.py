"""Untrusted models, untrusted data, unknown visitors: each test performs an attack, small and local, and sees it fail.

Four parts: models and configs; folders that are written to, pushed or logged; images and visitors of the page;
datasets, recipes, cards and the downloads of these tests. SECURITY.md says what is promised.
"""

import ast
import contextlib
import http.server
import io
import json
import os
import pickle
import re
import resource
import shlex
import shutil
import socket
import stat
import struct
import subprocess
import sys
import tarfile
import threading
import time
import tracemalloc
import uuid
import zlib
from http.server import BaseHTTPRequestHandler, HTTPServer, ThreadingHTTPServer
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas
import pyarrow.parquet as pq
import pytest
import timm
import torch
import transformers_suite
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from hub_server import HubServer
from PIL import EpsImagePlugin, Image
from safetensors.torch import load_file, save_file
from test_app import needs_browser
from test_bad_input import animation, encode, picture, png_header
from test_compare import COMPARISON
from test_layers import PACKAGE, remote_files
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, pipeline

import browser
from archives import write_cifar, write_plantnet
from avgk_hf import (
    AvgKConfig,
    AvgKForImageClassification,
    AvgKTrainingArguments,
    load_splits,
    train,
)
from avgk_hf.app import guard, page
from avgk_hf.app.answers import Answers
from avgk_hf.app.page import GONE, MOST_PIXELS, build_page, launch, upload_folder
from avgk_hf.app.space import write_space
from avgk_hf.backbones import MODEL_ARGS, MOST_SIDE, check_model_args, create_backbone, known_cfg
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import image_processor, load_classifier, transform_for
from avgk_hf.cli import main
from avgk_hf.data import image_files, open_image
from avgk_hf.data.cifar import MOST_INSTRUCTIONS
from avgk_hf.data.glyphs import write_image_folder
from avgk_hf.files import new_file, replacing, write_text
from avgk_hf.images import FORMATS
from avgk_hf.model_card import render_card
from avgk_hf.recipes import parse_recipe
from avgk_hf.study.runner import run_trainer
from avgk_hf.study.spec import plan, read_comparison
from avgk_hf.train import build_model
from avgk_hf.weights import check_folder
from browser import Visitor
from conftest import CLASSES, crossed, save_vit

# ------------------------------------------------------------------------------------------------- models and configs


LOADERS = {
    "our class": AvgKForImageClassification.from_pretrained,
    "the Auto class": AutoModelForImageClassification.from_pretrained,
    "load_classifier": lambda folder: load_classifier(str(folder)),
    "the pipeline": lambda folder: pipeline("average-k-image-classification", model=str(folder), lambda_val=0.1),
    "the config alone": lambda folder: AvgKForImageClassification(AvgKConfig.from_pretrained(folder)),
    "the config as a file": lambda folder: AvgKForImageClassification(
        AvgKConfig.from_json_file(Path(folder, "config.json"))
    ),
}
TIMM_LOADERS = (
    lambda folder: AvgKForImageClassification.from_timm(str(folder), num_labels=3, k=2),
    lambda folder: load_classifier(str(folder)),
)
every_loader = pytest.mark.parametrize("load", LOADERS.values(), ids=LOADERS)


class Bomb:
    """Creates a file when it is unpickled."""

    def __init__(self, marker):
        self.marker = str(marker)

    def __reduce__(self):
        return open, (self.marker, "w")


@pytest.fixture
def server():
    """The attacker's server on loopback: everything it is asked for is a pickle; `asked` says what that was."""

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self):
            self.server.asked.append(self.path)
            self.send_response(200)
            self.send_header("Content-Length", str(len(self.server.content)))
            self.end_headers()
            self.wfile.write(self.server.content)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as found:
        found.asked, content = [], BytesIO()
        torch.save({"weights": torch.zeros(1)}, content)
        found.content = content.getvalue()
        found.url = f"http://127.0.0.1:{found.server_port}"
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


@pytest.fixture
def folder(make_model, tmp_path):
    """A model as it is pushed, which each attacker changes."""
    model = make_model()
    Calibration.store(model.config, {2: 0.1}, {})
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def vit(tmp_path):
    """A classifier of another class."""
    save_vit(tmp_path / "vit")
    return tmp_path / "vit"


def change(folder, file="config.json", **fields):
    content = json.loads((folder / file).read_text())
    (folder / file).write_text(json.dumps({**content, **fields}))


def refused(match, error=ValueError):
    return pytest.raises(error, match=match)


def one_line(refusal):
    assert "\n" not in str(refusal.value) and len(str(refusal.value)) < 600


def attacks(server, target):
    """model_args that make timm fetch a file into a folder, or open one that is there."""
    address = {"url": f"{server.url}/zz.pth", "hf_hub_id": None}
    return {
        "url": {"pretrained": True, "cache_dir": str(target), "pretrained_cfg_overlay": address},
        "cfg": {"pretrained": True, "cache_dir": str(target), "pretrained_cfg": {"url": f"{server.url}/zz.pth"}},
        "file": {"pretrained": True, "pretrained_cfg_overlay": {"file": str(target / "x.pth")}},
        "checkpoint": {"checkpoint_path": str(target / "x.pth")},
        "cache_dir": {"cache_dir": str(target)},
        "features": {"features_only": True, "feature_cls": "fx"},
    }


KINDS = ("url", "cfg", "file", "checkpoint", "cache_dir", "features")


def test_the_attack_works_on_timm_itself(server, tmp_path):
    (tmp_path / "site").mkdir()
    with pytest.raises(RuntimeError, match="Missing key"):
        timm.create_model("test_resnet", **attacks(server, tmp_path / "site")["url"])
    assert server.asked == ["/zz.pth"] and (tmp_path / "site" / "zz.pth").is_file(), "the tests below show nothing"


@every_loader
def test_config_json_fetches_and_writes_nothing(load, folder, server, tmp_path):
    target = tmp_path / "site"
    target.mkdir()
    for kind, model_args in attacks(server, target).items():
        change(folder, model_args=model_args)
        with refused(r"model_args: '\w+' is not among the arguments that shape a timm model") as refusal:
            load(folder)
        one_line(refusal)
        assert not server.asked and not any(target.iterdir()), kind


@pytest.mark.parametrize("kind", KINDS)
def test_recipes_fetch_and_write_nothing(kind, server, tmp_path):
    target = tmp_path / "site"
    target.mkdir()
    recipe = {"model": "test_resnet", "dataset": "glyphs", "output_dir": str(tmp_path / "run"), "k": 2}
    (tmp_path / "recipe.yaml").write_text(json.dumps({**recipe, "model_args": attacks(server, target)[kind]}))
    arguments, _, _ = parse_recipe([str(tmp_path / "recipe.yaml")])
    with refused(r"model_args: '\w+' is not among the arguments that shape a timm model") as refusal:
        build_model(arguments, ["ash", "elm", "oak"])
    one_line(refusal)
    assert not server.asked and not any(target.iterdir())


@pytest.mark.parametrize("kind", KINDS)
def test_timm_folders_fetch_and_write_nothing(kind, server, tmp_path):
    target, timms = tmp_path / "site", tmp_path / "timm"
    target.mkdir()
    timm.models.save_for_hf(timm.create_model("test_resnet", num_classes=3), timms, safe_serialization=True)
    change(timms, model_args=attacks(server, target)[kind])
    for load in TIMM_LOADERS:
        with refused(r"model_args: '\w+' is not among the arguments that shape a timm model") as refusal:
            load(timms)
        one_line(refusal)
    assert not server.asked and not any(target.iterdir())


def test_hub_repos_fetch_nothing_else(server, fresh, tmp_path):
    """From the Hub's cache, in a new process, because the place of the cache is read on import."""
    repo = tmp_path / "home" / "hub" / "models--someone--tiny"
    snapshot = repo / "snapshots" / ("0" * 40)
    timm.models.save_for_hf(timm.create_model("test_resnet", num_classes=3), snapshot, safe_serialization=True)
    (repo / "refs").mkdir()
    (repo / "refs" / "main").write_text("0" * 40)
    change(snapshot, model_args={"cache_dir": str(tmp_path / "site")})
    code = (
        "from avgk_hf import AvgKForImageClassification as Model\n"
        "try:\n    Model.from_timm('hf_hub:someone/tiny', num_labels=5, k=2)\n"
        "except ValueError as error:\n    print(error)"
    )
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "1"}
    done = fresh.run(code, folder=tmp_path, env=environment)
    assert done.code == 0 and "model_args: 'cache_dir' is not among the arguments" in done.out
    assert not (tmp_path / "site").exists()


def test_the_weights_of_a_timm_folder_are_its_own_safetensors(server, tmp_path):
    original, marker = timm.create_model("test_resnet", num_classes=3), tmp_path / "marker"
    timms = tmp_path / "timm"
    timm.models.save_for_hf(original, timms, safe_serialization=True)
    torch.save({"conv1.0.weight": Bomb(marker)}, tmp_path / "other.pth")
    stored = json.loads((timms / "config.json").read_text())["pretrained_cfg"]
    source = {"url": f"{server.url}/zz.pth", "file": str(tmp_path / "other.pth"), "hf_hub_id": "someone/other"}
    source |= {"hf_hub_filename": "other.pth", "custom_load": True, "source": "hf-hub", "state_dict": {"a": 1}}
    for kind in ("", "hf-hub", "local-dir"):
        change(timms, pretrained_cfg={**stored, **source, "source": kind})
        model = AvgKForImageClassification.from_timm(str(timms), num_labels=3, k=2)
        assert torch.equal(model.backbone.conv1[0].weight, original.conv1[0].weight)
        assert not {*source} & {*model.config.pretrained_cfg}
    for name in ("pytorch_model.bin", "model.pth"):
        (timms / "model.safetensors").unlink(missing_ok=True)
        torch.save({"conv1.0.weight": Bomb(marker)}, timms / name)
        with refused("a pickle, and pickles are not opened here"):
            AvgKForImageClassification.from_timm(str(timms), num_labels=3, k=2)
    assert not server.asked and not marker.exists()


@pytest.mark.parametrize(
    "name", ["hf_hub:someone/other", "hf-hub:a/b", "local-dir:/etc", "../other", "/etc", "resnet18/..", "", "re\nsnet"]
)
def test_an_architecture_is_a_registered_name(name, folder, tmp_path):
    change(folder, architecture=name)
    for load in LOADERS.values():
        with refused(r"architecture='.*is no timm model"):
            load(folder)
    timms = tmp_path / "timm"
    timm.models.save_for_hf(timm.create_model("test_resnet", num_classes=3), timms, safe_serialization=True)
    change(timms, architecture=name)
    for load in TIMM_LOADERS:
        with refused(r"architecture='.*is no timm model"):
            load(timms)


def test_the_nearest_argument_is_offered_and_honest_ones_pass():
    with refused("'drop_rat' is not among .* Did you mean 'drop_rate'"):
        check_model_args({"drop_rat": 0.1})
    honest = {"in_chans": 1, "img_size": [32, 64], "depths": (2, 2), "drop_path_rate": 0.1, "global_pool": "avg"}
    check_model_args({**honest, "act_layer": "gelu", "class_token": False, "reg_tokens": 4, "window_size": 7})
    check_model_args({"depth": [[1, 1, 0]] * 3, "mlp_ratio": 4.0, "norm_layer": None})
    assert not {"pretrained", "cache_dir", "checkpoint_path", "pretrained_cfg", "num_classes"} & {*MODEL_ARGS}


@pytest.mark.parametrize(
    "value",
    [{"a": 1}, "a/b", "a:b", "x" * 100, float("nan"), float("inf"), -1, 1e9, 10**400, [[[1]]], [1] * 1000, [{"a": 1}]],
    ids=lambda value: repr(value)[:20],
)
def test_arguments_are_small_and_plain(value):
    for name in ("depth", "embed_dim", "img_size", "global_pool"):
        with refused(f"model_args: {name}=.*is not allowed") as refusal:
            AvgKConfig(architecture="test_vit", num_labels=6, k=2, model_args={name: value})
        one_line(refusal)


LARGE = {
    "a wide transformer": ("test_vit", {"embed_dim": 16384, "depth": 200, "num_heads": 1}),
    "a position for every pixel": ("test_vit", {"img_size": 4096, "patch_size": 1, "embed_dim": 4096}),
}


@pytest.mark.parametrize("case", LARGE)
def test_large_models_are_refused_before_memory_is_taken(case, folder):
    architecture, model_args = LARGE[case]
    change(folder, architecture=architecture, model_args=model_args)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for way, load in LOADERS.items():
        with refused("is too large: at most 8,000,000,000 numbers in 10,000 tensors") as refusal:
            load(folder)
        if way != "the pipeline":  # around which transformers writes a traceback
            one_line(refusal)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 1e6  # KiB


def test_models_of_many_small_layers_are_refused():
    with refused("is too large: at most 8,000,000,000 numbers in 10,000 tensors"):
        create_backbone("crossvit_tiny_240", {"depth": [[100, 100, 100]] * 64})


@pytest.mark.parametrize("fields", [{"num_labels": 10**8}, {"num_labels": 1e8}, {"num_labels": "many"}], ids=str)
def test_many_labels_are_refused_before_they_are_named(fields, folder, vit):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for place, loaders in ((folder, LOADERS.values()), (vit, [LOADERS["load_classifier"]])):
        content = json.loads((place / "config.json").read_text())
        kept = {name: value for name, value in content.items() if name not in ("id2label", "label2id", "thresholds")}
        (place / "config.json").write_text(json.dumps({**kept, **fields}))
        for load in loaders:
            with refused("num_labels=.*must be a whole number of at most 1,000,000"):
                load(place)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss < before + 5e5


def test_large_heads_are_refused():
    with refused("num_labels=1000000 is too many for resnet50, whose 2048 features"), torch.device("meta"):
        AvgKForImageClassification(AvgKConfig(architecture="resnet50", num_labels=1_000_000, k=2))


def test_large_models_of_other_classes_are_refused(vit):
    for fields in ({"hidden_size": 2_000_000}, {"num_hidden_layers": 10**9}, {"image_size": 10**6}):
        shutil.copytree(vit, vit.with_name("copy"))
        change(vit.with_name("copy"), **fields)
        with refused("is too large: at most"):
            load_classifier(str(vit.with_name("copy")))
        shutil.rmtree(vit.with_name("copy"))


@pytest.mark.parametrize(
    "fields",
    [
        {"input_size": [3, 30000, 30000]},
        {"input_size": [3, 32, 32.5]},
        {"input_size": [10**6, 32, 32]},
        {"input_size": 32},
        {"crop_pct": 1e-6},
        {"crop_pct": "all"},
        {"mean": ["0.5"]},
        {"std": [0, 0, 0]},
        {"mean": [float("nan")] * 3},
        {"interpolation": "../x"},
        {"crop_mode": "__import__"},
    ],
    ids=str,
)
def test_images_are_prepared_within_bounds(fields, folder):
    stored = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    change(folder, pretrained_cfg={**stored, **fields})
    for load in LOADERS.values():
        with refused(rf"pretrained_cfg: {next(iter(fields))}=.*is not allowed") as refusal:
            load(folder)
        one_line(refusal)


def test_what_is_not_known_of_a_description_is_left_out():
    found = known_cfg({"url": "http://x", "file": "/etc/passwd", "img_size": 30000, "input_size": [3, 8, 8], "x": 1})
    assert found == {"input_size": [3, 8, 8]}


def test_processors_make_no_enormous_images(folder, vit):
    """Their settings may stand in files and under names that the model's config does not look at."""
    stored = json.loads((folder / "config.json").read_text())["pretrained_cfg"]
    del stored["input_size"]
    change(folder, pretrained_cfg={**stored, "img_size": 30000})
    with refused("pretrained_cfg: input_size=.*30000.*is not allowed"):
        pipeline("average-k-image-classification", model=str(folder), lambda_val=0.1)
    change(vit, "preprocessor_config.json", size={"height": 30000, "width": 30000})
    with refused(f"the image processor has size=.*at most {MOST_SIDE} pixels"):
        image_processor(load_classifier(str(vit)))


ABSURD = {
    "deep": '{"model_type": "avgk", "calibration": ' + '{"a":' * 100_000 + "1" + "}" * 100_001,
    "rather deep": '{"model_type": "avgk", "calibration": {"a": ' + "[" * 400 + "]" * 400 + "}}",
    "a list": "[1]",
    "a number": "3",
    "a long number": '{"model_type": "avgk", "k": ' + "9" * 100_000 + "}",
    "labels in a list": '{"model_type": "avgk", "id2label": [1]}',
    "labels of no number": '{"model_type": "avgk", "id2label": {"a": "b"}}',
    "a type": '{"model_type": ["avgk"]}',
    "no type of weights": '{"model_type": "avgk", "dtype": "load"}',
    "an old name for it": '{"model_type": "avgk", "torch_dtype": "hub"}',
}


@pytest.mark.parametrize("case", ABSURD)
def test_absurd_json_is_one_line(case, folder):
    (folder / "config.json").write_text(ABSURD[case])
    for load in (check_folder, AvgKForImageClassification.from_pretrained, LOADERS["load_classifier"]):
        if load is not check_folder or case in ("deep", "rather deep", "a list", "a number", "a long number"):
            with pytest.raises((ValueError, OSError)) as refusal:
                load(folder)
            one_line(refusal)


def test_what_transformers_would_act_on_is_left_out(folder, vit):
    """Kernels and code of others, packed weights, other files, another model's name."""
    fields = {
        "attn_implementation": "someone/kernel",
        "_attn_implementation": "someone/kernel",
        "experts_implementation": "someone/kernel",
        "use_kernels": True,
        "kernel_config": {"a": "someone/kernel"},
        "quantization_config": {"quant_method": "bitsandbytes", "load_in_8bit": True},
        "transformers_weights": "adapter_model.bin",
        "fusion_config": {"patch_embeddings": True},
        "_name_or_path": "/etc",
        "auto_map": {"AutoConfig": "someone/code--x.Config", "AutoModelForImageClassification": "x.Model"},
        "custom_pipelines": {"average-k-image-classification": {"impl": "x.Pipeline", "pt": [], "type": "image"}},
    }
    for place in (folder, vit):
        (place / "x.py").write_text("raise SystemExit('code of a stranger')")
        change(place, **fields)
        model = load_classifier(str(place))
        assert model.name_or_path == str(place)
        assert model.config._attn_implementation in ("sdpa", "eager")
        for name in ("quantization_config", "transformers_weights", "fusion_config", "kernel_config", "use_kernels"):
            assert not hasattr(model.config, name)
        model(torch.zeros(1, 3, 32, 32))
    for load in LOADERS.values():
        model = load(folder)
        config = getattr(model, "model", model).config
        assert not hasattr(config, "quantization_config") and "someone" not in config.to_json_string()


def test_code_beside_a_model_is_refused_not_asked_about(folder, vit, monkeypatch):
    monkeypatch.setattr("builtins.input", lambda *_: pytest.fail("asked whether to run a stranger's code"))
    code = "open('marker', 'w')\nraise SystemExit('code of a stranger')"
    monkeypatch.chdir(folder)
    (folder / "x.py").write_text(code)
    change(folder, auto_map={"AutoConfig": "x.Config", "AutoModelForImageClassification": "x.Model"})
    change(folder, "preprocessor_config.json", auto_map={"AutoImageProcessor": "x.Processor"})
    assert type(load_classifier(str(folder))) is AvgKForImageClassification  # our own type needs no other code
    assert type(AutoConfig.from_pretrained(folder)) is AvgKConfig
    AutoImageProcessor.from_pretrained(folder, trust_remote_code=False)
    (vit / "x.py").write_text(code)
    change(vit, "preprocessor_config.json", image_processor_type="X", auto_map={"AutoImageProcessor": "x.Processor"})
    with refused("trust_remote_code"):
        image_processor(load_classifier(str(vit)))
    change(vit, model_type="theirs", auto_map={"AutoConfig": "x.Config", "AutoModelForImageClassification": "x.Model"})
    with refused("trust_remote_code"):
        load_classifier(str(vit))
    assert not (folder / "marker").exists()


def test_an_image_processor_of_another_type_is_refused(folder):
    change(folder, image_processor_type="SomeOtherProcessor")
    for load in LOADERS.values():
        with refused("config.image_processor_type='SomeOtherProcessor' is unknown"):
            load(folder)


def test_adapters_name_no_other_model_and_import_nothing(folder, vit, tmp_path):
    pytest.importorskip("peft")
    adapter = {"peft_type": "LORA", "base_model_name_or_path": str(vit), "target_modules": ["fc"], "r": 2}
    adapter |= {"megatron_config": {"a": 1}, "megatron_core": "antigravity"}
    for place in (folder, vit):
        (place / "adapter_config.json").write_text(json.dumps(adapter))
        save_file({"a": torch.zeros(1)}, place / "adapter_model.safetensors")
    for load in (LOADERS["our class"], LOADERS["the Auto class"], LOADERS["load_classifier"], LOADERS["the pipeline"]):
        with refused("holds an adapter of peft, and adapters are not loaded here"):
            load(folder)
    with refused("holds an adapter of peft"):
        load_classifier(str(vit))
    assert "antigravity" not in sys.modules


@pytest.mark.parametrize("name", ["../other.safetensors", "/tmp/x.safetensors", "sub/x.safetensors", "x.bin", "", 3])
def test_an_index_names_files_beside_it(name, folder):
    shutil.copy(folder / "model.safetensors", folder.parent / "other.safetensors")
    keys = load_file(folder / "model.safetensors")
    (folder / "model.safetensors").unlink()
    index = {"metadata": {}, "weight_map": dict.fromkeys(keys, name)}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    for load in (check_folder, *(LOADERS[way] for way in ("our class", "the Auto class", "load_classifier"))):
        with refused("weights are only read from .*safetensors files beside it"):
            load(folder)
    save_file({"a": torch.zeros(1)}, folder / "adapter_model.safetensors")  # another file must not hide the index
    with refused("weights are only read from .*safetensors files beside it"):
        check_folder(folder)


@pytest.mark.parametrize("name", ["model.safetensors", "weights.safetensors", "pytorch_model.bin", "x.h5", "x.pkl"])
def test_pickles_under_other_names_are_not_run(name, folder, vit, tmp_path):
    marker = tmp_path / "marker"
    pickle.loads(pickle.dumps(Bomb(marker))).close()
    marker.unlink()  # it does do harm where it is trusted
    for place, loaders in ((folder, ("our class", "the Auto class", "load_classifier")), (vit, ("load_classifier",))):
        (place / "model.safetensors").unlink()
        (place / name).write_bytes(pickle.dumps(Bomb(marker)))
        for way in loaders:
            with pytest.raises((OSError, ValueError)):
                LOADERS[way](place)
    with pytest.raises(Exception, match=r"safetensors|header"):
        AvgKForImageClassification.from_timm(
            "test_resnet", 3, k=2, checkpoint=str(folder / (name if name.endswith("safetensors") else "none.bin"))
        )
    assert not marker.exists()


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_reduce_payloads_in_a_checkpoint_are_not_run(name, make_trainer, tmp_path):
    trainer = make_trainer(num_train_epochs=1)
    trainer.train()
    checkpoint, marker = next((tmp_path / "run").glob("checkpoint-*")), tmp_path / "marker"
    content = torch.load(checkpoint / name, weights_only=False)
    torch.save({**content, "more": [Bomb(marker)]}, checkpoint / name)  # all else is as it was
    with refused(rf"{name} is cut off or damaged, or holds more than tensors"):
        make_trainer(num_train_epochs=2).train(resume_from_checkpoint=str(checkpoint))
    assert not marker.exists()


# ---------------------------------------------------------------------- folders that are written to, pushed or logged


SECRET, LIKE = "not-like-a-token-of-the-Hub", "hf_" + "x" * 34
PRIVATE = "what only the user may see"


@pytest.fixture
def model_folder(make_model, tmp_path):
    model = make_model(num_labels=None, id2label=dict(enumerate(["ash", "beech", "cedar", "elm", "fir", "oak"])))
    Calibration.store(model.config, {2: 0.1}, {"num_examples": 3})
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def home(tmp_path):
    """A folder of the user with a file and a folder, that nothing may change."""
    folder = tmp_path / "home"
    (folder / "keys").mkdir(parents=True)
    (folder / "profile").write_text(PRIVATE)
    yield folder
    assert sorted(path.name for path in folder.rglob("*")) == ["keys", "profile"]
    assert (folder / "profile").read_text() == PRIVATE


def plant(link: Path, target: Path) -> None:
    """Put a link in the place of whatever is there."""
    if link.is_file():
        link.unlink()
    link.parent.mkdir(parents=True, exist_ok=True)
    link.symlink_to(target, target_is_directory=target.is_dir())


CALIBRATE, ANEW = ["calibrate", "MODEL", "DATA"], ["calibrate", "MODEL", "DATA", "--out", "MODEL"]
EVALUATE = ["evaluate", "MODEL", "DATA", "--out", "MODEL/metrics.json"]
THROUGH_LINKS = {
    "the name of an unfinished config": ("config.json.new", "profile", CALIBRATE),
    "a card": ("README.md", "profile", ANEW),
    "code": ("monitor.py", "profile", ANEW),
    "a processor": ("preprocessor_config.json", "profile", ANEW),
    "a file that is to come": ("README.md", "new", ANEW),
    "an unfinished folder": (".unfinished", "keys", ANEW),
    "a folder in the place of code": ("monitor.py", "keys", ANEW),
    "a folder in the place of the card": ("README.md", "keys", ANEW),
    "metrics": ("metrics.json", "profile", EVALUATE),
    "a picture": ("size.png", "profile", [*CALIBRATE, "--plot", "MODEL/size.png"]),
    "a graph": ("onnx/model.onnx", "profile", ["export", "MODEL", "--onnx"]),
    "a folder of graphs": ("onnx", "keys", ["export", "MODEL", "--onnx"]),
}


@pytest.mark.parametrize("attack", THROUGH_LINKS)
def test_nothing_is_written_through_a_link_of_a_model_folder(attack, model_folder, image_folder, home):
    name, target, arguments = THROUGH_LINKS[attack]
    plant(model_folder / name, home / target)
    arguments = [a.replace("MODEL", str(model_folder)).replace("DATA", str(image_folder)) for a in arguments]
    done = main(arguments)  # the fixture looks at what the link leads to
    assert done == (2 if attack in ("a graph", "a folder of graphs") else 0)
    assert AvgKForImageClassification.from_pretrained(model_folder).config.thresholds


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_what_a_link_leads_to_stays_as_it_was(name, model_folder, image_folder, tmp_path):
    """A model that is linked together, as in the Hub's cache: the link is replaced, not the file."""
    before = (model_folder / name).read_bytes()
    (model_folder / name).rename(tmp_path / "kept")
    plant(model_folder / name, tmp_path / "kept")
    assert main(["calibrate", str(model_folder), str(image_folder), "--k", "3", "--out", str(model_folder)]) == 0
    assert (tmp_path / "kept").read_bytes() == before and not (model_folder / name).is_symlink()
    assert set(AvgKForImageClassification.from_pretrained(model_folder).config.thresholds) == {"2", "3"}


def test_a_linked_folder_in_the_way_does_not_cost_the_config(model_folder, make_model, home):
    for name in ("model.safetensors", "sets.py", "config.json"):
        plant(model_folder / name, home / "keys")
        make_model().save_pretrained(model_folder)
        AvgKForImageClassification.from_pretrained(model_folder)
    (model_folder / ".unfinished").write_text("")  # whatever stands there
    make_model().save_pretrained(model_folder)
    assert not (model_folder / ".unfinished").exists()


@pytest.mark.parametrize(
    "name", ["results.json", "train.log", "trainer_state.json", ".unfinished", "README.md", "set_sizes.png", "runs"]
)
def test_a_run_folder_with_links_that_lead_out_is_refused(name, recipe, tmp_path, home, capsys):
    plant(tmp_path / "run" / name, home / ("keys" if "." not in name[1:] else "profile"))
    assert main(["train", str(recipe), "--dataset", "./is-not-even-looked-for"]) == 2
    assert f"{tmp_path / 'run' / name} is a link that leads out of the folder" in capsys.readouterr().err


def test_links_that_come_later_are_not_followed_either(make_trainer, tmp_path, home):
    """The second wall: what the Trainer writes itself, with links planted after it looked."""
    trainer, run = make_trainer(num_train_epochs=1), tmp_path / "run"
    for name in ("train.log", "trainer_state.json", "README.md", ".unfinished", "results.json", "checkpoint-5"):
        plant(run / name, home / ("keys" if "." not in name[1:] else "profile"))
    trainer.train()
    trainer.save_state()
    trainer.save_model()
    trainer.create_model_card()
    assert (run / "train.log").is_symlink()  # nothing is logged there, and training goes on
    assert (run / "checkpoint-5" / "optimizer.pt").is_file() and not (run / "checkpoint-5").is_symlink()
    assert json.loads((run / "trainer_state.json").read_text())["global_step"] == 5


FOLDERS = {
    "train": ["train", "RECIPE", "--output_dir", "LINK"],
    "train several": [
        "train",
        "RECIPE",
        "--seeds",
        "2",
        "--dataset",
        "./is-not-even-looked-for",
        "--output_dir",
        "LINK",
    ],
    "train seeds": ["train", "RECIPE", "--seeds", "2", "--output_dir", "PARENT"],
    "calibrate": ["calibrate", "MODEL", "./is-not-even-looked-for", "--out", "LINK"],
    "evaluate": ["evaluate", "MODEL", "./is-not-even-looked-for", "--out", "LINK/metrics.json"],
    "export": ["export", "MODEL", "--onnx", "--out", "LINK"],
    "sweep": ["sweep", "RECIPE", "--search", "alpha=1,2", "--out", "LINK"],
    "sweep study": ["sweep", "RECIPE", "--search", "alpha=1,2", "--out", "PARENT"],
    "compare": ["compare", "COMPARISON", "--out", "LINK"],
    "plot": ["plot", "MODEL", "--out", "LINK"],
    "demo": ["demo", "--out", "LINK"],
    "app": ["app", "MODEL", "--space", "LINK"],
    "card": ["card", "MODEL", "--out", "LINK/README.md"],
}


@pytest.mark.parametrize("command", FOLDERS)
def test_a_linked_output_folder_is_refused(command, model_folder, image_folder, recipe, tmp_path, home, capsys):
    name = {"train seeds": "seed-1", "sweep study": "study.db-journal"}.get(command, "out")
    plant(tmp_path / "place" / name, home / "keys")
    (tmp_path / "compare.yaml").write_text(COMPARISON)
    places = {"RECIPE": recipe, "MODEL": model_folder, "DATA": image_folder, "COMPARISON": tmp_path / "compare.yaml"}
    places |= {"LINK": tmp_path / "place" / name, "PARENT": tmp_path / "place"}
    arguments = FOLDERS[command]
    for word, path in places.items():
        arguments = [text.replace(word, str(path)) for text in arguments]
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert re.search("is a link|exists and is not an empty folder", error), error


def test_a_link_above_the_folder_is_the_users_own(recipe, model_folder, image_folder, tmp_path):
    (tmp_path / "disk").mkdir()
    plant(tmp_path / "data", tmp_path / "disk")
    out = tmp_path / "data" / "calibrated"
    assert main(["calibrate", str(model_folder), str(image_folder), "--out", str(out)]) == 0
    assert (tmp_path / "disk" / "calibrated" / "config.json").is_file()


def test_image_folders_are_not_written_through_links(splits, tmp_path, home):
    for number, name in enumerate(("", "train", "train/ash")):
        plant(tmp_path / f"out{number}" / name if name else tmp_path / "out0", home / "keys")
        with pytest.raises(OSError, match="is a link"):
            write_image_folder(splits, tmp_path / f"out{number}")


@pytest.mark.parametrize("kind", ["link", "second name", "pipe", "device"])
def test_a_log_is_a_file_of_its_own(kind, tmp_path, home, capsys):
    log = tmp_path / "log"
    if kind == "link":
        plant(log, home / "profile")
    elif kind == "second name":
        log.hardlink_to(home / "profile")
    elif kind == "pipe":
        os.mkfifo(log)
    else:
        log = Path("/dev/null")
    assert main(["--log", str(log), "report", str(tmp_path)]) == 2
    assert f"nothing can be logged to {log} (" in capsys.readouterr().err


def test_a_device_is_not_replaced_by_a_file(model_folder, image_folder, tmp_path, capsys):
    os.mkfifo(tmp_path / "pipe")
    for out in (tmp_path / "pipe", "/dev/null", "/dev/stdout"):
        before = os.lstat(out)
        assert main(["evaluate", str(model_folder), str(image_folder), "--out", str(out)]) == 2
        assert "is no regular file" in capsys.readouterr().err and os.path.samestat(before, os.lstat(out))


def test_files_are_readable_as_the_user_wants_them(model_folder, image_folder, tmp_path):
    """A fresh file is not made for its owner only, as temporary files are."""
    assert main(["calibrate", str(model_folder), str(image_folder)]) == 0
    (tmp_path / "plain").write_text("")
    assert (model_folder / "config.json").stat().st_mode == (tmp_path / "plain").stat().st_mode


def test_every_file_is_renamed_once(make_model, tmp_path, monkeypatch):
    """However many functions that write whole files and folders call each other."""
    renamed, rename = [], os.replace
    monkeypatch.setattr(os, "replace", lambda old, new: old == new or renamed.append(Path(new)) or rename(old, new))
    with replacing(tmp_path / "run") as folder, replacing(folder / "model") as inner:
        make_model().save_pretrained(inner)
        plant(inner / "notes.txt", tmp_path / "new")
        write_text(inner / "notes.txt", "in place, but through no link")
        assert not renamed and not (tmp_path / "new").exists()
        with pytest.raises(RuntimeError), new_file(inner / "config.json") as new:
            assert new == inner / "config.json"
            raise RuntimeError
        assert not (inner / "config.json").exists()
    assert renamed == [tmp_path / "run" / "model"]
    make_model().save_pretrained(tmp_path / "run" / "model")
    assert len(renamed) == len(set(renamed)) and renamed[-1] == tmp_path / "run" / "model" / "config.json"
    assert not list(tmp_path.rglob(".unfinished*"))


WRITING = {"write_text", "write_bytes", "touch", "mkdir", "makedirs", "rename", "symlink_to", "hardlink_to", "dump"}
WRITING |= {"save", "savefig", "save_file", "save_to_json", "save_pretrained", "to_json_file", "save_model"}
WRITING |= {"NamedTemporaryFile", "mkstemp", "mkdtemp", "to_csv", "tofile"}
ELSEWHERE = {
    ("answers.py", "save"): "into a temporary folder",
    ("page.py", "mkdir"): "above the temporary folder, where the user's environment names a place",
    ("page.py", "mkdtemp"): "the temporary folder of uploads",
    ("images.py", "open"): "for reading",
    ("glyphs.py", "save"): "into memory",
    ("glyphs.py", "write_bytes"): "into the file of `new_file`",
    ("export.py", "save"): "into a temporary folder",
    ("model_card.py", "save_pretrained"): "into the folder of `replacing`",
    ("model_card.py", "save"): "into the file of `new_file`",
    ("configuration.py", "save_pretrained"): "by way of `to_json_file`",
    ("card.py", "save"): "into the file of `new_file`",
    ("configuration.py", "to_json_file"): "into the file of `new_file`",
    ("modeling.py", "save_pretrained"): "into the folder of `replacing`; of other processes nothing",
    ("drawing.py", "savefig"): "into the file of `new_file`",
    ("drawing.py", "save"): "the function with the line above",
    ("plots.py", "save"): "that of drawing.py",
    ("class_plots.py", "save"): "that of drawing.py",
    ("rows.py", "open"): "the file of `new_file`",
    ("features.py", "save_file"): "into the file of `new_file`",
    ("averaging.py", "save_file"): "into a fresh folder",
    ("checkpoints.py", "save"): "of the averaged weights, into a fresh folder",
    ("hub.py", "mkdir"): "above the folder that the user names",
    ("hub.py", "copytree"): "of this package into a temporary folder",
    ("hub.py", "move"): "into a folder that is new or empty",
    ("train.py", "save_model"): "of the trainer, with `replacing`",
    ("trainer.py", "save"): "into the file of `new_file`",
    ("checkpoints.py", "save_model"): "into the folder of `replacing`",
    ("checkpoints.py", "save_to_json"): "into the file of `new_file`, or a fresh folder",
    ("checkpoints.py", "save_pretrained"): "into the folder of `replacing`",
    ("checkpoints.py", "save_file"): "into a fresh folder",
    ("checkpoints.py", "replace"): "of folders that are fresh",
}


def writing(path: Path) -> set[str]:
    """The calls of a file that write, by their last name; those of functions of `avgk_hf.files` aside."""
    tree, found = ast.parse(path.read_text()), set()
    imports = [node for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) and node.module == "files"]
    ours = {alias.name for node in imports for alias in node.names}
    for node in (node for node in ast.walk(tree) if isinstance(node, ast.Call)):
        name = getattr(node.func, "attr", getattr(node.func, "id", None))
        module = getattr(getattr(node.func, "value", None), "id", None)
        given = (*node.args, *(keyword.value for keyword in node.keywords))
        modes = [str(each.value) for each in given if isinstance(each, ast.Constant)]
        if name == "open":
            writes = module == "os" or any(re.fullmatch("[rbt]*[wax+][rbtwax+]*", mode) for mode in modes)
        elif name == "replace":
            writes = module == "os" or len(node.args) == 1  # not of a string, which takes two
        elif module == "shutil":
            writes = name not in ("rmtree", "disk_usage", "ignore_patterns")
        else:
            writes = name in WRITING and (isinstance(node.func, ast.Attribute) or name not in ours)
        if writes:
            found.add(name)
    return found


def test_only_one_file_writes():
    """What is new here goes through `avgk_hf.files`, or is listed with the reason why not."""
    found = {(path.name, name) for path in PACKAGE.rglob("*.py") if path.name != "files.py" for name in writing(path)}
    assert found == set(ELSEWHERE)


PUSH = """
import sys
from pathlib import Path
from avgk_hf import AvgKForImageClassification
from avgk_hf.cli import main
folder, snapshot, saved = sys.argv[1:]
assert main(["push", folder, "someone/links"]) == 0
assert main(["push", snapshot, "someone/cached"]) == 0
model = AvgKForImageClassification.from_pretrained(folder)
model.save_pretrained(saved, push_to_hub=True, repo_id="someone/saved")
(Path(folder) / "model.safetensors").rename(snapshot + ".safetensors")
(Path(folder) / "model.safetensors").symlink_to(snapshot + ".safetensors")
assert main(["push", folder, "someone/nothing"]) == 2
"""
NAMES = {*(f"{name}.py" for name in remote_files()), "config.json", "model.safetensors", "preprocessor_config.json"}


def infest(folder: Path, home: Path) -> None:
    """What somebody could put into a model folder to see it published."""
    plant(folder / "README.md", home / "profile")
    plant(folder / "key.png", home / "profile")
    plant(folder / "pictures", home)
    (folder / "monitor.py").write_text(f"print('{PRIVATE}')")
    (folder / "setup.py").write_text(f"print('{PRIVATE}')")
    (folder / ".hidden.png").write_text(PRIVATE)
    (folder / "sub").mkdir()
    for name in ("README.md", "config.json", "notes.png", "sets.py"):
        (folder / "sub" / name).write_text(PRIVATE)


def environment(hub: HubServer, home: Path) -> dict[str, str]:
    foreign = re.compile("HF_|HUGGING|TRANSFORMERS_|.*_PROXY$", re.IGNORECASE)
    kept = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    kept |= {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "HF_HUB_DISABLE_XET": "1", "NO_PROXY": "127.0.0.1"}
    return {**kept, "HF_HUB_DISABLE_TELEMETRY": "1", "PYTHONPATH": str(PACKAGE.parent), "OMP_NUM_THREADS": "1"}


def test_push_publishes_the_model_and_nothing_else(model_folder, fresh, tmp_path, home):
    own = {path.name: path.read_bytes() for path in model_folder.iterdir()}
    cache = tmp_path / "models--someone--tiny"
    (cache / "blobs").mkdir(parents=True)
    for number, name in enumerate((*own, "notes.png")):
        (cache / "blobs" / f"{number:040}").write_bytes(own.get(name, b"a picture"))
        plant(cache / "snapshots" / "1a2b" / name, Path("../../blobs", f"{number:040}"))
    plant(cache / "snapshots" / "1a2b" / "key.png", home / "profile")
    plant(cache / "snapshots" / "1a2b" / "other.png", Path("../../blobs/../../home/profile"))
    infest(model_folder, home)
    (model_folder / "shown.png").write_bytes(b"a picture")
    plant(model_folder / "again.png", model_folder / "shown.png")
    shutil.copytree(model_folder, tmp_path / "saved", symlinks=True)
    with HubServer() as hub:
        env = {**environment(hub, tmp_path / "cache"), "HF_TOKEN": hub.token}
        arguments = [model_folder, cache / "snapshots" / "1a2b", tmp_path / "saved"]
        done = fresh.run(PUSH, *arguments, folder=tmp_path, env=env)
        assert done.code == 0, done.err
        repos = {"links": {"shown.png", "again.png"}, "cached": {"notes.png"}, "saved": {"README.md"}}
        for repo, pictures in repos.items():
            files = hub.files(f"someone/{repo}")
            assert set(files) - {".gitattributes"} == NAMES | pictures, repo
            assert not any(PRIVATE.encode() in content for content in files.values())
            assert files["monitor.py"] == own["monitor.py"] and files["model.safetensors"] == own["model.safetensors"]
        assert ("model", "someone/nothing") not in hub.repos
    said = [line for line in done.err.splitlines() if "lead out of" in line]
    assert any("README.md, key.png" in line for line in said) and any("key.png, other.png" in line for line in said)
    assert any("model.safetensors is a link that leads out of the folder" in line for line in done.err.splitlines())


def test_a_space_publishes_the_model_and_nothing_else(model_folder, image_folder, tmp_path, home):
    pytest.importorskip("gradio")
    own = (model_folder / "monitor.py").read_bytes()
    infest(model_folder, home)
    examples = shutil.copytree(image_folder / "test" / "oak", tmp_path / "examples")
    shutil.copyfile(examples / "0.png", tmp_path / "holiday.png")
    for number in range(20):
        plant(examples / f"link{number}.png", tmp_path / "holiday.png")
    write_space(str(model_folder), tmp_path / "space", str(examples))
    model = tmp_path / "space" / "model"
    assert {path.name for path in model.iterdir()} == NAMES and (model / "monitor.py").read_bytes() == own
    files = [path for path in (tmp_path / "space").rglob("*") if path.is_file()]
    assert not any(PRIVATE.encode() in path.read_bytes() for path in files)
    pixels = (tmp_path / "holiday.png").read_bytes()
    published = [path.read_bytes() for path in (tmp_path / "space" / "examples").iterdir()]
    assert 0 < len(published) <= 5 and published.count(pixels) <= 1  # 0.png itself is in the folder


TWICE = f"""
import sys
from avgk_hf.cli import main
for token in ["--hub_token", "{SECRET}"], ["--hub-token={SECRET}", "--resume_from_checkpoint", "last"]:
    assert main([*sys.argv[1:], *token]) == 0
"""


def test_a_token_is_in_no_file_and_no_output(recipe, image_folder, fresh, tmp_path):
    """Train, log, save, resume and push with a token, then look everywhere; local paths are in no pushed file."""
    options = ["--push_to_hub", "true", "--hub_model_id", "someone/trees", "--hub_strategy", "every_save"]
    options += ["--num_train_epochs", "1", "--report_to", "tensorboard"]
    with HubServer() as hub:
        hub.token = SECRET
        hub.fail("POST .*/commit/", times=1)
        env = environment(hub, tmp_path / "cache")
        arguments = ["--log", str(tmp_path / "log"), "train", str(recipe), *options]
        done = fresh.run(TWICE, *arguments, folder=tmp_path, env=env)
        assert done.code == 0, done.err
        printed = done.out + done.err
        pushed = hub.files("someone/trees")
        assert "model.safetensors" in pushed and "Training goes on" in printed
        for name, content in pushed.items():
            for private in (SECRET, str(tmp_path), str(image_folder)):
                assert private.encode() not in content, name
        assert not any(SECRET in request for request in hub.requests)
    assert SECRET not in printed
    log = (tmp_path / "log").read_text()
    assert "--hub_token ***\n" in log and "--hub-token=*** --resume_from_checkpoint last\n" in log
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert len(files) > 10
    for path in files:
        assert SECRET.encode() not in path.read_bytes(), path


def test_a_token_is_not_in_the_command_to_go_on_with(recipe, monkeypatch, capsys, tmp_path):
    def stopped(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr(train, "run", stopped)
    monkeypatch.setattr(train, "run_seeds", stopped)
    monkeypatch.setenv("HF_TOKEN", "of-the-environment")
    for secret, arguments in (
        (SECRET, ["--hub_token", SECRET, "--seeds", "2"]),
        (SECRET, [f"--hub_token={SECRET}", "--seeds", "2"]),
        (SECRET, ["--hub-token", SECRET, "--seeds", "2"]),
        (LIKE, ["--run_name", LIKE, "--seeds", "2"]),
        ("of-the-environment", ["--run_name", "of-the-environment", "--seeds", "2"]),
    ):
        assert main(["--log", str(tmp_path / "log"), "train", str(recipe), *arguments]) == 130
        error = capsys.readouterr().err
        assert f"go on with `avgk train {shlex.quote(str(recipe))}" in error and "***" in error
        assert "--seeds 2 --resume_from_checkpoint last`" in error
        assert secret not in error and secret not in (tmp_path / "log").read_text()


def test_a_token_is_in_no_hint(recipe, tmp_path, capsys):
    text = recipe.read_text()
    for value in (f'"{SECRET}\\n"', f"[{SECRET}]", f"{{{SECRET}: 1}}", f'"{SECRET} "', f'"{SECRET}ä"'):
        recipe.write_text(f"{text}hub_token: {value}\n")
        assert main(["--log", str(tmp_path / "log"), "train", str(recipe)]) == 2
    assert main(["train", str(recipe), "--hub_token", "Bearer", LIKE]) == 2
    recipe.write_text(text)
    assert main(["sweep", str(recipe), "--search", f"hub_token={SECRET},2"]) == 2
    (tmp_path / "compare.yaml").write_text(COMPARISON.replace("ce: {}", f"ce: {{hub_token: {SECRET}}}"))
    assert main(["compare", str(tmp_path / "compare.yaml")]) == 2
    printed = "".join(capsys.readouterr())
    assert SECRET not in printed and LIKE not in printed and SECRET not in (tmp_path / "log").read_text()


def test_a_token_is_in_no_record(recipe, tmp_path):
    args = AvgKTrainingArguments(str(tmp_path), hub_token=SECRET)
    assert SECRET.encode() not in pickle.dumps(args) and args.hub_token == SECRET  # training_args.bin is a pickle
    recipe.write_text(f"{recipe.read_text()}hub_token: {SECRET}\n")
    (tmp_path / "compare.yaml").write_text(COMPARISON)
    comparison = read_comparison(str(tmp_path / "compare.yaml"))
    trainer, _, config = run_trainer(comparison, plan(comparison)[0], str(tmp_path / "out"))
    assert trainer.args.hub_token == SECRET and "learning_rate" in config and SECRET not in json.dumps(config)


# ----------------------------------------------------------------------------------- images, and visitors of the page


# a picture that would be fetched, a script that would run, and both kinds of templates that Gradio fills in
HOSTILE = "<img src=x onerror=document.title='owned'>![p](http://127.0.0.1:9/p.png)${document.title='owned'}{{value}}"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
ALERT = 'role="alert"'


@pytest.fixture(scope="module")
def model_folder_page(tmp_path_factory):
    """A calibrated model of somebody else: every text in its records is hostile."""
    torch.manual_seed(0)
    labels = {i: f"{name} {HOSTILE}" for i, name in enumerate(CLASSES)}
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32)
    Calibration.store(model.config, {1: 0.3, 2: 0.1}, {"num_examples": 7, "dataset": HOSTILE})
    folder = tmp_path_factory.mktemp("page") / "<img src=x onerror=alert(1)>"
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served(model_folder_page, examples=(), **options):
    answers = Answers(load_classifier(str(model_folder_page)))
    built = build_page(answers, model_folder_page.name, examples)
    port = browser.free_port()
    launch(built, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, **options)
    try:
        yield built, f"http://127.0.0.1:{port}"
    finally:
        built.close(verbose=False)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "example.png"
    picture((20, 20)).save(path)
    return path


@pytest.fixture(scope="module")
def page_and_url(model_folder_page, example):
    with served(model_folder_page, [(example, 2)]) as found:
        yield found


@pytest.fixture
def visitor(page_and_url, request):
    return Visitor(page_and_url[1], request.node.name)


@pytest.fixture
def beacon():
    """A server on this machine that answers with an EPS and counts who asks."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(EPS)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/x.jpg", asked
        server.shutdown()


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A program `gs` that leaves a file when it is started."""
    started, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{started}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return started


def in_time(function, *args):
    """What a function gives; one that waits for ever is a failure, not a test that never ends."""
    found = []

    def run():
        try:
            found.append(function(*args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it never comes back"
    return found[0]


def eventually(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


# ------------------------------------------------------------------------------------------------------------- images


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes and devices in folders")
@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "device", "endless device", "folder"])
def test_only_regular_files_are_opened(kind, tmp_path, model_folder_page):
    path = tmp_path / "image.png"
    os.mkfifo(tmp_path / "fifo")
    if "device" in kind:
        path = Path("/dev/zero" if "endless" in kind else "/dev/null")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "fifo")
    transform = transform_for(load_classifier(str(model_folder_page)))
    for door in (open_image, transform.image, lambda found: open_image({"path": str(found), "bytes": None})):
        error = in_time(door, path)
        assert isinstance(error, ValueError) and "it is no regular file" in str(error)
    classify = pipeline("average-k-image-classification", model=str(model_folder_page))
    assert isinstance(in_time(classify, str(path)), FileNotFoundError)
    assert path not in image_files(tmp_path)


def test_an_eps_starts_no_program(ghostscript, tmp_path, model_folder_page, beacon):
    (tmp_path / "plan.jpg").write_bytes(EPS)
    (tmp_path / "plan.eps").write_bytes(EPS)
    with contextlib.suppress(Exception):
        Image.open(tmp_path / "plan.jpg").load()
    assert ghostscript.exists()  # what Pillow would do
    ghostscript.unlink()
    classify = pipeline("average-k-image-classification", model=str(model_folder_page))
    for door in (open_image, classify):
        with pytest.raises(ValueError, match=r"plan\.jpg cannot be read as an image"):
            door(str(tmp_path / "plan.jpg"))
    with pytest.raises(ValueError, match=r"x\.jpg cannot be read as an image"):
        classify(beacon[0])
    with pytest.raises(ValueError, match="cannot be read as an image"):
        open_image(EPS)
    assert not ghostscript.exists() and image_files(tmp_path) == [tmp_path / "plan.jpg"]


def test_only_known_formats_are_opened(tmp_path):
    Image.init()
    refused = []
    for name in sorted(set(Image.SAVE) & set(Image.OPEN) - set(FORMATS)):
        with contextlib.suppress(Exception):  # Pillow cannot write all of them here
            data = encode(picture((16, 16)), name)
            Image.open(io.BytesIO(data))
            refused.append((name, data))
    assert len(refused) > 5 and {"ICO", "TGA"} <= {name for name, _ in refused}
    for name, data in refused:
        if Image.open(io.BytesIO(data)).format not in (*FORMATS, "MPO"):
            with pytest.raises(ValueError, match="cannot be read as an image"):
                open_image(data, name=name)
    for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        assert open_image(encode(picture(), name)).size == picture().size


def test_16_bits_take_no_64():
    """The peak of what numpy holds; a file of 167 KB took 2.3 GB."""
    side = 1500
    data = encode(Image.fromarray(np.zeros((side, side), np.uint16)), "PNG")
    tracemalloc.start()
    try:
        open_image(data, "L")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * side**2


def tiled_tiff(size, tile):
    """A small image that announces a large tile."""
    compressor = zlib.compressobj(9)
    data = b"".join(compressor.compress(bytes(tile)) for _ in range(10)) + compressor.flush()
    short = {258: 8, 259: 8, 262: 1, 277: 1}
    tags = {256: size, 257: size, **short, 322: tile, 323: tile, 324: 8, 325: len(data)}
    fields = [
        struct.pack(
            "<HHI" + ("HH" if tag in short else "I"), tag, 3 if tag in short else 4, 1, value, *[0] * (tag in short)
        )
        for tag, value in tags.items()
    ]
    return (
        b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + b"".join(fields) + bytes(4)
    )


def test_the_tile_of_a_tiff_counts_as_its_size():
    assert Image.open(io.BytesIO(tiled_tiff(16, 30000))).size == (16, 16)
    with pytest.raises(ValueError, match="30000 x 30000 pixels, the limit is"):
        open_image(tiled_tiff(16, 30000))


def test_a_jpeg_cannot_ask_for_passes_without_end():
    """A scan of 42 bytes costs a pass over the whole image: 1 MB of them, nine minutes at 25 megapixels."""
    data = encode(picture((40, 30)), "JPEG", progressive=True)
    head, _, last = data.rpartition(b"\xff\xda")
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(Image.open(io.BytesIO(data))))
    with pytest.raises(ValueError, match="more than 500 scans"):
        open_image(head + (b"\xff\xda" + last[:-2]) * 501 + b"\xff\xd9")


def png_with(kind, chunk):
    """A PNG with one more chunk behind its header."""
    data = encode(picture(), "PNG")
    end = 8 + 25  # signature and header
    return (
        data[:end]
        + struct.pack(">I", len(chunk))
        + kind
        + chunk
        + struct.pack(">I", zlib.crc32(kind + chunk))
        + data[end:]
    )


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_compressed_metadata_does_not_unfold(kind):
    packed = zlib.compress(bytes(50 * 2**20))
    data = png_with(kind, {b"iTXt": b"k\0\1\0\0\0", b"zTXt": b"k\0\0", b"iCCP": b"k\0\0"}[kind] + packed)
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            open_image(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data) < 10**5 and peak < 10 * 2**20


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP"])
def test_later_frames_are_not_decoded(name, monkeypatch):
    """A million of them cost nothing."""
    data = animation(name)
    monkeypatch.setattr(type(Image.open(io.BytesIO(data))), "seek", lambda *args: pytest.fail("another frame"))
    assert open_image(data).size == picture().size


# ----------------------------------------------------------------------------------------------- files of the server


@pytest.mark.parametrize("meta", ["with meta", "without meta", "as a stream"])
def test_a_path_that_was_never_uploaded_is_not_opened(meta, visitor, example, tmp_path, beacon):
    picture().save(tmp_path / "private.png")
    (upload_folder() / "private.png").write_bytes((tmp_path / "private.png").read_bytes())
    fields = {"with meta": {}, "without meta": {"meta": None}, "as a stream": {"is_stream": True}}[meta]
    paths = [
        tmp_path / "private.png",
        tmp_path / "nothing.png",
        example,
        upload_folder() / "private.png",
        "/etc/passwd",
    ]
    answers = {visitor.look(str(path), **fields) for path in (*paths, beacon[0], "", f"file://{paths[0]}")}
    answers.add(visitor.look(os.path.relpath(paths[0]), **fields))
    taken, texts = zip(*answers, strict=True)
    assert not any(taken) and beacon[1] == []
    if meta == "without meta":  # what exists cannot be told from what does not
        assert set(texts) == {GONE}
    assert all("identify" not in str(text) for text in texts)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
def test_pipes_do_not_stop_the_page(visitor, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for number in range(5):
        visitor.session = f"fifo {number}"
        assert in_time(lambda: visitor.look(str(tmp_path / "fifo"), meta=None)) == (False, GONE)
    taken, text = visitor.look(visitor.upload(encode(picture(), "PNG")))
    assert taken and "for K = 2" in text


def test_the_url_of_an_image_is_not_fetched(visitor, beacon):
    path = visitor.upload(encode(picture(), "PNG"))
    assert visitor.look(path, url=beacon[0])[0]
    for fields in ({"path": None}, {"path": beacon[0], "orig_name": "x.png"}):
        visitor.look(**{"path": None, "url": beacon[0], **fields})
    for address in (f"file={beacon[0]}", f"proxy={beacon[0]}", "file=http://192.0.2.1/x.png"):
        assert visitor.http.get(f"/gradio_api/{address}").status_code == 404
    assert beacon[1] == []


def test_files_are_sent_only_if_they_were_uploaded_or_are_examples(visitor, page_and_url, example, tmp_path):
    picture().save(tmp_path / "private.png")
    (upload_folder() / "left.png").write_bytes(b"of another visitor")
    paths = [tmp_path / "private.png", example, "/etc/passwd", upload_folder() / "left.png", upload_folder()]
    for path in (*map(str, paths), f"{upload_folder()}/../{tmp_path}/private.png", "/dev/zero", "avgk_hf/cli.py"):
        for route in ("file=", "file/"):
            assert visitor.http.get(f"/gradio_api/{route}{path}").status_code == 404
    config = visitor.http.get("/config").json()
    (gallery,) = (c["props"]["value"] for c in config["components"] if c["type"] == "gallery")
    assert visitor.http.get(gallery[0]["image"]["url"]).content == example.read_bytes()
    assert visitor.look(gallery[0]["image"]["path"])[0]
    own = visitor.upload(encode(picture(), "PNG"))
    assert visitor.http.get(f"/gradio_api/file={own}").status_code == 200


def test_several_images_have_to_be_uploaded_too_and_are_not_kept(visitor, beacon, tmp_path):
    """The same door as for one, and no other address: the table stands in the answer."""
    picture().save(tmp_path / "private.png")
    meta = {"meta": {"_type": "gradio.FileData"}}
    own = [visitor.upload(encode(picture(seed=seed), "PNG"), f"{seed}.png") for seed in (400, 401)]
    for path in (str(tmp_path / "private.png"), "/etc/passwd", beacon[0], f"{own[0]}/../x.png"):
        refused = visitor.event(visitor.several, [[{"path": own[0], **meta}, {"path": path, **meta}]])
        assert not refused["success"] and "private" not in json.dumps(refused["output"])
    many = [{"path": path, **meta} for path in own] + [{"path": own[0], **meta}] * 32
    assert visitor.event(visitor.several, [many])["success"] and beacon[1] == []
    (text,) = visitor.event(visitor.table, [None, "average size", 2, None, 0])["output"]["data"]
    assert text.count('<th scope="row">') == 16 and "these were left out: 400.png, " in text and "and 2 more" in text
    assert "<script>" not in text and "onerror=alert(1)>" not in text  # the names of classes are hostile
    assert not any(map(os.path.exists, own))


@pytest.mark.parametrize("name", ["page.html", "drawing.svg", "code.js"])
def test_what_is_uploaded_cannot_run_as_a_page(name, visitor):
    path = visitor.upload(b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", name)
    headers = visitor.http.get(f"/gradio_api/file={path}").headers
    assert headers["content-type"].startswith("application/octet-stream")
    assert headers["content-disposition"].startswith("attachment")


def test_nothing_goes_past_the_queue_or_to_other_doors_of_gradio(visitor, page_and_url):
    body = {"data": [{"path": "/etc/passwd"}], "session_hash": "x"}
    names = {function.api_name for function in page_and_url[0].fns.values()} | {"read"}
    doors = [f"{door}/{name}" for door in ("run", "api", "call", "call/v2") for name in names]
    others = (
        "component_server",
        "process_recording",
        "vibe-code",
        "vibe-edit",
        "reset",
        "stream/x",
        "run-history/connect",
    )
    for door in (*doors, *others):
        assert visitor.http.post(f"/gradio_api/{door}", json={**body, "fn_index": visitor.read}).status_code == 404
    for door in ("/monitoring", "/docs", "/openapi.json", "/login", "/gradio_api/deep_link?session_hash=x"):
        assert visitor.http.get(door).status_code == 404


# ------------------------------------------------------------------------------------------------- memory and patience


@pytest.mark.parametrize("side", [5001, 9000, 10**5])
def test_the_page_refuses_large_images_before_it_decodes_them(side, visitor):
    taken, text = visitor.look(visitor.upload(png_header(side, side)))
    assert taken and ALERT in text and "limit" in text
    if side == 5001:
        assert f"{side} x {side} pixels, the limit is {MOST_PIXELS}" in text


def test_one_image_at_a_time_and_a_bounded_queue(model_folder_page, monkeypatch):
    go, inside, most = threading.Event(), [], []

    def slow(*args):
        inside.append(1)
        most.append(len(inside))
        go.wait(60)
        inside.pop()
        raise ValueError("enough")

    monkeypatch.setattr(Answers, "scores", slow)
    monkeypatch.setattr(page, "WAITING", 5)
    with served(model_folder_page) as (_, url):
        visitor = Visitor(url)
        path = visitor.upload(encode(picture(), "PNG"))
        answers = []
        for number in range(12):
            body = {"data": [{"path": path}], "fn_index": visitor.read, "session_hash": f"visitor {number}"}
            answers.append(visitor.http.post("/gradio_api/queue/join", json=body).status_code)
            eventually(lambda: most)
        go.set()
        eventually(lambda: len(most) >= 6 and not inside)
    assert max(most) == 1 and answers[:6] == [200] * 6 and answers[-5:] == [503] * 5


def test_requests_are_bounded(visitor, monkeypatch):
    """Whatever their header says; of uploads at once, too."""
    joined = visitor.event(visitor.read, ["x" * guard.MOST_ASKED])
    assert joined.status_code == 413
    assert visitor.upload(bytes(guard.MOST_UPLOADED)).status_code == 413
    many = [("files", (f"{number}.png", bytes(guard.MOST_UPLOADED // 8))) for number in range(10)]
    assert visitor.http.post("/gradio_api/upload", files=many).status_code == 413
    monkeypatch.setattr(guard, "MOST_UPLOADED", 10_000)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    start = b'--b\r\ncontent-disposition: form-data; name="files"; filename="x.png"\r\n\r\n'
    stream = iter([start, *[bytes(1000)] * 20])
    assert visitor.http.post("/gradio_api/upload", content=stream, headers=headers).status_code == 413
    monkeypatch.setattr(guard, "AT_ONCE", 0)
    assert visitor.upload(encode(picture(), "PNG")).status_code == 503


# ----------------------------------------------------------------------------------------------------------- uploads


def kept():
    # a folder that is removed meanwhile is no error here, as it would be of `rglob`
    return [Path(folder, name) for folder, _, names in os.walk(upload_folder()) for name in names]


def test_uploads_are_bounded_in_total(visitor, page_and_url, monkeypatch, example):
    monkeypatch.setattr(guard, "MOST_FILES", 3)
    paths = [visitor.upload(encode(picture(seed=seed), "PNG")) for seed in range(100, 108)]
    assert len(kept()) == 3 + 1  # and the example
    assert [os.path.exists(path) for path in paths] == [False] * 5 + [True] * 3
    assert any(path.name == example.name for path in kept())
    assert page_and_url[0].upload_file_set <= {str(path) for path in kept()}
    assert visitor.look(paths[0]) == (False, GONE) and visitor.look(paths[-1])[0]


def test_uploads_that_break_off_are_removed(visitor, page_and_url, monkeypatch):
    monkeypatch.setattr(guard, "MOST_FILES", 3)
    before = set(kept())
    address = page_and_url[1].removeprefix("http://").split(":")
    head = (
        f"POST /gradio_api/upload HTTP/1.1\r\nHost: {':'.join(address)}\r\nContent-Length: 100000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\ncontent-disposition: form-data; name="files"; filename="x.png"\r\n\r\n'
    )
    for _ in range(5):
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head.encode() + bytes(50000))
            eventually(lambda: set(kept()) - before)  # noqa: B023
        before = set(kept())
    visitor.upload(encode(picture(seed=200), "PNG"))
    assert len(kept()) <= 3 + 1


def test_the_image_of_a_visitor_is_removed_when_another_comes_and_when_he_leaves(visitor):
    first, second = (visitor.upload(encode(picture(seed=seed), "PNG")) for seed in (300, 301))
    other = Visitor(visitor.url, "other")
    assert visitor.look(first)[0] and other.look(first)[0]  # the same image of two
    assert visitor.look(second)[0] and os.path.exists(first)
    assert other.look(second)[0] and not os.path.exists(first) and os.path.exists(second)
    for leaving in (visitor, other):
        assert os.path.exists(second)
        with leaving.http.stream("GET", f"/gradio_api/heartbeat/{leaving.session}") as alive:
            next(alive.iter_lines())
        eventually(lambda leaving=leaving: leaving is visitor or not os.path.exists(second))


def test_an_example_that_a_visitor_uploads_stays(visitor, example):
    """Gradio keeps files by their content, so that it is the same file."""
    config = visitor.http.get("/config").json()
    (gallery,) = (c["props"]["value"] for c in config["components"] if c["type"] == "gallery")
    uploaded = visitor.upload(example.read_bytes(), example.name)
    assert uploaded == gallery[0]["image"]["path"]
    meta = {"meta": {"_type": "gradio.FileData"}}
    assert visitor.event(visitor.several, [[{"path": uploaded, **meta}]])["success"]
    assert visitor.look(uploaded)[0] and visitor.look(visitor.upload(encode(picture(seed=500), "PNG")))[0]
    assert visitor.http.get(gallery[0]["image"]["url"]).content == example.read_bytes()


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_other_users_of_the_machine_cannot_read_uploads():
    assert stat.S_IMODE(upload_folder().stat().st_mode) == 0o700


# ------------------------------------------------------------------------------------------------- names and origins


def test_a_foreign_name_for_this_machine_is_not_answered(visitor):
    port = visitor.url.rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0", ""):
        for path in ("/", "/config", "/gradio_api/queue/data?session_hash=first"):
            assert visitor.http.get(path, headers={"host": host}).status_code == 400, host
    for host in (f"localhost:{port}", "127.0.0.1:9000"):  # the second through a tunnel
        assert visitor.http.get("/config", headers={"host": host}).status_code == 200


def test_other_sites_cannot_send_requests_through_a_visitors_browser(visitor):
    data, port = encode(picture(), "PNG"), int(visitor.url.rpartition(":")[2])
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"http://evil.example:{port}"):
        assert visitor.upload(data, headers={"origin": origin}).status_code == 403
        answered = visitor.http.get("/config", headers={"origin": origin})
        assert answered.status_code == 403
    assert os.path.exists(visitor.upload(data, headers={"origin": visitor.url}))


def test_a_page_for_others_answers_to_its_public_name(model_folder_page, monkeypatch):
    """As in a Space, which listens on all addresses."""
    assert guard.is_local("127.0.0.9") and not guard.is_local("0.0.0.0") and not guard.is_local("192.0.2.1")
    monkeypatch.setattr(page, "is_local", lambda address: False)
    with served(model_folder_page) as (_, url):
        visitor = Visitor(url)
        public = {"host": "someone-trees.hf.space", "origin": "https://someone-trees.hf.space"}
        assert visitor.http.get("/config", headers=public).status_code == 200
        assert visitor.look(visitor.upload(encode(picture(), "PNG"), headers=public))[0]


# ---------------------------------------------------------------------------------------------------- records are text


def test_records_are_text_on_the_page(visitor, model_folder_page):
    components = visitor.http.get("/config").json()["components"]
    assert not any(component["type"] == "markdown" for component in components)
    taken, text = visitor.look(visitor.upload(encode(picture(), "PNG")))
    shown = [component["props"]["value"] for component in components if component["type"] == "html"]
    assert taken and "&lt;img" in text and "&lt;img" in shown[0]
    assert not any("<img" in value for value in (text, *shown))
    html = visitor.http.get("/").text
    assert "<img src=x" not in html
    taken, text = visitor.look(visitor.upload(b"no image", "<img src=x onerror=alert(1)>.png"))
    assert ALERT in text and "<img" not in text and "/" not in text.removesuffix("</p></div>")


@needs_browser
def test_hostile_records_do_nothing_in_a_browser(page_and_url, tmp_path):
    with browser.chromium() as driver:
        shown = browser.Page(driver, page_and_url[1])
        title = driver.title
        picture((30, 30)).save(tmp_path / "x.png")
        shown.upload(tmp_path / "x.png")
        shown.await_status("for K = 2")
        labels = [label for label, *_ in shown.rows("#avgk-set .in")]
        assert labels and all(label.endswith(HOSTILE) for label in labels)
        (tmp_path / "<img src=x onerror=document.title='owned'>.png").write_bytes(b"no image")
        shown.upload(tmp_path / "<img src=x onerror=document.title='owned'>.png")
        shown.await_status("cannot be read as an image")
        assert driver.title == title and "owned" not in title
        assert not shown.all("img[src*='p.png'], img[onerror]")
        asked = [address for address in shown.requests() if address.startswith("http")]
        assert asked and all(address.startswith(page_and_url[1]) for address in asked)


# -------------------------------------------------------------- datasets, recipes, cards and the tests' own downloads


GLOBALS = {"array": b"cnumpy.core.multiarray\n_reconstruct\n", "dtype": b"cnumpy\ndtype\n", "nd": b"cnumpy\nndarray\n"}


PLAIN = b"NNNJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00"


def array_pickle(dtype=b"U\x02u1", order=b"U\x01|", shape=b"K\x04", data=b"U\x04abcd", rest=PLAIN):
    """An array as CIFAR-100's files hold it, of which every part can be forged."""
    made = GLOBALS["array"] + GLOBALS["nd"] + b"K\x00\x85U\x01b\x87R"
    kind = GLOBALS["dtype"] + dtype + b"K\x00K\x01\x87R(K\x03" + order + rest + b"tb"
    return b"\x80\x02}U\x04data" + made + b"(K\x01(" + shape + b"t" + kind + b"\x89" + data + b"tbs."


FORGED = {
    "objects": array_pickle(dtype=b"U\x02O8", data=b"U\x08\x41\x41\x41\x41\x41\x41\x41\x41", shape=b"K\x01"),
    "objects by state": array_pickle(rest=b"NN(U\x01O)tJ\xff\xff\xff\xffJ\xff\xff\xff\xffK\x3f"),
    "size by state": array_pickle(rest=b"NNNJ\xff\xff\xff\x7fJ\x01\x00\x00\x00K\x00"),
    "fields": array_pickle(rest=b"N(U\x01ft}U\x01f(NK\x7ftsJ\xff\xff\xff\x7fJ\x01\x00\x00\x00K\x00"),
    "text": array_pickle(dtype=b"U\x02S9"),
    "shape": array_pickle(shape=b"J\xff\xff\xff\x7f"),
    "negative shape": array_pickle(shape=b"J\xfc\xff\xff\xffJ\xff\xff\xff\xff"),
    "overflowing shape": array_pickle(shape=b"\x8a\x05\x00\x00\x00\x00\x01" * 2, data=b"U\x00"),
    "shape of text": array_pickle(shape=b"U\x014"),
    "no bytes": array_pickle(data=b"]"),
    "fortran": array_pickle().replace(b"\x89U\x04abcd", b"\x88U\x04abcd"),
    "state of a dtype for an array": b"\x80\x02}U\x04data" + GLOBALS["dtype"] + b"(K\x01(K\x04tNN)tbs.",
    "state of a class": b"\x80\x02}U\x04data" + GLOBALS["nd"] + b"N}U\x07__len__K\x01s\x86bs.",
    "a class called": b"\x80\x02}U\x04data" + GLOBALS["nd"] + b"(J\xff\xff\xff\x7ft\x85Rs.",
    "a new object": b"\x80\x02}U\x04data" + GLOBALS["nd"] + b"K\x04\x85\x81s.",
    "an extension": b"\x80\x02}U\x04data\x82\x01s.",
    "persistent": b"\x80\x02}U\x04dataK\x01Qs.",
    "an empty stack": b"\x80\x02RRR.",
    "a mark too many": b"\x80\x02}U\x04data((K\x01\x86s.",
    "a key that is a list": b"\x80\x02}(](tK\x01s.",
    "memory by a number in the memo": b"\x80\x02}r\xff\xff\xff\x7fU\x04dataNs.",
    "memory by a stated length": b"\x80\x04}\x8e\xff\xff\xff\xff\xff\xff\xff\x00.",
    "memory by instructions": b"\x80\x02" + b"(" * (MOST_INSTRUCTIONS + 1),
    "memory by calls": b"\x80\x02](X\x00\x00\x10\x00" + b"a" * 2**20 + b"q\x00c_codecs\nencode\nq\x01"
    + b"h\x01h\x00U\x06latin1\x86R" * 4_000 + b"e.",
}  # fmt: skip


@pytest.mark.parametrize("case", FORGED)
def test_forged_arrays_are_refused(case, tmp_path):
    """Believed, each ends the process by a signal, takes all memory, or runs what it names."""
    folder = tmp_path / "cifar-100-python"
    write_cifar(folder)
    (folder / "train").write_bytes(FORGED[case])
    with pytest.raises(ValueError, match=r"train (cannot be read as CIFAR-100|has no 'fine_labels')"):
        load_splits(str(folder))


def pointers(kind, flags):
    """Eight bytes as an array of objects, whose dtype says by its flags that they need no care."""
    whole = b"cnumpy\ndtype\nX\x02\x00\x00\x00O8K\x00K\x01\x87R(K\x03X\x01\x00\x00\x00|" + PLAIN[:-1] + b"\x3ftb"
    field = b"NX\x01\x00\x00\x00f\x85}X\x01\x00\x00\x00f" + whole + b"K\x00\x86sK\x08K\x01K" + bytes([flags])
    rest = field if kind == "V8" else PLAIN[:-1] + bytes([flags])
    name = b"X\x02\x00\x00\x00" + kind.encode()
    made = array_pickle(dtype=name, order=b"X\x01\x00\x00\x00|", shape=b"K\x01", data=b"U\x08AAAAAAAA", rest=rest)
    return made.removesuffix(b".") + b"U\x0bfine_labels]K\x00as."


POINTED = """
import sys
from avgk_hf.data.cifar import load_cifar, Path
for folder in sys.argv[1:]:
    try:
        load_cifar(Path(folder))
    except ValueError as error:
        print(error)
"""


def test_forged_pointers_do_not_end_the_process(fresh, tmp_path):
    """Believed, the bytes are followed as addresses: a segmentation fault, or worse."""
    forged = {"V8": 0x01, "O8": 0x3D}
    for kind, flags in forged.items():
        write_cifar(tmp_path / kind)
        (tmp_path / kind / "train").write_bytes(pointers(kind, flags))
    done = fresh.run(POINTED, *(tmp_path / kind for kind in forged), folder=tmp_path)
    assert done.code == 0, f"ended by signal {-done.code}: {done.err}"
    for line, kind in zip(done.out.splitlines(), forged, strict=True):
        assert f"train cannot be read as CIFAR-100 (it holds an array of {kind!r}" in line


def test_nested_names_of_classes_are_refused(tmp_path):
    """To write out one list that holds another twice, 60 times over, would never end."""
    folder = tmp_path / "cifar-100-python"
    write_cifar(folder)
    nested = b"]q\x00(U\x01aU\x01be" + b"](h\x00h\x00eq\x00" * 60
    (folder / "meta").write_bytes(b"\x80\x02}U\x10fine_label_names](" + nested + b"es.")
    with pytest.raises(ValueError, match="'fine_label_names' is no list of bytes"):
        load_splits(str(folder))


LAUGHS = "a: &a [x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"{name}: &{name} [{', '.join([f'*{before}'] * 9)}]\n" for before, name in zip("abcdefgh", "bcdefghi", strict=True)
)
RECIPE = "model: test_resnet\ndataset: glyphs\noutput_dir: out\n"
BAD_YAML = {
    "nested aliases": (LAUGHS, "the alias *a is not followed; write the value out"),
    "nested aliases in a field": (RECIPE + LAUGHS + "model_args: {i: *i}\n", "the alias *a is not followed"),
    "a merge": ("model: &m {a: 1}\nmodel_args: {<<: *m}\n", "the alias *m is not followed"),
    "a list in itself": ("model: &m [*m]\n", "the alias *m is not followed"),
    "depth": ("model: " + "[" * 10_000, "not valid YAML"),
    "depth of mappings": ("model: " + "{a: " * 10_000, "not valid YAML"),
    "size": ("#" * 1_000_001, "are the most that is read"),
    "a number without end": (f"k: {'9' * 100_000}\n", "not valid YAML"),
    "a set": (RECIPE + "model_args: {a: !!set {x, y}}\n", "not valid YAML"),
    "bytes": (RECIPE + "model_args: {a: !!binary aGk=}\n", "not valid YAML"),
    "an object": ("model: !!python/object/apply:os.system ['touch RUN']\n", "not valid YAML"),
    "an object in a list": ("calibrate_k: [!!python/object/new:os.system ['touch RUN']]\n", "not valid YAML"),
    "a name": ("model: !!python/name:os.system\n", "not valid YAML"),
}


@pytest.mark.parametrize("command", ["train", "sweep", "compare"])
@pytest.mark.parametrize("case", BAD_YAML)
def test_yaml_that_unfolds_or_makes_objects_is_refused(case, command, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text, reason = BAD_YAML[case]
    (tmp_path / "file.yaml").write_text(text)
    assert main([command, "file.yaml"]) == 2
    said = capsys.readouterr().err
    assert reason in said and said.count("\n") == 1 and len(said) < 1_000
    assert [path.name for path in tmp_path.iterdir()] == ["file.yaml"]


def test_dates_in_a_recipe_are_text(tmp_path):
    (tmp_path / "file.yaml").write_text(RECIPE + "run_name: 2024-05-01\nmodel_args: {a: 2024-05-01}\n")
    model_args, _, args = parse_recipe([str(tmp_path / "file.yaml")])
    assert (model_args.model_args, args.run_name) == ('{"a": "2024-05-01"}', "2024-05-01")


@pytest.mark.parametrize("text", ["[" * 100_000, '{"a":' * 100_000, "[1]", "9" * 100_000])
def test_absurd_json_is_one_line_data(text, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["train", "recipe.yaml", "--dataset", str(image_folder), "--model_args", text]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "not a mapping in JSON" in said
    write_plantnet(tmp_path / "plants")
    (tmp_path / "plants" / "plantnet300K_species_id_2_name.json").write_text(text)
    with pytest.raises(
        ValueError, match=r"species_id_2_name\.json (is not valid JSON|nests more|must hold a mapping)"
    ):
        load_splits(str(tmp_path / "plants"))


def test_searches_without_end_are_refused(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    fields = ("learning_rate", "weight_decay", "num_train_epochs", "warmup_steps", "max_grad_norm", "lr_gamma")
    values = "{" + ", ".join(f"{name}: {list(range(1, 1000))}" for name in fields) + "}"
    (tmp_path / "sweep.yaml").write_text(f"recipe: recipe.yaml\nsearch: {values}\n")
    (tmp_path / "compare.yaml").write_text(f"recipe: recipe.yaml\nlosses: {{ce: {{}}}}\nk: [2]\nshared: {values}\n")
    for command in ("sweep", "compare"):
        assert main([command, str(tmp_path / f"{command}.yaml")]) == 2
        assert "combinations are more than" in capsys.readouterr().err


@pytest.fixture
def secret(tmp_path):
    """An image of the reader that the dataset has no business with."""
    (tmp_path / "private").mkdir()
    Image.new("RGB", (8, 8)).save(tmp_path / "private" / "secret.png")
    return tmp_path / "private" / "secret.png"


@pytest.fixture
def listener():
    """An address that notes who asks for it."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_error(404)

        do_HEAD = do_GET

        def log_message(self, *args):
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"127.0.0.1:{server.server_port}", asked
        server.shutdown()


def write_folder(folder):
    for split in ("train", "validation", "test"):
        for name in ("ash", "elm"):
            (folder / split / name).mkdir(parents=True)
            Image.new("RGB", (8, 8)).save(folder / split / name / "0.png")
    return folder


PLACES = ["http://{web}/x.csv", "https://{web}/x.csv", "zip://x.csv::http://{web}/x.zip", "hf://datasets/a/b/x.csv"]
PLACES += ["s3://bucket/x.csv", "file://{secret}", "{secret}", "../private/*.png", "train/../../private/*", "~/*.png"]
READMES = {
    "text": "configs:\n- config_name: default\n  data_files: '{place}'\n",
    "splits": "configs:\n- config_name: default\n  data_files:\n  - {{split: train, path: ['train/*', '{place}']}}\n",
    "a second one": "configs:\n- config_name: a\n  data_files: 'train/*'\n- config_name: b\n  data_dir: '{place}'\n",
}


@pytest.mark.parametrize(("place", "form"), crossed(PLACES, READMES))
def test_a_readme_points_to_its_folder_only(place, form, secret, listener, tmp_path, monkeypatch):
    for name in ("HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE"):
        monkeypatch.setattr(f"datasets.config.{name}", False, raising=False)
    folder = write_folder(tmp_path / "trees")
    place = place.format(web=listener[0], secret=secret)
    yaml = READMES[form].format(place=place)
    for file, text in (("README.md", f"---\n{yaml}---\n# Trees\n"), (".huggingface.yaml", yaml)):
        (folder / file).write_text(text)
        with pytest.raises(ValueError, match=rf"{file} points to '{re.escape(place)}', outside .*allow_outside"):
            load_splits(str(folder))
        (folder / file).unlink()
    assert listener[1] == []


@pytest.mark.parametrize(
    "text", [LAUGHS, "configs:\n- config_name: a\n  storage_options: {key: x}\n", "a: !!python/name:os.system"]
)
def test_other_readmes_are_refused(text, tmp_path):
    folder = write_folder(tmp_path / "trees")
    (folder / "README.md").write_text(f"---\n{text}\n---\n")
    with pytest.raises(ValueError, match=r"(the YAML of .*\.md cannot be read|md sets .storage_options.)"):
        load_splits(str(folder))


def test_an_honest_readme_is_followed(tmp_path):
    folder = write_folder(tmp_path / uuid.uuid4().hex)  # `datasets` caches by this name and the README alone
    (folder / "README.md").write_text("---\nlicense: mit\nconfigs:\n- config_name: default\n  data_files:\n"
                                      "  - split: test\n    path: 'test/**'\n---\n")  # fmt: skip
    assert list(load_splits(str(folder))) == ["test"]


LINKS = {"image": "train/ash/1.png", "folder": "train/fir", "table": "train.csv", "readme": "README.md"}


@pytest.mark.parametrize("kind", LINKS)
def test_links_that_lead_out_are_refused(kind, secret, tmp_path):
    folder = write_folder(tmp_path / "trees")
    (folder / LINKS[kind]).symlink_to(secret.parent if kind == "folder" else secret)
    with pytest.raises(ValueError, match=f"{LINKS[kind]} is a link that leads out of .*--allow-outside"):
        load_splits(str(folder))
    if kind == "image":
        assert len(load_splits(str(folder), allow_outside=True)["train"]) == 3
    if kind == "folder":
        with pytest.raises(ValueError, match=r"train/fir is a link to a folder, and is not followed"):
            load_splits(str(folder), allow_outside=True)


def test_links_of_archives_are_refused(secret, tmp_path):
    write_cifar(tmp_path / "cifar")
    (tmp_path / "cifar" / "meta").unlink()
    (tmp_path / "cifar" / "meta").symlink_to(secret)
    write_plantnet(tmp_path / "plants")
    (tmp_path / "plants" / "images" / "train" / "9" / "x.jpg").symlink_to(secret)
    for folder in ("cifar", "plants"):
        with pytest.raises(ValueError, match="is a link that leads out of"):
            load_splits(str(tmp_path / folder))


def test_links_within_the_folder_are_followed(tmp_path):
    folder = write_folder(tmp_path / "trees")
    (folder / "train" / "ash" / "1.png").symlink_to("0.png")
    (tmp_path / "link").symlink_to(folder)
    assert len(load_splits(str(tmp_path / "link"))["train"]) == 3
    snapshot = tmp_path / "datasets--a--b" / "snapshots" / "0123"
    write_folder(snapshot)
    (tmp_path / "datasets--a--b" / "blobs").mkdir()
    (snapshot / "train" / "ash" / "0.png").rename(tmp_path / "datasets--a--b" / "blobs" / "45")
    (snapshot / "train" / "ash" / "0.png").symlink_to("../../../../blobs/45")
    assert len(load_splits(str(snapshot))["train"]) == 2


LINKED = ["images", "a class that is called like a split", "a README that names the files", "parquet", "saved"]


@pytest.mark.parametrize("kind", LINKED)
def test_the_folder_that_is_named_may_be_a_link(kind, secret, tmp_path, monkeypatch):
    """What its reader names, he means; only what lies in it may not lead out."""
    folder = write_folder(tmp_path / "disk" / uuid.uuid4().hex)
    if kind == LINKED[1]:
        Image.new("RGB", (8, 8)).save(folder / "train" / "ash" / "1.png")
        for split in ("train", "test"):
            (folder / split / "train").mkdir()
            Image.new("RGB", (8, 8)).save(folder / split / "train" / "0.png")
    elif kind == LINKED[2]:
        yaml = "configs:\n- config_name: default\n  data_files:\n  - {split: train, path: 'train/**'}\n"
        (folder / "README.md").write_text(f"---\n{yaml}---\n")
    elif kind in LINKED[3:]:
        train, folder = load_splits(str(folder))["train"], tmp_path / "disk" / kind
        folder.mkdir()
        own = train.cast_column("image", ImageFeature(decode=False)).map(
            lambda row: {"image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}}
        )
        own.to_parquet(folder / "train.parquet") if kind == "parquet" else own.save_to_disk(folder)
    number = len(load_splits(str(folder))["train"])
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my_plants").symlink_to(folder)
    (tmp_path / "far").symlink_to(folder.parent)
    for name in ("my_plants", "./my_plants", str(tmp_path / "my_plants"), f"far/{folder.name}"):
        assert len(load_splits(name)["train"]) == number
    if kind in LINKED[:3]:
        (folder / "train" / "ash" / "9.png").symlink_to(secret)
        with pytest.raises(ValueError, match=r"9\.png is a link that leads out of my_plants"):
            load_splits("my_plants")


def test_what_is_refused_is_not_blamed_on_a_readme(tmp_path, monkeypatch):
    folder = write_folder(tmp_path / "trees")
    monkeypatch.setattr("avgk_hf.data.boundary._within", lambda path, roots: False)
    with pytest.raises(ValueError) as refused:
        load_splits(str(folder))
    assert "0.png would be read with it, which lies outside of it" in str(refused.value)
    assert "README" not in str(refused.value) and "empty or broken" not in str(refused.value)


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = write_folder(tmp_path / "trees")
    os.mkfifo(folder / "train" / "ash" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png is neither a file nor a folder"):
        load_splits(str(folder))


IMAGES = ["{secret}", "{folder}/../private/secret.png", "../private/secret.png"]
IMAGES += ["http://{web}/x.png", "hf://datasets/a/b/x.png", "s3://bucket/x.png", "zip://x.png::http://{web}/x.zip"]
IMAGES += ["file://{secret}", "{folder}/.."]


@pytest.mark.parametrize(("image", "kind"), crossed(IMAGES, ["csv", "jsonl", "parquet", "saved"]))
def test_images_stay_inside_the_folder(image, kind, secret, listener, tmp_path):
    folder = tmp_path / "table"
    folder.mkdir()
    Image.new("RGB", (8, 8)).save(folder / "own.png")
    paths = [str(folder / "own.png"), image.format(secret=secret, folder=folder, web=listener[0])]
    if kind in ("csv", "jsonl"):
        frame = pandas.DataFrame({"image": paths, "label": [0, 1]})
        text = frame.to_csv(index=False) if kind == "csv" else frame.to_json(orient="records", lines=True)
        (folder / f"train.{kind}").write_text(text)
    else:
        stored = [{"bytes": None, "path": path} for path in paths]
        features = Features(image=ImageFeature(), label=ClassLabel(2))
        table = Dataset.from_dict({"image": stored, "label": [0, 1]}, features)
        # as arrow holds it, because the library itself would store the bytes of a file that it finds
        if kind == "parquet":
            pq.write_table(table.data.table, folder / "train.parquet")
        else:
            Dataset.from_dict({"image": paths, "label": [0, 1]}).save_to_disk(folder)
    with pytest.raises(ValueError, match=r"names the image .*, outside of it"):
        load_splits(str(folder))
    if image == "{secret}":
        assert len(load_splits(str(folder), allow_outside=True)["train"]) == 2
    assert listener[1] == []


@pytest.mark.parametrize("name", ["{secret}", "../private/secret.png", "http://{web}/x.png", "file://{secret}"])
@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_metadata_names_files_of_its_folder(name, kind, secret, listener, tmp_path):
    folder = tmp_path / "trees"
    (folder / "train").mkdir(parents=True)
    Image.new("RGB", (8, 8)).save(folder / "train" / "own.png")
    rows = {"file_name": ["own.png", name.format(secret=secret, web=listener[0])], "label": ["ash", "elm"]}
    frame = pandas.DataFrame(rows)
    text = frame.to_csv(index=False) if kind == "csv" else frame.to_json(orient="records", lines=True)
    (folder / "train" / f"metadata.{kind}").write_text(text)
    with pytest.raises(ValueError, match=r"dataset .* (cannot be read|names the image)"):
        load_splits(str(folder))
    assert listener[1] == []


def test_saved_datasets_name_files_of_their_folder(tmp_path):
    data = DatasetDict({"train": Dataset.from_dict({"image": ["x"], "label": [0]})})
    data["train"].save_to_disk(tmp_path / "private")
    for name, place in (("dataset_dict.json", "."), ("state.json", "train")):
        data.save_to_disk(tmp_path / name)
        path = tmp_path / name / place / name
        old = "train" if name == "dataset_dict.json" else "data-00000-of-00001.arrow"
        path.write_text(path.read_text().replace(old, f"../../private/{old}"))
        with pytest.raises(ValueError, match=f"{name} names '../../private/{old}', which is no file beside it"):
            load_splits(str(tmp_path / name))


def test_a_script_in_a_dataset_folder_is_not_run(tmp_path):
    folder, mark = write_folder(tmp_path / "trees"), tmp_path / "mark"
    for script in ("dataset.py", "__init__.py", "conftest.py", "builder.py"):
        (folder / script).write_text(f"open({str(mark)!r}, 'w')")
    assert len(load_splits(str(folder))["train"]) == 2
    (folder / "trees.py").write_text(f"open({str(mark)!r}, 'w')")
    with pytest.raises(ValueError, match="cannot be read"):
        load_splits(str(folder))
    assert not mark.exists()


def test_other_formats_are_not_read(tmp_path):
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.xml").write_text("<image>x</image>")
    with pytest.raises(ValueError, match="it would be read as xml; only imagefolder"):
        load_splits(str(tmp_path / "data"))


@pytest.mark.parametrize("command", ["calibrate", "evaluate", "export", "train", "sweep", "compare"])
def test_every_command_stays_inside_the_folder(command, secret, make_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    folder = write_folder(tmp_path / "trees")
    (folder / "test" / "ash" / "1.png").symlink_to(secret)
    (tmp_path / "recipe.yaml").write_text(RECIPE.replace("glyphs", "trees"))
    (tmp_path / "compare.yaml").write_text("{recipe: recipe.yaml, losses: {ce: {}}, shared: {lr_gamma: [1]}, k: [1]}")
    if command in ("calibrate", "evaluate", "export"):
        model = make_model(num_labels=2, k=1, id2label={0: "ash", 1: "elm"})
        Calibration.store(model.config, {1: 0.5}, {})
        model.save_pretrained("model")
    arguments = {
        "calibrate": ["model", "trees"],
        "evaluate": ["model", "trees"],
        "export": ["model", "--onnx", "--dataset", "trees"],
        "train": ["recipe.yaml"],
        "sweep": ["recipe.yaml", "--search", "alpha=1,2"],
        "compare": ["compare.yaml"],
    }
    assert main([command, *arguments[command]]) == 2
    assert "1.png is a link that leads out of trees" in capsys.readouterr().err


EVIL = {
    "escapes": "oak\x1b[2J\x1b]0;title\x07",
    "one byte of C1": "oak\x9b2J",
    "a row": "oak\n  1.0000  elm",
    "a row by return": "oak\r  1.0000  elm",
    "a row by others": "oak\x0b\x0c\x1c\x85\u2028\u2029elm",
    "backwards": "oak\u202egnp.mle\u2066",
    "nothing to see": "oak\u200b\ufeff",
    "erased": "oak\b\b\b\x7felm",
}


def without_bars(text):
    """What was printed besides the progress of loading and of the evaluation."""
    return "\n".join(line for line in text.split("\n") if not re.search(r"%\||(it|examples)/s\]", line))


def is_plain(text):
    return all(line.isprintable() for line in text.split("\n"))


@pytest.mark.parametrize("case", EVIL)
def test_labels_and_names_cannot_paint_the_terminal(case, make_model, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    model = make_model(num_labels=2, k=1, id2label={0: EVIL[case], 1: "elm"})
    Calibration.store(model.config, {1: 0.0}, {})
    model.save_pretrained("model")
    name = f"{EVIL[case]}.png"
    Image.new("RGB", (8, 8)).save(name, format="PNG")
    (tmp_path / f"bad {name}").write_text("no image")
    command = ["predict", "model", name, f"bad {name}", "--lambda-val", "0", "--on-bad-image", "skip"]
    capsys.readouterr()
    assert main(["--log", "log.txt", *command]) == 1
    printed = capsys.readouterr()
    said = without_bars(printed.err)
    assert is_plain(printed.out) and is_plain(said)
    assert printed.out.count("\n") == 3 and said.count("\n") == 3  # no row was forged
    log = without_bars((tmp_path / "log.txt").read_text())
    assert is_plain(log) and log.count("\n") == 1 + 3 + 3
    for how in ("--csv", "--json"):
        assert main([*command, how]) == 1
        if how == "--csv":
            assert is_plain(capsys.readouterr().out)
    out = capsys.readouterr().out
    assert is_plain(out.replace("\x7f", ""))
    assert EVIL[case] in {item["label"] for item in json.loads(out)[0]["set"]}
    assert main(["predict", "model", f"bad {name}"]) == 2
    assert is_plain(without_bars(capsys.readouterr().err))


@pytest.mark.parametrize("case", EVIL)
def test_class_folders_cannot_paint_the_terminal(case, make_model, tmp_path, monkeypatch, capsys):
    """`avgk evaluate` names a class that the model does not know."""
    monkeypatch.chdir(tmp_path)
    model = make_model(num_labels=2, k=1, id2label={0: "ash", 1: "elm"})
    Calibration.store(model.config, {1: 0.5}, {})
    model.save_pretrained("model")
    folder = write_folder(tmp_path / "trees")
    (folder / "test" / "ash").rename(folder / "test" / EVIL[case])
    for command in ("evaluate", "calibrate"):
        capsys.readouterr()
        main([command, "model", "trees", "--split", "test"])
        printed = capsys.readouterr()
        assert is_plain(printed.out) and is_plain(without_bars(printed.err))


def finished_run(folder, **fields):
    metrics = {"average_k_accuracy": 0.9, "mean_set_size": 1.0, "lambda_val": 0.5, "top1_accuracy": 0.9}
    results = {"dataset": "trees", "data": {}, "objective": "ce", "k": 1, "seed": 0, "hyperparameters": {}}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "results.json").write_text(json.dumps({**results, "validation": metrics, "recipe": None, **fields}))
    return folder


HOSTILE_DATA = [
    *EVIL.values(),
    "x | 100.00 | y",
    "x\n\n## Results\n\n| a |\n|---|\n| 100 |",
    "<img src=http://a.b/c.png>",
]
HOSTILE_DATA += ["![x](http://a.b/c.png)", "[x](javascript:alert(1))", "`x`", "```\nx\n```", "# x", "- x", "1. x"]
HOSTILE_DATA += ["http://a.b", "www.a.b", "a@b.c", "*x*", "__x__", "~~x~~", "&lt;img&gt;", "$x$", "\\| x", "---"]
HOSTILE_DATA += ["x\n---\ny: z", "x: y", "{{ k }}"]
LIVE = r"!\[x\]|(?<!\\)(\[x|<img|&lt;|~~x|__x)|http://a\.b|www\.a|a@b"  # what would be more than text


@pytest.mark.parametrize("value", HOSTILE_DATA)
def test_reports_show_records_as_text(value, tmp_path, capsys):
    runs = [finished_run(tmp_path / name, data={"dataset": text}) for name, text in (("a", value), ("b", "plain"))]
    assert main(["report", *map(str, runs), "--out", str(tmp_path / "report")]) == 0
    printed = capsys.readouterr().out
    rows = [line for line in printed.split("\n") if line.startswith("|")]
    assert is_plain(printed) and len(rows) == 4
    assert {len(re.findall(r"(?<!\\)\|", row)) for row in rows} == {len(re.findall(r"\|", rows[0]))}


def test_a_metric_that_is_no_number_is_refused(tmp_path, capsys):
    run = finished_run(tmp_path / "a", validation={"average_k_accuracy": ["![x](http://a.b)"]})
    assert main(["report", str(run), "--out", str(tmp_path / "report")]) == 2
    assert "validation.average_k_accuracy=" in capsys.readouterr().err


@pytest.mark.parametrize("value", HOSTILE_DATA)
def test_the_card_escapes_every_value(value):
    def render(value):
        shown = {"architecture": "test_resnet", "pretrained_cfg": {"input_size": [3, 32, 32]}}
        config = AvgKConfig(**shown, k=1, id2label={0: value, 1: "elm", 2: "fir"})
        config.head, config.heads = "auto", {"1": "ml"}
        record = {"num_examples": [value], "dataset": value, "split": value, "date": {"a": value}}
        config.calibration = {**record, "step": value, "head": value}
        config.thresholds, config.heads = {"1": 0.5}, {"1": "ml"}
        metrics = {"average_k_accuracy": 0.5, "mean_set_size": 2.0, "lambda_val": 0.1, "top1_accuracy": 0.4}
        results, name = {"test": metrics}, value.replace("/", "-")
        on_hub = render_card(name, config, results, {}, "someone/data").content
        assert yaml.safe_load(on_hub.split("\n---\n")[0].removeprefix("---\n"))["model-index"][0]["name"] == name
        return render_card(name, config, results, {value: value}, value).content

    def text_of(content):
        """The body without its block of code, which holds the name as a string of Python."""
        body, code = content.split("\n---\n", 1)[1], content.split("```python\n")[1].split("\n```\n")[0]
        compile(code, "card", "exec")
        return body.replace(code, "", 1)

    def shape(content):
        """What each line begins with, and its cells."""
        marks = re.compile(r"\s*(#+ |[-+*] |\d+[.)] |>|```|~~~|---|===|\||<|\[|!)?")
        lines = text_of(content).split("\n")
        return [(marks.match(line)[1], len(re.findall(r"(?<!\\)\|", line))) for line in lines]

    content = render(value)
    assert shape(content) == shape(render("plain"))
    front, body = content.split("\n---\n", 1)
    assert "model-index" not in yaml.safe_load(front.removeprefix("---\n"))
    assert not re.search(LIVE, text_of(content))
    assert is_plain(body.replace("\x7f", ""))


def write_sdist(folder, version, mark):
    """A source distribution whose setup.py leaves a mark when it runs."""
    files = {"setup.py": f"open({str(mark)!r}, 'w')", "PKG-INFO": f"Name: transformers\nVersion: {version}\n"}
    files |= {f"tests/{name}": f"open({str(mark)!r}, 'w')" for name in transformers_suite.FILES}
    folder.mkdir()
    with tarfile.open(folder / f"transformers-{version}.tar.gz", "w:gz") as archive:
        for name, text in files.items():
            member = tarfile.TarInfo(f"transformers-{version}/{name}")
            member.size = len(text)
            archive.addfile(member, io.BytesIO(text.encode()))


def test_tests_fetched_from_an_index_are_not_built(tmp_path, monkeypatch):
    version, mark = next(iter(transformers_suite.HASHES)), tmp_path / "mark"
    write_sdist(tmp_path / "index", version, mark)
    here = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(tmp_path / "index"), "PIP_CONFIG_FILE": os.devnull}
    for name, value in here.items():
        monkeypatch.setenv(name, value)
    program = Path(transformers_suite.__file__).with_name("sdist.py")
    subprocess.run([sys.executable, str(program), "transformers", version, str(tmp_path / "file")], check=True)
    served = tmp_path / "index" / f"transformers-{version}.tar.gz"
    assert (tmp_path / "file").read_bytes() == served.read_bytes() and not mark.exists()
    with pytest.raises(ValueError, match="has the SHA-256"):  # what the index serves is not what was reviewed
        transformers_suite.archive(version, tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == [] and not mark.exists()


def test_tests_in_the_cache_are_checked_again(tmp_path):
    version = next(iter(transformers_suite.HASHES))
    write_sdist(tmp_path / "cache", version, tmp_path / "mark")
    with pytest.raises(ValueError, match="has the SHA-256"):
        transformers_suite.archive(version, tmp_path / "cache")
    with pytest.raises(ValueError, match=r"states none for 4\.0"):
        transformers_suite.archive("4.0", tmp_path / "cache")


def test_dependencies_are_bounded_and_not_built():
    root = Path(__file__).parent.parent
    text = (root / "pyproject.toml").read_text()
    lists = re.findall(r"(?ms)^(?:requires|dependencies|demo|sweep|app|onnx|docs|dev) = (\[.*?\])$", text)
    names = [name for found in lists for name in ast.literal_eval(found) if not name.startswith("avgk_hf")]
    assert len(names) > 30 and all(re.fullmatch(r"[\w\[\]-]+>=[\d.]+,<\d+", name) for name in names), names
    installs = [line for line in (root / "Makefile").read_text().splitlines() if "pip install" in line]
    own = [line for line in installs if "--no-build" not in line and "--only-binary :all:" not in line]
    assert len(installs) == 4 and [line.split()[-2:] for line in own] == [["--editable", "."]]
