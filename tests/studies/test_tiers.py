"""The plan is data: order of the cells, what they need, and what identifies a finished one."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_extras.studies.tiers import (
    BASE,
    DENSE,
    EQUAL_TIME,
    FIXED,
    TIERS,
    Cell,
    cells_of,
    digest,
)

TINY, A = TIERS["tiny"], TIERS["a"]


def test_tier_a_has_the_runs_of_the_plan():
    cells = cells_of(A)
    assert len(cells) == 3 * 23 == len({cell.key for cell in cells})
    assert (A.base_seq, A.long_seq, A.steps, A.seeds) == (8192, 65536, 200, (0, 1, 2))
    assert {"dense", "xattention", "moba", "fixed", "untrained", "equal-time"} < {
        cell.name for cell in cells
    }
    config = compose([*A.model, *A.variant("vertical_slash-0.6-windows").words])
    assert (config.sparsity.windows, config.sparsity.p_v) == (16, 0.6)
    middle = compose([*A.model, *A.variant("block_topk-10-middle").words])
    assert middle.layer_kinds["dense"] == [3, 4]


def test_the_first_cells_of_a_seed_are_a_table_with_a_control():
    names = [cell.name for cell in cells_of(A, (), [0])]
    assert names[:6] == [
        BASE, DENSE, "vertical_slash-0.6", FIXED, "untrained", "vertical_slash-0.9"
    ]  # fmt: skip
    assert names.index("moba") < names.index("dense-again") < names.index(EQUAL_TIME)


REVERSED = [replace(tier, variants=tier.variants[::-1]) for tier in TIERS.values()]


@pytest.mark.parametrize("tier", [*TIERS.values(), *REVERSED], ids=lambda tier: tier.name)
def test_each_cell_comes_after_those_that_it_needs(tier):
    before: set[str] = set()
    for cell in cells_of(tier):
        needed = () if cell.variant is None else (BASE, *cell.variant.needs)
        assert {Cell(cell.seed).key if n == BASE else f"{n}/seed-{cell.seed}" for n in needed} <= (
            before
        )
        before.add(cell.key)


@pytest.mark.parametrize("tier", TIERS.values(), ids=TIERS)
def test_the_settings_of_each_cell_compose(tier):
    for variant in tier.variants:
        own = [*tier.model, f"seq={tier.long_seq}", *variant.words, "topology.workers=1"]
        config = compose(own, plan=True)
        if config.sparsity.pattern == "vertical_slash":
            span = -(-config.sparsity.last_q // config.sparsity.block) * config.sparsity.block
            assert span == tier.probe


def test_only_adds_what_a_cell_needs():
    names = [cell.name for cell in cells_of(TINY, [FIXED], [1])]
    assert names == [BASE, DENSE, "vertical_slash-0.6", FIXED]
    assert [cell.name for cell in cells_of(TINY, [BASE])] == [BASE, BASE]
    assert EQUAL_TIME in {cell.name for cell in cells_of(TINY)}


@pytest.mark.parametrize(
    ("only", "seeds", "line"),
    [
        (["vertical"], [], "--only vertical: no such cell; allowed: base, dense, "),
        ([], [7], "--seeds 7: tier tiny has the seeds 0, 1"),
        ([], [0, 1, 0], "--seeds 0,1,0: 0 appears twice; give each seed once"),
    ],
)
def test_a_wrong_name_is_one_line(only, seeds, line):
    with pytest.raises(ConfigError) as caught:
        cells_of(TINY, only, seeds)
    (problem,) = caught.value.problems
    assert problem.startswith(line)


def test_a_cell_is_identified_by_its_settings_and_not_by_the_others():
    dense = Cell(0, A.variant(DENSE))
    assert digest(A, dense) == digest(replace(A, variants=(), flops=1.0, base_flops=1.0), dense)
    assert digest(A, dense) != digest(replace(A, steps=301), dense)
    assert digest(A, dense) != digest(A, Cell(1, dense.variant))
    assert digest(A, Cell(0)) == digest(replace(A, steps=301), Cell(0))
    other = replace(dense.variant, about="another text")
    assert digest(A, dense) == digest(A, Cell(0, other))
