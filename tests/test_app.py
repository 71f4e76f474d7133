"""The page of `avgk app` in a real browser, and the Space that it writes."""

import json
import os
import re
import socket
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlparse
from urllib.request import urlopen

import pytest
from hub_server import HubServer
from huggingface_hub import ModelCard
from selenium.webdriver import Keys
from transformers import pipeline

import avgk_hf.auto  # noqa: F401
import browser
from avgk_hf.app import (
    BY_COVERAGE,
    answer,
    build_page,
    coverage_thresholds,
    example_images,
    image_scores,
    write_space,
)
from avgk_hf.calibrate import calibrate, load_classifier, transform_for
from avgk_hf.cli import main
from avgk_hf.train import main as train
from conftest import CLASSES, RECIPE, save_vit

COVERAGE = {"lac": {"0.5": 0.3, "0.95": 0.05}}
needs_browser = pytest.mark.skipif(
    not (browser.CHROMIUM and browser.DRIVER),
    reason="there is no chromium with chromedriver: `make browser`, or `apt-get install chromium chromium-driver`",
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory, image_folder):
    """A model trained for two epochs, calibrated for K = 1, 2, 3 and 4, with thresholds for two coverages."""
    folder = tmp_path_factory.mktemp("app")
    (folder / "recipe.yaml").write_text(RECIPE.format(dataset=image_folder, output=folder / "trees"))
    train([str(folder / "recipe.yaml"), "--calibrate_k", "1", "3", "4"])
    path = folder / "trees" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "coverage": COVERAGE}))
    return folder / "trees"


@pytest.fixture(scope="module")
def classify(model_folder):
    return pipeline("average-k-image-classification", model=str(model_folder))


@pytest.fixture(scope="module")
def opened(model_folder, image_folder):
    """One server and one browser for all tests; and every address the browser has asked for."""
    if not (browser.CHROMIUM and browser.DRIVER):
        pytest.skip("no browser")
    with browser.app(model_folder, "--examples", str(image_folder / "test")) as url, browser.chromium() as driver:
        yield browser.Page(driver, url)


@pytest.fixture
def page(opened):
    opened.open()
    return opened


def labels(found):
    return [item["label"] for item in found]


def shown(page):
    """Labels and scores of the set on the page."""
    script = (
        "return [...document.querySelectorAll('#avgk-set .in tr')].map(row => [...row.cells].map(c => c.innerText))"
    )
    return [(row[0], float(row[2].removeprefix("< "))) for row in page.driver.execute_script(script)]


def slider(page):
    return page.until("#avgk-k input[type=range]")


@needs_browser
def test_the_slider_gives_the_sets_of_the_pipeline(page, classify, image_folder):
    image = image_folder / "test" / "cedar" / "0.png"
    page.upload(image)
    page.await_status("for K = 2")  # the model's own
    slider(page).send_keys(Keys.HOME)
    sizes = []
    for k in (1, 2, 3, 4):
        page.await_status(f"for K = {k}")
        found = classify(str(image), k=k)
        assert [label for label, _ in shown(page)] == labels(found)
        assert [score for _, score in shown(page)] == pytest.approx([item["score"] for item in found], abs=1e-3)
        assert page.status.startswith(f"{len(found)} class")
        sizes.append(len(found))
        slider(page).send_keys(Keys.ARROW_RIGHT)
    assert sizes == sorted(sizes) and len(set(sizes)) > 1

    # the table of growth: sizes, and the classes in the order in which they enter
    rows = page.rows("#avgk-growth tbody")
    assert [(row[0], int(row[1])) for row in rows] == list(zip("1234", sizes, strict=True))
    joined = [name for row in rows for name in row[3].split(", ") if row[3] != "–"]
    assert joined == labels(classify(str(image), k=4))


@needs_browser
def test_coverage_can_be_asked_for(page, classify, image_folder):
    image = image_folder / "test" / "fir" / "1.png"
    page.upload(image)
    page.await_status("for K = 2")
    page.until("#avgk-ask input[value=coverage]").send_keys(Keys.SPACE)
    page.await_status("for 50% coverage")
    for level, words in (("0.5", "50%"), ("0.95", "95%")):
        page.until(f"#avgk-coverage input[value='{level}']").send_keys(Keys.SPACE)
        page.await_status(f"for {words} coverage")
        assert [label for label, _ in shown(page)] == labels(classify(str(image), lambda_val=COVERAGE["lac"][level]))
    assert not page.all("#avgk-k input[type=range]") or not slider(page).is_displayed()


@needs_browser
def test_a_bad_image_gets_a_message_and_the_next_one_an_answer(page, image_folder, tmp_path):
    (tmp_path / "broken.png").write_bytes((image_folder / "test" / "oak" / "0.png").read_bytes()[:60])
    page.upload(tmp_path / "broken.png")
    page.await_status("broken.png cannot be read as an image")
    assert "replace or remove it." in page.status and "/" not in page.status and shown(page) == []
    assert page.until("#avgk-set [role]").get_attribute("role") == "alert"
    page.upload(image_folder / "test" / "oak" / "0.png")
    page.await_status("for K = 2")


@needs_browser
def test_examples_go_from_clear_to_hopeless(page):
    page.until("#avgk-examples button img")
    captions = [element.text for element in page.all("#avgk-examples .caption-label")]
    sizes = [int(caption.split()[0]) for caption in captions]
    assert len(sizes) == 8 and sizes == sorted(sizes) and sizes[0] < sizes[-1]
    for number in (7, 0):
        page.all("#avgk-examples button")[number].send_keys(Keys.ENTER)
        page.wait.until(lambda _, number=number: page.status.startswith(captions[number]))
        assert len(shown(page)) == sizes[number]


@needs_browser
def test_the_keyboard_reaches_everything_and_all_of_it_has_a_name(page, image_folder):
    def names():
        return {e.accessible_name for e in page.all("input, button, select, textarea, [tabindex]") if e.is_displayed()}

    assert all(names())
    reached = []
    for _ in range(40):
        page.driver.switch_to.active_element.send_keys(Keys.TAB)
        reached.append(page.driver.switch_to.active_element.accessible_name)
        if reached[-1].startswith("Thumbnail 8"):
            break
    order = [next(i for i, name in enumerate(reached) if part in name) for part in ("Drop", "slider for K", "Thumb")]
    assert order == sorted(order)

    page.upload(image_folder / "test" / "elm" / "0.png")
    page.await_status("for K = 2")
    assert all(names()) and {"Predicted set", "Growth of the set"} <= names()
    assert page.driver.execute_script("return document.documentElement.lang") == "en"


@needs_browser
def test_two_visitors_do_not_meet(page, classify, image_folder):
    ours, theirs = (image_folder / "test" / name / "0.png" for name in ("ash", "oak"))
    assert labels(classify(str(ours), k=3)) != labels(classify(str(theirs), k=3))
    page.upload(ours)
    page.await_status("for K = 2")
    first = page.driver.current_window_handle
    page.driver.switch_to.new_window("tab")
    page.open()
    page.upload(theirs)
    page.await_status("for K = 2")
    page.driver.close()
    page.driver.switch_to.window(first)
    slider(page).send_keys(Keys.ARROW_RIGHT)
    page.await_status("for K = 3")
    assert [label for label, _ in shown(page)] == labels(classify(str(ours), k=3))


@needs_browser
def test_no_request_leaves_this_machine(page):
    """Of this test and those before it: the log of the browser is read here for the first time."""
    page.driver.get(page.url)
    page.until("#avgk-examples button img")
    requests = page.requests()
    hosts = {urlparse(address).hostname for address in requests if address.startswith(("http", "ws"))}
    assert hosts == {"127.0.0.1"} and len(requests) > 20


def test_the_threshold_of_a_coverage_is_used(model_folder, image_folder):
    model = load_classifier(str(model_folder))
    scores = image_scores(model, transform_for(model), image_folder / "test" / "fir" / "1.png")
    for level, lambda_val in coverage_thresholds(model.config).items():
        text, growth = answer(model.config, scores, BY_COVERAGE, 2, level)
        own = scores["ml"][0]
        assert len(re.findall("data-class", text.partition('class="below"')[0])) == max((own >= lambda_val).sum(), 1)
        assert "50%" in growth and "95%" in growth


def test_class_names_cannot_write_to_the_page(make_model, image_folder):
    model = make_model(id2label={i: f"<script>{name}</script>" for i, name in enumerate(CLASSES)})
    model.config.set_calibration({1: 0.2, 2: 0.1}, {})
    scores = image_scores(model, transform_for(model), image_folder / "test" / "oak" / "0.png")
    for text in answer(model.config, scores, "average size", 2, None):
        assert "<script>" not in text and "&lt;script&gt;" in text


def test_between_recorded_values_a_threshold_in_between_answers(make_model, image_folder):
    model = make_model()
    model.config.set_calibration({1: 0.2, 2: 0.1, 5: 0.05}, {})
    scores = image_scores(model, transform_for(model), image_folder / "test" / "oak" / "0.png")
    lambda_val = model.config.threshold(4)
    assert 0.05 < lambda_val < 0.1
    text, growth = answer(model.config, scores, "average size", 4, None)
    assert "for K = 4" in text and f"threshold {lambda_val:.4g}" in text
    assert growth.count('aria-current="true"') == 1


def test_what_cannot_be_shown_is_refused_at_the_start(make_model, tmp_path, model_folder, capsys):
    model = make_model()
    with pytest.raises(ValueError, match="avgk calibrate MODEL DATASET"):
        build_page(model, "trees")
    model.save_pretrained(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    free = ["--port", str(browser.free_port())]
    for arguments, message in (
        ([tmp_path / "model", *free], "this model has no thresholds"),
        ([tmp_path / "model", "--space", tmp_path / "space"], "this model has no thresholds"),
        ([tmp_path / "none", *free], "there is no model folder"),
        ([model_folder, *free, "--examples", tmp_path / "empty"], "holds no images"),
        ([model_folder, *free, "--examples", tmp_path / "none"], "is no folder"),
        ([model_folder, "--space", tmp_path], "is not an empty folder"),
        ([model_folder, "--port", "70000"], "must lie in 1 to 65535"),
    ):
        assert main(["app", *map(str, arguments)]) == 2
        error = capsys.readouterr().err
        assert message in error and "Traceback" not in error
    assert not (tmp_path / "space").exists()


def test_a_port_in_use_is_refused(model_folder, capsys):
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = str(other.getsockname()[1])
        assert main(["app", str(model_folder), "--port", port]) == 2
    assert f"--port {port} cannot be used" in capsys.readouterr().err


def test_any_classifier_with_thresholds_can_be_shown(splits, image_folder, tmp_path):
    save_vit(tmp_path)
    model = load_classifier(str(tmp_path))
    calibrate(model, splits["validation"], k=[1.5, 3])
    examples = example_images(model, image_folder / "test")
    config = build_page(model, "vit", examples).get_config_file()
    slider = next(c["props"] for c in config["components"] if c["type"] == "slider")
    assert (slider["minimum"], slider["maximum"], slider["value"], slider["step"]) == (1.5, 3, 1.5, 0.5)
    path, size = examples[-1]
    found = pipeline("average-k-image-classification", model=model, image_processor=str(tmp_path))(str(path), k=1.5)
    assert len(found) == size


def test_glyphs_are_drawn_as_examples(make_model, tmp_path):
    from avgk_hf.data.glyphs import CHARACTERS, class_name

    model = make_model(num_labels=120, id2label=dict(enumerate(map(class_name, CHARACTERS))), in_chans=1)
    model.config.set_calibration({2: 0.01}, {})
    chosen = example_images(model, None, tmp_path)
    sizes = [size for _, size in chosen]
    assert len(chosen) == 8 and sizes == sorted(sizes) and all(path.is_file() for path, _ in chosen)


def test_a_written_space_runs_by_itself(model_folder, image_folder, tmp_path):
    """Outside of the checkout, with the package, model and examples that were copied."""
    space = tmp_path / "space"
    write_space(str(model_folder), space, str(image_folder / "test"))
    assert not list(space.rglob("checkpoint-*")) and not list(space.rglob("*.bin"))
    card = ModelCard.load(space / "README.md").data
    assert (card.sdk, card.app_file, card.title) == ("gradio", "app.py", "trees")
    needs = (space / "requirements.txt").read_text().splitlines()
    assert f"gradio=={card.sdk_version}" in needs and any(line.startswith("timm") for line in needs)
    assert str(tmp_path) not in (space / "app.py").read_text()
    own = space / "avgk_hf" / "app.py"
    # to know it from the one that is installed
    own.write_text(own.read_text().replace("Drop an image, or", "Drop a leaf, or"))

    port = browser.free_port()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env.update(GRADIO_SERVER_PORT=str(port), GRADIO_SERVER_NAME="127.0.0.1", HF_HUB_OFFLINE="1")
    url = f"http://127.0.0.1:{port}"
    with browser.running([sys.executable, str(space / "app.py")], url, env=env, cwd=tmp_path):
        with urlopen(f"{url}/config") as answered:
            config = json.load(answered)
    assert config["title"].startswith("trees") and "Drop a leaf, or" in json.dumps(config)
    gallery = next(c for c in config["components"] if c["type"] == "gallery")
    assert len(gallery["props"]["value"]) == 8


HUB_MODEL = """
import contextlib, io, sys
from avgk_hf.cli import main
_, folder, space = sys.argv
assert main(["push", folder, "someone/trees"]) == 0
printed = io.StringIO()
with contextlib.redirect_stdout(printed):
    assert main(["app", "someone/trees", "--space", space]) == 0
code = printed.getvalue().partition("\\n\\n")[2].replace("USER/NAME", "someone/leaves")
exec("\\n".join(line.strip() for line in code.splitlines()))
"""


def test_a_model_of_the_hub_stays_there_and_the_printed_lines_push_the_space(model_folder, tmp_path):
    with HubServer() as hub:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env.update(HF_ENDPOINT=hub.url, HF_TOKEN=hub.token, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1")
        command = [sys.executable, "-c", HUB_MODEL, str(model_folder), str(tmp_path / "space")]
        done = subprocess.run(command, env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        with urlopen(f"{hub.url}/api/spaces/someone/leaves") as answered:
            pushed = {item["rfilename"] for item in json.load(answered)["siblings"]}
    assert {"app.py", "README.md", "requirements.txt", "avgk_hf/app.py"} <= pushed
    assert not any(Path(name).parts[0] in ("model", "examples") for name in pushed)
    assert ModelCard.load(tmp_path / "space" / "README.md").data.models == ["someone/trees"]
    assert "load_classifier('someone/trees')" in (tmp_path / "space" / "app.py").read_text()
