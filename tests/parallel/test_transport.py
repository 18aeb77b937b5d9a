"""A lost peer is reported with its place in the exchange; other errors pass unchanged."""

from __future__ import annotations

import pytest
import torch

from mtrain_cli.launch import progress_record
from mtrain_cli.parallel.transport import ExchangeError, explain_peer_loss

WHERE = "ring, layer 3, forward, step 2 of 4"


def test_a_lost_peer_is_reported_with_its_place():
    with (
        pytest.raises(
            ExchangeError,
            match=rf"^{WHERE}: kv from rank 1 did not arrive "
            r"\(Timed out waiting 6000ms for recv operation\)$",
        ),
        explain_peer_loss(WHERE, "waits for kv from rank 1", "kv from rank 1 did not arrive", 1),
    ):
        raise RuntimeError(
            "[/w/gloo/transport/tcp/unbound_buffer.cc:129] Timed out waiting 6000ms for recv "
            "operation"
        )


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory."), RuntimeError("Tensors must be contiguous")],
)
def test_other_errors_pass_unchanged(error):
    with (
        pytest.raises(type(error)) as caught,
        explain_peer_loss(WHERE, "posts kv", "kv could not be posted"),
    ):
        raise error
    assert caught.value is error


def test_the_record_of_a_failed_worker_keeps_where_it_waited(tmp_path, monkeypatch):
    monkeypatch.setattr(progress_record, "_record", None)
    progress_record.start_record(tmp_path / "where")
    with explain_peer_loss(WHERE, "waits for kv from rank 1", "", 1):
        found = progress_record.read_activity(tmp_path / "where")
        assert (found.doing, found.waits_for) == (f"{WHERE}: waits for kv from rank 1", 1)
    found = progress_record.read_activity(tmp_path / "where")
    assert (found.doing, found.waits_for) == (WHERE, None)
    with pytest.raises(ExchangeError), explain_peer_loss(WHERE, "waits for kv from rank 1", "", 1):
        raise RuntimeError("Connection closed by peer")
    assert progress_record.read_activity(tmp_path / "where").waits_for == 1
