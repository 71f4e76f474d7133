"""The page of `avgk app` in a real browser, and the Space that it writes."""

import base64
import csv
import importlib.metadata
import io
import json
import os
import re
import shutil
import socket
import sys
import time
from pathlib import Path
from unittest import mock
from urllib.parse import urlparse
from urllib.request import urlopen

import pytest
import torch
from hub_server import HubServer
from huggingface_hub import ModelCard
from PIL import Image
from selenium.webdriver import Keys
from transformers import TimmWrapperImageProcessor, pipeline

import browser
from avgk_hf.app.answers import Answers, chosen_examples, example_images
from avgk_hf.app.page import build_page
from avgk_hf.app.space import write_space
from avgk_hf.calibration import Calibration
from avgk_hf.classifiers import load_classifier
from avgk_hf.cli import main
from avgk_hf.data.glyphs import CHARACTERS, class_name
from avgk_hf.evaluation import calibrate
from conftest import CLASSES, save_vit

LONG = "1355868_Lactuca_virosa_Habl._ex_Willd."  # as the classes of Pl@ntNet-300K are called
needs_browser = pytest.mark.skipif(
    not (browser.CHROMIUM and browser.DRIVER),
    reason="there is no chromium with chromedriver: `make browser`, or `apt-get install chromium chromium-driver`",
)
PLACE = "return document.querySelector('#avgk-set').getBoundingClientRect().top"


@pytest.fixture(scope="module")
def model_folder(trained_run, tmp_path_factory, image_folder):
    """A trained model, calibrated for K = 1 to 4 and for two coverages; one class has a long name."""
    folder = shutil.copytree(
        trained_run, tmp_path_factory.mktemp("app") / "trees", ignore=shutil.ignore_patterns("checkpoint-*")
    )
    asked = ["--k", "1", "3", "4", "--coverage", "0.5", "0.9"]
    assert main(["calibrate", str(folder), str(image_folder), *asked]) == 0
    path = folder / "config.json"
    path.write_text(path.read_text().replace("cedar", LONG))
    return folder


@pytest.fixture(scope="module")
def classify(model_folder):
    return pipeline("average-k-image-classification", model=str(model_folder))


@pytest.fixture(scope="module")
def hosts(tmp_path_factory):
    """A file with every host that the server connects to."""
    return tmp_path_factory.mktemp("hosts") / "hosts.txt"


@pytest.fixture(scope="module")
def opened(model_folder, image_folder, hosts):
    """One server and one browser for all tests."""
    examples = ["--examples", str(image_folder / "test")]
    with browser.app(model_folder, *examples, hosts=hosts) as url, browser.chromium() as driver:
        yield browser.Page(driver, url)


@pytest.fixture
def page(opened):
    opened.open()
    return opened


def labels(found):
    return [item["label"] for item in found]


def shown(page):
    """Labels and scores of the set on the page."""
    return [(label, float(score.removeprefix("< "))) for label, _, score in page.rows("#avgk-set .in")]


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
    sizes = []
    for level, words in ((0.5, "50%"), (0.9, "90%")):
        page.until(f"#avgk-coverage input[value='{level}']").send_keys(Keys.SPACE)
        page.await_status(f"for {words} coverage")
        found = labels(classify(str(image), coverage=level))
        assert [label for label, _ in shown(page)] == found
        sizes.append((words, str(len(found))))
    assert [(name, size) for name, size, *_ in page.rows("#avgk-growth tbody")] == sizes
    assert sizes[0][1] != sizes[1][1]
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
    names = {caption.partition("; ")[2].removeprefix("true: ") for caption in captions}
    files = {name for name in names if name.endswith(".png")}  # in folders that are no class
    assert names <= {*CLASSES, *files} and len(names - files) > 1
    for number in (7, 0):
        page.all("#avgk-examples button")[number].send_keys(Keys.ENTER)
        page.wait.until(lambda _, number=number: page.status.startswith(captions[number].partition(";")[0]))
        assert len(shown(page)) == sizes[number]
        page.wait.until(lambda _: -1 <= page.driver.execute_script(PLACE) < 900)  # the answer is seen


@needs_browser
def test_several_images_give_a_table_to_download(page, classify, image_folder, tmp_path):
    """The table is in the page itself: there is no address to fetch it from."""
    (tmp_path / "broken.png").write_text("no image")
    images = [
        image_folder / "test" / "fir" / "1.png",
        tmp_path / "broken.png",
        image_folder / "test" / "ash" / "0.png",
    ]
    page.until("#avgk-files input[type=file]").send_keys("\n".join(map(str, images)))
    link = page.until("#avgk-several a[download]")
    rows = page.rows("#avgk-several tbody")
    assert [row[0] for row in rows] == [path.name for path in images] and "cannot be read" in rows[1][2]
    assert str(tmp_path) not in rows[1][2]
    text = base64.b64decode(link.get_attribute("href").partition("base64,")[2]).decode("utf-8-sig")
    found = list(csv.DictReader(io.StringIO(text)))
    assert [each["k"] for each in found] == list("1234") * 3 and link.get_attribute("download") == "sets.csv"
    for each in (*found[:4], *found[8:]):
        image = next(str(path) for path in images if path.name == each["image"])
        assert each["classes"].split(" | ") == labels(classify(image, k=int(each["k"])))
    assert rows[0][1] == found[1]["size"]  # the model's own K

    def told(words):
        return words in page.driver.execute_script("return document.querySelector('#avgk-several').innerText")

    slider(page).send_keys(Keys.HOME)  # the table follows the controls
    page.wait.until(lambda _: told("1 of which cannot be read, for K = 1"))
    assert page.rows("#avgk-several tbody")[0][1] == found[0]["size"]
    page.until("#avgk-ask input[value=coverage]").send_keys(Keys.SPACE)
    page.until("#avgk-coverage input[value='0.9']").send_keys(Keys.SPACE)
    page.wait.until(lambda _: told("1 of which cannot be read, for 90% coverage"))
    sizes = [row[1] for row in page.rows("#avgk-several tbody")]
    assert sizes == [
        str(len(labels(classify(str(image), coverage=0.9)))) if image != images[1] else "" for image in images
    ]
    assert told("for every recorded coverage")


@pytest.mark.long
@needs_browser
def test_desktop_and_phone_in_light_and_dark(page, image_folder, tmp_path):
    """The answer stands above the examples on a phone, nothing is wider than it, and dark is dark."""
    for name in browser.SCREENS:
        browser.look_at(page, name, image_folder / "test" / "fir" / "1.png", tmp_path / f"{name}.png")
        assert (tmp_path / f"{name}.png").stat().st_size > 10_000
        tops = [page.until(part).rect["y"] for part in ("#avgk-image", "#avgk-set", "#avgk-examples", "#avgk-files")]
        assert tops[1] < tops[2] < tops[3] and (
            tops[0] < tops[1] < page.until("#avgk-k").rect["y"] or "phone" not in name
        )
        widths = "return [document.documentElement.scrollWidth, window.innerWidth]"
        scroll, inner = page.driver.execute_script(widths)
        assert scroll <= inner
        corner = Image.open(tmp_path / f"{name}.png").convert("L").getpixel((5, 5))
        assert corner < 60 if "dark" in name else corner > 200
    browser.leave_screen(page)


def test_a_class_is_called_what_the_visitor_calls_it(model_folder, image_folder, tmp_path, capsys):
    answers, scores = answers_and_scores(load_classifier(str(model_folder)), image_folder / "test" / "oak" / "0.png")
    answers = Answers(answers.model, "species")
    text, growth = answers.html(scores, k=4)
    assert "species</span> for K = 4" in text and ">species</th>" in growth
    assert "mean over species" in answers.html(scores, k=2)[0]  # of a K that was trained, with what it is worth
    for part in (*answers.html(scores, k=2), *answers.html(scores, coverage=0.9)):
        assert not re.search(r"\bclass(es)?\b(?!=)", re.sub(r"<[^>]*>", " ", part))
    page = build_page(answers, "trees")
    slider = components(page, "slider")[0]
    assert slider["label"] == "K, species on average"
    for control in (*components(page, "slider"), *components(page, "radio")):
        assert not re.search(r"\bclass(es)?\b", f"{control.get('label')} {control.get('info')}")
    assert (Answers(answers.model, "bird/birds").count(1), Answers(answers.model, "bird/birds").count(2)) == (
        "1 bird",
        "2 birds",
    )
    write_space(str(model_folder), tmp_path / "space", noun="species")
    assert "), 'species')" in (tmp_path / "space" / "app.py").read_text()
    assert main(["app", str(model_folder), "--port", str(browser.free_port()), "--noun", "a\nb"]) == 2
    assert "is no word" in capsys.readouterr().err


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
def test_a_long_name_stays_in_its_cell(page, image_folder):
    page.upload(image_folder / "test" / "cedar" / "0.png")
    page.await_status("for K = 2")
    slider(page).send_keys(Keys.END)
    page.await_status("for K = 4")
    script = (
        "return [...document.querySelectorAll(arguments[0])].map(c => [c.innerText, c.scrollWidth, c.clientWidth])"
    )
    try:
        for width in (1240, 500):
            page.driver.set_window_size(width, 900)
            cells = page.driver.execute_script(script, ".avgk th, .avgk td")
            assert sum(LONG in text for text, _, _ in cells) == 2  # in the set, and in its growth
            assert [cell for cell in cells if cell[1] > cell[2]] == []
    finally:
        page.driver.set_window_size(1240, 900)


@needs_browser
def test_no_request_leaves_this_machine(page, image_folder, hosts):
    """Of this test and those before it: the log of the browser is read here for the first time."""
    page.until("#avgk-examples button img")
    page.upload(image_folder / "test" / "oak" / "0.png")
    page.await_status("for K = 2")
    requests = page.requests()
    asked = {urlparse(address).hostname for address in requests if address.startswith(("http", "ws"))}
    assert asked == {"127.0.0.1"} and len(requests) > 20
    assert set(hosts.read_text().split()) == {"127.0.0.1"}  # the server asks itself, once, whether it is there


def answers_and_scores(model, path):
    answers = Answers(model)
    return answers, answers.scores(answers.transform.image(path))


def components(page, kind):
    """What a page tells a browser about its components of one kind."""
    return [c["props"] for c in page.get_config_file()["components"] if c["type"] == kind]


def test_the_coverage_of_another_head_is_not_offered(make_model):
    model, thresholds = make_model(), {1: 0.4, 2: 0.2}
    for head, offered in (("ml", True), ("sccp", False)):
        record, coverage = {"head": head, "num_examples": None}, {"lac": {"0.9": 0.1, "0.5": 0.3}}
        Calibration.store(model.config, thresholds, record, head_thresholds={"ml": thresholds}, coverage=coverage)
        ask, levels = components(build_page(Answers(model), "trees"), "radio")
        assert ask["visible"] is offered
        assert [level for _, level in levels["choices"]] == ([0.5, 0.9] if offered else [])


def test_a_model_with_one_k_has_text_in_place_of_the_slider(make_model, image_folder):
    model = make_model()
    Calibration.store(model.config, {2: 0.2}, {}, coverage={"lac": {"0.9": 0.1}})
    page = build_page(Answers(model), "trees")
    assert not components(page, "slider")
    assert any("K = 2 classes on average" in text["value"] for text in components(page, "html"))
    (show,) = {function.fn for function in page.fns.values() if function.name == "show"}
    answers, found = answers_and_scores(model, image_folder / "test" / "oak" / "0.png")
    assert show(found, "average size", 2.0, 0.9) == answers.html(found, k=2)
    assert show(found, "coverage", 2.0, 0.9) == answers.html(found, coverage=0.9)


def test_a_set_of_thousands_is_counted_and_its_best_are_shown(make_model):
    """In time and size that a slider can be moved with: lists instead of sets would take minutes."""
    labels = 50_000
    model = make_model(objective="ce", num_labels=labels, id2label={j: f"class {j}" for j in range(labels)})
    Calibration.store(model.config, {1: 0.9, 10_000: 0.8, 40_000: 0.2}, {})
    answers = Answers(model)
    scores = {"ml": torch.arange(labels)[None] / labels}
    start = time.monotonic()
    text, growth = answers.html(scores, k=40_000)
    assert time.monotonic() - start < 10 and len(text) + len(growth) < 100_000
    rows = re.findall('data-class="([0-9]+)"', text)
    assert rows == [str(labels - 1 - i) for i in range(200)] + ["9999", "9998", "9997"]
    assert "40000 classes" in text and "and 39800 more" in text and "and 29994 more" in growth


def test_class_names_cannot_write_to_the_page(make_model, image_folder):
    model = make_model(id2label={i: f"<script>{name}</script>" for i, name in enumerate(CLASSES)})
    Calibration.store(model.config, {1: 0.2, 2: 0.1}, {})
    answers, scores = answers_and_scores(model, image_folder / "test" / "oak" / "0.png")
    for text in answers.html(scores, k=2):
        assert "<script>" not in text and "&lt;script&gt;" in text


def test_between_recorded_values_a_threshold_in_between_answers(make_model, image_folder):
    model = make_model()
    Calibration.store(model.config, {1: 0.2, 2: 0.1, 5: 0.05}, {})
    answers, scores = answers_and_scores(model, image_folder / "test" / "oak" / "0.png")
    lambda_val = Calibration.of(model.config).threshold(4)
    assert 0.05 < lambda_val < 0.1
    text, growth = answers.html(scores, k=4)
    assert "for K = 4" in text and f"threshold {lambda_val:.4g}" in text
    assert growth.count('aria-current="true"') == 1


def test_what_cannot_be_shown_is_refused_at_the_start(make_model, tmp_path, model_folder, capsys):
    model = make_model()
    with pytest.raises(ValueError, match="avgk calibrate MODEL DATASET"):
        build_page(Answers(model), "trees")
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


FIRST_LINE = """
import builtins, os, sys
from avgk_hf.cli import main
said = print
def note(*words, **how):
    said(*words, "gradio" in sys.modules, flush=True)
    os._exit(0)
builtins.print = note
main(sys.argv[1:])
"""


@pytest.mark.long
def test_the_command_answers_before_gradio_is_imported(fresh, model_folder, tmp_path):
    words = ["app", str(model_folder), "--port", browser.free_port(), "--noun", "tree/trees"]
    ended = fresh.run(FIRST_LINE, *words, folder=tmp_path)
    assert (ended.code, ended.out) == (0, "trees knows 6 trees; its page is being made. False\n"), ended.err


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
    examples = example_images(Answers(model), image_folder / "test")
    (slider,) = components(build_page(Answers(model), "vit", examples), "slider")
    assert (slider["minimum"], slider["maximum"], slider["value"], slider["step"]) == (1.5, 3, 1.5, 0.5)
    path, size = examples[-1]
    found = pipeline("average-k-image-classification", model=model, image_processor=str(tmp_path))(str(path), k=1.5)
    assert len(found) == size


def test_glyphs_are_drawn_as_examples(make_model):
    model = make_model(
        num_labels=120, id2label=dict(enumerate(map(class_name, CHARACTERS))), model_args={"in_chans": 1}
    ).eval()
    Calibration.store(model.config, {2: 1 / 120}, {})  # of an untrained model: some scores lie above it, some below
    model.config.id2label = dict(sorted(model.config.id2label.items(), key=str))  # as a file that is sorted holds them
    with chosen_examples(Answers(model), None) as chosen:
        sizes = [size for _, size in chosen]
        assert len(chosen) == 8 and sizes == sorted(sizes) and len(set(sizes)) > 3
        assert len({path.read_bytes() for path, _ in chosen}) == 8
        classify = pipeline(
            "average-k-image-classification",
            model=model,
            image_processor=TimmWrapperImageProcessor(model.config.pretrained_cfg),
        )
        assert [len(classify(str(path))) for path, _ in chosen] == sizes
    assert not chosen[0][0].exists()


def test_examples_are_images_that_can_be_read(model_folder, image_folder, tmp_path, caplog):
    answers = Answers(load_classifier(str(model_folder)))
    good = (image_folder / "test" / "oak" / "0.png").read_bytes()
    (tmp_path / ".hidden").mkdir()
    for name in ("a.png", "B.PNG", "._a.png", ".hidden/a.png", "notes.txt", "report.pdf"):
        (tmp_path / name).write_bytes(good)
    found = example_images(answers, tmp_path)
    assert {path.name for path, _ in found} == {"a.png", "B.PNG"}
    found.append((image_folder / "test" / "oak" / "0.png", found[0][1]))
    (gallery,) = components(build_page(answers, "trees", found), "gallery")
    number = answers.count(found[0][1])
    captions = {each["caption"] for each in gallery["value"]}  # the file's name, or the class that its folder names
    assert captions == {f"{number}; {name}" for name in ("a.png", "B.PNG", "true: oak")}
    for number in range(100):  # more than are looked at
        (tmp_path / f"b{number}.png").write_bytes(good[:60])
    assert {path.name for path, _ in example_images(answers, tmp_path)} == {"a.png", "B.PNG"}
    warned = [record.getMessage() for record in caplog.records if record.name == "avgk_hf.app.answers"]
    assert len(warned) == 1 and "left out 100 images that cannot be read, e.g. " in warned[0]
    for name in ("a.png", "B.PNG"):
        (tmp_path / name).unlink()
    with pytest.raises(ValueError, match="none of the 100 images can be read"):
        example_images(answers, tmp_path)


def test_a_space_is_written_whole_or_not_at_all(model_folder, tmp_path, monkeypatch):
    space = tmp_path / "new" / "space"
    missing = importlib.metadata.PackageNotFoundError("avgk_hf")
    monkeypatch.chdir(tmp_path)
    with mock.patch("importlib.metadata.requires", side_effect=missing), pytest.raises(ImportError, match="installed"):
        write_space(str(model_folder), space)
    assert not space.parent.exists()
    for name in ("shutil.copytree", "shutil.copyfile"):
        with mock.patch(name, side_effect=OSError("no space left")), pytest.raises(OSError, match="no space left"):
            write_space(str(model_folder), space)
        assert list(space.parent.iterdir()) == []
    space.mkdir()
    monkeypatch.chdir(space)
    odd = shutil.copytree(model_folder, tmp_path / 'odd"""\\N')
    write_space(str(odd), ".")  # an empty folder stays the one it is
    compile(Path("app.py").read_text(), "app.py", "exec")
    assert ModelCard.load("README.md").data.title == odd.name
    assert {path.name for path in Path().iterdir()} == {"app.py", "avgk_hf", "model", "README.md", "requirements.txt"}
    assert list(space.parent.iterdir()) == [space]


@pytest.mark.long
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
    own = space / "avgk_hf" / "app" / "page.py"
    # to know it from the one that is installed
    own.write_text(own.read_text().replace("Choose or drop an image, or", "Drop a leaf, or"))

    port = browser.free_port()
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    env.update(GRADIO_SERVER_PORT=str(port), GRADIO_SERVER_NAME="127.0.0.1", HF_HUB_OFFLINE="1", OMP_NUM_THREADS="1")
    url = f"http://127.0.0.1:{port}"
    with browser.running([sys.executable, str(space / "app.py")], url, env=env, cwd=tmp_path):
        with urlopen(f"{url}/config") as answered:
            config = json.load(answered)
        visitor, image = browser.Visitor(url), image_folder / "test" / "oak" / "0.png"
        taken, text = visitor.look(visitor.upload(image.read_bytes()))
        assert taken and "for K = 2" in text
        assert visitor.look(str(image), meta=None)[0] is False  # never uploaded
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


@pytest.mark.long
def test_a_model_of_the_hub_stays_there_and_the_printed_lines_push_the_space(model_folder, fresh, tmp_path):
    with HubServer() as hub:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env.update(HF_ENDPOINT=hub.url, HF_TOKEN=hub.token, HF_HOME=str(tmp_path / "home"), HF_HUB_DISABLE_XET="1")
        env["PYTHONPATH"] = str(Path(__file__).parent.parent)
        done = fresh.run(HUB_MODEL, model_folder, tmp_path / "space", folder=tmp_path, env=env)
        assert done.code == 0, done.err
        with urlopen(f"{hub.url}/api/spaces/someone/leaves") as answered:
            pushed = {item["rfilename"] for item in json.load(answered)["siblings"]}
    assert {
        "app.py",
        "README.md",
        "requirements.txt",
        "avgk_hf/app/page.py",
        "avgk_hf/app/templates/set.html",
    } <= pushed
    assert not any(Path(name).parts[0] in ("model", "examples") for name in pushed)
    assert ModelCard.load(tmp_path / "space" / "README.md").data.models == ["someone/trees"]
    assert "load_classifier('someone/trees')" in (tmp_path / "space" / "app.py").read_text()
