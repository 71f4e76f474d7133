"""Attacks by images and on the page, one a test: each is performed, on this machine only, and refused."""

import contextlib
import io
import os
import socket
import stat
import struct
import threading
import time
import tracemalloc
import zlib
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import EpsImagePlugin, Image
from test_app import needs_browser
from test_bad_input import animation, encode, picture, png_header
from transformers import pipeline

import browser
from avgk_hf import AvgKForImageClassification, app, guard
from avgk_hf.app import MOST_PIXELS, build_page, launch, upload_folder
from avgk_hf.calibrate import load_classifier, transform_for
from avgk_hf.data import image_files, open_image
from avgk_hf.images import FORMATS
from browser import Visitor
from conftest import CLASSES

# a picture that would be fetched, a script that would run, and both kinds of templates that Gradio fills in
HOSTILE = "<img src=x onerror=document.title='owned'>![p](http://127.0.0.1:9/p.png)${document.title='owned'}{{value}}"
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 8 8\n%%EndComments\nshowpage\n"
ALERT = 'role="alert"'


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A calibrated model of somebody else: every text in its records is hostile."""
    torch.manual_seed(0)
    labels = {i: f"{name} {HOSTILE}" for i, name in enumerate(CLASSES)}
    model = AvgKForImageClassification.from_timm("test_resnet", id2label=labels, k=2, image_size=32)
    model.config.set_calibration({1: 0.3, 2: 0.1}, {"num_examples": 7, "dataset": HOSTILE})
    folder = tmp_path_factory.mktemp("page") / "<img src=x onerror=alert(1)>"
    model.save_pretrained(folder)
    return folder


@contextlib.contextmanager
def served(model_folder, examples=(), **options):
    model = load_classifier(str(model_folder))
    page = build_page(model, model_folder.name, examples)
    port = browser.free_port()
    launch(page, server_name="127.0.0.1", server_port=port, prevent_thread_lock=True, **options)
    try:
        yield page, f"http://127.0.0.1:{port}"
    finally:
        page.close(verbose=False)


@pytest.fixture(scope="module")
def example(tmp_path_factory):
    path = tmp_path_factory.mktemp("examples") / "example.png"
    picture((20, 20)).save(path)
    return path


@pytest.fixture(scope="module")
def page_and_url(model_folder, example):
    with served(model_folder, [(example, 2)]) as found:
        yield found


@pytest.fixture
def visitor(page_and_url, request):
    return Visitor(page_and_url[1], request.node.name)


@pytest.fixture
def beacon():
    """A server on this machine that answers with an EPS and counts who asks."""
    asked = []

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self):
            asked.append(self.path)
            self.send_response(200)
            self.end_headers()
            self.wfile.write(EPS)

        def log_message(self, *args):
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/x.jpg", asked
        server.shutdown()


@pytest.fixture
def ghostscript(tmp_path, monkeypatch):
    """A program `gs` that leaves a file when it is started."""
    started, program = tmp_path / "started", tmp_path / "bin" / "gs"
    program.parent.mkdir()
    program.write_text(f"#!/bin/sh\ntouch '{started}'\n")
    program.chmod(0o755)
    monkeypatch.setenv("PATH", str(program.parent), prepend=os.pathsep)
    monkeypatch.setattr(EpsImagePlugin, "gs_binary", None)
    return started


def in_time(function, *args):
    """What a function gives; one that waits for ever is a failure, not a test that never ends."""
    found = []

    def run():
        try:
            found.append(function(*args))
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(60)
    assert found, "it never comes back"
    return found[0]


def eventually(condition):
    end = time.monotonic() + 30
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


# ------------------------------------------------------------------------------------------------------------- images


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes and devices in folders")
@pytest.mark.parametrize("kind", ["fifo", "link to a fifo", "device", "endless device", "folder"])
def test_only_regular_files_are_opened(kind, tmp_path, model_folder):
    path = tmp_path / "image.png"
    os.mkfifo(tmp_path / "fifo")
    if "device" in kind:
        path = Path("/dev/zero" if "endless" in kind else "/dev/null")
    elif kind == "folder":
        path.mkdir()
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path.symlink_to(tmp_path / "fifo")
    transform = transform_for(load_classifier(str(model_folder)))
    for door in (open_image, transform.image, lambda found: open_image({"path": str(found), "bytes": None})):
        error = in_time(door, path)
        assert isinstance(error, ValueError) and "it is no regular file" in str(error)
    classify = pipeline("average-k-image-classification", model=str(model_folder))
    assert isinstance(in_time(classify, str(path)), FileNotFoundError)
    assert path not in image_files(tmp_path)


def test_an_eps_starts_no_program(ghostscript, tmp_path, model_folder, beacon):
    (tmp_path / "plan.jpg").write_bytes(EPS)
    (tmp_path / "plan.eps").write_bytes(EPS)
    with contextlib.suppress(Exception):
        Image.open(tmp_path / "plan.jpg").load()
    assert ghostscript.exists()  # what Pillow would do
    ghostscript.unlink()
    classify = pipeline("average-k-image-classification", model=str(model_folder))
    for door in (open_image, classify):
        with pytest.raises(ValueError, match=r"plan\.jpg cannot be read as an image"):
            door(str(tmp_path / "plan.jpg"))
    with pytest.raises(ValueError, match=r"x\.jpg cannot be read as an image"):
        classify(beacon[0])
    with pytest.raises(ValueError, match="cannot be read as an image"):
        open_image(EPS)
    assert not ghostscript.exists() and image_files(tmp_path) == [tmp_path / "plan.jpg"]


def test_only_known_formats_are_opened(tmp_path):
    Image.init()
    refused = []
    for name in sorted(set(Image.SAVE) & set(Image.OPEN) - set(FORMATS)):
        with contextlib.suppress(Exception):  # Pillow cannot write all of them here
            data = encode(picture((16, 16)), name)
            Image.open(io.BytesIO(data))
            refused.append((name, data))
    assert len(refused) > 5 and {"ICO", "TGA"} <= {name for name, _ in refused}
    for name, data in refused:
        if Image.open(io.BytesIO(data)).format not in (*FORMATS, "MPO"):
            with pytest.raises(ValueError, match="cannot be read as an image"):
                open_image(data, name=name)
    for name in ("JPEG", "PNG", "WEBP", "GIF", "BMP", "TIFF", "PPM"):
        assert open_image(encode(picture(), name)).size == picture().size


def test_16_bits_take_no_64():
    """The peak of what numpy holds; a file of 167 KB took 2.3 GB."""
    side = 1500
    data = encode(Image.fromarray(np.zeros((side, side), np.uint16)), "PNG")
    tracemalloc.start()
    try:
        open_image(data, "L")
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 12 * side**2


def tiled_tiff(size, tile):
    """A small image that announces a large tile."""
    compressor = zlib.compressobj(9)
    data = b"".join(compressor.compress(bytes(tile)) for _ in range(10)) + compressor.flush()
    short = {258: 8, 259: 8, 262: 1, 277: 1}
    tags = {256: size, 257: size, **short, 322: tile, 323: tile, 324: 8, 325: len(data)}
    fields = [
        struct.pack(
            "<HHI" + ("HH" if tag in short else "I"), tag, 3 if tag in short else 4, 1, value, *[0] * (tag in short)
        )
        for tag, value in tags.items()
    ]
    return (
        b"II*\0" + struct.pack("<I", 8 + len(data)) + data + struct.pack("<H", len(tags)) + b"".join(fields) + bytes(4)
    )


def test_the_tile_of_a_tiff_counts_as_its_size():
    assert Image.open(io.BytesIO(tiled_tiff(16, 30000))).size == (16, 16)
    with pytest.raises(ValueError, match="30000 x 30000 pixels, the limit is"):
        open_image(tiled_tiff(16, 30000))


def test_a_jpeg_cannot_ask_for_passes_without_end():
    """A scan of 42 bytes costs a pass over the whole image: 1 MB of them, nine minutes at 25 megapixels."""
    data = encode(picture((40, 30)), "JPEG", progressive=True)
    head, _, last = data.rpartition(b"\xff\xda")
    assert np.array_equal(np.asarray(open_image(data)), np.asarray(Image.open(io.BytesIO(data))))
    with pytest.raises(ValueError, match="more than 500 scans"):
        open_image(head + (b"\xff\xda" + last[:-2]) * 501 + b"\xff\xd9")


def png_with(kind, chunk):
    """A PNG with one more chunk behind its header."""
    data = encode(picture(), "PNG")
    end = 8 + 25  # signature and header
    return (
        data[:end]
        + struct.pack(">I", len(chunk))
        + kind
        + chunk
        + struct.pack(">I", zlib.crc32(kind + chunk))
        + data[end:]
    )


@pytest.mark.parametrize("kind", [b"zTXt", b"iTXt", b"iCCP"])
def test_compressed_metadata_does_not_unfold(kind):
    packed = zlib.compress(bytes(50 * 2**20))
    data = png_with(kind, {b"iTXt": b"k\0\1\0\0\0", b"zTXt": b"k\0\0", b"iCCP": b"k\0\0"}[kind] + packed)
    tracemalloc.start()
    try:
        with contextlib.suppress(ValueError):
            open_image(data)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data) < 10**5 and peak < 10 * 2**20


@pytest.mark.parametrize("name", ["GIF", "PNG", "WEBP"])
def test_later_frames_are_not_decoded(name, monkeypatch):
    """A million of them cost nothing."""
    data = animation(name)
    monkeypatch.setattr(type(Image.open(io.BytesIO(data))), "seek", lambda *args: pytest.fail("another frame"))
    assert open_image(data).size == picture().size


# ----------------------------------------------------------------------------------------------- files of the server


@pytest.mark.parametrize("meta", ["with meta", "without meta", "as a stream"])
def test_a_path_that_was_never_uploaded_is_not_opened(meta, visitor, example, tmp_path, beacon):
    picture().save(tmp_path / "private.png")
    (upload_folder() / "private.png").write_bytes((tmp_path / "private.png").read_bytes())
    fields = {"with meta": {}, "without meta": {"meta": None}, "as a stream": {"is_stream": True}}[meta]
    paths = [
        tmp_path / "private.png",
        tmp_path / "nothing.png",
        example,
        upload_folder() / "private.png",
        "/etc/passwd",
    ]
    answers = {visitor.look(str(path), **fields) for path in (*paths, beacon[0], "", f"file://{paths[0]}")}
    answers.add(visitor.look(os.path.relpath(paths[0]), **fields))
    taken, texts = zip(*answers, strict=True)
    assert not any(taken) and beacon[1] == []
    if meta == "without meta":  # what exists cannot be told from what does not
        assert set(texts) == {app.GONE}
    assert all("identify" not in str(text) for text in texts)


@pytest.mark.skipif(os.name == "nt", reason="Windows has no pipes in folders")
def test_pipes_do_not_stop_the_page(visitor, tmp_path):
    os.mkfifo(tmp_path / "fifo")
    for number in range(5):
        visitor.session = f"fifo {number}"
        assert in_time(lambda: visitor.look(str(tmp_path / "fifo"), meta=None)) == (False, app.GONE)
    taken, text = visitor.look(visitor.upload(encode(picture(), "PNG")))
    assert taken and "for K = 2" in text


def test_the_url_of_an_image_is_not_fetched(visitor, beacon):
    path = visitor.upload(encode(picture(), "PNG"))
    assert visitor.look(path, url=beacon[0])[0]
    for fields in ({"path": None}, {"path": beacon[0], "orig_name": "x.png"}):
        visitor.look(**{"path": None, "url": beacon[0], **fields})
    for address in (f"file={beacon[0]}", f"proxy={beacon[0]}", "file=http://192.0.2.1/x.png"):
        assert visitor.http.get(f"/gradio_api/{address}").status_code == 404
    assert beacon[1] == []


def test_files_are_sent_only_if_they_were_uploaded_or_are_examples(visitor, page_and_url, example, tmp_path):
    picture().save(tmp_path / "private.png")
    (upload_folder() / "left.png").write_bytes(b"of another visitor")
    paths = [tmp_path / "private.png", example, "/etc/passwd", upload_folder() / "left.png", upload_folder()]
    for path in (*map(str, paths), f"{upload_folder()}/../{tmp_path}/private.png", "/dev/zero", "avgk_hf/app.py"):
        for route in ("file=", "file/"):
            assert visitor.http.get(f"/gradio_api/{route}{path}").status_code == 404
    config = visitor.http.get("/config").json()
    (gallery,) = (c["props"]["value"] for c in config["components"] if c["type"] == "gallery")
    assert visitor.http.get(gallery[0]["image"]["url"]).content == example.read_bytes()
    assert visitor.look(gallery[0]["image"]["path"])[0]
    own = visitor.upload(encode(picture(), "PNG"))
    assert visitor.http.get(f"/gradio_api/file={own}").status_code == 200


@pytest.mark.parametrize("name", ["page.html", "drawing.svg", "code.js"])
def test_what_is_uploaded_cannot_run_as_a_page(name, visitor):
    path = visitor.upload(b"<svg xmlns='http://www.w3.org/2000/svg'><script>alert(1)</script></svg>", name)
    headers = visitor.http.get(f"/gradio_api/file={path}").headers
    assert headers["content-type"].startswith("application/octet-stream")
    assert headers["content-disposition"].startswith("attachment")


def test_nothing_goes_past_the_queue_or_to_other_doors_of_gradio(visitor, page_and_url):
    body = {"data": [{"path": "/etc/passwd"}], "session_hash": "x"}
    names = {function.api_name for function in page_and_url[0].fns.values()} | {"read"}
    doors = [f"{door}/{name}" for door in ("run", "api", "call", "call/v2") for name in names]
    others = (
        "component_server",
        "process_recording",
        "vibe-code",
        "vibe-edit",
        "reset",
        "stream/x",
        "run-history/connect",
    )
    for door in (*doors, *others):
        assert visitor.http.post(f"/gradio_api/{door}", json={**body, "fn_index": visitor.read}).status_code == 404
    for door in ("/monitoring", "/docs", "/openapi.json", "/login", "/gradio_api/deep_link?session_hash=x"):
        assert visitor.http.get(door).status_code == 404


# ------------------------------------------------------------------------------------------------- memory and patience


@pytest.mark.parametrize("side", [5001, 9000, 10**5])
def test_the_page_refuses_large_images_before_it_decodes_them(side, visitor):
    taken, text = visitor.look(visitor.upload(png_header(side, side)))
    assert taken and ALERT in text and "limit" in text
    if side == 5001:
        assert f"{side} x {side} pixels, the limit is {MOST_PIXELS}" in text


def test_one_image_at_a_time_and_a_bounded_queue(model_folder, monkeypatch):
    go, inside, most = threading.Event(), [], []

    def slow(*args):
        inside.append(1)
        most.append(len(inside))
        go.wait(60)
        inside.pop()
        raise ValueError("enough")

    monkeypatch.setattr(app, "image_scores", slow)
    monkeypatch.setattr(app, "WAITING", 5)
    with served(model_folder) as (_, url):
        visitor = Visitor(url)
        path = visitor.upload(encode(picture(), "PNG"))
        answers = []
        for number in range(12):
            body = {"data": [{"path": path}], "fn_index": visitor.read, "session_hash": f"visitor {number}"}
            answers.append(visitor.http.post("/gradio_api/queue/join", json=body).status_code)
            eventually(lambda: most)
        go.set()
        eventually(lambda: len(most) >= 6 and not inside)
    assert max(most) == 1 and answers[:6] == [200] * 6 and answers[-5:] == [503] * 5


def test_requests_are_bounded(visitor, monkeypatch):
    """Whatever their header says; of uploads at once, too."""
    joined = visitor.event(visitor.read, ["x" * guard.MOST_ASKED])
    assert joined.status_code == 413
    assert visitor.upload(bytes(guard.MOST_UPLOADED)).status_code == 413
    many = [("files", (f"{number}.png", bytes(guard.MOST_UPLOADED // 8))) for number in range(10)]
    assert visitor.http.post("/gradio_api/upload", files=many).status_code == 413
    monkeypatch.setattr(guard, "MOST_UPLOADED", 10_000)
    headers = {"content-type": "multipart/form-data; boundary=b"}
    start = b'--b\r\ncontent-disposition: form-data; name="files"; filename="x.png"\r\n\r\n'
    stream = iter([start, *[bytes(1000)] * 20])
    assert visitor.http.post("/gradio_api/upload", content=stream, headers=headers).status_code == 413
    monkeypatch.setattr(guard, "AT_ONCE", 0)
    assert visitor.upload(encode(picture(), "PNG")).status_code == 503


# ----------------------------------------------------------------------------------------------------------- uploads


def kept():
    return [path for path in upload_folder().rglob("*") if path.is_file()]


def test_uploads_are_bounded_in_total(visitor, page_and_url, monkeypatch, example):
    monkeypatch.setattr(guard, "MOST_FILES", 3)
    paths = [visitor.upload(encode(picture(seed=seed), "PNG")) for seed in range(100, 108)]
    assert len(kept()) == 3 + 1  # and the example
    assert [os.path.exists(path) for path in paths] == [False] * 5 + [True] * 3
    assert any(path.name == example.name for path in kept())
    assert page_and_url[0].upload_file_set <= {str(path) for path in kept()}
    assert visitor.look(paths[0]) == (False, app.GONE) and visitor.look(paths[-1])[0]


def test_uploads_that_break_off_are_removed(visitor, page_and_url, monkeypatch):
    monkeypatch.setattr(guard, "MOST_FILES", 3)
    before = set(kept())
    address = page_and_url[1].removeprefix("http://").split(":")
    head = (
        f"POST /gradio_api/upload HTTP/1.1\r\nHost: {':'.join(address)}\r\nContent-Length: 100000\r\n"
        "Content-Type: multipart/form-data; boundary=b\r\n\r\n"
        '--b\r\ncontent-disposition: form-data; name="files"; filename="x.png"\r\n\r\n'
    )
    for _ in range(5):
        with socket.create_connection((address[0], int(address[1]))) as connection:
            connection.sendall(head.encode() + bytes(50000))
            eventually(lambda: set(kept()) - before)  # noqa: B023
        before = set(kept())
    visitor.upload(encode(picture(seed=200), "PNG"))
    assert len(kept()) <= 3 + 1


def test_the_image_of_a_visitor_is_removed_when_another_comes_and_when_he_leaves(visitor):
    first, second = (visitor.upload(encode(picture(seed=seed), "PNG")) for seed in (300, 301))
    other = Visitor(visitor.url, "other")
    assert visitor.look(first)[0] and other.look(first)[0]  # the same image of two
    assert visitor.look(second)[0] and os.path.exists(first)
    assert other.look(second)[0] and not os.path.exists(first) and os.path.exists(second)
    for leaving in (visitor, other):
        assert os.path.exists(second)
        with leaving.http.stream("GET", f"/gradio_api/heartbeat/{leaving.session}") as alive:
            next(alive.iter_lines())
        eventually(lambda leaving=leaving: leaving is visitor or not os.path.exists(second))


@pytest.mark.skipif(os.name == "nt", reason="Windows has other rights")
def test_other_users_of_the_machine_cannot_read_uploads():
    assert stat.S_IMODE(upload_folder().stat().st_mode) == 0o700


# ------------------------------------------------------------------------------------------------- names and origins


def test_a_foreign_name_for_this_machine_is_not_answered(visitor):
    port = visitor.url.rpartition(":")[2]
    for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", "0.0.0.0", ""):
        for path in ("/", "/config", "/gradio_api/queue/data?session_hash=first"):
            assert visitor.http.get(path, headers={"host": host}).status_code == 400, host
    for host in (f"localhost:{port}", "127.0.0.1:9000"):  # the second through a tunnel
        assert visitor.http.get("/config", headers={"host": host}).status_code == 200


def test_other_sites_cannot_send_requests_through_a_visitors_browser(visitor):
    data, port = encode(picture(), "PNG"), int(visitor.url.rpartition(":")[2])
    for origin in ("http://evil.example", "null", f"http://127.0.0.1:{port + 1}", f"http://evil.example:{port}"):
        assert visitor.upload(data, headers={"origin": origin}).status_code == 403
        answered = visitor.http.get("/config", headers={"origin": origin})
        assert answered.status_code == 403
    assert os.path.exists(visitor.upload(data, headers={"origin": visitor.url}))


def test_a_page_for_others_answers_to_its_public_name(model_folder, monkeypatch):
    """As in a Space, which listens on all addresses."""
    assert guard.is_local("127.0.0.9") and not guard.is_local("0.0.0.0") and not guard.is_local("192.0.2.1")
    monkeypatch.setattr(app, "is_local", lambda address: False)
    with served(model_folder) as (_, url):
        visitor = Visitor(url)
        public = {"host": "someone-trees.hf.space", "origin": "https://someone-trees.hf.space"}
        assert visitor.http.get("/config", headers=public).status_code == 200
        assert visitor.look(visitor.upload(encode(picture(), "PNG"), headers=public))[0]


# ---------------------------------------------------------------------------------------------------- records are text


def test_records_are_text_on_the_page(visitor, model_folder):
    components = visitor.http.get("/config").json()["components"]
    assert not any(component["type"] == "markdown" for component in components)
    taken, text = visitor.look(visitor.upload(encode(picture(), "PNG")))
    shown = [component["props"]["value"] for component in components if component["type"] == "html"]
    assert taken and "&lt;img" in text and "&lt;img" in shown[0]
    assert not any("<img" in value for value in (text, *shown))
    html = visitor.http.get("/").text
    assert "<img src=x" not in html
    taken, text = visitor.look(visitor.upload(b"no image", "<img src=x onerror=alert(1)>.png"))
    assert ALERT in text and "<img" not in text and "/" not in text.removesuffix("</p></div>")


@needs_browser
def test_hostile_records_do_nothing_in_a_browser(page_and_url, tmp_path):
    with browser.chromium() as driver:
        page = browser.Page(driver, page_and_url[1])
        title = driver.title
        picture((30, 30)).save(tmp_path / "x.png")
        page.upload(tmp_path / "x.png")
        page.await_status("for K = 2")
        labels = [label for label, *_ in page.rows("#avgk-set .in")]
        assert labels and all(label.endswith(HOSTILE) for label in labels)
        (tmp_path / "<img src=x onerror=document.title='owned'>.png").write_bytes(b"no image")
        page.upload(tmp_path / "<img src=x onerror=document.title='owned'>.png")
        page.await_status("cannot be read as an image")
        assert driver.title == title and "owned" not in title
        assert not page.all("img[src*='p.png'], img[onerror]")
        asked = [address for address in page.requests() if address.startswith("http")]
        assert asked and all(address.startswith(page_and_url[1]) for address in asked)
