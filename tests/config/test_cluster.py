"""Cluster files: presets are complete, and a wrong file is refused in one line."""

from __future__ import annotations

from dataclasses import replace

import pytest
import yaml

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.cluster import (
    SOURCES,
    Constant,
    file_of,
    load_cluster,
    shipped,
    uneven_nodes,
)
from mtrain_cli.config.schema import ConfigError


@pytest.mark.parametrize("name", shipped())
def test_presets_state_the_source_of_every_constant(name):
    found = load_cluster(name)
    assert found.name == name
    assert f"{found.nodes}x{found.gpus_per_node}" == name.split("_")[1]
    for key, constant in found.constants().items():
        assert constant.source in SOURCES, key
        assert constant.note, key
        assert constant.low <= constant.value <= constant.high, key
        assert constant.source != "measured" or name == "h200_1x8", key


def test_the_clusters_of_the_papers_ship():
    assert {"h200_1x8", "h100_4x8", "a100_4x8", "a800_4x8", "b200_4x8"} <= set(shipped())
    a100 = load_cluster("a100_4x8")
    assert (a100.outer.bandwidth_gbps.value, a100.inner.bandwidth_gbps.value, a100.gpus) == (
        25,
        300,
        32,
    )
    assert (a100.outer.shared_by.low, a100.outer.shared_by.high) == (1, 8)
    # What a file leaves out stands for itself.
    assert (
        a100.inner.capacity_gbps
        == a100.inner.bandwidth_gbps
        == a100.inner.collective_bandwidth_gbps
    )


@pytest.mark.parametrize("name", shipped())
def test_every_preset_has_a_topology_of_the_same_name_and_size(name):
    cluster, topology = load_cluster(name), compose([f"topology={name}"]).topology
    assert (topology.cluster, topology.device) == (name, "cuda")
    assert topology.workers == cluster.gpus
    assert topology.gpus_per_node in ("auto", cluster.gpus_per_node)
    assert topology.gpu_memory_gib in ("auto", cluster.gpu.hbm_gib.value)


def test_the_cluster_of_a_topology_exists(tmp_path):
    with pytest.raises(ConfigError, match=r"^topology.cluster=mars_8: no such cluster; allowed: a"):
        compose(["topology.cluster=mars_8"])
    mine = tmp_path / "mine.yaml"
    with pytest.raises(ConfigError, match=r"^topology.cluster=.*mine.yaml: no such file$"):
        compose([f"topology.cluster={mine}"])
    mine.write_text(yaml.safe_dump(document()))
    assert compose([f"topology.cluster={mine}"]).topology.cluster == str(mine)


def document() -> dict:
    return yaml.safe_load(shipped()["a100_4x8"].read_text())


def problems(tmp_path, content) -> list[str]:
    path = tmp_path / "mine.yaml"
    path.write_text(content if isinstance(content, str) else yaml.safe_dump(content))
    with pytest.raises(ConfigError) as error:
        load_cluster(str(path))
    assert all(line.startswith(str(path)) for line in error.value.problems)
    return [line.removeprefix(f"{path}: ") for line in error.value.problems]


def test_a_file_of_the_user(tmp_path):
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(document() | {"nodes": 2}))
    found = load_cluster(str(path))
    assert (found.name, found.gpus) == ("mine", 16)
    assert load_cluster(str(path), nodes=128).gpus == 1024


def test_defaults_of_constants_that_a_file_leaves_out(tmp_path):
    """Collectives get the capacity of a link; matrix products 0.77 of the peak, in 0.5 to 0.95."""
    content = document()
    content["links"]["inner"] = {
        key: {"value": value, "source": "guess"}
        for key, value in (
            ("latency_us", 7),
            ("bandwidth_gbps", 300),
            ("capacity_gbps", 500),
            ("gpu_share", 0.1),
        )
    }
    content["gpu"]["gemm_tflops"] = None  # as if it were left out
    content["gpu"]["peak_tflops"] = {"value": 1000, "source": "datasheet"}
    path = tmp_path / "mine.yaml"
    path.write_text(yaml.safe_dump(content))
    found = load_cluster(str(path))
    assert (
        found.inner.collective_latency_us.value,
        found.inner.collective_bandwidth_gbps.value,
    ) == (7, 500)
    gemm = found.gpu.gemm_tflops
    assert (gemm.low, gemm.value, gemm.high, gemm.source) == (500, 770, 950, "guess")

    content["gpu"]["gemm_tflops"] = {"value": 700, "source": "guess"}  # of itself, up to 1,400
    path.write_text(yaml.safe_dump(content))
    assert load_cluster(str(path)).gpu.gemm_tflops.high == 1000  # the peak


FORM = "{value: N, source: measured|datasheet|paper|guess, note: ...}"
MISTAKES = [
    ("colour", "red", "colour=red: unknown key; allowed: name, nodes, gpus_per_node, gpu, links"),
    ("nodes", 0, "nodes=0: expected a whole number of at least 1 and at most 16,384"),
    ("nodes", "two", "nodes=two: expected a whole number of at least 1 and at most 16,384"),
    ("gpus_per_node", None, "gpus_per_node: is missing; expected a whole number"),
    ("links", None, "links: is missing; expected a section with inner, outer for several nodes"),
    ("links.outer", None, "links.outer: is missing; expected a section with latency_us, bandwidth"),
    ("gpu.device", "tpu", "gpu.device=tpu: allowed: cuda, cpu"),
    ("gpu.peak_tflops", None, f"gpu.peak_tflops: is missing; expected a number above 0 and at most "
     f"1e+12 as {FORM}"),
    ("gpu.peak_tflops.value", 0, "gpu.peak_tflops.value=0: expected a number above 0"),
    ("gpu.hbm_gbps.value", -3, "gpu.hbm_gbps.value=-3: expected a number above 0 and at most"),
    ("links.inner.latency_us", "fast", "links.inner.latency_us=fast: expected a number of at least "
     f"0 and at most 1e+12 with its source, as {FORM}"),
    ("links.inner.bandwidth_gbps.value", None, "links.inner.bandwidth_gbps.value: is missing; "
     "expected a number above 0"),
    ("links.inner.bandwidth_gbps", None, "links.inner.bandwidth_gbps: is missing; expected a "
     "number above 0 and at most 1e+12 as"),
    ("links.inner.gpu_share.value", 1.5, "links.inner.gpu_share.value=1.5: expected a share, at "
     "least 0 and below 1"),
    ("links.outer.shared_by.value", 3, "links.outer.shared_by=3: does not divide gpus_per_node=8; "
     "allowed: 1, 2, 4, 8"),
    ("links.outer.bandwith_gbps", 3, "links.outer.bandwith_gbps=3: unknown key (did you mean "
     "bandwidth_gbps?); allowed: latency_us"),
    ("links.outer.latency_us.source", "a friend", "links.outer.latency_us.source=a friend: "
     "expected one of measured, datasheet, paper, guess"),
]  # fmt: skip


@pytest.mark.parametrize(("key", "value", "said"), MISTAKES)
def test_a_mistake_is_one_line_under_its_key(tmp_path, key, value, said):
    wrong = document()
    *sections, name = key.split(".")
    section = wrong
    for one in sections:
        section = section[one]
    if value is None:
        del section[name]
    else:
        section[name] = value
    (line,) = problems(tmp_path, wrong)
    assert line.startswith(said)


def test_a_number_may_be_written_as_yaml_reads_it(tmp_path):
    """YAML reads 1e3 as a text."""
    content = document()
    content["gpu"]["peak_tflops"]["value"] = "1e3"
    content["gpu"].pop("gemm_tflops", None)
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(content))
    assert load_cluster(str(tmp_path / "mine.yaml")).gpu.gemm_tflops.value == 770


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ("", "not a cluster file"),
        ("- 1", "not a cluster file"),
        ("a: [", "not readable as YAML"),
    ],
)
def test_files_that_describe_no_cluster_are_refused(tmp_path, content, said):
    assert any(said in line for line in problems(tmp_path, content))


def test_several_nodes_need_outer_links():
    with pytest.raises(
        ConfigError,
        match=r"--nodes 2: h200_1x8 does not describe links between nodes; allowed: 1, or ",
    ):
        load_cluster("h200_1x8", nodes=2)
    with pytest.raises(ConfigError, match="nodes=0: expected"):
        load_cluster("h200_1x8", nodes=0)


@pytest.mark.parametrize(
    ("name", "said"),
    [("a100_4x", "did you mean a100_4x8?"), ("no/such.yaml", "no such file")],
)
def test_unknown_names_are_refused(name, said):
    with pytest.raises(ConfigError) as error:
        load_cluster(name)
    assert said in str(error.value)


def test_bounds_come_from_the_file_or_the_source():
    assert (Constant.of(10, "measured").low, Constant.of(10, "guess").high) == (9, 20)
    assert (Constant.of(10, "guess", "", 3).low, Constant.of(10, "guess").scaled(2).high) == (3, 40)


@pytest.mark.parametrize(
    ("gpu", "expected"),
    [
        ("NVIDIA A100-SXM4-40GB", (8, 0)),
        ("NVIDIA H100 80GB HBM3", (9, 0)),
        ("NVIDIA GH200 480GB", (9, 0)),
        ("NVIDIA H20", (9, 0)),
        ("NVIDIA B200", (10, 0)),
        ("NVIDIA GB200", (10, 0)),
        ("NVIDIA A800-SXM4-80GB", (8, 0)),
        ("unheard of", (8, 0)),
    ],
)
def test_capability_by_name(gpu, expected):
    assert replace(load_cluster("h200_1x8").gpu, name=gpu).capability == expected


def test_a_name_that_is_too_long_for_a_file_is_an_unknown_cluster():
    with pytest.raises(ValueError, match="allowed: "):
        file_of("x" * 5000)


@pytest.mark.parametrize(
    ("part", "name", "allowed", "refused"),
    [
        ("gpu", "peak_tflops", [1e-9, 1e12], [0, 1.001e12]),
        ("gpu", "launch_us", [0, 1e12], [-1e-9, 1.001e12]),
        ("inner", "gpu_share", [0, 0.999], [-1e-9, 1]),
        ("inner", "collective_ranks", [1, 16_384], [0, 1.5, 16_385]),
    ],
)
def test_a_constant_ends_at_its_last_allowed_value(tmp_path, part, name, allowed, refused):
    path = tmp_path / "mine.yaml"

    def write(value: float) -> None:
        content = document()
        section = content["gpu"] if part == "gpu" else content["links"][part]
        section[name] = {"value": value, "source": "guess"}
        path.write_text(yaml.safe_dump(content))

    for value in allowed:
        write(value)
        found = load_cluster(str(path))
        assert vars(found.gpu if part == "gpu" else found.inner)[name].value == value
    for value in refused:
        write(value)
        with pytest.raises(ConfigError, match=name):
            load_cluster(str(path))


@pytest.mark.parametrize("name", ["nodes", "gpus_per_node"])
def test_nodes_and_gpus_end_at_16384(tmp_path, name):
    other = {"nodes": "gpus_per_node", "gpus_per_node": "nodes"}[name]
    path = tmp_path / "mine.yaml"
    for value, is_allowed in ((1, True), (16_384, True), (0, False), (16_385, False)):
        content = document() | {name: value, other: 16_384 if name == "nodes" else 1}
        content["links"]["outer"]["shared_by"] = {"value": 1, "source": "guess"}
        path.write_text(yaml.safe_dump(content))
        if is_allowed:
            assert getattr(load_cluster(str(path)), name) == value
        else:
            with pytest.raises(ConfigError, match=f"{name}={value}"):
                load_cluster(str(path))


def test_one_node_needs_no_links_and_may_be_partly_used():
    cluster = load_cluster("h200_1x8", nodes=1)
    assert [uneven_nodes(cluster, workers) for workers in (1, 7, 8, 16)] == [None] * 4
    assert uneven_nodes(cluster, 9) is not None
