"""The banner says what runs and why."""

import json
from pathlib import Path

from training.test_dry_run import text

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import Config
from mtrain_cli.launch.environment import Environment, resolve_environment
from mtrain_cli.training.dry_run import banner
from mtrain_cli.training.hardware import Hardware
from mtrain_cli.training.planning import make_plan
from mtrain_cli.training.resolution import resolve_run
from mtrain_cli.training.run_plan import RunPlan


def test_the_banner_says_what_runs_and_why_in_80_columns():
    config = compose(["topology.device=cpu"])
    environment = make_plan(config).environment
    printed = text(
        banner(plan_here(config, environment), Path("runs/tiny-4k"), "stdlib: 212 documents")
    )
    for word in (
        "tiny (qwen2), 822 K parameters",
        "2 CPU processes",
        "all_gather: ",
        "sdpa: ",
        "striped",
        "stdlib: 212 documents",
        "runs/tiny-4k",
    ):
        assert word in printed, word
    assert max(len(line.rstrip()) for line in printed.splitlines()) <= 80
    assert len(printed.splitlines()) <= 24


def test_the_banner_shows_weights_schedule_seed_compilation_and_layout_reason(tmp_path):
    assert "weights random, seed 7" in banner_of("seed=7")
    assert "212 documents; order from seed 7" in banner_of("seed=7")
    shape = {
        "hidden_size": 128,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 384,
    }
    (tmp_path / "config.json").write_text(
        json.dumps({"model_type": "qwen2", "vocab_size": 264, "head_dim": 32, **shape})
    )
    begun = banner_of(f"train.init_from={tmp_path}").replace(" ", "")  # a long path is folded
    assert f"weights{tmp_path}(train.init_from)" in begun
    assert (
        "weights from the checkpoint of step 40; the run started from random, seed 0"
        in banner_of(resumed=40)
    )
    plain = banner_of("train.steps=100", "optim.lr=1e-3")
    assert (
        "schedule cosine: warm up over 10 steps to a peak of 1.00e-03, "
        "decay to 1.00e-04 from step 11 to step 100" in plain
    )
    assert "compile off (train.compile=auto)" in plain
    assert (
        "compile on (train.compile=true): the first step also compiles, which can take minutes"
        in banner_of("train.compile=true")
    )
    reasons = {
        "data.document_mask=true": "auto: striping balances the uneven work of packed documents",
        "data.document_mask=false": "auto: zigzag balances dense attention without documents",
        "sparsity=moba": "auto: striping balances the uneven work of the index of moba",
        "topology.layout=contiguous": "tokens per worker; as configured",
        "topology.workers=1": "auto: each worker holds whole sequences, so layouts do not differ",
    }
    for word, reason in reasons.items():
        assert reason in banner_of(word), word


def test_the_banner_names_the_mask_and_its_pairs():
    words = ["mask=sliding_window", "mask.window=64", "seq=4k", "topology.workers=1"]
    pairs = sum(min(position + 1, 64) for position in range(4096))
    share = f"{100 * pairs / (4096 * 4097 / 2):.3g}% of the pairs of a causal mask"
    mask = "mask sliding_window, window 64"
    assert f"{mask}, inside each document; {share}" in banner_of(*words)
    assert f"{mask}; {share}" in banner_of(*words, "data.document_mask=false")
    assert "of a causal mask" not in banner_of("topology.workers=1")


def plan_here(config: Config, environment: Environment) -> RunPlan:
    hardware = Hardware.here(environment.device)
    return RunPlan.of(config, environment, hardware, resolve_run(config, environment))


def banner_of(
    *words: str, resumed: int | None = None, device: str = "cpu", run_dir: Path = Path("runs/x")
) -> str:
    config = compose([f"topology.device={device}", *words])
    environment = resolve_environment(config)
    plan = plan_here(config, environment)
    return " ".join(text(banner(plan, run_dir, "stdlib: 212 documents", resumed=resumed)).split())
