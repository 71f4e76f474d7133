"""The folder for Inference Endpoints, called as Hugging Face's toolkit calls it, and behind HTTP."""

import base64
import importlib.util
import io
import json
import os
import socket
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from http.client import HTTPConnection
from pathlib import Path
from urllib.parse import urlencode

import anyio
import numpy as np
import pytest
import torch
import uvicorn
from hub_server import HubServer
from PIL import Image
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

import avgk_hf.endpoint as endpoint
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import load_classifier, write_thresholds
from avgk_hf.cli import main
from avgk_hf.evaluation import calibrate
from conftest import made_once, save_vit

ROOT = Path(__file__).parent.parent
QUESTIONS = ({}, {"k": 1.5}, {"k": 3, "max_size": 2}, {"coverage": 0.9}, {"cumulative": 0.6}, {"min_size": 3})


@pytest.fixture(scope="module")
def calibrated(tmp_path_factory, image_folder):
    """A classifier of transformers with thresholds."""

    def make(folder):
        torch.manual_seed(0)
        save_vit(folder)
        model = load_classifier(str(folder))
        with torch.no_grad():
            model.classifier.weight *= 40  # so that scores differ by more than is rounded
        model.save_pretrained(folder)
        assert main(["calibrate", str(folder), str(image_folder), "--k", "1", "2", "3"]) == 0

    return made_once(tmp_path_factory, "endpoint_model", make)


@pytest.fixture(scope="module")
def folder(tmp_path_factory, calibrated):
    target = tmp_path_factory.mktemp("endpoint") / "sets"
    assert main(["export", str(calibrated), "--endpoint", str(target)]) == 0
    return target


def as_the_toolkit_does(folder):
    """What `check_and_register_custom_pipeline_from_directory` of huggingface-inference-toolkit 0.5.6 does."""
    spec = importlib.util.spec_from_file_location("handler.EndpointHandler", Path(folder) / "handler.py")
    sys.path.insert(0, str(folder))
    try:
        handler = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(handler)
        return handler.EndpointHandler(str(folder))
    finally:
        sys.path.remove(str(folder))


@pytest.fixture
def handler(folder):
    return as_the_toolkit_does(folder)


@pytest.fixture(scope="module")
def images(image_folder):
    return sorted((image_folder / "test").rglob("*.png"))


def text(path) -> str:
    return base64.b64encode(Path(path).read_bytes()).decode()


def predicted(model, images, capsys, question) -> list[list[dict]]:
    """What `avgk predict` prints for the same images and question."""
    options = [word for name, value in question.items() for word in (f"--{name.replace('_', '-')}", str(value))]
    capsys.readouterr()
    assert main(["predict", str(model), *map(str, images), *options, "--json"]) == 0
    return [row["set"] for row in json.loads(capsys.readouterr().out)]


def same(found, expected) -> bool:
    """The same classes in the same order; scores may differ by what another number of rows rounds differently."""
    names, others = ([each["label"] for each in one] for one in (found, expected))
    scores = (np.array([each["score"] for each in one]) for one in (found, expected))
    return names == others and np.allclose(*scores, rtol=0, atol=1e-6)


def test_what_the_folder_holds(folder, calibrated):
    assert {path.name for path in folder.iterdir()} == {
        *("handler.py", "requirements.txt", "README.md", "model", "avgk_hf")
    }
    needs = (folder / "requirements.txt").read_text().splitlines()
    assert any(line.startswith("timm") for line in needs) and not any("extra" in line for line in needs)
    assert str(calibrated) not in "".join(path.read_text() for path in folder.iterdir() if path.is_file())
    assert (folder / "model" / "model.safetensors").read_bytes() == (calibrated / "model.safetensors").read_bytes()


@pytest.mark.parametrize("question", QUESTIONS, ids=str)
def test_sets_are_those_of_predict(handler, images, calibrated, capsys, question):
    """One image and several, as bytes, base64, a data URL, and as the toolkit opens what comes with an image type."""
    expected = predicted(calibrated, images, capsys, question)
    found = handler({"inputs": [text(path) for path in images], "parameters": question})
    assert set(found) == {"sets", "meta"} and all(map(same, found["sets"], expected)) and len(expected) == 30
    opened = Image.open(io.BytesIO(images[7].read_bytes())).convert("RGB")
    wrapped = base64.encodebytes(images[7].read_bytes()).decode()  # in lines, as the command `base64` prints it
    for given in (images[7].read_bytes(), text(images[7]), f"data:image/png;base64,{wrapped}", opened):
        (one,) = handler({"inputs": given, "parameters": dict(question)})["sets"]
        assert same(one, expected[7])
    json.dumps(found, allow_nan=False)
    asked = found["meta"]["asked"]
    assert asked.items() >= {**question, "min_size": question.get("min_size", 1), "balance": 0.0}.items()
    assert ("k" in asked) == (not {"coverage", "cumulative"} & set(question))


def test_the_questions_of_a_model_with_two_heads(make_model, splits, images, tmp_path, capsys):
    """Its own K, the head that was chosen for another, and a balance."""
    model = make_model()
    model.config.train_counts = [30, 14, 10, 8, 6, 4]
    calibrate(model, splits["validation"], [1, 3])
    model.save_pretrained(tmp_path / "trees")
    handler = endpoint.EndpointHandler(str(tmp_path / "trees"))
    several = [path.read_bytes() for path in images]
    for question in ({}, {"k": 3}, {"balance": 1.0}, {"coverage": 0.9, "method": "raps"}):
        found = handler({"inputs": several, "parameters": question})
        assert all(map(same, found["sets"], predicted(tmp_path / "trees", images, capsys, question)))
    assert found["meta"]["monitor"]["k"] == 2 and found["meta"]["monitor"]["num_images"] == 30  # of the first question
    assert found["meta"]["asked"] == {"coverage": 0.9, "method": "raps", "min_size": 1, "balance": 0.0}


SENT = base64.b64encode(b"none of any format").decode()
BAD = {
    "no mapping": ([SENT], 'a request is {"inputs"'),
    "no inputs": ({"parameters": {}}, 'a request is {"inputs"'),
    "another part": ({"inputs": SENT, "options": {}}, "the request has 'options', which is unknown: it takes inputs"),
    "no parameters": ({"inputs": SENT, "parameters": [2]}, 'parameters must be a mapping, e.g. {"k": 2}'),
    "a misspelt one": ({"inputs": SENT, "parameters": {"max_sizes": 2}}, "'max_sizes', which is unknown"),
    "that of others": ({"inputs": SENT, "parameters": {"top_k": 2}}, "parameters has 'top_k', which is unknown"),
    "one of Python": ({"inputs": SENT, "parameters": {"self": 2}}, "parameters has 'self', which is unknown"),
    "k as a word": ({"inputs": SENT, "parameters": {"k": "two"}}, "k='two' must be a number from 1 to below"),
    "k as a list": ({"inputs": SENT, "parameters": {"k": [2]}}, "k=[2] must be a number"),
    "an endless word": ({"inputs": SENT, "parameters": {"k": "9" * 10**6}}, "k='999"),
    "k out of range": ({"inputs": SENT, "parameters": {"k": 5}}, "no threshold is stored for k=5"),
    "two questions": ({"inputs": SENT, "parameters": {"k": 2, "coverage": 0.9}}, "are different questions"),
    "infinite": ({"inputs": SENT, "parameters": {"lambda_val": "-inf"}}, "lambda_val=-inf, which is no finite number"),
    "a coverage": ({"inputs": SENT, "parameters": {"coverage": 0.123}}, "coverage=0.123 is not recorded"),
    "a size": ({"inputs": SENT, "parameters": {"min_size": 1.5}}, "min_size=1.5 must be a whole number"),
    "a method": ({"inputs": SENT, "parameters": {"coverage": 0.9, "method": "best"}}, "method='best' is unknown"),
    "no image": ({"inputs": SENT}, "inputs cannot be read as an image (it is none of JPEG, PNG"),
    "the second": ({"inputs": ["GOOD", SENT]}, "inputs[1] cannot be read as an image"),
    "cut off": ({"inputs": "CUT"}, "inputs cannot be read as an image ("),
    "a number": ({"inputs": 3}, "inputs of type int is no image"),
    "a mapping": ({"inputs": {"url": "x"}}, "inputs of type dict is no image"),
    "a list in a list": ({"inputs": [[SENT]]}, "inputs[0] of type list is no image"),
    "nothing": ({"inputs": None}, "inputs of type NoneType is no image"),
    "no images": ({"inputs": []}, "inputs holds 0 images: send 1 to 64 at once"),
    "too many": ({"inputs": [SENT] * 65}, "inputs holds 65 images"),
    "too many bytes": ({"inputs": bytes(25 * 2**20 + 1)}, "inputs is larger than 26214400 bytes"),
    "too much text": ({"inputs": "A" * (50 * 2**20 + 1)}, "inputs is larger than 26214400 bytes"),
    "too many pixels": ({"inputs": "LARGE"}, "10000 x 10000 pixels, the limit is 25000000"),
    "too many, opened": ({"inputs": Image.new("1", (10_000, 10_000))}, "inputs: 10000 x 10000 pixels"),
}


@pytest.mark.parametrize("case", BAD)
def test_a_bad_request_is_refused_by_name(case, handler, images, folder):
    """In one line of bounded length that names nothing of the server, and the next request is answered."""
    data, words = BAD[case]
    large = io.BytesIO()
    if case == "too many pixels":
        Image.new("1", (10_000, 10_000)).save(large, "png")
    places = {
        "GOOD": text(images[0]),
        "CUT": text(images[0])[:400],
        "LARGE": base64.b64encode(large.getvalue()).decode(),
    }
    if isinstance(data, dict) and isinstance(data.get("inputs"), (str, list)):
        given = data["inputs"]
        given = (
            places.get(given, given)
            if isinstance(given, str)
            else [places.get(each, each) if isinstance(each, str) else each for each in given]
        )
        data = {**data, "inputs": given}
    with pytest.raises(ValueError) as caught:
        handler(data)
    message = str(caught.value)
    assert words in message and len(message) <= endpoint.MOST_TEXT + 3 and "\n" not in message
    assert str(folder) not in message and "Traceback" not in message and "0x" not in message
    assert len(handler({"inputs": images[0].read_bytes()})["sets"]) == 1


def test_nothing_is_fetched_and_no_path_opened(handler, images):
    """Addresses and paths are text that is no base64, or base64 of something that is no image."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        listener.settimeout(0.2)
        port = listener.getsockname()[1]
        places = [f"http://127.0.0.1:{port}/x.png", f"hf://127.0.0.1:{port}/x", str(images[0]), f"file://{images[0]}"]
        for given in (*places, images[0], {"bytes": None, "path": str(images[0])}, "etc/passwd12"):
            with pytest.raises(ValueError, match=r"addresses are not fetched and paths|is no image|cannot be read as"):
                handler({"inputs": given})
        with pytest.raises(TimeoutError):
            listener.accept()


def test_a_fault_of_the_server_says_nothing_of_it(handler, images, caplog):
    """The log has all of it."""
    broken = torch.nn.Parameter(torch.zeros(3, 3))
    handler.model.classifier.weight = broken
    with pytest.raises(RuntimeError, match=r"^the request could not be answered; the server's log says why\.$"):
        handler({"inputs": images[0].read_bytes()})
    assert "shapes cannot be multiplied" in caplog.text


def test_the_monitor_counts_the_models_own_sets(handler, images, monkeypatch):
    """Of its own K and balance, before sizes are bounded; a new one begins after some images."""
    several = [path.read_bytes() for path in images]
    first = handler({"inputs": several[0], "parameters": {"k": 2}})["meta"]["monitor"]
    assert first.pop("interval")[0] == 0
    assert first == {"k": 1, "num_images": 0, "mean_set_size": None, "drifted": False}
    for question in ({"coverage": 0.9}, {"lambda_val": 0.1}, {"cumulative": 0.9}):
        assert handler({"inputs": several, "parameters": question})["meta"]["monitor"]["num_images"] == 0
    plain = handler({"inputs": several})["meta"]["monitor"]
    bounded = handler({"inputs": several, "parameters": {"k": 1, "min_size": 4}})["meta"]["monitor"]
    assert (plain["num_images"], bounded["num_images"]) == (30, 60)
    assert plain["mean_set_size"] == bounded["mean_set_size"]
    low, high = bounded["interval"]
    assert low <= bounded["mean_set_size"] <= high and "before" not in bounded
    monkeypatch.setattr(endpoint, "WATCHED", 60)
    after = handler({"inputs": several[0]})["meta"]["monitor"]
    assert after["num_images"] == 1 and after["before"] == bounded


def test_drift_is_in_the_answer(calibrated, images, tmp_path):
    """A model that says K = 1 and gives all six classes."""
    model = load_classifier(str(calibrated))
    model.save_pretrained(tmp_path / "odd")
    for name in ("preprocessor_config.json",):
        (tmp_path / "odd" / name).write_bytes((calibrated / name).read_bytes())
    Calibration.store(model.config, {1: 0.0}, source={"num_examples": 500, "dataset": "trees"})
    write_thresholds(model, tmp_path / "odd")
    handler = endpoint.EndpointHandler(str(tmp_path / "odd"))  # the folder of a model will do
    several = [path.read_bytes() for path in images]
    seen = [handler({"inputs": several})["meta"]["monitor"] for _ in range(4)]
    assert seen[-1]["drifted"] and seen[-1]["message"].startswith("drift: calibrated on 500 images of trees")
    assert seen[-1]["mean_set_size"] == 6 and all("message" in each or not each["drifted"] for each in seen)


@contextmanager
def served(handler):
    """The handler behind HTTP, as the toolkit's web service puts it there, but for several threads at once."""

    async def predict(request):
        try:
            if request.headers["content-type"] == "application/json":
                body = json.loads(await request.body())
            else:
                body = {"inputs": Image.open(io.BytesIO(await request.body())).convert("RGB")}
                values = dict(request.query_params).items()
                body["parameters"] = {name: int(value) if value.isnumeric() else value for name, value in values}
            return JSONResponse(await anyio.to_thread.run_sync(partial(handler, body)))
        except Exception as error:
            return JSONResponse({"error": str(error)}, 400)

    app = Starlette(routes=[Route("/", predict, methods=["POST"])])
    server = uvicorn.Server(uvicorn.Config(app, "127.0.0.1", 0, log_level="error", backlog=400))
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            time.sleep(0.01)
        yield server.servers[0].sockets[0].getsockname()[1]
    finally:
        server.should_exit = True
        thread.join(30)


def ask(port, body, content="application/json", address="/") -> tuple[int, dict]:
    connection = HTTPConnection("127.0.0.1", port, timeout=120)
    connection.request("POST", address, body, {"Content-Type": content})
    answered = connection.getresponse()
    found = answered.status, json.loads(answered.read())
    connection.close()
    return found


def test_two_hundred_at_once(handler, images, calibrated, capsys):
    """None is lost or another's, whatever is asked; the monitor has counted each, and a bad one harms no other."""
    expected = [predicted(calibrated, images, capsys, question) for question in QUESTIONS]
    update, inside, met = handler.monitor.update, [], []

    def slowly(sizes):
        inside.append(1)
        time.sleep(0.002)  # others come by
        met.append(len(inside))
        update(sizes)
        inside.pop()

    handler.monitor.update = slowly

    def request(number):
        image, question = number % len(images), QUESTIONS[number % len(QUESTIONS)]
        gate.wait(60)
        if number % 10 == 9:  # refused
            status, found = ask(port, json.dumps({"inputs": SENT, "parameters": question}))
            return status == 400 and "cannot be read as an image" in found["error"], 0
        of_image = expected[number % len(QUESTIONS)]
        if number % 3 == 1:  # an image as it is
            address = f"/?{urlencode(question)}"
            status, found = ask(port, images[image].read_bytes(), "image/png", address)
            wanted = [of_image[image]]
        else:  # one or several
            several = [(image + i) % len(images) for i in range(1 + number % 4)]
            inputs = [text(images[each]) for each in several]
            body = {"inputs": inputs if len(inputs) > 1 else inputs[0], "parameters": question}
            status, found = ask(port, json.dumps(body))
            wanted = [of_image[each] for each in several]
        right = status == 200 and len(found["sets"]) == len(wanted) and all(map(same, found["sets"], wanted))
        own = not {"coverage", "cumulative"} & set(question) and question.get("k", 1) == 1
        return right, len(wanted) if own else 0

    gate = threading.Barrier(200)
    with served(handler) as port, ThreadPoolExecutor(200) as pool:
        found = list(pool.map(request, range(200), timeout=200))
    assert len(found) == 200 and all(right for right, _ in found)
    assert set(met) == {1}  # no two threads at once in what is shared
    assert handler.monitor.num_images == sum(counted for _, counted in found) > 50


BY_ITSELF = """
import importlib.util, json, statistics, sys
folder, image = sys.argv[1:]
spec = importlib.util.spec_from_file_location("handler.EndpointHandler", folder + "/handler.py")
sys.path.insert(0, folder)
handler = importlib.util.module_from_spec(spec)
spec.loader.exec_module(handler)
found = handler.EndpointHandler(folder)({"inputs": open(image, "rb").read()})
print(json.dumps([found["sets"], sys.modules["avgk_hf"].__file__, statistics.__file__]))
"""


@pytest.mark.long
def test_the_folder_works_by_itself(folder, images, handler, forks, tmp_path):
    """Elsewhere, first on the path, as the toolkit puts it: with its own copy of the package, and Python's modules."""
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = forks.run(BY_ITSELF, folder, images[3], folder=tmp_path, env={**env, "PYTHONPATH": str(tmp_path)})
    assert done.code == 0, done.err
    sets, package, python = json.loads(done.out.splitlines()[-1])
    assert package == str(folder / "avgk_hf" / "__init__.py") and "avgk" not in Path(python).parts[-2]
    assert same(sets[0], handler({"inputs": images[3].read_bytes()})["sets"][0])


OPTIONS = {
    "a question": (["--k", "2"], "--k is for --onnx: leave it out"),
    "a graph's file": (["--out", "x"], "--out is for --onnx"),
    "what is measured": (["--labels-by-position"], "--labels-by-position is for --onnx"),
}


@pytest.mark.parametrize("case", OPTIONS)
def test_options_of_a_graph_are_refused(case, calibrated, tmp_path, capsys):
    given, words = OPTIONS[case]
    assert main(["export", str(calibrated), "--endpoint", str(tmp_path / "new"), *given]) == 2
    assert words in capsys.readouterr().err and not (tmp_path / "new").exists()


def test_what_cannot_be_written_is_refused(calibrated, folder, tmp_path, capsys):
    assert main(["export", str(calibrated), "--endpoint", str(folder)]) == 2
    assert "exists and is not an empty folder; name a new one" in capsys.readouterr().err
    save_vit(tmp_path / "vit")
    assert main(["export", str(tmp_path / "vit"), "--endpoint", str(tmp_path / "new")]) == 2
    assert "has no thresholds" in capsys.readouterr().err and not (tmp_path / "new").exists()


HUB = """
import contextlib, io, sys
from avgk_hf.cli import main
from avgk_hf.evaluation import calibrate
model, folder = sys.argv[1:]
assert main(["push", model, "someone/trees"]) == 0
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    assert main(["export", "someone/trees", "--endpoint", folder]) == 0
lines = [line.strip() for line in printed.getvalue().splitlines() if line.startswith("    ")]
exec("\\n".join(lines).replace("USER/NAME", "someone/endpoint"))
from huggingface_hub import HfApi
print(*HfApi().list_repo_files("someone/endpoint"))
"""


def test_a_model_of_the_hub_and_the_printed_lines(calibrated, fresh, tmp_path):
    """Its files are fetched into the folder, and the lines that are printed upload it."""
    with HubServer() as hub:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path / "home")}
        env |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
        done = fresh.run(HUB, calibrated, tmp_path / "sets", folder=tmp_path, env=env)
    assert done.code == 0, done.err
    files = {"handler.py", "requirements.txt", "model/model.safetensors", "model/config.json", "avgk_hf/endpoint.py"}
    assert files <= set(done.out.splitlines()[-1].split())
