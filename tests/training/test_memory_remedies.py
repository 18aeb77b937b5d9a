"""A run that does not fit is refused in one line, and each remedy in this line helps."""

from __future__ import annotations

import dataclasses
import re

import pytest
import torch
from slow_cases import mostly_slow
from test_planning import planned

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.launch import environment
from mtrain_cli.training import hardware
from mtrain_cli.training.memory import GIB
from mtrain_cli.training.planning import require_fit

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="plans for GPUs that are not here"
)


@mostly_slow(("memory", "gib"), [("manual", 26), ("auto", 16)], keep=(0,))
def test_an_impossible_run_is_refused_in_one_line_and_each_remedy_helps(memory, gib):
    words = [f"train.memory={memory}", f"topology.gpu_memory_gib={gib}"]
    chosen_plan = planned(*words)
    with pytest.raises(ConfigError) as caught:
        require_fit(chosen_plan)
    (line,) = caught.value.problems
    assert line.startswith("seq=512k: a worker needs ")
    assert (
        f"{gib}.00 GiB (topology.gpu_memory_gib, 95% of it usable) and 115.20 GiB of host memory "
        "(90% of an assumed amount; set topology.host_memory_gib)" in line
    )
    remedies = re.search(r"; fits with (.*)$", line)[1].split(", or ")
    changes = [
        re.search(r"topology\.workers=\d+", remedy)[0] if "GPUs" in remedy else remedy
        for remedy in remedies
    ]
    assert any(change.startswith("seq=") for change in changes)
    assert any(change.startswith("topology.workers=") for change in changes)
    for change in changes:
        helped = planned(*words, *change.split())
        assert helped.has_room_for(helped.memory), change
        require_fit(helped)
    (seq,) = (change for change in changes if change.startswith("seq="))
    longer = planned(*words, f"seq={compose([seq]).seq * 9 // 8}")
    assert not longer.has_room_for(longer.memory)


def test_a_run_that_fits_is_not_refused_and_states_may_fill_the_host():
    require_fit(planned("topology.gpu_memory_gib=80", "train.activation_checkpoint=full"))
    one = planned("topology.workers=2", "optim.offload=true", "seq=8k")
    assert one.has_room_for(one.memory)
    crowded = dataclasses.replace(one, host_share=64 * GIB)
    assert not crowded.has_room_for(one.memory)
    with pytest.raises(
        ConfigError,
        match=r"and \d+\.\d\d GiB of host memory \(.*\) with topology.exchange=all_gather, but ",
    ):
        require_fit(crowded)


def test_more_cpu_workers_are_no_remedy_for_a_model_that_is_too_large(monkeypatch):
    """They share the machine's memory."""
    for place in (hardware, environment):
        monkeypatch.setattr(place, "host_memory", lambda: 24 * GIB)
    with pytest.raises(
        ConfigError,
        match=r"; only a smaller model would fit; add --dry-run topology=h200_1x8 to plan for",
    ):
        require_fit(
            planned(
                "model=qwen3b",
                "seq=4k",
                "topology.device=cpu",
                "topology.workers=2",
                "train.memory=auto",
            )
        )
    with pytest.raises(ConfigError, match=r"; only a smaller model or more workers would fit$"):
        require_fit(
            planned(
                "model=qwen3b",
                "seq=4k",
                "topology.workers=4",
                "topology.gpu_memory_gib=0.1",
                "train.memory=auto",
            )
        )
