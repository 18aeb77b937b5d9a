"""Object collectives: a stranger in the group creates only objects of listed classes."""

from __future__ import annotations

import io
import os
import pickle
from datetime import timedelta
from pathlib import Path
from typing import Any

import gloo
import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.planner import WriteItemType

from mtrain_cli.composition import compose
from mtrain_cli.launch.failures import Failure
from mtrain_cli.launch.safe_pickle import MessageUnpickler, RefusedError
from mtrain_cli.launch.worker import open_store
from mtrain_cli.parallel.collectives import share
from mtrain_cli.training.checkpointer import Checkpointer


def loads_message(content: bytes) -> Any:
    """Unpickle one message the way `guard_collectives` does."""
    return MessageUnpickler(io.BytesIO(content)).load()


class Bomb:
    def __init__(self, marker: str) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (self.marker,)


def _sends(rank: int, world: int, folder: str) -> tuple[str, list[Any], list[Any]]:
    marker = f"{folder}/ran-{rank}"
    try:
        dist.all_gather_object([None] * world, Bomb(marker) if rank else 1)
        refused = ""
    except pickle.UnpicklingError as error:
        refused = str(error)
    everyone: list[Any] = [None] * world
    dist.all_gather_object(everyone, {"rank": rank, "rows": np.arange(rank)})
    checkpointer = Checkpointer(f"{folder}/checkpoints", keep=1)
    checkpointer.save(
        1, {"model": {"weight": torch.ones(3)}, "trainer": {"step": 1}}, asynchronous=False
    )
    return (
        refused,
        share({"of": rank, "text": "é" * rank, "pair": (rank, None)}),
        [len(found["rows"]) for found in everyone],
    )


def test_ranks_refuse_pickled_functions_and_continue(tmp_path):
    expected = [{"of": rank, "text": "é" * rank, "pair": [rank, None]} for rank in range(2)]
    for refused, shared, lengths in gloo.run(2, _sends, str(tmp_path)):
        assert refused == f"names {os.mkdir.__module__}.mkdir, which mtrain does not load"
        assert shared == expected
        assert lengths == [0, 1]
    assert not list(tmp_path.glob("ran-*"))
    assert (tmp_path / "checkpoints" / "step-1" / "manifest.json").is_file()


@pytest.mark.parametrize(
    "value",
    [
        Failure(1, None, "died", "message", "", 1.0),
        compose.compose([]),
        (OSError(28, "No space left on device"), [np.float64(1.5), np.zeros(3, [("a", "<f4")])]),
        torch.Size([1, 2]),
    ],
    ids=["dataclass", "config", "error", "size"],
)
def test_plain_values_are_unpickled(value):
    found = loads_message(pickle.dumps(value))
    assert repr(found) == repr(value)


@pytest.mark.parametrize(
    "pickled",
    [
        b"cbuiltins\neval\n.",
        b"cos\nsystem\n.",
        b"cbuiltins\nsetattr\n.",
        b"cmtrain_cli.launch.safe_pickle\npickle.Unpickler\n.",
        b"\x80\x04\x8c\x0cmtrain_cli.x\x8c\x02os\x93.",
        b"ctorch.storage\n_load_from_bytes\n.",
        b"ctorch.serialization\nload\n.",
        b"\x80\x04\x8c\x05torch\x8c\x0dSize.__init__\x93.",
        b"cmtrain_cli.training.checkpoint\nCheckpointer\n.",
    ],
)
def test_functions_and_active_classes_are_refused(pickled):
    with pytest.raises(RefusedError, match="which mtrain does not load"):
        loads_message(pickled)


@pytest.mark.parametrize("content", [b"I1\nQ.", b"P1\n."])
def test_persistent_ids_are_refused(content):
    with pytest.raises(RefusedError, match="persistent id"):
        loads_message(content)


def test_members_of_enumerations_are_those_of_early_python_3_11():
    kind = b"ctorch.distributed.checkpoint.planner\nWriteItemType\n"
    content = b"cbuiltins\ngetattr\n(" + kind + b"VTENSOR\ntR."
    assert MessageUnpickler(io.BytesIO(content)).load() is WriteItemType.TENSOR
    for other in (b"cbuiltins\ndict\nVfromkeys\n", kind + b"V__class__\n"):
        with pytest.raises((RefusedError, KeyError)):
            MessageUnpickler(io.BytesIO(b"cbuiltins\ngetattr\n(" + other + b"tR.")).load()


def test_a_store_that_other_users_can_open_is_refused(tmp_path):
    tmp_path.chmod(0o755)
    with pytest.raises(PermissionError):
        open_store(tmp_path, 1, timedelta(seconds=5))
    tmp_path.chmod(0o700)
    open_store(tmp_path, 1, timedelta(seconds=5)).set("a", "1")


def test_nothing_is_imported_for_a_message(tmp_path: Path, monkeypatch):
    (tmp_path / "boom.py").write_text(
        f"import os\nos.mkdir({str(tmp_path / 'ran')!r})\nclass Error(Exception): pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(RefusedError):
        loads_message(b"cboom\nError\n.")
    assert not (tmp_path / "ran").exists()
