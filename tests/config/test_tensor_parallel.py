"""Bad settings of tensor parallelism end in one line that says what is allowed."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.parallel_checks import require_degree_1
from mtrain_cli.config.schema import ConfigError

MODEL = ("model.num_heads=12", "model.num_kv_heads=6", "model.intermediate_size=384")


def test_one_worker_supports_what_two_do_not():
    assert compose([*MODEL, "topology.tensor_parallel=1", "optim.offload=true"]).optim.offload


@pytest.mark.parametrize(("heads", "allowed", "refused"), [(1, 1, 2), (2, 2, 3), (6, 6, 12)])
def test_the_largest_degree_is_the_common_divisor(heads, allowed, refused):
    words = [*MODEL, f"model.num_kv_heads={heads}"]
    compose([*words, f"topology.tensor_parallel={allowed}"])
    with pytest.raises(ConfigError, match=r"must divide model\.num_heads=12"):
        compose([*words, f"topology.tensor_parallel={refused}"])


def test_an_allowed_degree_gives_each_worker_a_part_of_the_model():
    config = compose([*MODEL, "topology.tensor_parallel=6"])
    part = config.of_worker.model
    assert (part.num_heads, part.num_kv_heads, part.intermediate_size) == (2, 1, 64)
    assert part.hidden_size == config.model.hidden_size
    assert config.of_worker.of_worker.topology.tensor_parallel == 6
    assert compose(list(MODEL)).of_worker == compose(list(MODEL))


def test_the_batch_is_split_over_the_groups_that_share_sequences():
    words = [*MODEL, "topology.workers=8", "topology.context_parallel=2"]
    compose([*words, "topology.tensor_parallel=2", "train.global_batch=2"])
    with pytest.raises(ConfigError, match="must be a multiple of 4"):
        compose([*words, "train.global_batch=2"])


def test_other_commands_refuse_it_by_name():
    require_degree_1(compose(list(MODEL)), "tensor_parallel", "mtrain simulate")
    config = compose([*MODEL, "topology.tensor_parallel=2"])
    with pytest.raises(ConfigError) as error:
        require_degree_1(config, "tensor_parallel", "mtrain simulate")
    assert error.value.problems == (
        "topology.tensor_parallel=2: not supported by `mtrain simulate`; leave this setting out",
    )
