"""A small Hub on loopback, so that pushing to the Hub and loading from it is tested without a network.

    with HubServer() as hub:
        env = {"HF_ENDPOINT": hub.url, "HF_TOKEN": hub.token, "HF_HUB_DISABLE_XET": "1"}

It speaks the part of the HTTP interface that `huggingface_hub` uses to create, fill, list and download repositories of
models, datasets and Spaces, and holds them in memory. Large and binary files arrive through LFS, the others within the
commit. `fail` and `cut` make it as unreliable as a network.
"""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, unquote

import yaml


@dataclass(frozen=True)
class File:
    """A file of a revision."""

    content: bytes
    lfs: bool

    @property
    def oid(self) -> str:
        """What clients compare with their own copy: SHA-256 for LFS, the SHA-1 of git otherwise."""
        return hashlib.sha256(self.content).hexdigest() if self.lfs else git_hash(self.content)

    def entry(self, path: str) -> dict[str, Any]:
        """The file as an entry of a tree."""
        size = len(self.content)
        entry = {"type": "file", "path": path, "size": size, "oid": self.oid[:40]}
        return {**entry, "lfs": {"oid": self.oid, "size": size, "pointerSize": 0}} if self.lfs else entry


@dataclass
class Fault:
    """What happens to the next requests that match: an error without `after_bytes`, a cut connection with it."""

    pattern: str
    times: float
    status: int = 500
    after_bytes: int | None = None


class HubError(Exception):
    """An answer that is no success: the HTTP status, and a code that clients turn into exceptions of their own."""

    def __init__(self, status: int, code: str, **fields: Any) -> None:
        super().__init__(code)
        self.status, self.code, self.fields = status, code, {"error": code, **fields}


class HubServer:
    """A Hub at `url` with one user, `someone`, who may write with `token`; anyone may read.

    `requests` lists all requests as `METHOD /path?query`. A repository has one branch, `main`.
    """

    user = "someone"
    token = "hf_" + "loopback" * 4

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.clear()
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._http.hub = self
        self.url = f"http://127.0.0.1:{self._http.server_port}"

    def clear(self) -> None:
        """Forget everything: a new Hub at the same address."""
        self.requests: list[str] = []
        self.faults: list[Fault] = []
        self.repos: dict[tuple[str, str], dict[str, dict[str, File]]] = {}  # (type, id): revisions, oldest first
        self.objects: dict[str, bytes] = {}  # what came through LFS, by SHA-256, committed or not

    def __enter__(self) -> "HubServer":
        threading.Thread(target=self._http.serve_forever, args=[0.05], daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    def revision(self, repo_id: str, repo_type: str = "model") -> str:
        """The name of a repository's newest revision."""
        return next(reversed(self.repos[repo_type, repo_id]))

    def files(self, repo_id: str, repo_type: str = "model", revision: str | None = None) -> dict[str, bytes]:
        """The files of a repository's newest revision, or of another one."""
        files = self.repos[repo_type, repo_id][revision or self.revision(repo_id, repo_type)]
        return {path: file.content for path, file in files.items()}

    def fail(self, pattern: str, status: int = 500, times: float = 1) -> None:
        """Answer the next requests with an error.

        Args:
            pattern: Regular expression, searched in `METHOD /path?query`.
            status: The HTTP status.
            times: How many requests; `math.inf` for all until `faults.clear()`.
        """
        self.faults.append(Fault(pattern, times, status=status))

    def cut(self, pattern: str, after_bytes: int, times: float = 1) -> None:
        """Close the connection of the next requests within a body.

        Args:
            pattern: As in `fail`.
            after_bytes: Bytes of the body that still pass: of the request for POST and PUT, of the answer for GET.
            times: As in `fail`.
        """
        self.faults.append(Fault(pattern, times, after_bytes=after_bytes))

    def take_fault(self, request: str) -> Fault | None:
        """The fault that befalls this request, if any; it counts as one of its times."""
        with self.lock:
            fault = next((f for f in self.faults if f.times > 0 and re.search(f.pattern, request)), None)
            if fault is not None:
                fault.times -= 1
            return fault

    def find(self, kind: str | None, repo_id: str, revision: str | None = None) -> tuple[str, dict[str, File]]:
        """The name and the files of a revision; `kind` is models, datasets or spaces."""
        key = (kind or "models").removesuffix("s"), repo_id
        if key not in self.repos:
            raise HubError(404, "RepoNotFound")
        sha = self.revision(repo_id, key[0]) if revision in (None, "main") else revision
        if sha not in self.repos[key]:
            raise HubError(404, "RevisionNotFound")
        return sha, self.repos[key][sha]


class _Handler(BaseHTTPRequestHandler):
    """One connection. The methods in ROUTES return JSON, or status, body and headers."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def _serve(self) -> None:
        self.hub: HubServer = self.server.hub
        request = f"{self.command} {self.path}"
        self.hub.requests.append(request)
        fault = self.hub.take_fault(request)
        self.cut_after = fault.after_bytes if fault else None
        self.body = self._read()
        if self.cut_after is not None:
            self.close_connection = True
            if self.command in ("POST", "PUT"):
                return
        try:
            if fault and self.cut_after is None:
                raise HubError(fault.status, "InjectedFault")
            with self.hub.lock:  # so that a commit is seen as a whole or not at all
                answer = self._answer()
        except HubError as error:
            answer = error.status, json.dumps(error.fields).encode(), {"X-Error-Code": error.code}
        if not isinstance(answer, tuple):
            answer = 200, json.dumps(answer).encode(), {"Content-Type": "application/json"}
        status, body, headers = answer
        self.send_response(status)
        for name, value in {**headers, "Content-Length": str(len(body))}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body[: self.cut_after])

    do_GET = do_HEAD = do_POST = do_PUT = _serve

    def _read(self) -> bytes:
        """The body of the request, as far as it is to pass."""
        if "chunked" not in self.headers.get("Transfer-Encoding", ""):
            length = int(self.headers.get("Content-Length", 0))
            return self.rfile.read(length if self.cut_after is None else min(self.cut_after, length))
        body, size = b"", -1
        while size != 0 and (self.cut_after is None or len(body) < self.cut_after):
            size = int(self.rfile.readline() or b"0", 16)
            body += self.rfile.read(size)
            self.rfile.readline()
        return body

    def _answer(self) -> Any:
        path, _, query = self.path.partition("?")
        self.query = parse_qs(query)
        method = "GET" if self.command == "HEAD" else self.command
        for route, function in ROUTES.items():
            match = re.fullmatch(route, f"{method} {path}")
            if match:
                # who knows the address for a PUT has got it from a POST
                private = method == "POST" or path == "/api/whoami-v2"
                if private and self.headers["Authorization"] != f"Bearer {self.hub.token}":
                    raise HubError(401, "Unauthorized")
                return function(self, **{name: part and unquote(part) for name, part in match.groupdict().items()})
        raise HubError(404, "NoSuchRoute")

    def log_message(self, *args: Any) -> None:
        """Nothing: `HubServer.requests` lists them."""

    def create(self) -> dict[str, Any]:
        wanted = json.loads(self.body)
        kind, repo_id = wanted.get("type", "model"), f"{wanted.get('organization') or self.hub.user}/{wanted['name']}"
        url = f"{self.hub.url}/{'' if kind == 'model' else kind + 's/'}{repo_id}"
        if (kind, repo_id) in self.hub.repos:
            raise HubError(409, "RepoExists", url=url)
        self.hub.repos[kind, repo_id] = {"0" * 40: {}}
        return {"url": url}

    def validate(self) -> dict[str, Any]:
        wanted = json.loads(self.body)
        errors = card_errors(wanted["content"]) if wanted["repoType"] == "model" else []
        if errors:
            raise HubError(400, "BadRequest", errors=[{"message": text} for text in errors])
        return {"errors": [], "warnings": []}

    def info(self, kind: str, repo_id: str, revision: str | None) -> dict[str, Any]:
        sha, files = self.hub.find(kind, repo_id, revision)
        return {"id": repo_id, "sha": sha, "private": False, "siblings": [{"rfilename": path} for path in files]}

    def tree(self, kind: str, repo_id: str, revision: str, folder: str | None) -> list[dict[str, Any]]:
        _, files = self.hub.find(kind, repo_id, revision)
        prefix = f"{folder}/" if folder else ""
        recursive = self.query.get("recursive") == ["true"]
        entries = {}
        for path in sorted(path for path in files if path.startswith(prefix)):
            parts = path.split("/")
            first = prefix.count("/") + 1
            for depth in range(first, len(parts) + 1 if recursive else first + 1):
                name = "/".join(parts[:depth])
                directory = {"type": "directory", "path": name, "oid": git_hash(name.encode())}
                entries[name] = files[name].entry(name) if name in files else directory
        if folder and not entries:
            raise HubError(404, "EntryNotFound")
        return list(entries.values())

    def preupload(self, kind: str, repo_id: str, revision: str) -> dict[str, Any]:
        _, files = self.hub.find(kind, repo_id, revision)
        answers = []
        for wanted in json.loads(self.body)["files"]:
            path, sample = wanted["path"], base64.b64decode(wanted["sample"])
            lfs = path.endswith((".safetensors", ".parquet")) or b"\0" in sample or wanted["size"] > 10 * 2**20
            oid = files[path].oid if path in files else None  # clients leave out what has not changed
            mode = "lfs" if lfs else "regular"
            answers.append({"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid})
        return {"files": answers}

    def lfs_batch(self, kind: str | None, repo_id: str) -> dict[str, Any]:
        self.hub.find(kind, repo_id)
        objects = json.loads(self.body)["objects"]
        for wanted in objects:
            if wanted["oid"] not in self.hub.objects:
                href = f"{self.hub.url}/lfs/{wanted['oid']}"
                wanted["actions"] = {"upload": {"href": href}, "verify": {"href": href + "/verify"}}
        return {"transfer": "basic", "objects": objects}

    def lfs_put(self, oid: str) -> dict[str, Any]:
        if hashlib.sha256(self.body).hexdigest() != oid:
            raise HubError(400, "WrongHash")
        self.hub.objects[oid] = self.body
        return {}

    def lfs_verify(self, oid: str) -> dict[str, Any]:
        if len(self.hub.objects.get(oid, b"")) != json.loads(self.body)["size"]:
            raise HubError(400, "WrongSize")
        return {}

    def commit(self, kind: str, repo_id: str, revision: str) -> dict[str, Any]:
        parent, files = self.hub.find(kind, repo_id, revision)
        files = dict(files)
        for line in self.body.splitlines():
            operation = json.loads(line)
            key, value = operation["key"], operation["value"]
            if key == "file":
                files[value["path"]] = File(base64.b64decode(value["content"]), lfs=False)
            elif key == "lfsFile":
                if value["oid"] not in self.hub.objects:
                    raise HubError(400, "ObjectNotFound")
                files[value["path"]] = File(self.hub.objects[value["oid"]], lfs=True)
            elif key in ("deletedFile", "deletedFolder"):
                gone = value["path"].rstrip("/") + "/"
                files = {path: file for path, file in files.items() if not f"{path}/".startswith(gone)}
        sha = git_hash(json.dumps([parent, {path: file.oid for path, file in files.items()}]).encode())
        self.hub.repos[kind.removesuffix("s"), repo_id][sha] = files
        return {"commitUrl": f"{self.hub.url}/{repo_id}/commit/{sha}", "commitOid": sha}

    def resolve(self, kind: str | None, repo_id: str, revision: str, path: str) -> tuple[int, bytes, dict[str, str]]:
        sha, files = self.hub.find(kind, repo_id, revision)
        if path not in files:
            raise HubError(404, "EntryNotFound")
        file, size = files[path], len(files[path].content)
        headers = {"ETag": f'"{file.oid}"', "X-Repo-Commit": sha, "Accept-Ranges": "bytes"}
        if file.lfs:
            headers.update({"X-Linked-ETag": f'"{file.oid}"', "X-Linked-Size": str(size)})
        part = re.fullmatch(r"bytes=(\d+)-(\d*)", self.headers.get("Range", ""))
        if part is None:
            return 200, file.content, headers
        start, end = int(part[1]), min(int(part[2] or size), size - 1)
        if start > end:
            raise HubError(416, "RangeNotSatisfiable")
        return 206, file.content[start : end + 1], {**headers, "Content-Range": f"bytes {start}-{end}/{size}"}


_API = r"/api/(?P<kind>models|datasets|spaces)/(?P<repo_id>[^/]+/[^/]+)"
_WEB = r"/(?:(?P<kind>datasets|spaces)/)?(?P<repo_id>[^/]+/[^/]+)"
ROUTES: dict[str, Callable[..., Any]] = {
    "GET /api/whoami-v2": lambda handler: {"type": "user", "name": handler.hub.user, "orgs": []},
    "POST /api/validate-yaml": _Handler.validate,
    "POST /api/repos/create": _Handler.create,
    f"GET {_API}(?:/revision/(?P<revision>[^/]+))?": _Handler.info,
    f"GET {_API}/tree/(?P<revision>[^/]+)(?:/(?P<folder>.+))?": _Handler.tree,
    f"POST {_API}/preupload/(?P<revision>[^/]+)": _Handler.preupload,
    f"POST {_API}/commit/(?P<revision>[^/]+)": _Handler.commit,
    rf"POST {_WEB}\.git/info/lfs/objects/batch": _Handler.lfs_batch,
    "PUT /lfs/(?P<oid>[0-9a-f]{64})": _Handler.lfs_put,
    "POST /lfs/(?P<oid>[0-9a-f]{64})/verify": _Handler.lfs_verify,
    f"GET {_WEB}/resolve/(?P<revision>[^/]+)/(?P<path>.+)": _Handler.resolve,
}


LICENSES = (
    "apache-2.0 mit bsd-3-clause cc-by-4.0 cc-by-sa-4.0 cc-by-nc-4.0 cc-by-nc-sa-4.0 cc0-1.0 gemma unknown other"
)
RELATIONS = ("adapter", "merge", "quantized", "finetune")
ID = r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*"


def card_errors(content: str) -> list[str]:
    """What the Hub's specification of a model card (modelcard.md of huggingface/hub-docs) finds wrong with one."""
    found = re.match("---\n(.*?)\n---\n", content, re.DOTALL)
    data = yaml.safe_load(found[1]) if found else {}
    ids = {name: data[name] for name in ("base_model", "datasets") if name in data}
    ids = [(name, item) for name, part in ids.items() for item in (part if isinstance(part, list) else [part])]
    errors = [f'"{name}" {item!r} is no id' for name, item in ids if not re.fullmatch(ID, str(item))]
    errors += [
        f'"{name}" must be a list of texts' for name in ("metrics", "tags") if not _are_texts(data.get(name, []))
    ]
    if data.get("license", "unknown") not in LICENSES.split():
        errors.append(f'"license" {data["license"]!r} is not on the list')
    if data.get("license") == "other" and not re.fullmatch("[a-z0-9.-]+", str(data.get("license_name"))):
        errors.append('"license_name" is required')
    if "base_model_relation" in data and ("base_model" not in data or data["base_model_relation"] not in RELATIONS):
        errors.append('"base_model_relation" is unknown, or of nothing')
    for model in data.get("model-index", []):
        for number, result in enumerate(model["results"]):
            needed = [("task", "type"), ("dataset", "type"), ("dataset", "name")]
            missing = [f"{part}.{name}" for part, name in needed if not isinstance(result[part].get(name), str)]
            missing += [
                "metrics.type and value" for metric in result["metrics"] if not {"type", "value"} <= set(metric)
            ]
            errors += [f'"model-index[0].results[{number}].{name}" is required' for name in missing]
            if not re.fullmatch(ID, str(result["dataset"].get("type"))):
                errors.append(f'"model-index[0].results[{number}].dataset.type" is no id')
    return errors


def _are_texts(values: Any) -> bool:
    return isinstance(values, list) and all(isinstance(value, str) for value in values)


def git_hash(content: bytes) -> str:
    """The SHA-1 that git gives to a file."""
    return hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
