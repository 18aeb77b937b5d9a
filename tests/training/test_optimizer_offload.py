"""The offloaded optimizer holds the same gradients, and few of them in transit."""

from __future__ import annotations

import gloo
import pytest
import torch
from test_trainer import make
from training.test_state_memory import BATCHES

from mtrain_cli.training.state_memory import BYTES, StateMemory


def leaving(rank: int, world: int) -> list[tuple[list[int], bool, list[float], int, int]]:
    """Compare offloaded gradients with resident ones, for one and two micro-batches.

    Returns bytes of gradients on the device after a step, resident and offloaded; whether both
    hold the same values; both squared norms; pinned bytes, actual and by the closed form.
    """
    results = []
    for batches in (1, 2):
        words = (*BATCHES, f"train.global_batch={batches * world}", "optim.offload=true")
        words = (*words, "train.dtype=bfloat16")
        plain = make(rank, world, 1, words)
        trainer = make(rank, world, 1, (*words, "optim.offload_gradients=true"))
        for each in (plain, trainer):
            ready = [each.next_batch_maker().to_device(host) for host in next(each.loader)]
            each.run_step.forward_backward(
                ready, [batch.attend for batch in ready], each.run_step.totals(ready)[0]
            )
        of_plain, of_trainer = plain.states, trainer.states
        expected = [
            part
            for unit, packed in zip(of_plain._units, of_plain._reduced, strict=True)
            for part in unit.of(packed)
        ]
        gradients = [gradient for unit in of_trainer._gradients for gradient in unit]
        same = all(torch.equal(a, b) for a, b in zip(expected, gradients, strict=True))
        norms = [states.squared_norm().item() for states in (of_plain, of_trainer)]
        pinned = sum(gradient.nbytes for gradient in gradients) + 2 * of_trainer._up[0].nbytes
        form = StateMemory(trainer.config, world, batches, BYTES["bfloat16"])
        bytes_of = [
            sum(gradient.nbytes for gradient in each.states.gradients())
            for each in (plain, trainer)
        ]
        results.append((bytes_of, same, norms, pinned, form.host - 12 * form.shard))
    return results


def test_offloaded_gradients_equal_resident_ones():
    for held, same, norms, pinned, form in gloo.run(2, leaving)[0]:
        assert held[0] > 0 == held[1]
        assert same
        assert norms[1] == pytest.approx(norms[0], rel=1e-6)
        assert pinned == form


def waited_for(rank: int, world: int) -> list[list[str]]:
    """Return the host's actions in each of two steps: send a unit, or wait for an earlier one."""
    words = "train.global_batch=1", "optim.offload=true", "optim.offload_gradients=true"
    trainer = make(rank, world, 1, (*BATCHES, *words))
    states, events = trainer.states, []
    leave, link = states._offload_gradients, states._link

    class Arrival:
        def __init__(self, number: int) -> None:
            self.number = number

        def synchronize(self) -> None:
            events.append(f"waits for {self.number}")

    def leaves(number: int, packed: torch.Tensor) -> None:
        link.event = lambda: Arrival(number)
        leave(number, packed)
        del link.event
        events.append(f"sends {number}")

    states._offload_gradients = leaves
    results = []
    for _ in range(2):
        ready = [trainer.next_batch_maker().to_device(host) for host in next(iter(trainer.loader))]
        trainer.run_step.forward_backward(ready, [batch.attend for batch in ready], 1)
        trainer.states.drop_gradients()
        results.append(events.copy())
        events.clear()
    return results


def test_at_most_two_units_of_offloaded_gradients_are_in_transit():
    # Three layers, the last one first, and the parameters outside them.
    step = ["sends 2", "sends 1", "waits for 2", "sends 0", "waits for 1", "sends 3"]
    assert gloo.run(1, waited_for)[0] == [step, step]
