"""Files of published tables: what ships is complete, and damaged files are refused."""

from __future__ import annotations

import pytest
import yaml

from mtrain_cli import resource_dir
from mtrain_cli.config.exchanges import exchange_names
from mtrain_cli.config.schema import LAYOUTS, ConfigError
from mtrain_extras.studies.published import PAPERS, chosen, names, read, read_file

ASKED = (
    *("table1", "table2", "table3", "llama-ruler", "fig6b", "fig7", "fig11", "fig12", "fig13"),
    *(f"burst-table{number}" for number in range(1, 6)),
    *("burst-fig14", "magi-masks", "magi-scaling"),
)


def test_all_tables_ship_with_their_source():
    assert set(ASKED) <= set(names())
    for name in names():
        table = read(name)
        assert any(table.paper.startswith(paper) for paper in PAPERS.values()), name
        assert table.title
        assert table.where
        assert table.rows or table.remarks
        for row in table.rows:
            assert row.layout in LAYOUTS
            assert row.exchange in exchange_names()
            assert table.evaluation or row.on(table.cluster).gpus > 0
            assert not row.measured or (resource_dir("profiles") / row.measured["profile"]).is_dir()


@pytest.mark.parametrize("name", [name for name in names() if read(name).evaluation])
def test_printed_averages_are_the_means_of_the_printed_scores(name):
    """A digit that was copied wrongly would show."""
    for row in read(name).rows:
        *scores, average = [value.value for value in row.values]
        assert average == pytest.approx(sum(scores) / len(scores), abs=0.051), row.name


def test_settings_of_a_row_replace_those_of_its_table():
    rows = {row.name: row for row in read("burst-table2").rows}
    first, last = rows["none"], rows["selective checkpoints ++"]
    assert first.exchange == "ring"
    assert last.exchange == "hierarchical_ring"
    assert "model=llama14b" in first.words
    assert [(v.quantity, v.value) for v in last.values] == [
        ("tokens/s/GPU", 117.83), ("MFU %", 51.68), ("GiB", 53.91),
    ]  # fmt: skip
    usp = read("burst-fig12").rows[0]
    assert usp.words.count("train.activation_checkpoint=full") == 1
    assert "train.activation_checkpoint=sequence_selective" not in usp.words


def test_a_paper_stands_for_its_tables():
    assert set(chosen(["burst", "table3", "burst-table1"])) == {
        *(name for name in names() if name.startswith("burst")),
        "table3",
    }
    assert chosen(["all"]) == names()
    with pytest.raises(ConfigError, match="tabel3: no such published table"):
        chosen(["tabel3"])


GOOD = {
    "title": "t", "paper": "p", "where": "w", "cluster": "a100_4x8",
    "rows": [{"row": "a", "values": {"GiB": 3}}],
}  # fmt: skip


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"rows": None}, "not a published table"),
        ({"mor": 1}, "wrong type"),
        ({"rows": [{"row": "a", "values": {"GB": 3}}]}, "GB: no such quantity"),
        ({"rows": [{"row": "a", "vals": {}}]}, "values"),
    ],
)
def test_a_damaged_file_is_one_line(tmp_path, change, reason):
    path = tmp_path / "x.yaml"
    path.write_text(yaml.safe_dump(GOOD))
    assert read_file(path).rows[0].values[0].value == 3
    path.write_text(yaml.safe_dump(GOOD | change))
    with pytest.raises(ConfigError, match=reason) as caught:
        read_file(path)
    assert len(caught.value.problems) == 1
    assert str(path) in str(caught.value)
