"""`mtrain simulate`: its keys, and mistakes in them."""

from __future__ import annotations

import pytest
from commands.typed_line import STRIPED, document, run, split


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


MISTAKES = {
    # values of keys, as options and as settings
    "--nodes 0": "nodes=0: expected a whole number of at least 1",
    "columns=-1": "columns=-1: expected a whole number of at least 0",
    "--density 0": "density=0: expected a share above 0 and at most 1, such as 0.05 or 5%",
    "density=120%": "density=120%: expected a share",
    "--density few": "density=few: expected a share",
    "density=": "density=: the value is empty",
    "--slow fast": "slow=fast: expected RANK=X,..., such as 3=1.5",
    "--slow 1=1000": "slow=1=1000: expected RANK=X,..., such as 3=1.5, with factors from 0.1",
    "--slow 9=2": "slow=9=2: there is no such rank; allowed: 0 to 7",
    "--calibration no.json": "--calibration no.json: no such calibration; allowed: kernels-a100,",
    "--layout zigzig": "topology.layout=zigzig: no such layout (did you mean zigzag?); allowed:",
    "topology.layout=zigzg": "topology.layout=zigzg: no such layout (did you mean zigzag?)",
    "--exchange rong": "topology.exchange=rong: no such exchange (did you mean ring?)",
    "--index nothing": "index=nothing: no such index; allowed: ",
    "model=huge": "model=huge: no such model",
    # the cluster and its GPUs
    "--cluster h200": "cluster=h200: no such cluster",
    "cluster=a100_4x9": "cluster=a100_4x9: no such cluster (did you mean a100_4x8?)",
    "topology.cluster=mars_8": "topology.cluster=mars_8: no such cluster",
    "cluster=a100_4x8 --cluster h100_4x8": "cluster=a100_4x8: cluster=h100_4x8 is given, too",
    "--nodes 2": "nodes=2: h200_1x8 does not describe links between nodes; allowed: 1, or a",
    "--nodes 3000 --cluster a100_4x8": "workers=24000: a100_4x8 has 24000 GPUs; allowed: 1 to 163",
    "--workers 9": "workers=9: h200_1x8 has 8 GPUs; allowed: 1 to 8",
    "topology.workers=65 --cluster a100_4x8": "workers=65: a100_4x8 has 32 GPUs; allowed: 1 to 32; "
    "for more, set nodes=9",
    "recommend --workers 65 cluster=a100_4x8 --nodes 9": "workers=65: a100_4x8 has nodes of 8 GPUs,"
    " all of which a run must use",
    "topology.device=cpu": "topology.device=cpu: h200_1x8 has NVIDIA H200; allowed: auto, cuda",
    # sweeps
    "nods=1,2": "nods=1: no key or group is called nods",
    "nodes=1,2": "nodes=2: h200_1x8 does not describe links between nodes",
    "workers=4,9": "workers=9: h200_1x8 has 8 GPUs; allowed: 1 to 8",
    "workers=4,x": "workers=x: expected a whole number",
    "seq=32k,long": "seq=long: expected a number of tokens",
    "seq=256,512 --density 5%": "256 tokens in blocks of 128 are too few for",
    "model=tiny,nope seq=16k": "model=nope: no such model",
    "nodes=1,2 workers=2,4": "workers: cannot be combined with several values of nodes",
    "workers=2,4 --slow 1=2": "slow: cannot be combined with several values of workers",
    "density=1%,2% sparsity=dense": "density=0.01: has no effect on dense attention",
    "columns=3,4 sparsity=fixed": "columns=3: sparsity=fixed has its own keys",
    "seq=16k topology=a100_4x8,b200_4x8": "topology=a100_4x8,b200_4x8: a command predicts",
    "seq=,": "seq=,: has no value, as seq=VALUE,VALUE",
    "seq=16k,32k seq=64k,128k": "seq=64k,128k: give all values at once, as seq=VALUE,VALUE",
    "recommend seq=64k,128k": "seq=64k,128k: one value; `mtrain simulate run` takes several",
    "--attention-only seq=64k,128k": "seq: --attention-only takes one value",
    # pairs
    "--layers 5": "layers=5: tiny has 4 that are not in sparsity.dense_layers; allowed: 1 to 4",
    "sparsity=moba": "sparsity=moba: there are no synthetic indices for this pattern",
    "sparsity=block_topk columns=9999": "columns=9999: tokens that all later queries see would",
    "sparsity=block_topk density=5%": "density=0.05: sparsity=block_topk always computes 15.000%",
    "seq=4m sparsity=block_topk": "sparsity=block_topk: there are no synthetic indices for this",
    "sparsity=fixed --columns 3": "columns=3: sparsity=fixed has its own keys",
    "sparsity=vertical_slash --columns 5000": "columns=5000: sparsity=vertical_slash allows at most"
    " 4096 per head",
    "sparsity=vertical_slash sparsity.max_slashes=9 --density 50%": "density=0.5: contradicts "
    "sparsity.max_slashes",
    "mask=full --density 5%": "mask.kind=full: sparsity.pattern=vertical_slash needs a mask in",
    "mask=sliding_window mask.full_every=2 --layers 2": "layers=2: mask.full_every=2 needs all",
    # configurations that are impossible
    "train.dtype=float32": "train.dtype=float32: no times were measured; allowed: auto, bfloat16",
    "train.kernel=flash4": "train.kernel=flash4: head_dim 32 is not 64 or 128; allowed on NVIDIA",
    "topology.context_parallel=3": "topology.context_parallel=3: must divide the 8 workers",
    "topology.context_parallel=4": "train.global_batch=1: must be a multiple of 2 = 2 context",
    "seq=1k --cluster h100_4x8 --layout striped": "topology.workers=32: 1024 tokens in blocks of",
    "--exchange ulysses --cluster h100_4x8": "topology.exchange=ulysses: cannot share 4 query",
    "--exchange ring topology.chunks=2": "not with topology.exchange=ring. Set",
    # commands and options
    "--recompute": "--recompute: only with --attention-only",
    "recommend --out new --no-files": "--out new: --no-files writes no files; give one of the two",
    "recommend --recompute": "No such option: --recompute",
    "model=tiny seq=16k recommend": "recommend: expected key=value",
    "sweep": "No such command sweep.",
    "recomend": "No such command recomend. Did you mean recommend?",
}


@pytest.mark.parametrize(("words", "message"), MISTAKES.items())
def test_mistakes_are_one_line(tmp_path, words, message):
    words = split(words)
    before = sorted(tmp_path.iterdir())
    shape = [] if any(w.startswith(("seq=", "model=")) for w in words) else ["model=tiny seq=16k"]
    command = [word for word in words[:1] if "=" not in word and not word.startswith("-")]
    found = run("simulate", *command, *shape, *words[len(command) :])
    assert found.exit_code == 2
    assert message in found.stderr.replace("'", "")  # releases of typer differ in their quotes
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1
    assert sorted(tmp_path.iterdir()) == before


@pytest.mark.parametrize(("limit", "columns"), [(64, 64), (0, 65)])  # 0 = no limit
def test_columns_up_to_the_patterns_limit_are_allowed(limit, columns):
    words = ("model=tiny seq=16k sparsity=vertical_slash", f"sparsity.max_columns={limit}")
    found = run("simulate", *words, "--columns", str(columns), "--exchange ring --no-files")
    assert (found.exit_code, found.stderr) == (0, "")


def test_an_index_can_be_a_shipped_profile():
    words = ("--index real-512k-4xh200 --workers 4 --layers 1 --no-files",)
    found = run("simulate", *words, "--exchange ring --layout striped", columns=200)
    assert (found.exit_code, found.stderr) == (0, "")
    assert "real-512k-4xh200/index.npz (vertical_slash)" in found.stdout


@pytest.mark.parametrize("word", ["topology=a100_4x8", "topology.cluster=a100_4x8"])
def test_a_topology_of_a_cluster_chooses_that_cluster(word):
    words = "model=tiny seq=64k --layout striped --exchange ring --no-files --json"
    named = document(words, "--cluster a100_4x8")
    assert (named["cluster"]["name"], named["cases"][0]["workers"]) == ("a100_4x8", 32)
    for more in ("", "--cluster a100_4x8", "cluster=a100_4x8"):
        assert document(words, f"{word} {more}")["predicted"] == named["predicted"]
    # workers and nodes replace the numbers of the topology.
    for more in ("topology.workers=4", "--nodes 2"):
        few = document(words, f"{word} {more}")
        assert few["predicted"] == document(words, "--cluster a100_4x8", more)["predicted"]
    found = run("simulate recommend", words.replace(" --json", ""), word, "--workers 4")
    (line,) = (line for line in found.stdout.splitlines() if line.startswith("type "))
    assert line.endswith(" topology.workers=4")


def test_an_option_is_a_setting_under_another_name():
    keys = "cluster=a100_4x8 nodes=2 workers=16 layout=striped exchange=ring density=10% columns=64"
    options = " ".join(f"--{key.replace('=', ' ')}" for key in keys.split())
    typed, set_ = (document("model=tiny seq=64k", words) for words in (options, keys))
    assert typed["predicted"] == set_["predicted"]
    assert typed["workers"] == 16


def test_a_setting_without_effect_is_named():
    found = run("simulate model=tiny seq=16k workers=1 optim.schedule=constant --no-files")
    assert (found.exit_code, found.stderr) == (0, "")
    found = run("simulate model=tiny seq=16k workers=1 model.rope.factor=2 --no-files", STRIPED)
    assert found.exit_code == 0
    assert "warning: model.rope.factor=2" in found.stderr
    blocks = "simulate model=tiny seq=16k workers=2 topology.block_size=64 --no-files"
    blocks += " data.document_mask=false"
    assert run(blocks, "--exchange ring").stderr == "", "striped is compared, too"
    assert "warning: topology.block_size=64" in run(blocks, "--layout zigzag").stderr
