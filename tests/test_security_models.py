"""Models of strangers: what a folder or a config.json may lead to. Each test is an attack that must be refused."""

import http.server
import json
import os
import pickle
import resource
import shutil
import subprocess
import sys
import threading
from io import BytesIO
from pathlib import Path

import pytest
import timm
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoImageProcessor, AutoModelForImageClassification, pipeline

from avgk_hf import AvgKConfig, AvgKForImageClassification
from avgk_hf.backbones import MODEL_ARGS, MOST_SIDE, check_model_args, create_backbone, known_cfg
from avgk_hf.calibrate import image_processor, load_classifier
from avgk_hf.modeling import check_folder
from avgk_hf.train import build_model, parse_recipe
from conftest import save_vit

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
    model.config.set_calibration({2: 0.1}, record={})
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


def test_hub_repos_fetch_nothing_else(server, tmp_path):
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
    done = subprocess.run([sys.executable, "-c", code], env=environment, check=True, capture_output=True, text=True)
    assert "model_args: 'cache_dir' is not among the arguments" in done.stdout
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
