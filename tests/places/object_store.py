"""A server of the S3 protocol on loopback, in a process of its own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import pytest

BUCKET = "bucket"


@contextlib.contextmanager
def object_store() -> Iterator[dict[str, str]]:
    """Yield the environment variables with which s3fs uses the server, which has one bucket."""
    pytest.importorskip("moto", reason="the S3 server of the tests needs moto[server]")
    pytest.importorskip("flask", reason="the S3 server of the tests needs moto[server]")
    pytest.importorskip("s3fs", reason="s3:// needs s3fs")
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    words = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        _wait(port, server)
        files(variables).mkdir(BUCKET)
        yield variables
    finally:
        server.kill()
        server.wait()


def files(variables: dict[str, str]):
    """Return the store's file system, which sees what other processes write."""
    import s3fs

    return s3fs.S3FileSystem(
        key=variables["AWS_ACCESS_KEY_ID"],
        secret=variables["AWS_SECRET_ACCESS_KEY"],
        endpoint_url=variables["AWS_ENDPOINT_URL"],
        use_listings_cache=False,
        skip_instance_cache=True,
    )


def _wait(port: int, server: subprocess.Popen) -> None:
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline and server.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            return
        time.sleep(0.1)
    pytest.fail(f"the S3 server did not start ({os.strerror(server.returncode or 0)})")
