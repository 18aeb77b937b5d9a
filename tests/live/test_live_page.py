"""The served page says what a run does now, to this machine alone, and runs nothing of others."""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import python_path
from live.growing_run import GrowingRun
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.launch import run_status
from mtrain_cli.launch.restart import Restart
from mtrain_extras.live.serve import serving


@contextlib.contextmanager
def served(folder: Path) -> Iterator[int]:
    """Serve a run in this process; the value is the port."""
    with serving(folder, 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join()


def ask(port: int, place: str = "/live", method: str = "GET", **headers: str):
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    with contextlib.closing(connection):
        connection.request(method, place, headers=headers)
        answer = connection.getresponse()
        return answer, answer.read().decode()


def news(port: int, known: str = "") -> dict:
    answer, text = ask(port, f"/live?known={known}")
    assert answer.status == 200
    return json.loads(text)


def steps_drawn(found: dict) -> int:
    curves = next(figure for figure in found["figures"] if figure["name"] == "training")
    return max(curves["views"][0]["data"][0]["x"])


@pytest.fixture
def growing(tmp_path, monkeypatch) -> Iterator[GrowingRun]:
    monkeypatch.setattr("mtrain_extras.live.serve._SHARE", 0)  # read the files at each question
    run = GrowingRun(tmp_path)
    yield run
    run.run.release()


def test_new_steps_and_held_out_losses_come_with_the_next_answer(growing):
    growing.train(12, held_out=True)
    with served(growing.run.path) as port:
        _, page = ask(port, "/")
        assert "<h1>grows</h1>" in page
        first = news(port)
        assert steps_drawn(first) == 12
        assert first["title"] == "running, step 12 of 40: grows"
        assert "body" not in news(port, first["known"])  # nothing is new
        growing.train(3, held_out=True)
        second = news(port, first["known"])
        assert steps_drawn(second) == 15
        assert "step 15/40  loss 4.2500" in second["news"]
        assert "Held-out loss" in second["body"]
        assert {figure["name"] for figure in second["figures"]} >= {"training", "held-out"}
        growing.log("warning: a line without a step")
        third = news(port, second["known"])
        assert "warning: a line without a step" in third["news"]
        assert "body" not in third  # only the log is new


def test_the_state_is_named_before_during_and_after_a_run(growing, monkeypatch):
    with served(growing.run.path) as port:
        growing.run.release()
        assert news(port)["title"] == "not begun, step 0 of 40: grows"
        growing.train(10)
        growing.run.log.write_text("resumed from the checkpoint of step 8, on 2 workers\n")
        growing.end("failed")
        assert news(port)["title"].startswith("failed, step 10 of 40")
        assert (
            "<dt>resumed</dt><dd>from the checkpoint of step 8, on 2 workers</dd>"
            in news(port)["news"]
        )
        restarts = [Restart(0.0, "rank 1 was killed", 1, 9, 8, 2)]
        monkeypatch.setattr(run_status.restart, "read_restarts", lambda _: (restarts, 0))
        assert "rank 1 was killed" in news(port)["news"]
        growing.end("finished")
        assert news(port)["title"].startswith("finished, step 10 of 40")


def test_a_run_that_loses_its_files_keeps_its_page(growing):
    growing.train(4)
    with served(growing.run.path) as port:
        growing.run.metrics.write_text("{no json\n")
        assert "no step is shown" in news(port)["body"] or "damaged" in news(port)["body"]
        for file in growing.run.path.iterdir():
            file.unlink()
        growing.run.path.rmdir()
        assert news(port)["title"].endswith(": grows")


def test_other_names_methods_and_paths_are_refused(growing):
    with served(growing.run.path) as port:
        for host in ("evil.example", f"evil.example:{port}", "127.0.0.1.evil.example", ""):
            answer, text = ask(port, Host=host)
            assert answer.status == 403, host
            assert "grows" not in text
        for host in (f"localhost:{port}", "localhost:9", "127.0.0.1"):  # also through a tunnel
            assert ask(port, Host=host)[0].status == 200
        for method in ("POST", "PUT", "DELETE", "OPTIONS", "TRACE"):
            assert ask(port, method=method)[0].status == 501
        for path in ("/../resolved.yaml", "/resolved.yaml", "//etc/passwd", "/live/../..", "/%2e"):
            answer, text = ask(port, path)
            assert answer.status == 404, path
            assert path not in text


def test_names_and_log_lines_are_text_and_only_the_pages_own_script_runs(tmp_path, monkeypatch):
    monkeypatch.setattr("mtrain_extras.live.serve._SHARE", 0)
    hostile = "<script>alert(1)<\u2044script><img src=x onerror=alert(1)>"
    run = GrowingRun(tmp_path, hostile)
    run.train(1)
    run.log("\x1b[2J</pre><script>alert(2)</script>")
    with served(run.run.path) as port:
        answer, page = ask(port, "/")
        found = news(port)
    run.end()
    policy = answer.headers["Content-Security-Policy"]
    (nonce,) = re.findall(r"script-src 'nonce-([\w-]{20,})'", policy)
    assert "default-src 'none'" in policy
    assert "frame-ancestors 'none'" in policy
    assert re.findall("<script(?! type=.text/plain)[^>]*>", page) == [f'<script nonce="{nonce}">']
    for text in (page, found["body"], found["news"]):
        assert "<img" not in text
        assert "\x1b" not in text
    assert "<script" not in found["body"]
    assert "&lt;script&gt;alert(2)" in found["news"]


@pytest.mark.slow  # mtrain in its own process imports torch
def test_only_loopback_is_served_and_ctrl_c_ends_with_one_line(growing):
    growing.train(1)
    command = [sys.executable, "-m", "mtrain_cli", "report", str(growing.run.path), "--serve"]
    process = subprocess.Popen(
        [*command, "--port", "0"],
        env={**os.environ, "PYTHONPATH": python_path()},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        port = int(re.search(r"http://127\.0\.0\.1:(\d+)/", line)[1])
        assert news(port)["title"].startswith("running")
        with socket.socket() as other, pytest.raises(ConnectionRefusedError):
            other.connect(("127.0.0.2", port))  # also loopback, but not the address of the server
        process.send_signal(signal.SIGINT)
        _, error = process.communicate(timeout=20)
    finally:
        process.kill()
    assert process.returncode == 130
    assert error == "mtrain: the page has ended; a run goes on without it\n"


def test_mistakes_are_one_line(growing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    run = str(growing.run.path)
    (tmp_path / "empty").mkdir()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        for words, expected in (
            ([run, "--port", port], f"--port {port}: Address already in use; give another one"),
            (["empty"], "empty: no such run"),
            (["missing"], "missing: no such run"),
            ([run, run], "--serve: takes one run"),
            ([run, "--json"], "--serve: takes one run"),
            ([run, "--out", "pages"], "--serve: takes one run"),
            ([run, "--port", "70000"], "--port 70000: must be at most"),
            ([], "there are no runs in runs/"),
        ):
            result = CliRunner().invoke(app, ["report", *words, "--serve"], prog_name="mtrain")
            assert result.exit_code == 2, result.output
            assert expected in result.stderr
            assert result.stderr.count("\n") == 1
