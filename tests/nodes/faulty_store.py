"""A store for fsspec that fails as a file says: ``faulty:///folder`` is a folder of this machine.

Processes find it through an entry point, which `install` writes. The file, which FAULTY_STORE
names, may appear, change and go while they run.
"""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any, ClassVar

from fsspec.implementations.local import LocalFileSystem

VARIABLE = "FAULTY_STORE"


class FaultyFileSystem(LocalFileSystem):
    """Obeys ``{"fault": ..., "number": ...}``.

    Faults: refuse allows no write, nth fails the write with this number, from also all later ones,
    and away every request. hang makes every request wait until the file is gone, and slow delays
    each write by ``number`` seconds.
    """

    protocol = "faulty"
    _writes: ClassVar[int] = 0

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, list):
            return [cls._strip_protocol(each) for each in path]
        return super()._strip_protocol(os.fspath(path).removeprefix("faulty://"))

    def put_file(self, *words: Any, **options: Any) -> Any:
        self._meet(writes=True)
        return super().put_file(*words, **options)

    def pipe_file(self, *words: Any, **options: Any) -> Any:
        self._meet(writes=True)
        return super().pipe_file(*words, **options)

    def rm_file(self, *words: Any, **options: Any) -> Any:
        self._meet(writes=True)
        return super().rm_file(*words, **options)

    def cat_file(self, *words: Any, **options: Any) -> Any:
        self._meet()
        return super().cat_file(*words, **options)

    def find(self, *words: Any, **options: Any) -> Any:
        self._meet()
        return super().find(*words, **options)

    def get_file(self, *words: Any, **options: Any) -> Any:
        self._meet()
        return super().get_file(*words, **options)

    def _meet(self, *, writes: bool = False) -> None:
        fault, number = _fault()
        if fault is None:
            FaultyFileSystem._writes = 0
        FaultyFileSystem._writes += writes and fault is not None
        count = FaultyFileSystem._writes
        if fault == "away":
            raise ConnectionError("cannot connect to the store")
        while fault == "hang":
            time.sleep(0.05)
            fault, number = _fault()
        if writes and fault == "refuse":
            raise PermissionError("AccessDenied: this key may not write")
        if writes and (
            (fault == "nth" and count == number) or (fault == "from" and count >= number)
        ):
            raise OSError("InternalError: please try again")
        if writes and fault == "slow":
            time.sleep(number)


def _fault() -> tuple[str | None, float]:
    try:
        document = json.loads(Path(os.environ.get(VARIABLE, "")).read_text())
    except (OSError, ValueError):
        return None, 0
    return document["fault"], document.get("number", 0)
