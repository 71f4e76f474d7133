"""`avgk predict` of many images: sources, shards that go on after a crash, several processes, and Ray."""

import io
import itertools
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tarfile
from pathlib import Path

import pyarrow as pa
import pyarrow.dataset
import pyarrow.parquet as pq
import pytest
import torch
from datasets import Dataset, DatasetDict, load_dataset
from datasets import Image as StoredImage

from avgk_hf import prediction
from avgk_hf.classifiers import load_classifier
from avgk_hf.cli import main
from avgk_hf.data import containers, image_files, sources
from avgk_hf.data.containers import OutOfReach, Part
from avgk_hf.data.sources import Source
from avgk_hf.prediction import RECORD, Predictor, Shards
from avgk_hf.questions import Question
from conftest import save_vit

ROOT = Path(__file__).parent.parent
SHARDS = ["--shard-size", "8", "--batch-size", "3"]


@pytest.fixture(scope="module")
def place(trained_run, image_folder, tmp_path_factory):
    """A model, and 30 images in every form that is read; one of them is broken."""
    place = tmp_path_factory.mktemp("predict")
    shutil.copytree(trained_run, place / "model", ignore=shutil.ignore_patterns("checkpoint-*"))
    shutil.copytree(image_folder / "test", place / "folder")
    files = image_files(place / "folder")
    files[11].write_bytes(b"no image")
    (place / "list.txt").write_text("".join(f"{file.relative_to(place)}\n" for file in files))
    for number, some in enumerate((files[:13], files[13:])):  # WebDataset has several, with labels beside the images
        (place / "tars").mkdir(exist_ok=True)
        with tarfile.open(place / "tars" / f"{number}.tar", "w") as tar:
            for file in some:
                tar.add(file, f"{file.parent.name}-{file.name}")
                tar.add(place / "list.txt", f"{file.parent.name}-{file.stem}.cls")
    stored = [{"bytes": file.read_bytes(), "path": None} for file in files]
    (place / "parquet").mkdir()
    for number, some in enumerate((stored[:20], stored[20:])):
        table = pa.table({"image": some, "label": [0] * len(some)})
        pq.write_table(table, place / "parquet" / f"{number}.parquet", row_group_size=7)
    pq.write_table(pa.table({"photo": [each["bytes"] for each in stored]}), place / "bytes.parquet")
    saved = Dataset.from_dict({"image": stored}).cast_column("image", StoredImage())
    DatasetDict({"test": saved, "train": saved.select(range(3))}).save_to_disk(place / "saved")
    return place


@pytest.fixture(autouse=True)
def here(place, monkeypatch):
    monkeypatch.chdir(place)


def predict(out, *arguments, code=1) -> list[dict]:
    """The rows of a folder in the order of its files."""
    assert main(["predict", "model", *map(str, arguments), "--out", str(out), *SHARDS]) == code
    return rows_of(out)


def rows_of(folder) -> list[dict]:
    return pq.read_table(folder).to_pylist()


def sets_of(rows) -> list[tuple]:
    return [(row["set"], bool(row["error"])) for row in rows]


@pytest.fixture(scope="module")
def expected(place):
    """The rows of one process, and those that are printed for the same folder."""
    before = os.getcwd()
    os.chdir(place)
    try:
        return predict("expected", "folder")
    finally:
        os.chdir(before)


def test_shards_hold_the_rows_of_a_file(place, expected, tmp_path, capsys):
    """Those of the folder are those of one Parquet file, its readers take it, and its record says that it is whole."""
    out = str(tmp_path / "sets.parquet")
    assert main(["predict", "model", "folder", "--out", out, "--batch-size", "3"]) == 1
    assert "left out 1 of 30 images" in capsys.readouterr().err
    found = rows_of(out)
    assert [row["image"] for row in expected] == [str(file) for file in image_files("folder")]
    assert [(row["image"], row["k"], row["size"], row["error"]) for row in expected] == [
        (row["image"], row["k"], row["size"], row["error"]) for row in found
    ]
    assert [row["size"] for row in expected] == [None if row["error"] else len(row["set"]) for row in expected]
    for row, other in zip(expected, found, strict=True):  # of other batches
        assert [each["label"] for each in row["set"]] == [each["label"] for each in other["set"]]
        assert [each["score"] for each in row["set"]] == pytest.approx([each["score"] for each in other["set"]], 1e-4)
    (error,) = [row["error"] for row in expected if row["error"]]
    assert "cannot be read as an image" in error and expected[11]["set"] == []
    parts = sorted(path.name for path in Path("expected").iterdir())
    assert parts == [RECORD, *(f"part-{i:06d}.parquet" for i in range(4))]
    assert json.loads(Path("expected", RECORD).read_text())["images"] == 30
    assert pyarrow.dataset.dataset("expected").count_rows() == 30
    assert load_dataset("expected", split="train", cache_dir=tmp_path / "cache").num_rows == 30


@pytest.mark.parametrize(
    ("given", "names"),
    [
        (["list.txt"], "folder/ash/0.png"),
        (["tars"], "tars/0.tar::ash-0.png"),
        (["tars/0.tar", "tars/1.tar"], "tars/0.tar::ash-0.png"),
        (["parquet"], "parquet/0.parquet::0"),
        (["bytes.parquet", "--image-column", "photo"], "bytes.parquet::0"),
        (["saved", "--split", "test"], "saved::0"),
        (["folder", "--workers", "2"], "folder/ash/0.png"),
    ],
    ids=lambda given: given[0] if isinstance(given, list) else "",
)
def test_every_source_gives_the_same_sets(given, names, expected, tmp_path):
    found = predict(tmp_path / "sets", *given)
    assert sets_of(found) == sets_of(expected)
    assert found[0]["image"] == names and len({row["image"] for row in found}) == 30


def killed_at(images: int):
    """A program that predicts until it has seen so many images, and then is killed as `kill -9` does it."""
    return f"""
import os, signal, sys
from avgk_hf.prediction import Predictor
whole, seen = Predictor._rows, []
def rows(self, batch):
    seen.extend(batch.names)
    if len(seen) > {images} and os.environ.get("RANK", "1") == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    return whole(self, batch)
Predictor._rows = rows
"""


def test_a_killed_run_goes_on(expected, tmp_path, capsys):
    """With kill -9 in the third shard: the two before it stay as they are, and the rows are those of a whole run."""
    command = ["predict", "model", "folder", "--out", str(tmp_path / "sets"), *SHARDS]

    def run():
        exec(killed_at(20), {})
        main(command)

    process = multiprocessing.get_context("fork").Process(target=run)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    parts = sorted(path for path in (tmp_path / "sets").glob("part-*"))
    assert [path.name for path in parts] == ["part-000000.parquet", "part-000001.parquet"]
    assert json.loads((tmp_path / "sets" / RECORD).read_text())["images"] is None
    times = [path.stat().st_mtime_ns for path in parts]
    assert main(command) == 1  # the broken image is in a shard that was there
    said = capsys.readouterr().err
    assert "30 images in 4 files; 1 images of files that were there cannot be read" in said
    assert [path.stat().st_mtime_ns for path in parts] == times
    assert rows_of(tmp_path / "sets") == expected
    assert json.loads((tmp_path / "sets" / RECORD).read_text())["images"] == 30
    assert main(command) == 1 and rows_of(tmp_path / "sets") == expected  # nothing is left to do
    assert main([*command, "--on-bad-image", "error"]) == 2
    assert "part-000001.parquet has images that cannot be read" in capsys.readouterr().err


def run_processes(forks, number, before, *arguments) -> list:
    """`-m avgk_hf.predict` in several processes, with what accelerate tells those that it launches."""
    group = {"WORLD_SIZE": str(number), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}  # where nobody listens
    threads = torch.get_num_threads()  # what is equal to the last bit is computed alike
    of_each = [{"RANK": str(rank), "LOCAL_RANK": str(rank), **group} for rank in range(number)]
    code = f"import runpy, torch; torch.set_num_threads({threads})\n{before}\n"
    code += "runpy.run_module('avgk_hf.predict', run_name='__main__')"
    return forks.run_together(code, [arguments] * number, Path.cwd(), of_each=of_each)


def test_processes_share_the_shards_and_one_is_killed(forks, expected, tmp_path):
    """The other one ends its own share, and a restart with another number of processes completes the rest."""
    given = ["model", "folder", "--out", tmp_path / "sets", *SHARDS, "--workers", "0"]
    one, killed = run_processes(forks, 2, killed_at(4), *given)
    assert killed.code == -signal.SIGKILL and one.code == 0, one.err
    assert "2 of them are not there yet" in one.err
    parts = sorted(path.name for path in (tmp_path / "sets").glob("part-*"))
    assert parts == ["part-000000.parquet", "part-000002.parquet"]
    ended = run_processes(forks, 3, "", *given)
    assert [done.code for done in ended] == [0, 0, 0], ended  # though one image is broken: a launcher ends them all
    assert sum("left out 1 of 8 images" in done.err for done in ended) == 1
    assert rows_of(tmp_path / "sets") == expected


def test_every_image_is_in_one_share(place, tmp_path):
    """For any number of images, processes and sizes of shards, whatever was there before."""
    predictor = Predictor(load_classifier("model"), [Question()])
    files = [str(path) for path in image_files("folder") if path.stat().st_size > 20]
    for n, world_size, size in ((1, 3, 2), (2, 2, 2), (3, 2, 2), (7, 3, 2), (6, 5, 1), (5, 2, 8)):
        folder, source = tmp_path / f"{n}-{world_size}-{size}", Source(files[:n])
        for rank in range(world_size):
            before = {path.name for path in folder.glob("part-*")}
            shards = Shards(folder, predictor, source, size)
            expected = shards.number(rank, world_size)
            seen = predictor.tally.images
            shards.write_share(rank, world_size)
            assert predictor.tally.images - seen == expected
            new = sorted(int(path.name[5:11]) for path in folder.glob("part-*") if path.name not in before)
            assert new == list(range(rank, -(-n // size), world_size))
            assert (shards.finish() == 0) == (len(before) + len(new) == -(-n // size))
        assert [row["image"] for row in rows_of(folder)] == files[:n]


def test_images_are_not_held(place):
    """Of a source without end the first batches come, and few images are read ahead of them."""
    taken = []

    class Endless(Source):
        def pieces(self):
            for number in itertools.count():
                taken.append(number)
                yield sources.Piece("named", "", [f"folder/ash/{number % 5}.png"])

        def number(self):
            return None

    for workers in (0, 2):
        taken.clear()
        predictor = Predictor(load_classifier("model"), [Question()], batch_size=4, workers=workers)
        rows = predictor.rows(Endless([]))
        found = [row["image"] for batch in itertools.islice(rows, 10) for row in batch]
        assert found == [f"folder/ash/{number % 5}.png" for number in range(40)]
        assert len(taken) <= 40 + 4 * (2 * workers + 2)
        rows.close()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (["--k", "3"], "holds sets of another question"),
        (["--bf16"], "holds sets of another bf16"),
        (["--allow-outside"], "holds sets of another source"),
        (["--shard-size", "9"], "holds sets of another shard size"),
    ],
)
def test_shards_of_others_are_not_mixed(change, message, expected, capsys):
    assert main(["predict", "model", "folder", "--out", "expected", *SHARDS, *change]) == 2
    assert message in capsys.readouterr().err and rows_of("expected") == expected


def test_shards_of_other_weights_or_images_are_not_mixed(expected, tmp_path, capsys):
    """A model of the same name, and a folder in which an image is new, are noticed."""
    shutil.copytree("expected", tmp_path / "sets")
    shutil.copytree("folder", tmp_path / "folder")
    shutil.copytree("model", tmp_path / "model")
    os.chdir(tmp_path)  # the fixture returns
    command = ["predict", "model", "folder", "--out", "sets", *SHARDS]
    assert main(command) == 1 and "30 images in 4 files" in capsys.readouterr().err  # the same in another place
    shutil.copy("folder/ash/0.png", "folder/beech/00.png")
    assert main(command) == 2
    assert "some came or went; choose another folder" in capsys.readouterr().err
    os.rename("folder/beech/00.png", "folder/beech/0.png")
    os.rename("folder/ash/3.png", "folder/ash/3a.png")  # neither the first nor another number of them
    assert main(command) == 2
    assert "part-000000.parquet has other images than the source" in capsys.readouterr().err
    os.rename("folder/ash/3a.png", "folder/ash/3.png")
    whole = Path("sets/part-000002.parquet").read_bytes()
    Path("sets/part-000002.parquet").write_bytes(b"")  # as a power failure leaves it
    assert main(command) == 2
    assert "part-000002.parquet cannot be read" in (said := capsys.readouterr().err) and "remove it, and" in said
    Path("sets/part-000002.parquet").write_bytes(whole)
    shutil.copy("sets/part-000003.parquet", "sets/part-000004.parquet")  # as if there had been more images
    assert main(command) == 2 and "it lost some; choose another folder" in capsys.readouterr().err
    os.remove("sets/part-000004.parquet")
    model = load_classifier("model")
    with torch.no_grad():
        next(model.parameters()).view(-1)[0] += 1
    model.save_pretrained("model")
    assert main(command) == 2
    assert "sets holds sets of another model (" in capsys.readouterr().err
    os.remove(Path("sets", RECORD))
    assert main(command) == 2
    assert "sets holds other files, and sets get a folder of their own" in capsys.readouterr().err


def test_what_cannot_be_meant_is_refused(place, tmp_path, capsys, monkeypatch):
    (tmp_path / "no.parquet").write_text("nothing")
    (tmp_path / "empty").mkdir()
    (tmp_path / "binary.txt").write_bytes(b"\xff\xfe\x00")
    for arguments, message in (
        (["folder", "--out", "folder/sets"], "--out folder/sets lies in folder"),
        (["parquet", "--image-column", "photo"], "parquet/0.parquet has no column 'photo', only ['image', 'label']"),
        (["saved"], "saved has the splits test, train: choose one with `--split`"),
        (["saved", "--split", "test", "--image-column", "x"], "saved has no column 'x', only ['image']"),
        (["folder", "--split", "test"], "the Hub's, not for folder: leave it out"),
        (["folder", "--out", "none", "--shard-size", "0"], "--shard-size=0 must be a whole number"),
        (["folder", "--csv", "--shard-size", "3"], "--shard-size is for a folder of files"),
        (["folder/ash/0.png", "--image-column", "photo"], "--image-column photo is for Parquet and datasets"),
        (["parquet", "--image-column", "label"], "'label' holds no images but int64"),
        (["folder", "--workers", "-1"], "--workers=-1 must be a whole number"),
        (["folder", "--engine", "ray", "--csv"], "name a folder for them, e.g. `--out sets`"),
        ([tmp_path / "no.parquet"], "no.parquet cannot be read as parquet"),
        ([tmp_path / "empty"], "empty holds no images"),
        ([tmp_path / "binary.txt"], "binary.txt is no list of paths"),
        (["nobody/nothing"], "as a dataset on the Hub it cannot be read"),
        (["folder/nothing.png"], "folder/nothing.png: there is no such file"),
    ):
        assert main(["predict", "model", *map(str, arguments)]) == 2
        assert message in capsys.readouterr().err
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert main(["predict", "model", "folder", "--out", "sets.csv"]) == 2
    assert "name a folder for them" in capsys.readouterr().err
    assert main(["predict", "model", "folder", "--out", str(tmp_path / "sets"), "--engine", "ray"]) == 2
    assert "run the command without a launcher" in capsys.readouterr().err


def test_bf16_and_progress(expected, tmp_path, capsys):
    """Scores of bfloat16 are near those of float32 and not rounded to its steps; its progress is told."""
    found = predict(tmp_path / "sets", "folder", "--bf16", "--lambda-val", "0")
    said = capsys.readouterr().err
    assert "predict: 30 of 30 images" in said
    whole = predict(tmp_path / "whole", "folder", "--lambda-val", "0")
    of_bf16, of_float = (
        torch.tensor([score["score"] for row in rows for score in sorted(row["set"], key=lambda each: each["label"])])
        for rows in (found, whole)
    )
    assert torch.allclose(of_bf16, of_float, atol=0.05) and not torch.equal(of_bf16, of_float)
    assert not torch.equal(of_bf16, of_bf16.bfloat16().float())


def test_a_source_leads_to_no_other_files(place, tmp_path, capsys):
    """Lists, links and rows that lead out are rows with an error, and are read with `--allow-outside`."""
    folder = tmp_path / "theirs"
    (folder / "photos").mkdir(parents=True)
    shutil.copy("folder/ash/0.png", tmp_path / "secret.png")
    shutil.copy("folder/ash/0.png", folder / "photos" / "own.png")
    (folder / "photos" / "link.png").symlink_to(tmp_path / "secret.png")
    lines = ["photos/own.png", "./photos/own.png", "../secret.png", str(tmp_path / "secret.png"), "photos/link.png"]
    (folder / "list.txt").write_text("\n".join([*lines, "hf://datasets/a/b/c.png", ""]))
    image = (folder / "photos" / "own.png").read_bytes()
    rows = [{"bytes": image, "path": "x"}, {"bytes": None, "path": "../secret.png"}, {"bytes": None, "path": None}]
    pq.write_table(pa.table({"image": rows}), folder / "rows.parquet")
    pq.write_table(pa.table({"image": ["../secret.png", "/etc/passwd"]}), folder / "paths.parquet")
    Dataset.from_dict({"image": [str(tmp_path / "secret.png")]}).save_to_disk(folder / "saved")
    for given, inside, allowed in (
        ("list.txt", [True, True, False, False, False, False], [True] * 5 + [False]),
        ("photos", [False, True], [True, True]),
        ("rows.parquet", [True, False, False], [True, True, False]),
        ("paths.parquet", [False, False], [True, False]),
        ("saved", [False], [True]),
    ):
        name = given.partition(".")[0]
        command = ["predict", "model", str(folder / given), *SHARDS, "--out"]
        assert main([*command, str(tmp_path / f"sets-{name}")]) == (1 if any(inside) else 2)
        found = rows_of(tmp_path / f"sets-{name}")
        assert [row["error"] is None for row in found] == inside, given
        assert all(
            "--allow-outside" in row["error"] or "::2" in row["error"] or "hf:" in row["image"]
            for row in found
            if row["error"]
        )
        assert main([*command, str(tmp_path / f"all-{name}"), "--allow-outside"]) == (0 if all(allowed) else 1)
        assert [row["error"] is None for row in rows_of(tmp_path / f"all-{name}")] == allowed, given


def test_a_line_of_a_list_is_no_address(place, tmp_path, monkeypatch):
    """Also where the list is in the folder of the command, and with `--allow-outside`."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(containers, "HfFileSystem", lambda: pytest.fail("the Hub is asked"))
    names = [f"hf://datasets/a/b/c.{ending}" for ending in ("tar", "png")]
    Path("list.txt").write_text("\n".join(names))
    for allow_outside in (False, True):
        source = Source(["list.txt"], allow_outside=allow_outside)
        (tar, error), (image, stored) = source.read(source.pieces())
        assert tar.startswith("./hf://") and "No such file" in str(error) and stored == image == names[1]
    Path("list.txt").write_text("hf://datasets/a/b/c.parquet")
    source = Source(["list.txt"])
    ((_, error),) = source.read(source.pieces())
    assert "cannot be read as parquet" in str(error)


def content(stored):
    """The bytes of an image of a tar, or why there are none."""
    try:
        return stored.read() if isinstance(stored, Part) else stored
    except ValueError as error:
        return error


def test_a_tar_is_read_within_bounds(place, tmp_path, monkeypatch):
    """Nothing is unpacked, large parts are not read, links are passed over, and what is cut off is said."""
    monkeypatch.setattr(containers, "MOST_BYTES", 20_000)
    image = Path("folder/ash/0.png")
    with tarfile.open(tmp_path / "a.tar", "w") as tar:
        tar.add(image, "../../escaped.png")
        link = tarfile.TarInfo("link.png")
        link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
        tar.addfile(link)
        large = tarfile.TarInfo("large.png")
        large.size = 30_000
        tar.addfile(large, io.BytesIO(bytes(30_000)))
        tar.add(image, "last.png")
    with tarfile.open(tmp_path / "b.tar", "w", format=tarfile.PAX_FORMAT) as tar:
        tar.add(image, "first.png")
        header = tarfile.TarInfo("second.png")
        header.pax_headers = {"comment": "x" * 30_000}
        tar.addfile(header)
    whole = (tmp_path / "a.tar").read_bytes()
    (tmp_path / "c.tar").write_bytes(whole[: len(whole) // 3])
    with tarfile.open(tmp_path / "d.tar", "w:gz") as tar:
        tar.add(image, "a.png")
    before = sorted(tmp_path.rglob("*"))
    found = {}
    for name in "abcd":
        source = Source([str(tmp_path / f"{name}.tar")])
        found[name] = [(image.partition("::")[2], content(stored)) for image, stored in source.read(source.pieces())]
    assert sorted(tmp_path.rglob("*")) == before
    assert [name for name, _ in found["a"]] == ["../../escaped.png", "large.png", "last.png"]
    assert [stored for _, stored in found["a"]][::2] == [image.read_bytes()] * 2
    assert "30000 bytes in one image, the limit is 20000" in str(found["a"][1][1])
    assert found["b"][0] == ("first.png", image.read_bytes()) and "bytes in one part" in str(found["b"][1][1])
    for name in "cd":
        assert "cannot be read as a tar without compression" in str(found[name][-1][1])


def test_rows_of_one_large_group_are_read_once(place, monkeypatch):
    """From shard to shard a Parquet file is read on, and what lies between the shards of a process is skipped."""
    opened = []
    iterate = pq.ParquetFile.iter_batches
    monkeypatch.setattr(pq.ParquetFile, "iter_batches", lambda *a, **k: opened.append(a) or iterate(*a, **k))
    for file, column, groups in (("bytes.parquet", "photo", [0]), ("parquet/0.parquet", "image", [1])):
        opened.clear()
        source = Source([file], column=column)
        images = [list(source.read(shard)) for number, shard in enumerate(source.shards(7)) if number % 2]
        assert [given[2][0] for given in opened] == groups
        every = list(source.read(source.pieces()))
        wanted = [image for number, image in enumerate(every) if number // 7 % 2]
        assert [image for shard in images for image in shard] == wanted


def header(name: str, size: int, kind: bytes = tarfile.REGTYPE) -> bytes:
    """The header of a file in a tar, of any size."""
    block = bytearray(tarfile.TarInfo(name).tobuf(tarfile.USTAR_FORMAT))
    block[124:136], block[156:157], block[148:156] = (2**96 + size).to_bytes(13, "big")[1:], kind, b" " * 8
    if size >= 0:
        block[124:136] = b"%011o\0" % size
    block[148:156] = b"%06o\0 " % sum(block)
    return bytes(block)


@pytest.mark.parametrize(
    "tar",
    [
        header("a.txt", -512) + bytes(10_000),  # for ever the same header
        header("a.png", -1) + bytes(10_000),  # all that is left
        (header("x", 1, tarfile.GNUTYPE_LONGNAME) + bytes(512)) * 1500,
    ],
    ids=["backwards", "minus one", "names of names"],
)
def test_hostile_tars_end(tar, place, tmp_path):
    (tmp_path / "a.tar").write_bytes(header("b.png", 0) + tar)
    source = Source([str(tmp_path / "a.tar")])
    found = [item for piece in itertools.islice(source.pieces(), 3) for item in piece.items]
    assert [first for _, first, _ in found] == [512, -1] and "cannot be read as a tar" in found[1][0]


def test_a_broken_group_spoils_the_same_rows_for_every_reader(place, tmp_path):
    """Whoever begins where: the images of other row groups are read."""
    table = pq.read_table("bytes.parquet")
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10, compression="none", use_dictionary=False)
    whole = bytearray((tmp_path / "a.parquet").read_bytes())
    start = pq.ParquetFile(tmp_path / "a.parquet").metadata.row_group(1).column(0).data_page_offset
    whole[start : start + 40] = bytes([255]) * 40
    (tmp_path / "a.parquet").write_bytes(whole)

    def read(shards) -> dict[int, bool]:
        source = Source([str(tmp_path / "a.parquet")], column="photo")
        chosen = [shard for number, shard in enumerate(source.shards(4)) if number in shards]
        found = [image for shard in chosen for image in source.read(shard)]
        return {int(name.rpartition("::")[2]): isinstance(stored, ValueError) for name, stored in found}

    every = read(range(8))
    assert every == {row: 10 <= row < 20 for row in range(30)}
    for shards in ([4, 6], [5], [2, 3, 7], [3]):
        assert read(shards) == {
            row: every[row] for shard in shards for row in range(4 * shard, min(4 * shard + 4, 30))
        }


def test_a_small_file_of_large_rows_is_read_row_by_row(tmp_path):
    """The same megabyte 64 times in a few hundred bytes: one of them is held at a time, and batches end early."""
    column = pa.array([bytes(2**20)] * 64, pa.binary())
    pq.write_table(pa.table({"image": column}), tmp_path / "a.parquet", compression="zstd", use_dictionary=True)
    assert (tmp_path / "a.parquet").stat().st_size < 5_000
    source = Source([str(tmp_path / "a.parquet")])
    before = pa.total_allocated_bytes()
    for _, stored in source.read(source.pieces()):
        assert len(stored) == 2**20 and pa.total_allocated_bytes() - before < 2**24


def test_large_rows_are_refused_and_batches_bounded(tmp_path, monkeypatch):
    pq.write_table(pa.table({"image": [bytes(10), bytes(30), bytes(10), bytes(10)]}), tmp_path / "a.parquet")
    monkeypatch.setattr(containers, "MOST_BYTES", 20)
    monkeypatch.setattr(prediction, "MOST_BYTES", 20)
    with monkeypatch.context() as reading:
        reading.setattr(containers.Bounded, "read", lambda self, size: self.file.read(size))
        source = Source([str(tmp_path / "a.parquet")])
        batches = list(prediction._batches([(0, source.pieces())], source, 64))
    assert [len(batch) for batch in batches] == [3, 1]
    assert "a row has 30 bytes, the limit is 20" in str(batches[0][1][2])


def test_the_hub_that_does_not_answer_ends_a_run(place, tmp_path, monkeypatch, capsys):
    """And is no fault of an image: nothing of that shard is written, and the same command goes on."""

    def no_answer(self, path):
        raise TimeoutError("no answer")

    monkeypatch.setattr(containers.HfFileSystem, "open", no_answer)
    with pytest.raises(OutOfReach, match=r"a.png cannot be read from the Hub now \(no answer\)") as error:
        Part("hf://datasets/a/b/a.png").read()
    with pytest.raises(FileNotFoundError):  # a file that is here, or is not, is what it is
        Part("none.png").read()

    def out_of_reach(*_):
        raise error.value

    monkeypatch.setattr(prediction, "load", out_of_reach)
    assert main(["predict", "model", "folder", "--out", str(tmp_path / "sets"), *SHARDS, "--workers", "0"]) == 2
    assert "start the same command again" in capsys.readouterr().err
    assert not list((tmp_path / "sets").glob("part-*"))


def test_names_that_are_no_utf8_are_written(place, tmp_path):
    """Of files, and of members of a tar."""
    folder = tmp_path / "photos"
    folder.mkdir()
    name = os.fsdecode(b"caf\xe9.png")
    shutil.copy("folder/ash/0.png", folder / name)
    with tarfile.open(tmp_path / "photos" / "a.tar", "w") as tar:
        tar.add("folder/ash/0.png", name)
    for out in ("sets", "sets.jsonl", "sets.csv"):
        command = ["predict", "model", str(folder), "--out", str(tmp_path / out)]
        assert main(command) == 0
    rows = rows_of(tmp_path / "sets")
    assert [row["image"].rpartition("/")[2] for row in rows] == ["a.tar::caf\\udce9.png", "caf\\udce9.png"]
    assert main([*command[:-1], str(tmp_path / "sets")]) == 0  # their names are those of the source


def test_other_preprocessing_is_another_model(tmp_path, image_folder, capsys):
    """A foreign classifier's image processor counts."""
    save_vit(tmp_path / "vit")
    calibrate = ["calibrate", str(tmp_path / "vit"), str(image_folder), "--k", "1", "2", "--out", str(tmp_path / "m")]
    assert main(calibrate) == 0
    command = ["predict", str(tmp_path / "m"), "folder/ash", "--out", str(tmp_path / "sets"), "--k", "2"]
    assert main(command) == 0
    path = tmp_path / "m" / "preprocessor_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "image_mean": [0.1, 0.2, 0.3]}))
    assert main(command) == 2 and "holds sets of another model" in capsys.readouterr().err


def test_shards_that_others_write_meanwhile_are_no_fault(place, tmp_path, monkeypatch):
    """While a process counts, another one ends a shard; what killed ones left behind goes in the end."""
    predictor, size = Predictor(load_classifier("model"), [Question()]), 8
    shards, others = (Shards(tmp_path / "sets", predictor, Source(["folder"]), size) for _ in range(2))
    (tmp_path / "sets" / ".unfinished-abc.parquet").touch()
    shards.write_share(0, 2)
    exists = Path.exists

    def slowly(path):
        found = exists(path)
        if path.name == "part-000001.parquet" and not found:
            meanwhile.undo()
            others.write_share(1, 2)
        return found

    with monkeypatch.context() as meanwhile:
        meanwhile.setattr(Path, "exists", slowly)
        assert shards.finish() <= 2
    assert others.finish() == 0 and not list((tmp_path / "sets").glob(".unfinished*"))
    assert len(rows_of(tmp_path / "sets")) == 30


def test_links_to_folders_are_followed_or_named(place, tmp_path):
    folder = tmp_path / "photos"
    (folder / "own").mkdir(parents=True)
    shutil.copy("folder/ash/0.png", folder / "own" / "a.png")
    (folder / "theirs").symlink_to(Path("folder/beech").resolve())
    (folder / "own" / "up").symlink_to(folder)  # and round again
    for one, other in (("a", "b"), ("b", "a")):  # each in the other
        (tmp_path / one).mkdir(exist_ok=True)
        (tmp_path / one / f"to_{other}").symlink_to(tmp_path / other)
    errors = {row["image"]: row["error"] for row in predict(tmp_path / "sets", folder)}
    assert [name for name, error in errors.items() if error is None] == [str(folder / "own" / "a.png")]
    assert {Path(name).name for name, error in errors.items() if error} == {"theirs", "up"}
    found = predict(tmp_path / "all", folder, "--allow-outside")
    assert str(folder / "theirs" / "0.png") in [row["image"] for row in found]
    assert len(found) == 2 + len(list(Path("folder/beech").iterdir()))
    assert list(sources.walk(tmp_path / "a", {".png"}, links=True)) == ["to_b/to_a"]


@pytest.mark.long
def test_the_command_of_the_page(expected, tmp_path):
    command = "accelerate launch --config_file recipes/accelerate_configs/cpu.yaml -m avgk_hf.predict"
    assert f"\n{command} " in (ROOT / "docs" / "scale.md").read_text()
    config = str(ROOT / "recipes/accelerate_configs/cpu.yaml")
    launch = [sys.executable, "-m", "accelerate.commands.launch", "--config_file", config, "--num_processes", "2"]
    given = ["-m", "avgk_hf.predict", "model", "folder", "--out", str(tmp_path / "sets"), *SHARDS, "--workers", "0"]
    threads = str(torch.get_num_threads())  # what is equal to the last bit is computed alike
    env = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": threads}
    done = subprocess.run([*launch, *given], env=env, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0 and done.stderr.count("30 images in 4 files") == 2, done.stderr  # so there were two
    assert rows_of(tmp_path / "sets") == expected


ON_RAY = """
import ray, sys
ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20)
from avgk_hf.cli import main
sys.exit(main(["predict", *sys.argv[1:]]))
"""


@pytest.mark.long
@pytest.mark.timeout(600)
def test_ray_writes_the_same_rows(expected, tmp_path):
    """On a local Ray with two workers, and the other engine takes up what it left."""
    pytest.importorskip("ray")
    if " " in sys.executable:
        pytest.skip("ray cannot start a Python whose path has a space")
    given = ["model", "folder", "--out", str(tmp_path / "sets"), *SHARDS, "--engine", "ray", "--workers", "0"]
    # on loopback only; ray's workers would yield to whatever else the machine does
    env = {"RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0", "RAY_worker_niceness": "0", "PYTHONPATH": str(ROOT)}
    env["OMP_NUM_THREADS"] = str(torch.get_num_threads())  # what is equal to the last bit is computed alike
    done = subprocess.run(
        [sys.executable, "-c", ON_RAY, *given], env={**os.environ, **env}, capture_output=True, text=True, timeout=500
    )
    assert done.returncode == 1 and "left out 1 of 30 images" in done.stderr, done.stderr
    assert sorted(rows_of(tmp_path / "sets"), key=lambda row: row["image"]) == sorted(
        expected, key=lambda row: row["image"]
    )
    os.remove(tmp_path / "sets" / "part-000002.parquet")
    assert predict(tmp_path / "sets", "folder") == expected
