"""`mtrain simulate`: mistakes, former options and completion."""

from __future__ import annotations

import pytest
from commands.typed_line import document, run, split


@pytest.fixture(autouse=True)
def _here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--price -1"], "--price -1: expected dollars per GPU-hour, at least 0"),
        (["--tokens many"], "--tokens many: expected a number of tokens such as 20b"),
        (["--tokens 0"], "--tokens 0: expected a number of tokens"),
        (["sweep seq=64k seq=128k"], "seq=64k seq=128k: give all values at once, as seq=64k,128k"),
        (["sweep"], "nothing to sweep: give NAME=VALUE,..., such as seq=128k,512k nodes=1,2,4"),
        (["sweep nods=1,2"], "nods=1,2: nods cannot be swept (did you mean nodes?)"),
        (["sweep nodes=0"], "mtrain: nodes=0: expected a whole number of at least 1"),
        (
            ["sweep nodes=2"],
            "nodes=2: h200_1x8 does not describe links between nodes; allowed: 1, or a cluster "
            "with such links: a100_4x8, ",
        ),
        (["sweep workers=4,9"], "workers=9: h200_1x8 has 8 GPUs; allowed: 1 to 8"),
        (["sweep seq=32k,long"], "seq=long: expected a number of tokens"),
        (
            ["sweep seq=256,512 --density 5%"],
            "seq=256,512: 256 tokens in blocks of 128 are too few for",
        ),
        (
            ["sweep nodes=1 --slow 1=2"],
            "--slow: only an option of `mtrain simulate run`, `mtrain simulate recommend`",
        ),
        (
            ["recommend --recompute"],
            "--recompute: only an option of `mtrain simulate run`\n",
        ),
        (
            ["--prediction x"],
            "--prediction: only an option of `mtrain simulate validate`\n",
        ),
        (
            ["validate --workers 4"],
            "--workers: only an option of `mtrain simulate run`, `mtrain simulate sweep`, "
            "`mtrain simulate recommend`, `mtrain simulate methods`\n",
        ),
        (["--fail-above 1"], "No such option: --fail-above"),
        (["nodes=2"], "nodes=2: give --nodes 2, or use `mtrain simulate sweep` for several values"),
        (["workers=2,4"], "workers=2,4: give --workers 2, or use `mtrain simulate sweep` for"),
        (["recommend columns=5"], "columns=5: give --columns 5, or use `mtrain simulate sweep`"),
        (["density="], "density=: give --density ..., or use `mtrain simulate sweep`"),
        (
            ["sweep workers=2,4 --workers 8"],
            "--workers 8: workers=2,4 already sweeps this number; give only one of the two",
        ),
        (
            ["sweep density=5%,10% --density 0.5"],
            "--density 0.5: density=5%,10% already sweeps this number; give only one of the two",
        ),
        (["sweep columns=1,2 --columns 5"], "--columns 5: columns=1,2 already sweeps this number"),
        (
            ["sweep nodes=1,2 --nodes 2 --cluster a100_4x8"],
            "--nodes 2: nodes=1,2 already sweeps this number",
        ),
        (
            ["sweep nodes=1,2 --workers 4 --cluster a100_4x8"],
            "--workers 4: nodes=1,2 already sweeps this number",
        ),
        (
            ["sweep density=1%,2% sparsity=dense"],
            "mtrain: density=0.01: has no effect on dense attention; leave it out",
        ),
        (
            ["sweep columns=3,4 sparsity=fixed"],
            "mtrain: columns=3: sparsity=fixed has its own keys",
        ),
        (["sweep model=tiny,nope seq=16k"], "mtrain: model=nope: no such model"),
        (
            ["recommend --out new --no-files"],
            "--out new: --no-files writes no files; give one of the two",
        ),
        (
            ["validate cluster=h100_4x8 seq=8k"],
            "cluster=h100_4x8: validate takes no settings; give folders of profiles, and --cluster",
        ),
        (["sweep nodes=1 workers=2"], "nodes and workers: both set the number of GPUs"),
        (["sweep layout=zigzag,striped"], "use --layout zigzag,striped to compare these"),
        (
            ["model=tiny --sweep 'seq=32k,64k workers=2,4'"],
            "--sweep: is now a command; type `mtrain simulate sweep model=tiny seq=32k,64k "
            "workers=2,4`",
        ),
        (
            ["sweep --recommend model=tiny"],
            "--recommend: is now a command; type `mtrain simulate recommend model=tiny`",
        ),
        (
            ["recommend model=tiny --sweep=seq=1k,2k --out run"],
            "--sweep: is now a command; type `mtrain simulate sweep model=tiny seq=1k,2k --out "
            "run`",
        ),
        (
            ["model=tiny recommend --sweep"],
            "--sweep: is now a command; type `mtrain simulate sweep model=tiny`",
        ),
        (
            ["model=tiny seq=16k recommend"],
            "recommend: is a command; type it first: `mtrain simulate recommend ...`",
        ),
        (["run --recommend"], "--recommend: is now a command; type `mtrain simulate recommend"),
        (["--validate x"], "--validate: is now a command; type `mtrain simulate validate "),
        (["recomend"], "No such command recomend. Did you mean recommend?"),
        (["x"], "No such command x. Commands: run, sweep, recommend, methods, validate. See "),
        (["--recompute"], "--recompute: only with --attention-only"),
        (["--layers 5"], "--layers 5: tiny has 4; allowed: 1 to 4"),
        (["train.dtype=float32"], "train.dtype=float32: kernels were measured in bfloat16 only"),
        (
            ["train.kernel=flash4"],
            "train.kernel=flash4: head_dim 32 is not 64 or 128; allowed on NVIDIA H200: auto",
        ),
        (["sparsity=moba"], "sparsity=moba: there are no synthetic indices for this pattern"),
        (["sparsity=dense --index local"], "--index local: contradicts sparsity=dense"),
        (
            ["sparsity=vertical_slash --columns 5000"],
            "--columns 5000: sparsity.max_columns=4096 allows at most 4096; give fewer, or set "
            "sparsity.max_columns=5000",
        ),
        (
            ["recommend sparsity=vertical_slash sparsity.max_columns=64 --columns 65"],
            "--columns 65: sparsity.max_columns=64 allows at most 64",
        ),
        (
            ["sweep sparsity=vertical_slash sparsity.max_columns=64 columns=64,65"],
            "columns=65: sparsity.max_columns=64 allows at most 64",
        ),
        (["sparsity=fixed --columns 3"], "--columns 3: sparsity=fixed has its own keys"),
        (
            ["sparsity=vertical_slash sparsity.max_slashes=9 --density 50%"],
            "--density 0.5: contradicts sparsity.max_slashes=9; give only one of the two",
        ),
        (
            ["sparsity=fixed --index uniform"],
            "--index uniform: contradicts sparsity=fixed, which draws its own index",
        ),
        (
            ["topology.workers=4"],
            "topology.workers=4: give --workers 4 instead, or several numbers with `mtrain "
            "simulate sweep workers=2,4,8`",
        ),
        (["topology.device=cpu"], "topology.device=cpu: h200_1x8 has GPUs; allowed: auto, cuda"),
        (["topology.context_parallel=3"], "topology.context_parallel=3: must divide the 8 workers"),
        (
            ["topology.context_parallel=4"],
            "train.global_batch=1: must be a multiple of 2 = 2 context groups",
        ),
        (
            ["--layout zigzig"],
            "--layout zigzig: no such layout (did you mean zigzag?); allowed: contiguous, zigzag, "
            "striped",
        ),
        (["price=2"], "price=2: is an option, not a setting; give --price 2"),
        (
            ["model=qwen3b", "seq=64k,128k"],
            "seq=64k,128k: one value per prediction; `mtrain simulate sweep` takes several",
        ),
        (["--exchange rong"], "--exchange rong: no such exchange (did you mean ring?)"),
        (
            ["--kernel flsh4"],
            "--kernel flsh4: no such kernel (did you mean flash4?); allowed: auto, reference, "
            "sdpa, triton, flash4",
        ),
        (["--cluster h200"], "--cluster h200: no such cluster"),
        (["--nodes 0"], "--nodes 0: must be at least 1"),
        (["--columns -1"], "--columns -1: must be at least 0"),
        (["--workers 9"], "--workers 9: h200_1x8 has 8 GPUs; allowed: 1 to 8"),
        (["--workers 65"], "--workers 65: h200_1x8 has 8 GPUs; allowed: 1 to 8 on its one node"),
        (
            ["--workers 65 --cluster a100_4x8"],
            "--workers 65: a100_4x8 has 32 GPUs; allowed: 1 to 32, or more with --nodes 9",
        ),
        (
            ["recommend --workers 65 cluster=a100_4x8 --nodes 9"],
            "--workers 65: a100_4x8 has nodes of 8 GPUs, and a run on several nodes must use all "
            "GPUs of each; allowed: 1 to 8, or multiples of 8 such as 64 or 72",
        ),
        (
            ["sweep workers=65 cluster=a100_4x8 --nodes 9"],
            "topology.workers=65: a100_4x8 has nodes of 8 GPUs",
        ),
        (
            ["cluster=a100_4x8 --cluster h100_4x8"],
            "cluster=a100_4x8: --cluster h100_4x8 names another cluster; give only one of the two",
        ),
        (
            ["cluster=a100_4x9"],
            "mtrain: cluster=a100_4x9: no such cluster (did you mean a100_4x8?)",
        ),
        (["topology.cluster=mars_8"], "mtrain: topology.cluster=mars_8: no such cluster; allowed:"),
        (
            ["topology=a100_4x8 --cluster h100_4x8"],
            "mtrain: topology=a100_4x8: --cluster h100_4x8 names another cluster; give only one of "
            "the two",
        ),
        (
            ["recommend topology=a100_4x8 topology.cluster=b200_4x8 cluster=h100_4x8"],
            "mtrain: topology.cluster=b200_4x8: cluster=h100_4x8 names another cluster",
        ),
        (
            ["sweep seq=16k topology=a100_4x8,b200_4x8"],
            "topology.cluster=a100_4x8: this command predicts for h200_1x8; start a command for",
        ),
        (
            ["sweep seq=16k cluster=a100_4x8,b200_4x8"],
            "cluster=a100_4x8,b200_4x8: a sweep predicts for one cluster; start a sweep for each",
        ),
        (["--nodes 2"], "mtrain: --nodes 2: h200_1x8 does not describe links between nodes"),
        (
            ["--index nothing"],
            "--index nothing: no such index; allowed: dense, local, clustered, uniform, drifting, "
            "fixed, fixed-512k-4xh200, ",
        ),
        (["--density 0"], "--density 0: must be a share above 0 and at most 1"),
        (
            ["--density 120%"],
            "--density 120%: must be a share above 0 and at most 1, such as 0.05 or 5%",
        ),
        (
            ["--density few"],
            "--density few: must be a share above 0 and at most 1, such as 0.05 or 5%",
        ),
        (
            ["sweep density=5,20%"],
            "mtrain: density=5: must be above 0 and at most 1, such as 0.05 or 5%",
        ),
        (["--slow 9=2"], "--slow 9=2: there is no rank 9; allowed: 0 to 7"),
        (["--slow fast"], "--slow fast: expected RANK=X, such as 3=1.5"),
        (["--jitter -1"], "--jitter -1: must be between 0 and 2"),
        (
            ["--calibration no.json"],
            "--calibration no.json: no such calibration; allowed: kernels-a100, kernels-h200, ",
        ),
        (
            ["seq=1k --cluster h100_4x8 --layout striped"],
            "--cluster h100_4x8, 32 workers: 1024 tokens in blocks of",
        ),
        (["topology.exchange=group_cst"], "mtrain: topology.exchange=group_cst: no such exchange"),
        (["topology.layout=zigzg"], "mtrain: topology.layout=zigzg: no such layout (did you"),
        (
            ["topology.exchange=ulysses --cluster h100_4x8"],
            "mtrain: topology.exchange=ulysses: cannot share",
        ),
        (["topology.chunks=2"], "not with exchange ring (compared by default). Set"),
        (["--exchange ring topology.chunks=2"], "not with --exchange ring. Set"),
        (["topology.exchange=ring topology.chunks=2"], "not with topology.exchange=ring. Set"),
        (["--nodes 600 --cluster a100_4x8"], "mtrain: --nodes 600: a100_4x8 has 4800 GPUs;"),
        (
            ["mask=full --density 5%"],
            "mask.kind=full: --density 0.05 needs a mask in which each query sees one interval of "
            "keys up to itself; give mask=causal, mask=sliding_window without global tokens, or "
            "leave --density out",
        ),
        (
            ["mask=sliding_window mask.full_every=2 --layers 2"],
            "--layers 2: with mask.full_every=2, all 4 layers are predicted; leave --layers out",
        ),
        (["recommend mask=full --index local"], "mask.kind=full: --index local needs a mask in"),
        (["sweep mask=full density=2%,5%"], "mask.kind=full: density=0.02 needs a mask in which"),
        (["model=huge"], "model=huge: no such model"),
        (
            ["--exchange ulysses --cluster h100_4x8"],
            "heads among 32 workers in nodes of 8; allowed",
        ),
    ],
)
def test_mistakes_are_one_line(tmp_path, words, message):
    words = split(*words)
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


def test_help_of_exchange_says_what_each_command_compares():
    texts = {
        name: " ".join(run("simulate", name, "--help", columns=400).stdout.split())
        for name in ("run", "sweep", "recommend")
    }
    assert [
        name
        for name in texts
        if "by default all, but group casts only under a mask other than causal." in texts[name]
    ] == ["recommend"]
    usual = (
        "only hierarchical_ring between nodes. Under a mask other than causal, group casts, too."
    )
    assert [name for name in texts if usual in texts[name]] == [
        "run",
        "sweep",
    ]


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
    # --workers and --nodes replace the numbers of the topology.
    for more in ("--workers 4", "--nodes 2"):
        few = document(words, f"{word} {more}")
        assert few["predicted"] == document(words, "--cluster a100_4x8", more)["predicted"]
    found = run("simulate recommend", words.replace(" --json", ""), word, "--workers 4")
    (line,) = (line for line in found.stdout.splitlines() if line.startswith("type "))
    assert word not in line
    assert line.endswith(" topology.workers=4")


def test_help_says_where_the_options_are():
    text = " ".join(run("simulate --help").stdout.split())
    assert "--cluster" in text
    assert "--density" in text
    assert "`mtrain simulate run --help`" in text
