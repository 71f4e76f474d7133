"""Datasets that are read as they come, and classifiers of other classes in two processes: the thresholds of one."""

import io
import json
import os
import shutil
import socket
import tarfile
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from datasets import ClassLabel, Features, Image, IterableDataset, List, Value
from hub_server import HubServer

from avgk_hf.classifiers import load_classifier
from avgk_hf.cli import main
from avgk_hf.data import Stream, load_splits, load_streams, streams
from avgk_hf.evaluation import calibrate, evaluate
from conftest import CLASSES, made_once, save_vit

ROOT = Path(__file__).parent.parent
SIZES = ["--k", "1", "2", "3", "--batch-size", "7"]


def stored_bytes(split):
    """The rows of a split with the files of the images in them."""
    for row in split.cast_column("image", Image(decode=False)):
        yield {**row, "image": {"bytes": Path(row["image"]["path"]).read_bytes(), "path": None}}


@pytest.fixture(scope="module")
def place(tmp_path_factory, image_folder, splits):
    """The same images in three layouts, a classifier that others trained, and what calibrating it as usual gives."""

    def make(folder):
        folder.mkdir()
        torch.manual_seed(0)
        save_vit(folder / "vit")
        for name in ("validation", "test"):
            rows = list(stored_bytes(splits[name]))
            data = splits[name].from_list(rows, features=splits[name].features)
            (folder / "parquet").mkdir(exist_ok=True)
            for part in range(2):
                data.shard(2, part, contiguous=True).to_parquet(folder / f"parquet/{name}-{part}.parquet")
            (folder / "text").mkdir(exist_ok=True)
            text = data.cast_column("label", Value("string")).map(lambda row: {"label": CLASSES[int(row["label"])]})
            text.to_parquet(folder / f"text/{name}.parquet")
            (folder / "tars").mkdir(exist_ok=True)
            for part in range(3):
                with tarfile.open(folder / f"tars/{name}-{part}.tar", "w") as tar:
                    for row in rows[part * 10 : (part + 1) * 10]:
                        for ending, content in (("png", row["image"]["bytes"]), ("cls", b"%d" % row["label"])):
                            info = tarfile.TarInfo(f"{row['index']:03d}.{ending}")
                            info.size = len(content)
                            tar.addfile(info, io.BytesIO(content))
        assert main(["calibrate", str(folder / "vit"), str(image_folder), *SIZES, "--out", str(folder / "usual")]) == 0

    return made_once(tmp_path_factory, "streams", make)


def recorded(folder) -> dict:
    """What was calibrated, but for the names of the dataset."""
    config = json.loads((folder / "config.json").read_text())
    record = {name: value for name, value in config["calibration"].items() if name != "dataset"}
    return {"thresholds": config["thresholds"], "calibration": record, "k": config.get("k")}


LAYOUTS = {
    "images": [],
    "parquet": ["--num-examples", "30"],
    "text": ["--workers", "2"],
    "tars": ["--image-column", "png", "--label-column", "cls", "--labels-by-position", "--on-bad-image", "skip"],
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_stream_gives_the_thresholds_of_a_dataset(layout, place, image_folder, tmp_path):
    """Bit for bit: thresholds, coverages and curve, counted or announced, with workers or without."""
    data = image_folder if layout == "images" else place / layout
    out = ["--streaming", "--out", str(tmp_path / "sets")]
    assert main(["calibrate", str(place / "vit"), str(data), *SIZES, *LAYOUTS[layout], *out]) == 0
    assert recorded(tmp_path / "sets") == recorded(place / "usual")


def test_nothing_of_a_stream_is_copied(place, tmp_path, monkeypatch):
    """`datasets` would write parquet into its cache; a stream needs no room on the disk."""
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", tmp_path / "cache")
    stream = load_streams(str(place / "parquet"))["test"].counted()
    assert len(stream) == 30 and stream.features["label"].names == CLASSES
    assert [row["index"] for row in stream.examples()] == list(range(30))
    left = [path for path in (tmp_path / "cache").rglob("*") if path.is_file() and path.suffix != ".lock"]
    assert left == []


def test_an_iterable_dataset_of_ones_own(place, splits):
    """Evaluated as the `Dataset` of the same rows, the drift too; a number that is wrong is refused, either way."""
    model, data = load_classifier(str(place / "usual")), splits["test"]
    features = Features(image=Image(), label=ClassLabel(names=CLASSES))

    def rows():
        yield from ({name: row[name] for name in ("image", "label")} for row in stored_bytes(data))

    stream = IterableDataset.from_generator(rows, features=features)
    usual = evaluate(model, data, [2], batch_size=7)
    assert evaluate(model, stream, [2], batch_size=7) == usual
    assert evaluate(model, Stream(stream, num_examples=30), [2], batch_size=7) == usual
    for number, words in ((29, "more than the announced num_examples=29"), (31, "30 images were given, but num_exa")):
        with pytest.raises(ValueError, match=words):
            evaluate(model, Stream(stream, number), [2])
    assert evaluate(model, stream.remove_columns("label"), [2])["num_images"] == 30
    with pytest.raises(ValueError, match="no column 'image'"):
        calibrate(model, stream.remove_columns("image"), [2])


def test_rows_of_a_stranger_lead_nowhere(place, tmp_path, monkeypatch):
    """Not to an address, not to memory without end, and a label is one class."""
    model = load_classifier(str(place / "usual"))
    features = Features(image=Image(), label=ClassLabel(names=CLASSES))

    def stream(path):
        row = {"image": {"bytes": None, "path": path}, "label": 0}
        return IterableDataset.from_generator(lambda: iter([row]), features=features)

    monkeypatch.setattr(streams.fsspec, "open", lambda *_: io.BytesIO(bytes(100)))
    for path in ("http://127.0.0.1/x.png", "zip://x.png::http://127.0.0.1/x.zip"):
        with pytest.raises(ValueError, match="is an address, and none of the Hub"):
            evaluate(model, stream(path), [2])
    monkeypatch.setattr(streams, "MOST_BYTES", 50)
    with pytest.raises(ValueError, match="has more than 50 bytes"):
        evaluate(model, stream("hf://datasets/a/b@c/x.png"), [2])
    lists = Features(image=Image(), label=List(Value("int64")))
    with pytest.raises(ValueError, match="the column 'label' holds no classes"):
        Stream(IterableDataset.from_generator(lambda: iter(()), features=lists))


def test_broken_images_of_a_stream_are_left_out(place, splits, tmp_path, capsys):
    """Opened by their own processes, and the others give what they give in a dataset without the broken ones."""
    rows = list(stored_bytes(splits["test"]))
    whole = splits["test"].from_list(rows[:5] + rows[6:], features=splits["test"].features)
    broken = splits["test"].from_list(
        [*rows[:5], {**rows[5], "image": {"bytes": b"none", "path": None}}, *rows[6:]], features=whole.features
    )
    for name, data in (("whole", whole), ("broken", broken)):
        data.to_parquet(tmp_path / name / "test.parquet")
    found = {}
    for name, options in (("whole", []), ("broken", ["--streaming", "--workers", "2"])):
        arguments = ["evaluate", str(place / "usual"), str(tmp_path / name), "--batch-size", "7", *options]
        assert main([*arguments, "--json"]) == (name == "broken")
        printed = capsys.readouterr()
        found[name] = json.loads(printed.out)
    assert "left out 1 of 30 images that cannot be read:\n  image 5" in printed.err
    assert found["broken"].pop("skipped") == 1 and found["broken"] == found["whole"]
    for ends in (["--on-bad-image", "error"], ["--num-examples", "30"]):
        assert main([*arguments[:5], "--streaming", *ends]) == 2
        assert "image 5 cannot be read as an image" in capsys.readouterr().err


REFUSED = {
    "a number without a stream": (["images", "--num-examples", "30"], "--num-examples 30 is for --streaming: add it"),
    "one that is none": (["images", "--streaming", "--num-examples", "0"], "num_examples=0 must be a whole number"),
    "classes that are not known": (["text", "--streaming", "--num-examples", "30"], "leave num_examples out"),
    "skipped, but counted before": (
        ["parquet", "--streaming", "--num-examples", "30", "--on-bad-image", "skip"],
        "images that are skipped do not count",
    ),
    "images again": (["images", "--streaming", "--unsure", "3"], "--unsure looks at images again"),
    "what needs all rows": (["images", "--streaming", "--validation-per-class", "2"], "needs all rows"),
    "a seed": (["images", "--streaming", "--seed", "3"], "--seed 3 is that of generated glyphs"),
    "another seed": (
        ["images", "--streaming", "--split-seed", "3"],
        "--split-seed 3 goes with --validation-per-class",
    ),
    "what is not copied": (["glyphs", "--streaming"], "takes no room by being loaded as usual"),
    "another column": (["tars", "--streaming"], "has no column 'image'"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_a_stream_cannot_do_is_refused(case, place, image_folder, capsys):
    (layout, *options), words = REFUSED[case]
    data = {"images": image_folder, "glyphs": "glyphs"}.get(layout, place / layout)
    assert main(["evaluate", str(place / "usual"), str(data), *options]) == 2
    assert words in capsys.readouterr().err


def test_a_stream_stays_inside_its_folder(place, image_folder, splits, tmp_path, capsys):
    """A row that names a file of the reader is refused before it is opened, and so is one that names an address."""
    for number, path in enumerate([str(image_folder / "test/ash/0.png"), "http://127.0.0.1:9/x.png", "file:///etc/x"]):
        rows = [{**row, "image": {"bytes": None, "path": path}} for row in stored_bytes(splits["test"])]
        data = splits["test"].from_list(rows, features=splits["test"].features)
        (tmp_path / str(number)).mkdir()
        pq.write_table(data.data.table, tmp_path / str(number) / "test.parquet")  # `to_parquet` would read the files
        assert main(["evaluate", str(place / "usual"), str(tmp_path / str(number)), "--streaming"]) == 2
        assert "outside of it: remove it, or permit it" in capsys.readouterr().err


PROGRAM = """
import os, sys
import torch
import torch.distributed as dist
from avgk_hf.cli import main

torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))

vit, images, parquet, folder = sys.argv[1:]
written = set()

def watch(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & (os.O_WRONLY | os.O_RDWR):
        written.add(os.fsdecode(arguments[0]))

sys.addaudithook(watch)
size = ["--k", "1", "2", "3", "--batch-size", "7"]
streaming = [parquet, "--streaming"]
for name, options in (("two", [images, "--workers", "2"]), ("stream", [*streaming, "--on-bad-image", "skip"])):
    assert main(["calibrate", vit, *options, *size, "--out", f"{folder}/{name}"]) == 0
    assert dist.get_world_size() == 2
    dist.barrier()  # it is written
out = ["--batch-size", "7", "--out", f"{folder}/metrics.json"]
assert main(["evaluate", f"{folder}/two", *streaming, *out]) == 0
print(*(path for path in written if path.startswith(folder)), file=sys.stderr)
assert main(["evaluate", f"{folder}/two", *streaming, "--split", "validation", "--num-examples", "29"]) == 2
ends = ["--batch-size", "7", "--on-bad-image", "error"]
raise SystemExit(main(["evaluate", f"{folder}/two", f"{folder}/broken", *ends]) - 2)
"""


def test_two_processes_give_the_thresholds_of_one(place, image_folder, forks, tmp_path):
    """As `accelerate launch -m avgk_hf.cli calibrate ...` starts them; the first alone writes and prints."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1])}
    group |= {"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "ACCELERATE_USE_CPU": "true", "PYTHONPATH": str(ROOT)}
    group["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # what is equal to the last bit is computed alike
    of_each = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    broken = shutil.copytree(image_folder / "test", tmp_path / "broken" / "test")
    (broken / "ash" / "0.png").write_text("none")  # in the first batch, which is the first process's
    given = [place / "vit", image_folder, place / "parquet", tmp_path]
    first, second = forks.run_together(PROGRAM, [given, given], tmp_path, {**os.environ, **group}, of_each)
    assert first.code == second.code == 0, first.err + second.err
    assert recorded(tmp_path / "two") == recorded(tmp_path / "stream") == recorded(place / "usual")
    assert "thresholds written to" in first.out and "config.json" in first.err
    assert "broken/test/ash/0.png cannot be read as an image" in first.err
    number, ended = second.err.strip().splitlines()
    assert number == "avgk evaluate: more than the announced num_examples=29 images were given."
    assert ended.startswith("avgk evaluate: another process has ended, and has said why (") and second.out == ""
    found = json.loads((tmp_path / "metrics.json").read_text())
    assert main(["evaluate", str(place / "usual"), str(image_folder), "--batch-size", "7"]) == 0
    model = load_classifier(str(place / "usual"))
    usual = evaluate(model, load_splits(str(image_folder))["test"], batch_size=7)
    assert {name: found[name] for name in usual} == usual


HUB = """
import sys
from huggingface_hub import HfApi
from avgk_hf.cli import main
vit, images, parquet, folder = sys.argv[1:]
api, options = HfApi(), ["--k", "1", "2", "3", "--batch-size", "7", "--streaming"]
for name, source in (("parquet", parquet), ("images", images)):
    api.create_repo(f"someone/{name}", repo_type="dataset")
    api.upload_folder(repo_id=f"someone/{name}", repo_type="dataset", folder_path=source, ignore_patterns="train/*")
    code = main(["calibrate", vit, f"someone/{name}", *options, "--out", f"{folder}/{name}"])
    assert code == (name == "images")  # one of which cannot be read
"""


def test_a_dataset_of_the_hub_is_read_as_it_comes(place, image_folder, fresh, tmp_path):
    """Parquet, and image files, fetched one by one; one that is none is opened by nobody else, and left out."""
    images = shutil.copytree(image_folder, tmp_path / "images", ignore=shutil.ignore_patterns("train"))
    (images / "validation" / "oak" / "0a.png").write_text("none")
    with HubServer() as hub:
        env = {name: value for name, value in os.environ.items() if not name.startswith("HF_")}
        env |= {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HOME": str(tmp_path / "home")}
        env |= {"HF_HUB_DISABLE_XET": "1", "PYTHONPATH": str(ROOT)}
        env["OMP_NUM_THREADS"] = str(torch.get_num_threads())
        done = fresh.run(HUB, place / "vit", images, place / "parquet", tmp_path, folder=tmp_path, env=env)
        fetched = [request for request in hub.requests if request.endswith("/validation/elm/0.png")]
    assert done.code == 0, done.err
    left_out = done.err.partition("left out 1 of 31 images that cannot be read:")[2]
    assert left_out.strip().startswith("hf://datasets/someone/images@")
    assert recorded(tmp_path / "images") == recorded(tmp_path / "parquet") == recorded(place / "usual")
    assert sum(request.startswith("GET") for request in fetched) == 2  # to look at it, and to compute its scores
    kept = [path for path in (tmp_path / "home").rglob("*") if path.suffix in (".png", ".parquet", ".arrow")]
    assert kept == []


GROWTH = """
import sys
from benchmarks.calibration import calibrate_whole
from benchmarks.measure import growth

print(growth(calibrate_whole, 12_000, int(sys.argv[1])))
"""


def test_memory_does_not_grow_with_the_classes(forks, tmp_path):
    """All that a calibration for K up to 10 and three coverages collects of 12,000 images, for 500 and 2,000 classes.

    A matrix of the scores would take 69 MiB more for the latter, 92 in all; what grows are batches of 128 rows.
    """
    ended = forks.run_together(GROWTH, [["500"], ["2000"]], ROOT, {**os.environ, "PYTHONPATH": str(ROOT)})
    few, many = (int(done.out) / 2**20 for done in ended)
    assert many - few < 35 and many < 46
