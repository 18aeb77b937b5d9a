"""A small server of the Hub's protocol on loopback: reading repositories, and pushing to them."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@dataclass
class FakeHub:
    """models, sets: {name: {path: content}}. gated, downloads, pushed: what the names say."""

    models: dict[str, dict[str, bytes]] = field(default_factory=dict)
    sets: dict[str, dict[str, bytes]] = field(default_factory=dict)
    gated: set[str] = field(default_factory=set)
    downloads: list[str] = field(default_factory=list)
    pushed: dict[str, dict[str, bytes]] = field(default_factory=dict)
    created: list[dict] = field(default_factory=list)
    tokens: list[str | None] = field(default_factory=list)
    url: str = ""


@contextlib.contextmanager
def fake_hub(monkeypatch: pytest.MonkeyPatch, folder) -> Iterator[FakeHub]:
    """Serve a hub, and make huggingface_hub of this process use it, with an empty cache."""
    hub = FakeHub()
    server = ThreadingHTTPServer(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_address[1]}"
    threading.Thread(target=server.serve_forever, daemon=True).start()
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder / "hub"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(folder / "token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    try:
        yield hub
    finally:
        server.shutdown()
        server.server_close()


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub
    protocol_version = "HTTP/1.1"

    def log_message(self, *_) -> None:
        pass

    def _answer(self, body: object, status: int = 200, **headers: str) -> None:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def _fail(self, status: int, code: str) -> None:
        self._answer({"error": code}, status, X_Error_Code=code, X_Error_Message=code)

    def do_GET(self) -> None:
        hub, path = self.hub, unquote(urlsplit(self.path).path)
        hub.tokens.append(self.headers.get("Authorization"))
        api = re.fullmatch(
            r"/api/(models|datasets)/([^/]+/[^/]+)(?:/(revision|tree)/([^/]+)/?(.*))?", path
        )
        file = re.fullmatch(r"/(datasets/)?([^/]+/[^/]+)/resolve/([^/]+)/(.+)", path)
        if api is None and file is None:
            self._fail(404, "EntryNotFound")
            return
        if api is not None:
            kind, repo, what, revision, below = api.groups()
        else:
            kind, repo, revision, name = file.groups()
            kind, what = ("datasets" if kind else "models"), "file"
        files = (hub.sets if kind == "datasets" else hub.models).get(repo)
        if files is None:
            self._fail(401, "RepoNotFound")
        elif repo in hub.gated and what != "revision":
            self._fail(403, "GatedRepo")
        elif revision not in (None, "main", "v1", COMMIT):
            self._fail(404, "RevisionNotFound")
        elif what == "tree":
            inside = {n: c for n, c in files.items() if not below or n.startswith(f"{below}/")}
            if inside:
                self._answer(_tree(inside))
            else:
                self._fail(404, "EntryNotFound")
        elif what == "file":
            if name not in files:
                self._fail(404, "EntryNotFound")
                return
            if self.command == "GET":
                hub.downloads.append(name)
            self._answer(files[name], ETag=f'"{_oid(files[name])}"', X_Repo_Commit=COMMIT)
        else:
            siblings = [{"rfilename": name} for name in files]
            self._answer({"id": repo, "sha": COMMIT, "siblings": siblings, "private": False})

    do_HEAD = do_GET

    def do_POST(self) -> None:
        hub, path = self.hub, urlsplit(self.path).path
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if "/paths-info/" in path:
            files = hub.sets["/".join(path.split("/")[3:5])]
            wanted = {n: files[n] for n in parse_qs(body.decode())["paths"] if n in files}
            self._answer(_tree(wanted))
        elif not self.headers.get("Authorization"):
            self._answer({"error": "Invalid username or password."}, 401)
        elif path == "/api/repos/create":
            hub.created.append(json.loads(body))
            self._answer({"url": f"{hub.url}/org/pushed", "id": "org/pushed"})
        elif path == "/api/validate-yaml":
            self._answer({"errors": [], "warnings": []})
        elif "/preupload/" in path:
            files = [{"path": one["path"], "uploadMode": "regular", "shouldIgnore": False}
                     for one in json.loads(body)["files"]]  # fmt: skip
            self._answer({"files": files})
        elif "/commit/" in path:
            repo = "/".join(path.split("/")[3:5])
            for line in body.splitlines():
                entry = json.loads(line)
                if entry["key"] == "file":
                    content = base64.b64decode(entry["value"]["content"])
                    hub.pushed.setdefault(repo, {})[entry["value"]["path"]] = content
            self._answer({"commitUrl": f"{hub.url}/{repo}/commit/{COMMIT}", "commitOid": COMMIT})
        else:
            self._fail(404, "EntryNotFound")


def _tree(files: dict[str, bytes]) -> list[dict]:
    return [{"type": "file", "path": name, "size": len(content), "oid": _oid(content)}
            for name, content in files.items()]  # fmt: skip


def _oid(content: bytes) -> str:
    return hashlib.sha1(content).hexdigest()
