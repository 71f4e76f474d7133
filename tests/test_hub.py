"""Pushing to a Hub and loading from it, with the real clients, and what is left when the connection fails."""

import json
import math
import os
import re
import shutil
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import timm
from forked import Forks
from hub_server import HubServer, card_errors
from safetensors.torch import save_file
from test_layers import remote_files
from transformers import pipeline

import avgk_hf
from archives import write_cifar
from avgk_hf.calibration import Calibration
from avgk_hf.cli import main
from conftest import CLASSES, save_vit, write_images


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    """A Hub, and programs of a user who knows no other."""
    home = tmp_path_factory.mktemp("home")
    nowhere = "http://127.0.0.1:9"  # nothing listens there: no program may reach for the internet
    foreign = re.compile("HF_|HUGGING|TRANSFORMERS_|.*_PROXY$", re.IGNORECASE)
    env = {name: value for name, value in os.environ.items() if not foreign.match(name)}
    env.update(HF_TOKEN=HubServer.token, HF_HOME=str(home), HF_HUB_DISABLE_XET="1")
    env.update(HF_HUB_DISABLE_TELEMETRY="1", HF_UPDATE_DOWNLOAD_COUNTS="0", HF_HUB_DISABLE_PROGRESS_BARS="1")
    env.update(HTTP_PROXY=nowhere, HTTPS_PROXY=nowhere, NO_PROXY="127.0.0.1")
    with HubServer() as hub, Forks({**env, "HF_ENDPOINT": hub.url}) as forks:
        yield hub, forks, home


@pytest.fixture
def hub(server):
    server[0].clear()
    return server[0]


@pytest.fixture
def client(server):
    """Run a program as a user with an empty cache would, and return what it prints last, read as JSON."""
    _, forks, home = server

    def run(code: str, *args):
        shutil.rmtree(home)
        home.mkdir()
        status, out, err = forks.run(code, *args, folder=home)
        assert status == 0, err
        return json.loads(out.splitlines()[-1]) if out else None

    return run


@pytest.fixture
def model_folder(make_model, tmp_path):
    model = make_model()
    Calibration.store(model.config, {2: 0.1}, {"num_examples": 3})
    model.save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def downloads(hub: HubServer) -> list[str]:
    return [request.rpartition("/")[2] for request in hub.requests if re.match("GET .*/resolve/", request)]


UPLOAD = """
import sys
from huggingface_hub import create_repo, upload_folder
_, folder, repo_id, repo_type = sys.argv
create_repo(repo_id, repo_type=repo_type, exist_ok=True, space_sdk="gradio" if repo_type == "space" else None)
upload_folder(repo_id=repo_id, repo_type=repo_type, folder_path=folder)
"""

ROUND_TRIP = """
import sys
from pathlib import Path
from huggingface_hub import *
from huggingface_hub.utils import EntryNotFoundError, HfHubHTTPError, RepositoryNotFoundError, RevisionNotFoundError
folder = Path(sys.argv[1])
assert whoami()["name"] == "someone"
for wrong, expected in (
    (lambda: create_repo("someone/tiny"), HfHubHTTPError),
    (lambda: model_info("someone/else"), RepositoryNotFoundError),
    (lambda: model_info("someone/tiny", revision="v2"), RevisionNotFoundError),
    (lambda: hf_hub_download("someone/tiny", "none.json"), EntryNotFoundError),
):
    try:
        wrong()
    except expected:
        continue
    raise AssertionError(expected)

names = sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())
assert list_repo_files("someone/tiny") == names
assert [entry.path for entry in list_repo_tree("someone/tiny")] == sorted(path.name for path in folder.iterdir())
assert [file.path for file in list_repo_tree("someone/tiny", "notes")] == ["notes/read me.txt"]
info = model_info("someone/tiny")
assert sorted(file.rfilename for file in info.siblings) == names
for name in names * 2:
    path = hf_hub_download("someone/tiny", name)
    assert Path(path).read_bytes() == (folder / name).read_bytes() and info.sha in path, name
snapshot = Path(snapshot_download("someone/tiny"))
assert all((snapshot / name).read_bytes() == (folder / name).read_bytes() for name in names)
same = upload_folder(repo_id="someone/tiny", folder_path=folder)
assert same.oid == info.sha  # nothing has changed, so there is no new revision
delete_file("config.json", "someone/tiny")
assert list_repo_files("someone/tiny") == [name for name in names if name != "config.json"]
assert list_repo_files("someone/tiny", revision=info.sha) == names
"""


def test_what_is_uploaded_comes_back_bit_for_bit(hub, client, model_folder):
    (model_folder / "notes").mkdir()
    (model_folder / "notes" / "read me.txt").write_text("with a space: ä")
    client(UPLOAD, model_folder, "someone/tiny", "model")
    assert hub.files("someone/tiny") == contents(model_folder)
    assert len([request for request in hub.requests if request.startswith("PUT /lfs/")]) == 1  # the weights
    client(ROUND_TRIP, model_folder)
    # each is downloaded once, although it was asked for three times
    assert sorted(downloads(hub)) == sorted(Path(name).name.replace(" ", "%20") for name in contents(model_folder))


def test_parts_are_served_and_strangers_cannot_write(hub, client, model_folder):
    client(UPLOAD, model_folder, "someone/tiny", "model")
    weights = hub.files("someone/tiny")["model.safetensors"]
    url = f"{hub.url}/someone/tiny/resolve/main/model.safetensors"
    for wanted, expected in (("5-", weights[5:]), ("3-9", weights[3:10]), (f"7-{10**9}", weights[7:])):
        with urlopen(Request(url, headers={"Range": f"bytes={wanted}"})) as answer:
            assert (answer.status, answer.read()) == (206, expected)
    with pytest.raises(OSError, match="416"):
        urlopen(Request(url, headers={"Range": f"bytes={len(weights)}-"}))
    with pytest.raises(OSError, match="401"):
        urlopen(Request(f"{hub.url}/api/models/someone/tiny/commit/main", data=b"", method="POST"))


OUTPUTS = """
import json, sys
import torch
from safetensors.torch import save_file
from avgk_hf.calibration import Calibration
from avgk_hf import AvgKForImageClassification
torch.manual_seed(0)
torch.set_num_threads(1)

def save_outputs(model, path):
    images = torch.linspace(-2, 2, 4 * 3 * 32 * 32).reshape(4, 3, 32, 32)
    with torch.no_grad():
        outputs = model.eval()(images)
    save_file({"logits": outputs.logits, "sccp_logits": outputs.sccp_logits}, path)
"""

PUSH = """
model = AvgKForImageClassification.from_timm("test_resnet", num_labels=6, k=2, image_size=32)
Calibration.store(model.config, {2: 0.1}, {"num_examples": 3})
model.push_to_hub("someone/tiny")
save_outputs(model, sys.argv[1])
"""

LOAD = """
model = AvgKForImageClassification.from_pretrained("someone/tiny")
save_outputs(model, sys.argv[1])
print(json.dumps([model.config.thresholds, model.config.calibration]))
"""


def test_a_pushed_model_is_the_same_elsewhere(hub, client, tmp_path):
    client(OUTPUTS + PUSH, tmp_path / "pushed.safetensors")
    files = hub.files("someone/tiny")
    assert {"model.safetensors", "config.json"} <= set(files)
    assert not [name for name in files if name.endswith((".bin", ".pt", ".pth", ".pkl", ".ckpt"))]
    for name, content in files.items():
        for secret in (hub.token, str(Path(avgk_hf.__file__).parent), str(tmp_path.parent)):
            assert secret.encode() not in content, f"{secret} in {name}"
    assert client(OUTPUTS + LOAD, tmp_path / "loaded.safetensors") == [{"2": 0.1}, {"num_examples": 3}]
    assert contents(tmp_path)["loaded.safetensors"] == contents(tmp_path)["pushed.safetensors"]
    assert sorted(downloads(hub)) == ["config.json", "model.safetensors"]


FROM_TIMM = """
import sys
import torch
from safetensors.torch import load_file
from avgk_hf import AvgKForImageClassification
model = AvgKForImageClassification.from_timm("hf_hub:someone/timm-tiny", num_labels=6, k=2)
weights, expected = model.backbone.state_dict(), load_file(sys.argv[1])
assert weights.keys() == expected.keys() and all(torch.equal(weights[name], expected[name]) for name in weights)
assert model(torch.zeros(2, 3, 32, 32)).logits.shape == (2, 6)
assert model.config.architecture == "test_resnet" and model.config.base_model == "someone/timm-tiny"
assert "someone" not in str(model.config.pretrained_cfg)
untrained = AvgKForImageClassification.from_timm("hf_hub:someone/timm-tiny", num_labels=6, k=2, pretrained=False)
assert untrained.config.base_model is None and "license" not in untrained.config.pretrained_cfg
by_name = AvgKForImageClassification.from_timm("test_resnet", num_labels=6, k=2, pretrained=True)
assert by_name.config.base_model == "timm/test_resnet.r160_in1k"
assert by_name.config.pretrained_cfg["license"] == "apache-2.0"
# a timm name is a classifier too: the weights that timm would load are on the Hub
from avgk_hf.classifiers import load_classifier
assert type(load_classifier("test_resnet")).__name__ == "TimmWrapperForImageClassification"
"""


def test_a_timm_model_on_the_hub_is_a_backbone(hub, client, tmp_path):
    backbone = timm.create_model("test_resnet", num_classes=3)
    timm.models.save_for_hf(backbone, tmp_path / "timm", safe_serialization=True)
    backbone.reset_classifier(0)
    save_file(backbone.state_dict(), tmp_path / "expected.safetensors")
    client(UPLOAD, tmp_path / "timm", "someone/timm-tiny", "model")
    client(UPLOAD, tmp_path / "timm", "timm/test_resnet.r160_in1k", "model")
    client(FROM_TIMM, tmp_path / "expected.safetensors")


DATASETS = """
import sys
from avgk_hf import load_splits
local = load_splits(sys.argv[1])
local.push_to_hub("someone/parquet")
for dataset in "someone/trees", "someone/parquet":
    splits = load_splits(dataset)
    assert list(splits) == list(local), dataset
    for name, split in splits.items():
        assert split.features == local[name].features
        for row, expected in zip(split, local[name], strict=True):
            assert row["image"].tobytes() == expected["image"].tobytes() and row["label"] == expected["label"]
"""
STREAMED = """
import sys
from avgk_hf import load_splits
from avgk_hf.data.sources import Source, load
from avgk_hf.images import open_image
class Opened:
    image = staticmethod(lambda stored, name: open_image(stored, name=name))
expected = [row["image"].convert("RGB").tobytes() for row in load_splits(sys.argv[1])["test"]]
for dataset in "someone/trees", "someone/parquet":
    source = Source([dataset], split="test")
    assert source.number() == len(expected)
    found = [(name, load(stored, Opened, name).tobytes()) for name, stored in source.read(source.pieces())]
    assert [pixels for _, pixels in found] == expected
    assert all(name.startswith(f"hf://datasets/{dataset}@") for name, _ in found)
"""


def test_datasets_on_the_hub_are_read(hub, client, tmp_path):
    for seed, split in enumerate(("train", "validation", "test")):
        write_images(tmp_path / split, dict.fromkeys(CLASSES, 2), seed=seed, size=8)
    client(UPLOAD, tmp_path, "someone/trees", "dataset")
    assert hub.files("someone/trees", "dataset") == contents(tmp_path)
    client(DATASETS, tmp_path)
    assert len(downloads(hub)) == 36 + 3 + 1  # images, parquet files and their README.md, each once
    client(STREAMED, tmp_path)


CIFAR = """
import sys
from avgk_hf import load_splits
local = load_splits(sys.argv[1])
named = local.rename_columns({"image": "img", "label": "fine_label"}).remove_columns("index")
for name in named:
    named[name] = named[name].add_column("coarse_label", [0] * len(named[name]))
named.push_to_hub("uoft-cs/cifar100", "cifar100")
splits = load_splits("uoft-cs/cifar100", None, "img", "fine_label", validation_per_class=1)
expected = load_splits(sys.argv[1], validation_per_class=1)
assert list(splits) == list(expected) == ["train", "validation", "test"]
for name, split in splits.items():
    assert split.column_names == ["image", "label", "index"] and split.features == expected[name].features
    for row, other in zip(split, expected[name], strict=True):
        assert row["image"].tobytes() == other["image"].tobytes()
        assert (row["label"], row["index"]) == (other["label"], other["index"])
"""


def test_cifar_on_the_hub_is_read(hub, client, tmp_path):
    """The columns and configuration of uoft-cs/cifar100, as its recipes name them, and the split of the archive."""
    write_cifar(tmp_path / "cifar-100-python", train=3)
    client(CIFAR, tmp_path / "cifar-100-python")
    assert len([file for file in downloads(hub) if file.endswith(".parquet")]) == 2


METRIC = """
import json
import evaluate
metric = evaluate.load("someone/average_k_accuracy")
scores = [[0.9, 0.1, 0.0], [0.5, 0.4, 0.1]]
result = metric.compute(predictions=scores, references=[0, 1], k=1.5, calibrate=True)
print(json.dumps([result["average_k_accuracy"], result["mean_set_size"]]))
"""


def test_the_metric_works_as_a_space(hub, client):
    metrics = Path(avgk_hf.__file__).parent / "metrics"
    client(UPLOAD, metrics / "average_k_accuracy", "someone/average_k_accuracy", "space")
    assert client(METRIC) == [1.0, 1.5]
    assert downloads(hub) == ["average_k_accuracy.py"]


ERROR_OF = """
import json, sys, time
time.sleep = lambda seconds: None  # huggingface_hub waits 23 seconds in all between its six attempts

def error_of(action, *args, **kwargs):
    try:
        action(*args, **kwargs)
    except Exception as error:
        return f"{type(error).__name__}: {error} {error.__cause__}"
"""

TRY_UPLOAD = """
from huggingface_hub import upload_folder
print(json.dumps(error_of(upload_folder, repo_id="someone/tiny", folder_path=sys.argv[1])))
"""


@pytest.mark.parametrize(
    ("pattern", "after_bytes", "attempts", "message"),
    [
        ("POST .*/preupload/", None, 6, "HfHubHTTPError: .*500 Internal Server Error"),
        ("PUT /lfs/", None, 6, "RuntimeError: Error while uploading 'model.safetensors'.*500 Internal Server Error"),
        ("PUT /lfs/", 100_000, 6, "RuntimeError: Error while uploading 'model.safetensors' to the Hub"),
        ("POST .*/commit/", None, 1, "HfHubHTTPError: .*500 Internal Server Error"),
        ("POST .*/commit/", 100, 1, "(RemoteProtocol|Read|Write)Error: "),
    ],
    ids=["preupload-500", "lfs-500", "lfs-cut", "commit-500", "commit-cut"],
)
def test_a_failed_upload_changes_nothing_and_can_be_repeated(
    hub, client, model_folder, pattern, after_bytes, attempts, message
):
    client(UPLOAD, model_folder, "someone/tiny", "model")
    revision, before = hub.revision("someone/tiny"), hub.files("someone/tiny")
    for name, content in before.items():  # retrained, so to speak
        (model_folder / name).write_bytes(content.replace(b"0.1", b"0.2") if name == "config.json" else content[::-1])
    local = contents(model_folder)

    hub.requests.clear()
    if after_bytes is None:
        hub.fail(pattern, times=math.inf)
    else:
        hub.cut(pattern, after_bytes, times=math.inf)
    error = client(ERROR_OF + TRY_UPLOAD, model_folder)
    assert re.match(message, error, re.DOTALL), error
    assert len([request for request in hub.requests if re.search(pattern, request)]) == attempts
    assert hub.revision("someone/tiny") == revision and hub.files("someone/tiny") == before
    assert contents(model_folder) == local

    hub.faults.clear()
    assert client(ERROR_OF + TRY_UPLOAD, model_folder) is None
    assert hub.files("someone/tiny") == local != before == hub.files("someone/tiny", revision=revision)


INTERRUPTED = """
from pathlib import Path
from huggingface_hub import constants, create_repo, hf_hub_download, upload_folder

folder = Path(sys.argv[1])
create_repo("someone/tiny")
errors = [error_of(upload_folder, repo_id="someone/tiny", folder_path=folder)]
errors += [error_of(hf_hub_download, "someone/tiny", name) for name in ("model.safetensors", "config.json")]
blobs = [path.stat().st_size for path in Path(constants.HF_HUB_CACHE).rglob("blobs/*")]
for name in ("model.safetensors", "config.json"):
    assert Path(hf_hub_download("someone/tiny", name)).read_bytes() == (folder / name).read_bytes()
print(json.dumps([*errors, blobs]))
"""


def test_short_interruptions_leave_no_half_files(hub, client, model_folder):
    hub.fail("POST .*/preupload/", times=2)
    hub.cut("PUT /lfs/", 100_000)
    hub.cut("GET .*/model.safetensors", 100_000)
    hub.fail("GET .*/config.json")
    upload, weights, config, blobs = client(ERROR_OF + INTERRUPTED, model_folder)
    assert upload is None and weights is None  # both were tried again
    assert re.match("HfHubHTTPError: .*500 Internal Server Error", config, re.DOTALL)
    assert blobs == [(model_folder / "model.safetensors").stat().st_size]
    assert sorted(downloads(hub)) == ["config.json"] * 2 + ["model.safetensors"] * 2
    assert not any(fault.times for fault in hub.faults)


PUSH_AGAIN = """
model = AvgKForImageClassification.from_timm("test_resnet", num_labels=6, k=2, image_size=32)
Calibration.store(model.config, {2: 0.1}, {"num_examples": 3})
errors = [error_of(model.push_to_hub, "someone/tiny") for _ in range(4)]
model.save_pretrained(sys.argv[1])
print(json.dumps(errors))
"""


def test_a_failed_push_of_a_model_can_be_repeated(hub, client, tmp_path):
    hub.fail("POST /api/repos/create")
    hub.fail("POST .*/commit/")
    hub.cut("POST .*/commit/", 100)
    *errors, last = client(OUTPUTS + ERROR_OF + PUSH_AGAIN, tmp_path)
    expected = ("HfHubHTTPError: .*500 ", "HfHubHTTPError: .*500 ", "(RemoteProtocol|Read|Write)Error: ")
    for message, error in zip(expected, errors, strict=True):
        assert re.match(message, error, re.DOTALL), error
    assert last is None
    assert len(hub.repos["model", "someone/tiny"]) == 2  # empty, as it was created, and with the model
    pushed = hub.files("someone/tiny")
    del pushed["README.md"]
    assert pushed == contents(tmp_path)


TRAIN_AND_PUSH = """
import json, sys
from pathlib import Path
from avgk_hf import AvgKForImageClassification, AvgKTrainer, AvgKTrainingArguments, load_splits, prepare
from avgk_hf.cli import main

images, run = sys.argv[1:]
splits = load_splits(images)
labels = dict(enumerate(splits["train"].features["label"].names))
model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32)
args = AvgKTrainingArguments(run, num_train_epochs=1, eval_strategy="epoch", save_strategy="epoch",
    load_best_model_at_end=True, push_to_hub=True, hub_model_id="someone/trees", hub_strategy="every_save",
    disable_tqdm=True, dataloader_pin_memory=False)
trainer = AvgKTrainer(model, args, prepare(splits["train"], model.config), prepare(splits["validation"], model.config),
    dataset_name="someone/images")
trainer.train()
trainer.evaluate(prepare(splits["test"], model.config), metric_key_prefix="test")
Path(run, "set_sizes.png").write_bytes(b"a picture")
trainer.push_to_hub()
assert main(["push", run, "someone/again"]) == 0
calibrate = ["calibrate", "someone/trees", images, "--k", "3", "--out", run + "-3", "--push", "someone/calibrated"]
assert main(calibrate) == 0
print(json.dumps({"thresholds": model.config.thresholds, "files": sorted(p.name for p in Path(run).iterdir())}))
"""

SETS = """
import json, sys
import avgk_hf
from transformers import pipeline
answer = pipeline("average-k-image-classification", model="someone/trees")(sys.argv[1])
other = pipeline("average-k-image-classification", model="someone/again")(sys.argv[1])
assert answer == other
print(json.dumps(answer))
"""

NO_PACKAGE = """
import json, sys
sys.modules["avgk_hf"] = None
from transformers import pipeline
answer = pipeline("average-k-image-classification", model="someone/trees", trust_remote_code=True)(sys.argv[1])
print(json.dumps(answer))
"""


def test_a_trained_model_reaches_strangers(hub, client, image_folder, tmp_path):
    """`trainer.push_to_hub()` and `avgk push`, then both ways of loading in new processes with empty caches."""
    run = tmp_path / "run"
    local = client(TRAIN_AND_PUSH, image_folder, run)
    for repo in ("someone/trees", "someone/again"):
        files = hub.files(repo)
        code = {f"{name}.py" for name in remote_files()}
        assert set(files) - {".gitattributes"} == code | {
            "README.md", "config.json", "calibration.json", "model.safetensors", "preprocessor_config.json",
            "set_sizes.png"
        }  # fmt: skip
        assert json.loads(files["config.json"])["thresholds"] == local["thresholds"]
        for name, data in files.items():
            assert hub.token.encode() not in data and str(tmp_path).encode() not in data, name
            assert str(image_folder).encode() not in data, name
    assert set(json.loads(hub.files("someone/calibrated")["config.json"])["thresholds"]) == {"2", "3"}
    assert "model.safetensors" in hub.files("someone/calibrated")
    card = hub.files("someone/trees")["README.md"].decode()
    parts = ("average-k-image-classification", "average-2 accuracy", "split validation", "datasets: - someone/images")
    for part in (*parts, "type: someone/images", "| oak | 4 |"):
        assert part in " ".join(card.split()), part
    for repo in ("someone/trees", "someone/calibrated"):
        card = hub.files(repo)["README.md"].decode()
        assert re.findall("^model = .*", card, re.MULTILINE) == [f'model = "{repo}"']
    assert "base_model: someone/trees\n" in card and "POST /api/validate-yaml" in hub.requests
    assert "training_args.bin" not in local["files"]
    image = image_folder / "test" / "oak" / "0.png"
    assert client(SETS, image) == client(NO_PACKAGE, image)


FOREIGN = """
import json, sys
if sys.argv[1] == "push":
    from avgk_hf.cli import main
    print(json.dumps(main(["push", *sys.argv[2:]])))
else:
    sys.modules["avgk_hf"] = None
    from transformers import pipeline
    sets = pipeline("average-k", model="someone/vit", trust_remote_code=True)
    print(json.dumps(sets(sys.argv[2], coverage=0.8)))
"""


def test_a_calibrated_classifier_reaches_strangers(hub, client, image_folder, tmp_path):
    """Of another class: the pipeline's code and calibration.json go with it, no other code."""
    save_vit(tmp_path / "vit")
    calibrate = ["calibrate", str(tmp_path / "vit"), str(image_folder), "--k", "2", "--coverage", "0.8"]
    assert main([*calibrate, "--out", str(tmp_path / "out")]) == 0
    code = {path.name for path in (tmp_path / "out").glob("*.py")}
    (tmp_path / "out" / "other.py").write_text("raise SystemExit")
    assert client(FOREIGN, "push", tmp_path / "out", "someone/vit") == 0
    files = set(hub.files("someone/vit"))
    assert {name for name in files if name.endswith(".py")} == code and "calibration.json" in files
    image = str(image_folder / "test" / "oak" / "0.png")
    sets = pipeline("average-k-image-classification", model=str(tmp_path / "out"))
    labels = [item["label"] for item in sets(image, coverage=0.8)]
    assert [item["label"] for item in client(FOREIGN, "use", image)] == labels
    card = hub.files("someone/vit")["README.md"].decode()
    assert 'model = "out"  # ' in (tmp_path / "out" / "README.md").read_text() and 'model = "someone/vit"\n' in card
    code = card.split("```python\n")[1].split("```\n")[0].replace('"IMAGE"', repr(image))  # as it stands there
    assert len(client(code + "import json\nprint(json.dumps(scores(image)))")) == 5


WRONG_CARDS = {
    "dataset.type": "model-index: [{name: a, results: [{task: {type: b}, dataset: {name: c}, metrics: []}]}]",
    "is no id": "datasets:\n- trees",
    "base_model_relation": "base_model_relation: finetune",
    "license": "license: invented",
    "license_name": "license: other",
}


@pytest.mark.parametrize("part", WRONG_CARDS)
def test_metadata_that_the_hub_refuses(part):
    """So that a card of ours which it takes means something."""
    assert part in " ".join(card_errors(f"---\n{WRONG_CARDS[part]}\n---\n"))


def test_a_failed_push_says_how_to_go_on(hub, client, model_folder):
    hub.fail("POST .*/commit/", status=500, times=9)
    before = contents(model_folder)
    code = "import json, sys\nfrom avgk_hf.cli import main\nprint(json.dumps(main(['push', *sys.argv[1:]])))"
    assert client(code, model_folder, "someone/tiny") == 2
    assert contents(model_folder) == before
    program = "import sys, json\nfrom avgk_hf.hub import push_folder\n" + (
        "try: push_folder(*sys.argv[1:])\nexcept OSError as error: print(json.dumps(str(error)))"
    )
    message = client(program, model_folder, "someone/tiny")
    assert f"{model_folder} is intact; go on with `avgk push {model_folder} someone/tiny`" in message
