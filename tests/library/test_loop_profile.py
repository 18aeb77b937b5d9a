"""`ContextParallel.profile` records another loop's steps; reports and predictions open them."""

from __future__ import annotations

import json
from contextlib import chdir
from itertools import product
from pathlib import Path
from types import SimpleNamespace

import gloo
import numpy as np
import pytest
import torch
from command import mtrain
from commands.replay import replayed
from slow_cases import mostly_slow
from torch.distributed.device_mesh import init_device_mesh

from mtrain_cli import api
from mtrain_cli.attention.index import MaskTables
from mtrain_cli.library.context_parallel import ContextParallel
from mtrain_cli.records.analysis import analyse
from mtrain_cli.records.imbalance import degrees
from mtrain_cli.records.index_file import load_indices
from mtrain_cli.records.record_files import open_records
from mtrain_cli.reporting.report_source import open_source

SEQ, HEADS, WINDOW, LAYERS = 256, 4, 30, 3
SPARSE = {
    "dense": (),
    "vertical_slash": ("sparsity.block=16", "sparsity.max_columns=8", "sparsity.min_columns=4"),
    "block_topk": ("sparsity.block=16", "sparsity.score=exact", "sparsity.density=0.45"),
}
# The documents of the two micro-batches of each step.
DOCUMENTS = np.repeat([0, 1], [100, 156]), np.repeat([0, 1, 2], [30, 200, 26])


def made(sparsity: str = "dense", *more: str, group=None, **arguments: str) -> ContextParallel:
    words = ("topology.block_size=16", *SPARSE[sparsity], *more)
    arguments = {"layout": "striped", "exchange": "ring"} | arguments
    return api.context_parallel(group, *words, seq=SEQ, sparsity=sparsity, **arguments)


def train_step(cp: ContextParallel, windows: tuple[int | None, ...] = (None,) * LAYERS) -> None:
    """Two micro-batches: both forward passes, then both backward passes in the other order."""
    losses = []
    generator = torch.Generator().manual_seed(1)
    for documents in DOCUMENTS:
        batch = cp.batch(documents)
        x = batch.shard(torch.randn(1, SEQ, HEADS, 8, generator=generator)).requires_grad_()
        for layer, window in enumerate(windows):
            x = x + batch.attention(x, x, x, layer, window=window)
        losses.append(x.square().sum())
    for loss in reversed(losses):
        loss.backward()


def recorders(cp: ContextParallel) -> list[bool]:
    return [engine.exchange.recorder is not None for engine in cp._engines.values()]


def loop(_rank: int, _world: int, folder: str) -> list[list[bool]]:
    cp, recording = made(), []
    with cp.profile(folder, steps=[2, 4]) as profile:
        for _ in range(5):
            train_step(cp)
            recording.append(recorders(cp))
            profile.step()
    train_step(cp)
    return [*recording, recorders(cp)]


@pytest.fixture(scope="module")
def profiled(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("profiled") / "measurements/loop"
    recording = [[False], [True], [False], [True], [False], [False]]
    assert gloo.run(2, loop, str(folder)) == [recording] * 2
    return folder


def pairs_of(documents: np.ndarray) -> np.ndarray:
    """Pairs by worker and step of a ring over two striped shards, [2, 2], by definition."""
    at = np.arange(SEQ)
    seen = (documents[:, None] == documents) & (at[:, None] >= at)
    owner = at // 16 % 2
    table = np.zeros((2, 2), int)
    for rank, step in product(range(2), range(2)):
        table[rank, step] = seen[owner == rank][:, owner == (rank - step) % 2].sum() * HEADS
    return table


def test_the_imbalance_is_that_of_the_pairs(profiled):
    recorded = open_records(profiled)
    assert recorded.complete
    frame = recorded.frame()
    assert set(frame.iteration) == {2, 4}
    (facts,) = recorded.summary["cases"]
    assert len(facts["iteration_ms"]) == 1, "steps 1 and 3 are not recorded; the first warms up"
    computed = frame[(frame.phase == "attention") & (frame.direction != "recompute")]
    keys = ["iteration", "layer", "direction", "micro"]
    tables = []
    for (_, _, direction, micro), rows in computed.groupby(keys, observed=True):
        table = np.zeros((2, 2), int)
        np.add.at(table, (rows["rank"].to_numpy(), rows["step"].to_numpy()), rows.pairs.to_numpy())
        if direction == "forward":
            assert table.tolist() == pairs_of(DOCUMENTS[micro]).tolist()
            tables.append(table)
    assert len(tables) == 2 * LAYERS * 2
    (case,) = analyse(recorded)
    found = [degree.mean for degree in case.passes["forward"].work]
    assert found == pytest.approx(degrees(np.array(tables, float)).mean(-1).tolist())
    assert case.tokens == SEQ * 2


def test_a_report_shows_a_loop_that_is_not_mtrains(profiled):
    source = open_source(profiled)
    assert source.remarks == []
    assert source.settings["model.name"] == "a model of another loop"
    assert source.settings["topology.exchange"].startswith("ring")
    assert not [name for name in source.settings if name.startswith(("optim.", "data."))]
    (facts,) = source.summary["cases"]
    pairs = sum(table.sum() for table in map(pairs_of, DOCUMENTS))
    assert facts["density"] == pytest.approx(pairs / (HEADS * 2 * SEQ * (SEQ + 1) / 2))
    assert facts["layers"] == LAYERS
    result = mtrain(profiled.parent, "report", str(profiled))
    assert result.returncode == 0, result.stderr
    for text in ("dense striped ring", "exchange ring", "one layer of rank 0"):
        assert text in result.stdout
    assert "None" not in result.stdout
    page = (profiled / "report.html").read_text()
    assert "Attention by worker and step" in page
    assert "loss" not in page.partition("<script")[0]


def test_a_simulation_predicts_another_layout_for_the_loop(profiled):
    # The file has the first micro-batch of the last recorded step.
    assert load_indices(profiled / "index.npz").layers("dense") == (0, 1, 2)
    replayed(profiled)
    folder = profiled.parents[1]
    words = ("cluster=h200_1x8", "workers=2", "layout=contiguous", "exchange=ring")
    result = mtrain(folder, "simulate", f"index={profiled}", *words, "--json", "--no-files")
    assert result.returncode == 0, result.stderr
    (case,) = json.loads(result.stdout)["cases"]
    assert (case["layout"], case["pattern"], case["cp"]) == ("contiguous", "dense", 2)
    assert case["exchange"].startswith("ring")


def sparse_loop(_rank: int, _world: int, folder: str) -> list[int]:
    transformers = pytest.importorskip("transformers")
    cp = made("vertical_slash", "train.activation_checkpoint=full")
    cp.register()
    torch.manual_seed(0)
    config = transformers.AutoConfig.for_model(
        "gemma3_text", vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=8, intermediate_size=64, sliding_window=WINDOW,
        layer_types=["sliding_attention", "full_attention"], pad_token_id=0, bos_token_id=1,
        eos_token_id=2,
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(
        config, attn_implementation="mtrain", dtype=torch.float32
    )
    cp.check(model)
    model.gradient_checkpointing_enable({"use_reentrant": False})
    ids = torch.randint(3, 64, (1, SEQ), generator=torch.Generator().manual_seed(2))
    model(**cp.inputs(ids, ids)).loss.backward()
    with cp.profile(folder):
        losses = [model(**cp.inputs(ids, ids, documents=of)).loss for of in DOCUMENTS]
        torch.stack(losses).sum().backward()
    return recorders(cp)


def test_windows_and_indices_of_a_transformers_model_are_counted(tmp_path):
    folder = tmp_path / "measurements/one"
    assert gloo.run(2, sparse_loop, str(folder)) == [[False]] * 2
    recorded = open_records(folder)
    (facts,) = recorded.summary["cases"]
    assert facts["model"] == "Gemma3ForCausalLM"
    assert facts["layer_kinds"] == {f"window of {WINDOW} tokens": [0], "sparse": [1]}
    frame = recorded.frame()
    passes = frame[frame.phase == "pass"]
    seen = set(zip(passes.micro, passes.layer, passes.direction, strict=True))
    assert seen == {*product((0, 1), (0, 1), ("forward", "recompute", "backward"))}
    forward = frame[(frame.direction == "forward") & (frame.micro == 0)]
    assert not forward[(forward.phase == "index") & (forward.layer == 0)].size
    at, documents = np.arange(SEQ), DOCUMENTS[0]
    seen = (documents[:, None] == documents) & (at[:, None] >= at)
    window = HEADS * (seen & (at[:, None] - at < WINDOW)).sum()
    assert forward.pairs[forward.layer == 0].sum() == window
    # The index of the layer without a window, as the file has it, counts the other pairs.
    file = load_indices(folder / "index.npz")
    assert file.layers("vertical_slash") == (0, 1)
    index = file.index("vertical_slash", 1)
    counts = index.counts(MaskTables.make(file.masks, index.block, bitmap=False))
    sparse = int(counts.pairs.sum())
    assert forward.pairs[forward.layer == 1].sum() == sparse
    replayed(folder)
    words = ("simulate", f"index={folder}", "workers=2", "layout=zigzag", "exchange=ring")
    result = mtrain(tmp_path, *words, "--json", "--no-files")
    assert result.returncode == 0, result.stderr
    (case,) = json.loads(result.stdout)["cases"]
    mean = (window + sparse) / 2 / HEADS
    assert case["density"] == pytest.approx(mean / (SEQ * (SEQ + 1) / 2))


def two_sequences(_rank: int, _world: int, folder: str, sparsity: str, way: dict[str, str]) -> None:
    cp = made(sparsity, **way)
    with cp.profile(folder):
        batch = cp.batch(np.stack(DOCUMENTS))
        x = batch.shard(torch.randn(2, SEQ, HEADS, 8, generator=torch.Generator().manual_seed(0)))
        x.requires_grad_()
        batch.attention(batch.attention(x, x, x, 0), x, x, 1).sum().backward()


@mostly_slow(
    ("sparsity", "layout", "exchange"),
    [
        ("vertical_slash", "contiguous", "ulysses"),
        ("vertical_slash", "balanced", "ring"),
        ("block_topk", "zigzag", "all_gather"),
    ],
    keep=(0,),
)
def test_a_prediction_counts_the_same_work(tmp_path, sparsity, layout, exchange):
    folder = tmp_path / "measurements/one"
    way = {"layout": layout, "exchange": exchange}
    gloo.run(2, two_sequences, str(folder), sparsity, way)
    replayed(folder)
    assert load_indices(folder / "index.npz").layers(sparsity) == (0, 1)


def strided(_rank: int, _world: int, folder: str) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("cp", "dp"))
    cp = made(group=mesh["cp"])
    with cp.profile(folder, steps=[1]):
        train_step(cp)


def test_groups_whose_ranks_alternate_are_told_apart(tmp_path):
    gloo.run(4, strided, str(tmp_path / "one"))
    (case,) = analyse(open_records(tmp_path / "one"))
    assert (case.workers, case.groups, case.missing) == (2, 2, ())
    frame = open_records(tmp_path / "one").frame()
    waits = frame[(frame.phase == "send") & (frame.peer >= 0)]
    assert {(a // 2, b // 2) for a, b in zip(waits["rank"], waits.peer, strict=True)} == {
        (0, 0), (1, 1),
    }  # fmt: skip
    pairs = sum(table.sum() for table in map(pairs_of, DOCUMENTS))
    forward = case.passes["forward"]
    assert forward.pairs.sum() * 2 == pytest.approx(pairs)


def test_one_process_needs_no_process_group(tmp_path):
    cp = made("vertical_slash")
    with chdir(tmp_path), cp.profile("one"):
        train_step(cp, (None, WINDOW, 60))
    recorded = open_records(tmp_path / "one")
    assert recorded.complete
    assert recorded.frame().pairs.sum() > 0
    assert not (tmp_path / "one/index.npz").exists(), "three kinds of layers"


def test_an_exception_of_the_loop_passes_and_ends_the_recording(tmp_path):
    cp = made()

    def fail() -> None:
        with cp.profile(tmp_path / "one") as profile:
            train_step(cp)
            profile.step()
            train_step(cp)
            raise RuntimeError("of the loop")

    with pytest.raises(RuntimeError, match="of the loop"):
        fail()
    assert recorders(cp) == [False]
    assert len(open_records(tmp_path / "one").frame().iteration.unique()) == 1
    with cp.profile(tmp_path / "two"):
        train_step(cp)


def test_steps_that_the_loop_does_not_reach_are_named(tmp_path):
    cp = made()

    def train() -> None:
        with cp.profile(tmp_path / "one", steps=(2, 3, 4)) as profile:
            for _ in range(2):
                train_step(cp)
                profile.step()

    with pytest.warns(UserWarning, match="the loop ended before steps 3, 4, so "):
        train()
    assert open_source(tmp_path / "one").remarks[0].startswith("1 of the 3 requested iterations")


def nested(folder: Path) -> None:
    cp = made()
    with cp.profile(folder / "one", steps=[9]), cp.profile(folder / "two"):
        pass


def several_heads(folder: Path) -> None:
    cp = made()
    with cp.profile(folder / "one"):
        batch = cp.batch()
        for layer, heads in enumerate((2, 4)):
            x = batch.shard(torch.zeros(1, SEQ, heads, 8))
            batch.attention(x, x, x, layer)


def twice(folder: Path) -> None:
    for _ in range(2):
        with made().profile(folder / "one") as profile:
            train_step(profile._owner)


def without_attention(folder: Path) -> None:
    with made().profile(folder / "one"):
        pass


def step_after_the_block(folder: Path) -> None:
    cp = made()
    with cp.profile(folder / "one") as profile:
        train_step(cp)
    profile.step()


def clock_of_another_device(folder: Path) -> None:
    with made().profile(folder / "one") as profile:
        kind = SimpleNamespace(device=torch.device("cuda"))
        profile.seen(None, kind, 0, None)  # type: ignore[arg-type]


def in_a_file(folder: Path) -> None:
    (folder / "file").write_text("")
    with made().profile(folder / "file"):
        pass


def two_masks_with_an_index(folder: Path) -> None:
    cp = made("vertical_slash")
    near = np.array([(0, SEQ, 0, SEQ, 1)])
    with cp.profile(folder / "one"):
        batch = cp.batch(DOCUMENTS[0], masks={"documents": None, "all": near})
        x = batch.shard(torch.randn(1, SEQ, HEADS, 8))
        for layer, mask in enumerate(("documents", "all")):
            batch.attention(x, x, x, layer, mask=mask)


@pytest.mark.parametrize(
    ("call", "problem"),
    [
        (nested, "profile: another profile of the same object has not ended"),
        (several_heads, "profile: the layers have different heads (2 of 8; 4 of 8); one shape can"),
        (without_attention, "profile: step 1 called no attention of this object"),
        (twice, "profile: FOLDER/one is not empty; give a new or an empty folder"),
        (step_after_the_block, "profile: step() was called outside of the `with` block"),
        (clock_of_another_device, "profile: attention runs on cuda, and this process sees a GPU"),
        (in_a_file, "profile: FOLDER/file"),
        (two_masks_with_an_index, "profile: layers under different masks choose keys in the same"),
        (lambda folder: made().profile(folder, steps=[]), "steps=[]: give the numbers of the"),
        (lambda folder: made().profile(folder, steps=[0, 2]), "steps=[0, 2]: give the numbers of"),
        (lambda folder: made().profile(folder, steps=["2"]), "steps=['2']: give the numbers of"),
    ],
)
def test_a_mistake_is_one_line(tmp_path, call, problem):
    with pytest.raises(api.ConfigError) as raised:
        call(tmp_path)
    assert str(raised.value).replace(str(tmp_path), "FOLDER").startswith(problem)
    assert "\n" not in str(raised.value)
