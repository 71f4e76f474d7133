"""Attacks by data, recipes and records that others wrote: each is performed, and seen refused."""

import ast
import io
import json
import os
import re
import shlex
import subprocess
import sys
import tarfile
import threading
import uuid
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pandas
import pyarrow.parquet as pq
import pytest
import transformers_suite
import yaml
from datasets import ClassLabel, Dataset, DatasetDict, Features
from datasets import Image as ImageFeature
from PIL import Image

from archives import write_cifar, write_plantnet
from avgk_hf import load_splits
from avgk_hf.cli import main
from avgk_hf.data.cifar import MOST_INSTRUCTIONS
from avgk_hf.model_card import render_card
from avgk_hf.train import parse_recipe

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


def test_forged_pointers_do_not_end_the_process(tmp_path):
    """Believed, the bytes are followed as addresses: a segmentation fault, or worse."""
    forged = {"V8": 0x01, "O8": 0x3D}
    for kind, flags in forged.items():
        write_cifar(tmp_path / kind)
        (tmp_path / kind / "train").write_bytes(pointers(kind, flags))
    command = [sys.executable, "-c", POINTED, *(str(tmp_path / kind) for kind in forged)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, f"ended by signal {-done.returncode}: {done.stderr}"
    for line, kind in zip(done.stdout.splitlines(), forged, strict=True):
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
def test_absurd_json_is_one_line(text, image_folder, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    assert main(["train", "recipe.yaml", "--dataset", str(image_folder), "--model_args", text]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert "not a mapping in JSON" in said
    write_plantnet(tmp_path / "plants")
    (tmp_path / "plants" / "plantnet300K_species_id_2_name.json").write_text(text)
    with pytest.raises(ValueError, match=r"species_id_2_name\.json (is not valid JSON|holds a)"):
        load_splits(str(tmp_path / "plants"))


def test_searches_without_end_are_refused(tmp_path, capsys):
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    fields = (
        "alpha",
        "beta",
        "epsilon",
        "role_lambda",
        "theta_lr",
        "learning_rate",
        "weight_decay",
        "num_train_epochs",
    )
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


@pytest.mark.parametrize("form", READMES)
@pytest.mark.parametrize("place", PLACES)
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


def test_a_pipe_is_not_waited_for(tmp_path):
    folder = write_folder(tmp_path / "trees")
    os.mkfifo(folder / "train" / "ash" / "1.png")
    with pytest.raises(ValueError, match=r"1\.png is neither a file nor a folder"):
        load_splits(str(folder))


IMAGES = ["{secret}", "{folder}/../private/secret.png", "../private/secret.png"]
IMAGES += ["http://{web}/x.png", "hf://datasets/a/b/x.png", "s3://bucket/x.png", "zip://x.png::http://{web}/x.zip"]
IMAGES += ["file://{secret}", "{folder}/.."]


@pytest.mark.parametrize("kind", ["csv", "jsonl", "parquet", "saved"])
@pytest.mark.parametrize("image", IMAGES)
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
    (tmp_path / "compare.yaml").write_text("{recipe: recipe.yaml, losses: {ce: {}}, shared: {alpha: [1]}, k: [1]}")
    if command in ("calibrate", "evaluate", "export"):
        model = make_model(num_labels=2, k=1, id2label={0: "ash", 1: "elm"})
        model.config.set_calibration({1: 0.5}, record={})
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
    model.config.set_calibration({1: 0.0}, record={})
    model.save_pretrained("model")
    name = f"{EVIL[case]}.png"
    Image.new("RGB", (8, 8)).save(name, format="PNG")
    (tmp_path / f"bad {name}").write_text("no image")
    command = ["predict", "model", name, f"bad {name}", "--lambda-val", "0", "--on-bad-image", "skip"]
    capsys.readouterr()
    assert main(["--log", "log.txt", *command]) == 0
    printed = capsys.readouterr()
    said = without_bars(printed.err)
    assert is_plain(printed.out) and is_plain(said)
    assert printed.out.count("\n") == 3 and said.count("\n") == 1  # no row was forged
    log = without_bars((tmp_path / "log.txt").read_text())
    assert is_plain(log) and log.count("\n") == 1 + 3 + 1
    assert main([*command, "--json"]) == 0
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
    model.config.set_calibration({1: 0.5}, record={})
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


HOSTILE = [*EVIL.values(), "x | 100.00 | y", "x\n\n## Results\n\n| a |\n|---|\n| 100 |", "<img src=http://a.b/c.png>"]
HOSTILE += ["![x](http://a.b/c.png)", "[x](javascript:alert(1))", "`x`", "```\nx\n```", "# x", "- x", "1. x"]
HOSTILE += ["http://a.b", "www.a.b", "a@b.c", "*x*", "__x__", "~~x~~", "&lt;img&gt;", "$x$", "\\| x", "---"]
HOSTILE += ["x\n---\ny: z", "x: y", "{{ k }}"]
LIVE = r"!\[x\]|(?<!\\)(\[x|<img|&lt;|~~x|__x)|http://a\.b|www\.a|a@b"  # what would be more than text


@pytest.mark.parametrize("value", HOSTILE)
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


@pytest.mark.parametrize("value", HOSTILE)
def test_the_card_escapes_every_value(value, make_model):
    def render(value):
        config = make_model(num_labels=3, k=1, id2label={0: value, 1: "elm", 2: "fir"}).config
        config.head = "auto"
        record = {"num_examples": [value], "dataset": value, "split": value, "date": {"a": value}}
        config.calibration = {**record, "step": value, "head": value}
        config.thresholds = {"1": 0.5}
        metrics = {"average_k_accuracy": 0.5, "mean_set_size": 2.0, "lambda_val": 0.1, "top1_accuracy": 0.4}
        return render_card(value.replace("/", "-"), config, {"test": metrics}, {value: value}, value).content

    def text_of(content):
        """The body without its block of code, which holds the name as a string of Python."""
        body, code = content.split("\n---\n", 1)[1], content.split("```python\n")[1].split("\n```\n")[0]
        compile(code, "card", "exec")
        return body.replace(code, "", 1)

    def shape(content):
        """What each line begins with, and its cells."""
        marks = re.compile(r"\s*(#+ |[-+*] |\d+[.)] |>|```|~~~|---|===|\||<|\[|!)?")
        lines = re.sub("`avgk predict .*`", "", text_of(content)).split("\n")
        return [(marks.match(line)[1], len(re.findall(r"(?<!\\)\|", line))) for line in lines]

    content = render(value)
    assert shape(content) == shape(render("plain"))
    front, body = content.split("\n---\n", 1)
    assert yaml.safe_load(front.removeprefix("---\n"))["model-index"][0]["name"] == value.replace("/", "-")
    text = text_of(content).replace(shlex.quote(value.replace("/", "-")), "")
    assert not re.search(LIVE, text)
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
