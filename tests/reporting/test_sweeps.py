"""Tables of sweeps: the best of each group, what does not fit, and units."""

from __future__ import annotations

from mtrain_cli.reporting.sweeps import sweep_table, why_not


def row(
    workers: int,
    layout: str,
    seconds: float,
    *,
    seq: int = 1 << 19,
    fits: bool = True,
    **point: str,
) -> dict:
    rate = seq / seconds / workers
    return {
        "point": {"nodes": str(workers // 8), **point}, "workers": workers, "cp": workers,
        "dp": 1, "layout": layout, "exchange": "ring (so)", "kernel": "triton", "seq": seq,
        "density": 0.05, "mfu": 0.1, "hfu": 0.2, "memory_bytes": 30 << 30, "fits": fits,
        "seconds": {"low": seconds / 2, "value": seconds, "high": 2 * seconds},
        "tokens_per_second_per_gpu": {"low": rate / 2, "value": rate, "high": 2 * rate},
    }  # fmt: skip


ROWS = [
    row(8, "striped", 16, fits=False),
    row(16, "striped", 9),
    row(32, "striped", 5),
    row(8, "zigzag", 18),
    row(16, "zigzag", 11),
    row(32, "zigzag", 4),
    {
        **{"point": {"nodes": "64"}, "workers": 512, "layout": "zigzag", "exchange": "ring"},
        "cannot": "too many GPUs",
    },
]


def test_the_fastest_that_fits_of_each_number_of_gpus_is_the_best():
    table = sweep_table([("", ROWS)])
    lines = table.cells()
    assert [column.name for column in table.shown][:3] == ["GPUs", "layout", "exchange"]
    assert list(map(table.state, table.rows)) == ["not", "best", "", "best", "", "best", "not"]
    assert [line[-1] for line in lines[:2]] == ["no", "yes"]
    assert lines[-1][-1] == "impossible"
    assert why_not(ROWS) == ["too many GPUs"]
    both = sweep_table([("one", ROWS), ("two", [row(8, "striped", 3, seq_="x")])])
    assert [line["run"] for line in both.records()] == ["one"] * 7 + ["two"]
    assert both.records()[6]["cannot"] == "too many GPUs"
    assert list(map(both.state, both.rows))[-1] == "best", "runs do not compete"


def test_units_agree_in_table_and_sheet():
    """GiB are 2^30 bytes everywhere, and throughput is the likely value."""
    mine = [row(8, "striped", 16), row(16, "striped", 8)]
    table = sweep_table([("one", mine)])
    shown = dict(zip([column.name for column in table.shown], table.cells()[0], strict=True))
    assert (shown["GiB"], shown["tokens/s/GPU"], shown["best - worst"], shown["HFU"]) == (
        "30.0",
        "4,096",
        "8 - 32",
        "20.0%",
    )
    without = {**mine[0], "seconds": dict.fromkeys(("low", "value", "high"), 16)}
    place = [column.name for column in table.shown].index("best - worst")
    cells = sweep_table([("one", [without, mine[1]])]).cells()
    assert [line[place] for line in cells] == ["", "4 - 16"], "equal bounds were not predicted"
    line = table.records()[0]
    assert (line["memory_gib"], line["tokens_per_second_per_gpu"]) == (30, 4096)
    assert (line["seconds_low"], line["seconds"], line["seconds_high"]) == (8, 16, 32)
