"""The commands as a user types them."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import avgk_hf
from avgk_hf.cli import COMMANDS, build_parser, main
from avgk_hf.commands.options import METHOD
from avgk_hf.conformal import METHODS
from avgk_hf.shell import guarded

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def model_folder(trained_run, tmp_path_factory):
    """A trained model, calibrated for K = 1, 2 and 3."""
    return shutil.copytree(
        trained_run, tmp_path_factory.mktemp("cli") / "run", ignore=shutil.ignore_patterns("checkpoint-*")
    )


def test_help_and_version_load_nothing_heavy():
    code = (
        "import sys\nfrom avgk_hf.cli import main\n"
        "try: main(sys.argv[1:])\nexcept SystemExit: pass\n"
        "heavy = {'torch', 'transformers', 'timm', 'datasets', 'numpy'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    for arguments, expected in (
        (["--help"], "COMMAND"),
        (["--version"], avgk_hf.__version__),
        (["evaluate", "--help"], "--batch-size"),
    ):
        run = subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, check=True)
        assert expected in run.stdout


def test_every_command_has_help(capsys):
    commands = build_parser()._subparsers._group_actions[0].choices
    assert list(commands) == list(COMMANDS)
    files = {path.stem for path in (ROOT / "avgk_hf" / "commands").glob("*.py")}
    assert files - {"__init__", "options"} == set(COMMANDS)
    for command in commands:
        if command != "train":
            with pytest.raises(SystemExit) as stop:
                main([command, "--help"])
            assert stop.value.code == 0
            assert "usage: avgk " + command in capsys.readouterr().out
    assert main(["train", "--help"]) == 0


def test_unknown_arguments_are_refused(capsys):
    for words, line in {
        "plots": "avgk: there is no command or option 'plots'; did you mean plot?",
        "predikt a b": "avgk: there is no command or option 'predikt'; did you mean predict?",
        "report runs --outt x": "avgk report: unrecognized arguments: --outt x; did you mean --out?",
        "predict a b --k two": "avgk predict: argument --k: 'two' is no number",
        "predict": "avgk predict: the following arguments are required: model, source",
        "--lo x report runs": "avgk: there is no command or option '--lo'; did you mean --log?",
        "--log": "avgk: argument --log: expected one argument",
    }.items():
        with pytest.raises(SystemExit) as stop:
            main(words.split())
        assert stop.value.code == 2
        assert capsys.readouterr().err == f"{line} (`{line.partition(':')[0]} --help` lists the options)\n"
    with pytest.raises(SystemExit) as stop:
        main([])
    printed = capsys.readouterr()
    assert stop.value.code == 0 and "look at a dataset before training" in printed.out and not printed.err


def test_predict_prints_sets_best_first(model_folder, image_folder, capsys):
    images = [str(image_folder / "test" / "oak" / "0.png"), str(image_folder / "test" / "ash" / "1.png")]
    assert main(["predict", str(model_folder), *images, "--k", "3", "--json"]) == 0
    predictions = json.loads(capsys.readouterr().out)
    assert [item["image"] for item in predictions] == images
    for item in predictions:
        scores = [found["score"] for found in item["set"]]
        assert scores == sorted(scores, reverse=True) and len(scores) >= 1
    folder = str(image_folder / "test" / "oak")
    capsys.readouterr()
    assert main(["predict", str(model_folder), folder, images[0], "--json"]) == 0
    found = [item["image"] for item in json.loads(capsys.readouterr().out)]
    assert found == [*sorted(map(str, (image_folder / "test" / "oak").iterdir())), images[0]]
    assert main(["predict", str(model_folder), "broken.png", images[0], "--json"]) == 1
    printed = capsys.readouterr()
    assert [(item["image"], item["error"] is None) for item in json.loads(printed.out)] == [
        ("broken.png", False),
        (images[0], True),
    ]
    assert "left out 1 of 2 images that cannot be read:\n  broken.png: there is no such file" in printed.err
    assert main(["predict", str(model_folder), "broken.png", images[0], "--on-bad-image", "error"]) == 2
    assert "broken.png: there is no such file" in capsys.readouterr().err
    assert main(["predict", str(model_folder), images[0], "--lambda-val", "0"]) == 0
    text = capsys.readouterr().out
    assert text.startswith(f"{images[0]}: 6 classes\n") and all(name in text for name in ("ash", "oak", "fir"))


def test_evaluate_and_calibrate(model_folder, image_folder, tmp_path, capsys):
    before = json.loads((model_folder / "config.json").read_text())["thresholds"]
    out = tmp_path / "new" / "metrics.json"
    assert main(["evaluate", str(model_folder), str(image_folder), "--out", str(out), "--json"]) == 0
    metrics = json.loads(out.read_text())
    assert metrics == json.loads(capsys.readouterr().out[-len(out.read_text()) :])
    assert metrics["lambda_val"] == before["2"] and "average_k_accuracy@3" in metrics
    assert json.loads((model_folder / "config.json").read_text())["thresholds"] == before

    arguments = [
        "calibrate",
        str(model_folder),
        str(image_folder),
        "--k",
        "1.5",
        "4",
        "--out",
        str(tmp_path / "model"),
    ]
    assert main(arguments) == 0
    assert f"thresholds written to {tmp_path / 'model'}" in capsys.readouterr().out
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert set(config["thresholds"]) == {"1.5", "2", "4"}
    assert config["calibration"]["num_examples"] == 30
    assert main(["calibrate", str(tmp_path / "model"), str(image_folder), "--k", "5"]) == 0
    assert set(json.loads((tmp_path / "model" / "config.json").read_text())["thresholds"]) == {"2", "5"}


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["predict", "MODEL", "nothing.png"], "nothing.png: there is no such file"),
        (["predict", "MODEL", "IMAGES/../conf.jpg"], "there is no such file"),
        (["predict", "MODEL", "IMAGE", "--k", "4"], "no threshold is stored for k=4"),
        (["predict", "MODEL", "IMAGE", "--k", "9"], "there are 6 classes in all"),
        (["predict", "./nowhere", "IMAGE"], "there is no model folder './nowhere'"),
        (["predict", "IMAGES", "IMAGE"], "holds no config.json"),
        (["evaluate", "MODEL", "IMAGES", "--split", "dev"], "has no split 'dev'"),
        (["evaluate", "MODEL", "IMAGES", "--k", "4"], "no threshold is stored for k=4"),
        (["evaluate", "MODEL", "my_pants"], "there is no folder 'my_pants' here, and as a Hub id"),
        (["train", "nowhere.yaml"], "there is no recipe 'nowhere.yaml'"),
        (["train"], "name a recipe"),
    ],
)
def test_errors_are_one_clear_line(arguments, message, model_folder, image_folder, capsys, monkeypatch):
    places = {"MODEL": str(model_folder), "IMAGES": str(image_folder)}
    places["IMAGE"] = str(image_folder / "test" / "oak" / "0.png")
    arguments = [places.get(a, a.replace("IMAGES", places["IMAGES"])) for a in arguments]
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and "Traceback" not in error
    monkeypatch.setenv("AVGK_DEBUG", "1")
    with pytest.raises((ValueError, OSError)):
        main(arguments)


@pytest.mark.long
def test_demo_on_one_epoch(tmp_path, monkeypatch, capsys):
    """The real demo on a tenth of the images, so that every file it promises is written by the same code."""
    from avgk_hf import train
    from avgk_hf.commands import demo
    from avgk_hf.data.glyphs import load_glyphs

    full = load_glyphs(progress=False)
    small = type(full)({name: split.shard(10, 0) for name, split in full.items()})
    monkeypatch.setattr(train, "load_splits", lambda *args, **kwargs: small)
    results = demo.demo(tmp_path, ("--num_train_epochs", "1", "--disable_tqdm", "true", "--allow_new_classes"))
    text = capsys.readouterr().out
    assert set(results) == {"CE", "CE, balance 0.5", "AVG-K"} and demo.table(results) in text
    assert "the same CE model asked with balance 0.5, no further training" in text
    for name in ("contact_sheet.png", "set_sizes.png", "table.md", "results.json"):
        assert (tmp_path / name).stat().st_size > 100 and (name in text or name == "results.json")
    for objective in ("ce", "avgk"):
        assert {"model.safetensors", "config.json", "README.md", "results.json"} <= {
            path.name for path in (tmp_path / objective).iterdir()
        }


def test_plot_draws_every_picture(model_folder, tmp_path, capsys):
    before = (model_folder / "config.json").read_bytes()
    assert main(["plot", str(model_folder), "--out", str(tmp_path / "plots")]) == 0
    printed = capsys.readouterr().out.split()
    stems = ["contact_sheet_run", "set_sizes_by_shot_run", "set_sizes", "accuracy_against_k"]
    for stem in stems:
        png, svg = (tmp_path / "plots" / f"{stem}.{ending}" for ending in ("png", "svg"))
        assert png.read_bytes()[:8] == b"\x89PNG\r\n\x1a\n" and "<svg" in svg.read_text()
        assert str(png) in printed and str(svg) in printed
    curve = json.loads((tmp_path / "plots" / "accuracy_against_k.json").read_text())["run"]
    results = json.loads((model_folder / "results.json").read_text())
    assert list(curve) == ["1", "2", "3"]  # below the number of classes
    assert (
        curve["2"] == results["test"]["average_k_accuracy"] and curve["3"] == results["test"]["average_k_accuracy@3"]
    )
    drawn = (tmp_path / "plots" / "accuracy_against_k.svg").read_text()
    assert "sets of K classes on average" in drawn and "top-K: K for every image" in drawn
    assert (model_folder / "config.json").read_bytes() == before
    assert main(["plot", str(tmp_path), "--out", str(tmp_path / "none")]) == 2
    assert "holds no results.json" in capsys.readouterr().err


def test_glyphs_command(tmp_path, capsys, monkeypatch):
    from avgk_hf.data import glyphs

    monkeypatch.setattr(glyphs, "VALIDATION_IMAGES", 20)
    monkeypatch.setattr(glyphs, "TEST_IMAGES", 20)
    monkeypatch.setattr(glyphs, "train_counts", lambda: __import__("numpy").full(120, 1))
    assert main(["glyphs", "--out", str(tmp_path / "g"), "--seed", "4"]) == 0
    assert len(list((tmp_path / "g" / "train").rglob("*.png"))) == 120
    assert "dataset:" in capsys.readouterr().out


def test_recipes_are_in_the_wheel_and_the_version_is_one():
    assert '"recipes" = "avgk_hf/recipes"' in (ROOT / "pyproject.toml").read_text()
    assert f"## {avgk_hf.__version__}" in (ROOT / "CHANGELOG.md").read_text()


def test_what_is_printed_can_be_logged(model_folder, image_folder, tmp_path, capsys):
    """Of a progress bar its last state; a second command is appended, and an error is one line there too."""
    log = tmp_path / "avgk.log"
    assert main(["--log", str(log), "evaluate", str(model_folder), str(image_folder)]) == 0
    printed = capsys.readouterr().out
    text = log.read_text()
    assert text.splitlines()[0].endswith(f"avgk evaluate {model_folder} {image_folder}")
    assert printed in text and "accuracy  mean set size" in printed and "\r" not in text
    assert main(["--log", str(log), "card", str(tmp_path)]) == 2
    assert log.read_text().startswith(text)
    assert log.read_text().splitlines()[-1].startswith(f"avgk card: {tmp_path} holds no results.json")
    for number, options in enumerate((["--log=LOG"], ["--log", "NO", "--log", "LOG"]), 1):  # the last one counts
        words = [word.replace("LOG", str(tmp_path / f"{number}.log")) for word in options]
        assert main([*words, "card", str(tmp_path)]) == 2
        first, second = (tmp_path / f"{number}.log").read_text().splitlines()
        assert first.endswith(f"avgk card {tmp_path}") and second.startswith("avgk card: ")
    image = str(image_folder / "test" / "oak" / "0.png")
    capsys.readouterr()
    assert main([f"--log={tmp_path / 'predict.log'}", "predict", str(model_folder), image]) == 0
    assert capsys.readouterr().out in (tmp_path / "predict.log").read_text()
    assert main([f"--log={tmp_path / 'train.log'}", "train", "nowhere.yaml", "--seed", "1"]) == 2
    assert "there is no recipe" in (tmp_path / "train.log").read_text()
    assert main(["--log", str(tmp_path), "card", str(model_folder)]) == 2
    assert f"nothing can be logged to {tmp_path}" in capsys.readouterr().err


def test_the_help_names_the_methods():
    assert METHOD["help"].count(",") + 2 == len(METHODS)
    assert all(name in METHOD["help"] for name in METHODS)


def test_a_reader_that_has_read_enough_is_no_error(capsys):
    """`avgk info MODEL | head`."""

    def command():
        raise BrokenPipeError(32, "Broken pipe")

    assert guarded("info", command) == 141 and capsys.readouterr() == ("", "")
