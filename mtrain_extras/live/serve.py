"""`mtrain report RUN --serve`: the page of a run on the loopback address, renewed as it trains."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
import secrets
import sys
import threading
import time
from dataclasses import replace
from html import escape
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from mtrain_cli.commands.status import about_state, status_rows
from mtrain_cli.commands.train import find_run
from mtrain_cli.config.documents import json_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import run_status
from mtrain_cli.launch.run_dir import RunDir
from mtrain_cli.launch.run_status import RunStatus
from mtrain_cli.printable import one_line, same_width
from mtrain_cli.reporting import elements
from mtrain_cli.reporting.html import about
from mtrain_cli.reporting.report_source import (
    ReportSource,
    open_source,
    read_run,
    with_choices,
)
from mtrain_cli.reporting.sections import figures, own_sections, shared_sections

# A page of another site whose name points to this machine sends its own name.
_HOSTS = ("127.0.0.1", "localhost")
_SCRIPT = Path(__file__).with_name("live.js").read_text(encoding="utf-8")
_LOG_BYTES = 1 << 16
_LOG_LINES = 200
_SHARE = 10  # reading the files again takes at most 1 / 10 of a core
# plotly sets styles in elements.
_ALLOWED = (
    "default-src 'none'; script-src 'nonce-{}'; style-src 'unsafe-inline'; img-src data: blob:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)


class LivePage:
    """The page of a run. Several threads may ask for it."""

    def __init__(self, folder: Path) -> None:
        self._run, self._lock = RunDir(folder), threading.Lock()
        self._known = ""  # hash of the tables and figures
        self._seen: object = None  # the files and their versions
        self._due = 0.0  # when the files may be read again

    def whole(self, nonce: str) -> str:
        """Return the HTML of the page."""
        news = self.news("")
        return elements.page(news["title"], [news["body"]], self._drawn, nonce, _SCRIPT)

    def news(self, known: str) -> dict[str, Any]:
        """Return what the script of the page asks for.

        known: of the last answer. With the tables and figures of that one, the answer has none.
        """
        with self._lock:
            self._read()
            run = run_status.read_status(self._run)
            place = f", step {run.step} of {run.steps}" * bool(run.steps)
            title, state = f"{run.what}{place}: {self._run.path.name}", self._state(run)
            answer: dict[str, Any] = {"title": title, "news": state, "known": self._known}
            if known != self._known:
                answer["body"] = same_width("\n".join([self._head, state, *self._rest]))
                answer["figures"] = elements.views_of(self._drawn)
            return answer

    def _read(self) -> None:
        began, folder = time.monotonic(), self._run.path
        patterns = "*", "profile/**/*", "evaluation/*"
        seen = {file: _version(file) for pattern in patterns for file in folder.glob(pattern)}
        if self._known and (seen == self._seen or began < self._due):
            return
        try:
            source = _open(folder)
            log = self._run.log.read_bytes() if self._run.log.exists() else b""
        except OSError:  # a file was replaced meanwhile
            if not self._known:
                raise
            return
        resumes = re.findall(rb"^resumed (from .*)", log, re.MULTILINE)[-1:]
        self._resumed = [("resumed", line.decode(errors="replace")) for line in resumes]
        source = replace(source, steps_wanted=None)  # the state says how far the run is
        name, remarks = escape(source.name), elements.remarks(source.remarks)
        self._head, self._drawn = f"<header><h1>{name}</h1>{remarks}</header>", figures([source])
        sections = [*own_sections(source), *shared_sections([source])]
        self._rest = [
            *map(elements.figure, self._drawn),
            *map(elements.report_section, sections),
            elements.section("Run", about(source)),
        ]
        shown = json_text([self._head, self._rest, elements.views_of(self._drawn)])
        self._known = hashlib.sha256(shown.encode()).hexdigest()[:16]
        self._seen, now = seen, time.monotonic()
        self._due = now + _SHARE * (now - began)

    def _state(self, run: RunStatus) -> str:
        """Return the state of the run and the end of its log."""
        log = ""
        with contextlib.suppress(OSError), self._run.log.open("rb") as file:
            file.seek(-min(_LOG_BYTES, os.fstat(file.fileno()).st_size), os.SEEK_END)
            log = file.read().decode(errors="replace")
        rows = [("state", run.what + about_state(run)), *self._resumed, *status_rows(run)]
        listed = elements.definition_list(rows)
        lines = "\n".join(log.splitlines()[-_LOG_LINES:])
        shown = f'<h3>Log</h3><div class="log"><pre>{escape(lines)}</pre></div>' if lines else ""
        return same_width(f'<section id="news"><h2>State</h2>{listed}{shown}</section>')


def _version(file: Path) -> object:
    with contextlib.suppress(OSError):
        about_file = file.stat()
        return about_file.st_mtime_ns, about_file.st_size
    return None


def _open(folder: Path) -> ReportSource:
    try:
        return open_source(folder)
    except ConfigError:  # no step yet, or nothing that can be read
        source = read_run(folder)
        return replace(source, settings=with_choices(source.settings, source.chosen))


class _Server(ThreadingHTTPServer):
    page: LivePage

    def handle_error(self, *_: object) -> None:
        error = sys.exception()
        if not isinstance(error, ConnectionError | TimeoutError):  # else the browser has left
            print(f"mtrain: the page asks again: {one_line(repr(error))}", file=sys.stderr)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10  # seconds for a request
    server_version, sys_version = "mtrain", ""

    def do_GET(self) -> None:
        place, _, known = self.path.partition("?known=")
        if self.headers.get("Host", "").partition(":")[0] not in _HOSTS:
            self.send_error(403, "Not a name of this machine's loopback address")
        elif place == "/":
            nonce = secrets.token_urlsafe(16)
            self._answer("text/html", self.server.page.whole(nonce), nonce)
        elif place == "/live":
            self._answer("application/json", json_text(self.server.page.news(known)))
        else:
            self.send_error(404)

    def _answer(self, kind: str, text: str, nonce: str = "") -> None:
        content = text.encode()
        self.send_response(200)
        for name, value in {
            "Content-Type": f"{kind}; charset=utf-8",
            "Content-Length": len(content),
            "Content-Security-Policy": _ALLOWED.format(nonce),
            "Cross-Origin-Resource-Policy": "same-origin",
            "X-Content-Type-Options": "nosniff",
            "Cache-Control": "no-store",
        }.items():
            self.send_header(name, str(value))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, *_: object) -> None:
        pass


def serving(folder: Path, port: int) -> _Server:
    """Return a server of the page of a run, which listens. Raise ConfigError if it cannot."""
    try:
        server = _Server((_HOSTS[0], port), _Handler)
    except OSError as error:
        raise ConfigError(
            f"--port {port}: {error.strerror}; give another one, or 0 for any that is free"
        ) from error
    server.page = LivePage(folder.resolve())
    return server


def serve_run(name: str | None, port: int) -> None:
    """Serve the page of a run until Ctrl-C, by default of the run that `mtrain status` shows."""
    folder = find_run(name) if name is not None else run_status.find_latest_run().path
    with serving(folder, port) as server:
        print(
            f"{one_line(str(folder))}: http://{_HOSTS[0]}:{server.server_port}/ (Ctrl-C to end)",
            flush=True,
        )
        try:
            server.serve_forever()
        except KeyboardInterrupt as error:
            if not str(error):  # a signal has its own line
                print("mtrain: the page has ended; a run goes on without it", file=sys.stderr)
            raise
