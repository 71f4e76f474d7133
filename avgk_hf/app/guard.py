"""What the page of `avgk app` answers to visitors whom nobody knows: known addresses, and bounded requests.

Gradio serves more than this page asks for: every file of its folder, a proxy for other sites, events past the queue,
recordings. What the page itself asks for is let through, and nothing else.
"""

import os
import shutil
from contextlib import suppress
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

API = "/gradio_api/"
UPLOAD, FILE = f"{API}upload", f"{API}file="
EVENTS = ("app_id", "cancel", "info", "queue/data", "queue/join", "startup-events", "upload_progress")
ADDRESSES = {"/", "/config", "/favicon.ico", "/manifest.json", "/robots.txt", "/theme.css", UPLOAD}
ADDRESSES |= {f"{API}{name}" for name in EVENTS}
FOLDERS = ("/assets/", "/static/", "/svelte/", f"{API}heartbeat/")
MOST_UPLOADED = 25 * 2**20  # bytes of one upload
MOST_ASKED = 2**20  # bytes of any other request
MOST_FILES = 40  # uploads that are kept: with the bytes of one, 1 GB
AT_ONCE = 8  # uploads that are being received
LOOPBACK = ("127.0.0.1", "localhost", "::1", "[::1]")  # the names of one's own machine


def is_local(address: str) -> bool:
    """Whether a server that listens on this address is reached from its own machine only."""
    try:
        return ip_address(address.strip("[]")).is_loopback
    except ValueError:
        return address == "localhost"


def is_served(page: Any, path: str | None) -> bool:
    """Whether a file was uploaded to this page or is one of its examples: no other is opened or sent.

    The folder of an upload is named by a secret hash of its content, so that only who has the file can name it.
    """
    return path in page.upload_file_set or path in _examples(page)


def forget_upload(page: Any, path: str | None) -> None:
    """Remove a file that was uploaded; an example stays, also where a visitor uploaded it."""
    if path in page.upload_file_set and path not in _examples(page):
        page.upload_file_set.discard(path)
        with suppress(OSError):  # the folder may hold the same image under another name
            Path(path).unlink()
            Path(path).parent.rmdir()


def _examples(page: Any) -> set[str]:
    """The copies of the examples that Gradio made when the page was built."""
    return set().union(*(getattr(block, "keep_in_cache", ()) for block in page.blocks.values()))


class Guard:
    """ASGI middleware around the app of a page.

    Args:
        app: What answers if nothing is wrong.
        page: The `gr.Blocks` that it serves.
        folder: Where uploads are kept, and nothing else.
        local: Whether only this machine is to be answered: then a request that a page of another origin sends from a
            visitor's browser is refused.
    """

    def __init__(self, app: ASGIApp, page: Any, folder: Path, local: bool) -> None:
        self.app, self.page, self.folder, self.local = app, page, folder, local
        self.uploading = 0

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request, or refuse it."""
        if scope["type"] == "lifespan":
            return await self.app(scope, receive, send)
        path, headers = scope["path"], Headers(scope=scope)
        most = MOST_UPLOADED if path == UPLOAD else MOST_ASKED
        origin = headers.get("origin")
        if scope["type"] != "http" or not self._is_known(path):
            refusal = 404, "The page has nothing at this address."
        elif self.local and origin is not None and urlsplit(origin).netloc != headers.get("host"):
            refusal = 403, "The page answers no other site."
        elif int(headers.get("content-length", 0)) > most:
            refusal = 413, f"At most {most} bytes are taken."
        elif path == UPLOAD and self.uploading >= AT_ONCE:
            refusal = 503, "Others are uploading; try again."
        else:
            if path == UPLOAD:
                self._make_room()
            self.uploading += path == UPLOAD
            try:
                return await self.app(scope, _bounded(receive, most), send)
            finally:
                self.uploading -= path == UPLOAD
        return await PlainTextResponse(refusal[1], refusal[0])(scope, receive, send)

    def _is_known(self, path: str) -> bool:
        if path.startswith(FILE):
            return is_served(self.page, path.removeprefix(FILE))
        return path in ADDRESSES or path.startswith(FOLDERS)

    def _make_room(self) -> None:
        """Remove the oldest uploads, finished or broken off, so that no more than `MOST_FILES` are kept."""
        examples = {Path(path).parent for path in _examples(self.page)}
        uploads = sorted((path for path in self.folder.iterdir() if path not in examples), key=_written)
        for path in uploads[: max(0, len(uploads) + 1 - MOST_FILES)]:
            shutil.rmtree(path, ignore_errors=True) if path.is_dir() else path.unlink(missing_ok=True)
        self.page.upload_file_set -= {path for path in self.page.upload_file_set if not os.path.exists(path)}


def _written(path: Path) -> float:
    """When a file was written; one that another visitor has just removed is the oldest of all."""
    try:
        return path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _bounded(receive: Receive, most: int) -> Receive:
    """The same, but a body of more bytes than that, whatever its header says, is refused while it comes in."""
    seen = 0

    async def bounded() -> Message:
        nonlocal seen
        message = await receive()
        seen += len(message.get("body", b""))
        if seen > most:
            raise HTTPException(413, f"At most {most} bytes are taken.")
        return message

    return bounded
