"""Tables of work of a profile whose micro-batches differ."""

from __future__ import annotations

import numpy as np

from mtrain_cli.parallel.recording import DIRECTIONS, KINDS
from mtrain_cli.records import record_files
from mtrain_cli.records.analysis import analyse
from mtrain_extras.validate.validation import micro_batch_tables, work_table

WORKERS, STEPS, LAYERS, MICROS, ITERATIONS = 2, 3, 2, 2, (4, 7)


def recorded(folder):
    """Two context groups. Each count tells its iteration, micro-batch, layer, step and rank."""
    rows = []
    for iteration in ITERATIONS:
        for micro, layer, rank in np.ndindex(MICROS, LAYERS, 2 * WORKERS):
            for name in ("forward", "backward"):
                about = (0, iteration, micro, layer, DIRECTIONS.index(name))
                count = 10_000 * iteration + 1000 * micro + 100 * layer + 10 * rank
                for step in range(STEPS):
                    pairs = 0 if (step, rank) == (1, 0) else count + step
                    rows.append((*about, step, rank, KINDS.index("attention"), 7 + layer, pairs))
                columns = count + 5 if name == "forward" else 0
                rows.append((*about, -1, rank, KINDS.index("columns"), 3, columns))
    table = np.zeros(len(rows), record_files.ROW)
    names = "case iteration micro layer direction step rank phase blocks pairs"
    for name, values in zip(names.split(), zip(*rows, strict=True), strict=True):
        table[name] = values
    table["dur_us"] = 1000
    record_files.write_part(table, folder, 0)
    record_files.join_parts(folder)
    facts = {"label": "dense", "cp": WORKERS, "workers": 2 * WORKERS, "steps": {}}
    about = {"kind": "profile", "mode": "training", "complete": True, "samples_wanted": 2}
    record_files.write_summary(folder, about | {"samples": 2, "cases": [facts]})
    return record_files.open_records(folder)


def expected(iteration, layers, name, micro=0):
    """The mean over layers, by the definition of the counts."""
    first = 10_000 * iteration + 1000 * micro + 100 * np.mean(layers)
    table = []
    for rank in range(WORKERS):
        count = first + 10 * rank
        pairs = [0 if (step, rank) == (1, 0) else count + step for step in range(STEPS)]
        blocks = [np.rint(7 + np.mean(layers)) if of_step else 0 for of_step in pairs]
        table.append([*pairs, count + 5 if name == "forward" else 0, *blocks])
    return np.array(table)


def test_the_first_micro_batch_of_an_iteration_is_counted(tmp_path):
    opened = recorded(tmp_path)
    (case,) = analyse(opened)
    for iteration in ITERATIONS:
        for layers in ([0, 1], [1]):
            tables = micro_batch_tables(opened, [case], {0: layers}, iteration)
            assert set(tables[0]) == {"forward", "backward"}
            for name, table in tables[0].items():
                assert np.array_equal(table, expected(iteration, layers, name)), (iteration, name)
    assert micro_batch_tables(opened, [case], {0: [0, 1]}, 5) == {}


def test_the_work_of_a_pass_is_a_mean_over_all_micro_batches(tmp_path):
    (case,) = analyse(recorded(tmp_path))
    every = [expected(i, [0, 1], "forward", micro) for i in ITERATIONS for micro in range(MICROS)]
    others = 20  # ranks 2 and 3 of the second group count 20 more
    table = work_table(case.passes["forward"])
    assert table[1, 0] == np.mean([one[1, 0] for one in every]) + others / 2
