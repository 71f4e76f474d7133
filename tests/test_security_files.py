"""Folders and links of others: what is written, what is published, and where tokens do not go."""

import ast
import json
import os
import pickle
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hub_server import HubServer
from test_compare import COMPARISON
from test_layers import PACKAGE, REMOTE

from avgk_hf import AvgKForImageClassification, AvgKTrainingArguments, compare, train
from avgk_hf.cli import main
from avgk_hf.comparison import plan, read_comparison
from avgk_hf.data.glyphs import write_image_folder
from avgk_hf.space import write_space

SECRET, LIKE = "not-like-a-token-of-the-Hub", "hf_" + "x" * 34
PRIVATE = "what only the user may see"


@pytest.fixture
def model_folder(make_model, tmp_path):
    model = make_model(num_labels=None, id2label=dict(enumerate(["ash", "beech", "cedar", "elm", "fir", "oak"])))
    model.config.set_calibration({2: 0.1}, {"num_examples": 3})
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


WRITING = {"write_text", "write_bytes", "touch", "mkdir", "makedirs", "rename", "symlink_to", "hardlink_to", "dump"}
WRITING |= {"save", "savefig", "save_file", "save_to_json", "save_pretrained", "to_json_file", "save_model"}
WRITING |= {"NamedTemporaryFile", "mkstemp", "mkdtemp", "to_csv", "tofile"}
ELSEWHERE = {
    ("app.py", "save"): "into a temporary folder",
    ("glyphs.py", "save"): "into memory",
    ("export.py", "save"): "into a temporary folder",
    ("calibrate.py", "save_pretrained"): "into the folder of `replacing`",
    ("calibrate.py", "save"): "into the file of `new_file`",
    ("cli.py", "save"): "into the file of `new_file`",
    ("configuration.py", "to_json_file"): "into the file of `new_file`",
    ("modeling.py", "save_pretrained"): "into the folder of `replacing`; of other processes nothing",
    ("plots.py", "savefig"): "into the file of `new_file`",
    ("space.py", "mkdir"): "above the folder that the user names",
    ("space.py", "copytree"): "of this package into a temporary folder",
    ("space.py", "move"): "into a folder that is new or empty",
    ("train.py", "save_model"): "is `_save` of the trainer, with `replacing`",
    ("trainer.py", "save_model"): "is `_save`, with `replacing`",
    ("trainer.py", "save"): "into the file of `new_file`",
    ("trainer.py", "save_to_json"): "into the file of `new_file`, or a fresh folder",
    ("trainer.py", "save_pretrained"): "into the folder of `replacing`",
    ("trainer.py", "save_file"): "into a fresh folder",
    ("trainer.py", "replace"): "of folders that are fresh",
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
NAMES = {*(f"{name}.py" for name in REMOTE), "config.json", "model.safetensors", "preprocessor_config.json"}


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


def test_push_publishes_the_model_and_nothing_else(model_folder, tmp_path, home):
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
        done = subprocess.run([sys.executable, "-c", PUSH, *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        repos = {"links": {"shown.png", "again.png"}, "cached": {"notes.png"}, "saved": {"README.md"}}
        for repo, pictures in repos.items():
            files = hub.files(f"someone/{repo}")
            assert set(files) - {".gitattributes"} == NAMES | pictures, repo
            assert not any(PRIVATE.encode() in content for content in files.values())
            assert files["monitor.py"] == own["monitor.py"] and files["model.safetensors"] == own["model.safetensors"]
        assert ("model", "someone/nothing") not in hub.repos
    said = [line for line in done.stderr.splitlines() if "lead out of" in line]
    assert any("README.md, key.png" in line for line in said) and any("key.png, other.png" in line for line in said)
    assert any("model.safetensors is a link that leads out of the folder" in line for line in done.stderr.splitlines())


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


def test_a_token_is_in_no_file_and_no_output(recipe, image_folder, tmp_path):
    """Train, log, save, resume and push with a token, then look everywhere; local paths are in no pushed file."""
    options = ["--push_to_hub", "true", "--hub_model_id", "someone/trees", "--hub_strategy", "every_save"]
    options += ["--num_train_epochs", "1", "--report_to", "tensorboard"]
    with HubServer() as hub:
        hub.token = SECRET
        hub.fail("POST .*/commit/", times=1)
        env = environment(hub, tmp_path / "cache")
        arguments = ["--log", str(tmp_path / "log"), "train", str(recipe), *options]
        done = subprocess.run([sys.executable, "-c", TWICE, *arguments], env=env, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        printed = done.stdout + done.stderr
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
    trainer, _, config = compare._trainer(comparison, plan(comparison)[0][0], str(tmp_path / "out"))
    assert trainer.args.hub_token == SECRET and "learning_rate" in config and SECRET not in json.dumps(config)
