"""The page of a study is one file with tables, figures and commands."""

from __future__ import annotations

import json
from dataclasses import replace

from reporting.test_html import figures_in
from studies.test_learning_tables import A, summary

from mtrain_extras.studies import learning_page
from mtrain_extras.studies.cells import Done, Study
from mtrain_extras.studies.learning_page import figures, loss_by_step, write_page


def test_the_page_has_tables_figures_and_commands(tmp_path):
    found = summary([0.002, 0.003, 0.004])
    done = Done("d", "c", 300, 60.0, 0.2, 0.31, command=("mtrain", "train", "a=<b c>"))
    found = replace(found, done={"moba/seed-0": done})
    page = write_page(Study(tmp_path, A), found).read_text()
    assert page.index("that &lt;failed&gt;") < page.index("that &lt;held&gt;")
    assert "mtrain train &#x27;a=&lt;b c&gt;&#x27;" in page
    assert "loses nothing" in page
    assert "<failed>" not in page
    assert [figure["name"] for figure in figures_in(page)] == ["frontier", "needles"]


def test_the_frontier_has_a_point_with_an_interval_for_each_attention():
    frontier = figures(summary([0.002, 0.003, 0.004]))[0]
    by_density, by_seconds = frontier.views
    points = {point["name"]: point for point in by_density.data}
    assert {"dense-again", "vertical_slash-0.6, sparse inference"} <= set(points)
    sparse = points["vertical_slash-0.6, sparse inference"]
    assert (sparse["x"], sparse["y"]) == ([0.5], [0.003])
    assert sparse["error_y"]["array"] == [0.0024841]  # 4.303 * 0.001 / sqrt(3)
    (again,) = (point for point in by_seconds.data if point["name"] == "dense-again")
    assert again["x"] == [10.0]


def test_dense_and_own_attention_of_a_variant_have_one_color_and_the_legend_has_room():
    found = summary([0.002, 0.003, 0.004])
    own = next(each for each in found.compared if each.attention == "vertical_slash")
    found = replace(found, compared=(*found.compared, replace(own, attention="dense")))
    (view, *_) = figures(found)[0].views
    looks = {point["name"]: point["marker"] for point in view.data}
    assert len({look["color"] for look in looks.values()}) == len(looks) - 1
    assert looks["vertical_slash-0.6, sparse inference"]["symbol"] == "circle"
    assert looks["vertical_slash-0.6, dense inference"]["symbol"] == "circle-open"
    for number in (3, 19, 30):  # plotly gives half of the height to a legend below
        assert learning_page._height([{}] * number) / 2 > 20 * number + 10


def test_losses_of_training_are_drawn_beside_dense_at_the_same_steps(tmp_path):
    study, done = Study(tmp_path, A), Done("d", "c", 4, 60.0, 0.2, 0.31)
    runs = {
        "dense/seed-0": [4.0, 3.0, 2.0, 1.0],
        "dense/seed-1": [5.0, 4.0, 3.0, 2.0],
        "moba/seed-0": [4.5, 3.5, 2.25],  # stopped before the last step
        "moba/seed-1": [5.5, None, 3.75, 2.5],  # a step without labels
        "xattention/seed-2": [9.0],  # its seed has no dense cell
        "vertical_slash-0.6/seed-0": [9.0],  # not finished
    }
    for key, losses in runs.items():
        (tmp_path / key / "run").mkdir(parents=True)
        rows = ({"step": step, "loss": loss} for step, loss in enumerate(losses, 1))
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (tmp_path / key / "run/metrics.jsonl").write_text(text)
    tier = replace(A, steps=100)  # two steps a point
    found = replace(
        summary([0.002, 0.003, 0.004]), tier=tier,
        done={key: done for key in runs if not key.startswith("vertical")},
    )  # fmt: skip
    absolute, above = (
        {line["name"]: (line["x"], line["y"]) for line in view.data}
        for view in loss_by_step(study, found).views
    )
    assert absolute == {
        "dense": ([2, 4], [4.0, 2.0]),
        "moba": ([3], [4.0]),  # mean of 4.5, 5.5, 2.25 and 3.75: steps 1 and 3 of both seeds
        "xattention": ([1], [9.0]),
    }
    assert above == {"dense": ([2, 4], [0.0, 0.0]), "moba": ([3], [0.5])}
    assert loss_by_step(Study(tmp_path / "none", A), found).views == []
