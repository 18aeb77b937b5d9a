"""Offloaded activations return unchanged, one layer ahead of their use, and reuse host buffers."""

import random

import torch

from mtrain_cli.parallel import activation_offload
from mtrain_cli.parallel.activation_offload import ActivationOffload, block_sizes, layers_on_host

LAYERS = 4


def forward(store: ActivationOffload, step: int) -> list[list]:
    kept = []
    for layer in range(LAYERS):
        tensors = [torch.full((3, 5), 10.0 * step + layer), torch.arange(7) + layer]
        kept.append([store.put(layer, tensor) for tensor in tensors])
    return kept


def backward(kept: list[list], step: int) -> None:
    for layer in reversed(range(LAYERS)):
        first, second = (one.get() for one in kept[layer])
        assert torch.equal(first, torch.full((3, 5), 10.0 * step + layer))
        assert torch.equal(second, torch.arange(7) + layer)


def test_offloaded_tensors_return_and_buffers_are_reused():
    store = ActivationOffload(LAYERS, torch.device("cpu"))
    once = (LAYERS - 1) * (3 * 5 * 4 + 7 * 8)  # the last layer stays
    blocks = (LAYERS - 1) * 2 * 64
    for step in range(3):
        kept = forward(store, step)
        assert store.waiting == 2 * LAYERS
        backward(kept, step)
        assert store.waiting == 0
        assert store.allocated == blocks
        assert store.moved == 2 * once * (step + 1)


def test_a_layer_is_fetched_while_the_layer_after_it_is_in_backward():
    store = ActivationOffload(LAYERS, torch.device("cpu"))
    kept = forward(store, 0)
    there = [[one.device is not None for one in row] for row in kept]
    assert there == [[False] * 2] * (LAYERS - 1) + [[True] * 2]
    kept[3][0].get()
    assert [[one.device is not None for one in row] for row in kept[:3]] == [
        [False] * 2,
        [False] * 2,
        [True] * 2,
    ]
    kept[2][0].get()
    assert all(one.device is not None for one in kept[1])
    assert all(one.device is None for one in kept[0])


def test_a_forward_pass_without_backward_leaves_nothing_behind():
    store = ActivationOffload(LAYERS, torch.device("cpu"))
    forward(store, 0)
    allocated = store.allocated
    backward(forward(store, 1), 1)
    assert store.allocated == allocated
    assert store.waiting == 0


def test_only_the_given_number_of_layers_is_offloaded():
    for number in range(LAYERS + 1):
        store = ActivationOffload(LAYERS, torch.device("cpu"), number)
        for step in range(2):
            kept = forward(store, step)
            assert [row[0].device is None for row in kept] == [
                layer < min(number, LAYERS - 1) for layer in range(LAYERS)
            ]
            backward(kept, step)
            assert store.waiting == 0
        assert store.allocated == min(number, LAYERS - 1) * 2 * 64


def test_one_means_one_layer_and_true_means_all():
    assert [layers_on_host(word, 36) for word in (False, 0, 1, 16, 36, True)] == [
        0,
        0,
        1,
        16,
        35,
        35,
    ]
    assert layers_on_host(True, 1) == 0


def test_blocks_are_full_except_a_last_power_of_two():
    mib = 1 << 20
    assert block_sizes(576 * mib) == [16 * mib] * 36
    assert block_sizes(41 * mib) == [16 * mib, 16 * mib, 16 * mib]
    assert [block_sizes(size) for size in (0, 1, 3, 1000, 16 * mib + 1)] == [
        [],
        [1],
        [4],
        [1024],
        [16 * mib, 1],
    ]


def test_widths_that_change_between_steps_allocate_no_more_than_the_widest(monkeypatch):
    monkeypatch.setattr(activation_offload, "FULL_BLOCK", 256)
    store, draw = ActivationOffload(LAYERS, torch.device("cpu")), random.Random(0)
    widths = [150, *(draw.randrange(150) for _ in range(60))]
    for width in widths:
        # Views as fewer, wider elements, and tensors that are not contiguous.
        tensors = [
            [torch.randn(width, 2).t(), torch.randn(width // 2).double()] for _ in range(LAYERS)
        ]
        kept = [[store.put(layer, tensor) for tensor in row] for layer, row in enumerate(tensors)]
        for layer in reversed(range(LAYERS)):
            for one, tensor in zip(kept[layer], tensors[layer], strict=True):
                assert torch.equal(one.get(), tensor)
        assert store.allocated == (LAYERS - 1) * sum(
            sum(block_sizes(size)) for size in (150 * 2 * 4, 75 * 8)
        )
    blocks = [block.nbytes for free in store._free.values() for block in free]
    assert sum(blocks) == store.allocated
    assert all(size & (size - 1) == 0 for size in blocks)
