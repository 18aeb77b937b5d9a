"""Generated tokens equal those of transformers, on any number of workers and in any layout."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import gloo
import numpy as np
import pytest
import torch
import torch.nn.functional as functional
from inference.small_models import engine, source, tokens, write_hf, write_run
from slow_cases import mostly_slow

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.dataset import Sample
from mtrain_cli.inference.engine import END, LENGTH, DecodeStep, Engine, KvCache
from mtrain_cli.inference.limits import MemoryNeed
from mtrain_cli.inference.sampling import Sampling
from mtrain_cli.model.parallelize import ExecutedLayer, set_execution
from mtrain_cli.parallel.exchange import make_exchange
from mtrain_cli.parallel.layer_groups import own_part
from mtrain_cli.parallel.mesh import ContextGroup
from mtrain_cli.training.batch import Batches, Layouts, attention_setups
from mtrain_cli.training.resolution import resolve_run

LENGTHS = (1, 127, 128, 129, 1000)
NEW = 6
TENSOR_PARALLEL = "topology.tensor_parallel"
SAMPLED = Sampling(temperature=0.9, top_p=0.95, top_k=50, seed=3)
SPARSE = ("sparsity=vertical_slash", "sparsity.block=16", "sparsity.last_q=16")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return write_hf(tmp_path_factory.mktemp("qwen2") / "hf")


def transformers_ids(folder: Path, prompts: list[list[int]], max_new: int) -> list[list[int]]:
    """Return the ids that transformers generates greedily in float32."""
    transformers = pytest.importorskip("transformers")
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    found = []
    for ids in prompts:
        prompt = torch.tensor([ids])
        whole = model.generate(
            prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=max_new,
            do_sample=False, eos_token_id=None, pad_token_id=0,
        )  # fmt: skip
        found.append(whole[0, len(ids) :].tolist())
    return found


def generate(engine: Engine, prompts, sampling=SAMPLED, max_new: int = NEW, **options):
    return [c.ids for c in engine.generate(prompts, max_new, sampling, **options)]


@pytest.mark.parametrize("family", ["qwen2", "qwen3", "llama"])
def test_greedy_ids_equal_transformers(tmp_path, family):
    folder = write_hf(tmp_path / "hf", family, num_kv_heads=4 if family == "llama" else 2)
    prompts = [tokens(length) for length in LENGTHS]
    expected = transformers_ids(folder, prompts, 12)
    assert len({tuple(ids) for ids in expected}) > 3
    found = engine(folder)
    # One by one, then together.
    assert [generate(found, [ids], Sampling(), 12)[0] for ids in prompts] == expected
    assert generate(found, prompts, Sampling(), 12) == expected


def test_layers_below_max_window_layers_see_the_whole_prompt(tmp_path):
    transformers = pytest.importorskip("transformers")
    expected = {}
    for full in (0, 1, 2):
        folder = tmp_path / f"{full}"
        torch.manual_seed(0)
        config = transformers.AutoConfig.for_model(
            "qwen2", vocab_size=97, hidden_size=64, intermediate_size=96, num_hidden_layers=3,
            num_attention_heads=4, num_key_value_heads=2, initializer_range=0.2,
            use_sliding_window=True, sliding_window=20, max_window_layers=full,
        )  # fmt: skip
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        found, ids = engine(folder), tokens(100)
        (expected[full],) = transformers_ids(folder, [ids], 8)
        for _ in range(8):  # a new token would see the whole cache, so compute each text anew
            x_1NC, _ = found.hidden(ids)
            last = x_1NC[:, len(ids) - 1 : len(ids)]  # padding may follow
            ids.append(int(found.decoder.head(last).argmax()))
        assert ids[100:] == expected[full]
        assert generate(found, [tokens(12)], Sampling(), 8) == transformers_ids(
            folder, [tokens(12)], 8
        )
    assert len({tuple(ids) for ids in expected.values()}) == 3, "the full layers have an effect"


def prefix_logits(found: Engine, ids: list[int], prefix: int) -> torch.Tensor:
    """Return the logits of all tokens, [tokens, vocabulary]: q sees k if k <= q or k < prefix."""
    at = torch.arange(len(ids))
    seen = (at <= at[:, None]) | (at < prefix)

    def attend(q, k, v, layer):  # noqa: ARG001
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        out = functional.scaled_dot_product_attention(q, k, v, attn_mask=seen, enable_gqa=True)
        return out.transpose(1, 2)

    with torch.no_grad():
        x_1NC = found.decoder.hidden(torch.tensor([ids]), at[None], attend)
        return found.decoder.head(x_1NC)[0]


@pytest.mark.parametrize("length", [1, 20, 48, 129])
def test_a_prefix_lm_reads_the_prompt_as_its_prefix(tmp_path, length):
    """Tokens after a longer prompt's prefix, and all new tokens, are causal."""
    write_run(tmp_path / "run", "mask=prefix_lm", "mask.prefix=48")
    found, ids = engine(tmp_path / "run"), tokens(length)
    logits, whole = cached_logits(found, ids)
    expected = prefix_logits(found, whole, min(48, length))[length - 1 :]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)
    causal = prefix_logits(found, whole, 0)[length - 1 :]
    assert length == 1 or (causal - expected).abs().max() > 1e-3
    assert generate(found, [ids], Sampling(), NEW - 1) == [whole[length:]]


@mostly_slow(
    "words",
    [
        ("topology.layout=zigzag", "topology.exchange=ring"),
        ("topology.layout=balanced", "topology.exchange=group_cast"),
        (),
    ],
    ids=" ".join,
    keep=(1,),
)
def test_workers_share_the_prompts_of_a_prefix_lm(tmp_path, words):
    write_run(tmp_path / "run", "mask=prefix_lm", "mask.prefix=300")
    expected = on_workers(0, 1, str(tmp_path / "run"), ())
    for result in gloo.run(2, on_workers, str(tmp_path / "run"), ("topology.workers=2", *words)):
        assert result["greedy"] == expected["greedy"]
        assert result["sampled"] == expected["sampled"]


def on_workers(rank: int, world: int, folder: str, words: tuple[str, ...]) -> dict:
    """Generate on this process, and return ids, losses and how many tokens it holds."""
    tensor = [int(word.split("=")[1]) for word in words if word.startswith(TENSOR_PARALLEL)]
    place = gloo.environment(rank, world, tp=max(tensor, default=1))
    found = engine(Path(folder), *words, environment=place)
    prompts = [tokens(length) for length in LENGTHS]
    return {
        "greedy": generate(found, prompts, Sampling()),
        "sampled": generate(found, prompts),
        "losses": found.token_losses(prompts[-1]).numpy(),
        "held": [found.held(ids)[found.group.rank] for ids in prompts],
    }


@pytest.fixture(scope="module")
def alone(folder) -> dict:
    return on_workers(0, 1, str(folder), ())


def test_experts_serve_new_tokens_as_they_serve_a_text(tmp_path):
    """A token goes to the same experts whether its text is computed whole or token by token."""
    write_run(tmp_path / "run", "model=tiny_moe", "model.moe.expert_size=24")
    expected = on_workers(0, 1, str(tmp_path / "run"), ())
    found, ids = engine(tmp_path / "run"), tokens(60)
    logits, whole = cached_logits(found, ids)
    x_1NC, _ = found.hidden(whole)
    again = found.decoder.head(x_1NC[:, len(ids) - 1 : len(whole)])[0]
    torch.testing.assert_close(logits, again, atol=1e-5, rtol=0)
    for result in gloo.run(2, on_workers, str(tmp_path / "run"), ("topology.workers=2",)):
        assert result["greedy"] == expected["greedy"]
        assert result["sampled"] == expected["sampled"]
        np.testing.assert_allclose(result["losses"], expected["losses"], atol=2e-5)


@pytest.mark.parametrize("layout", ["contiguous", "zigzag", "striped"])
@pytest.mark.parametrize("world", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
def test_workers_and_layouts_do_not_change_the_tokens(folder, alone, world, layout):
    words = (f"topology.workers={world}", f"topology.layout={layout}")
    results = gloo.run(world, on_workers, str(folder), words)
    for result in results:
        assert result["greedy"] == alone["greedy"]
        assert result["sampled"] == alone["sampled"]
        np.testing.assert_allclose(result["losses"], alone["losses"], atol=2e-5)
    held = np.array([result["held"] for result in results])
    assert held.sum(0).tolist() == list(LENGTHS)
    # All but one worker hold no token of the shortest prompt.
    assert (held[:, 0] == 0).sum() == world - 1


@mostly_slow(
    "words",
    [
        ("topology.exchange=ring", "topology.layout=striped"),
        ("topology.exchange=ulysses",),
        ("topology.exchange=group_cast", "topology.layout=balanced"),
        (*SPARSE, "topology.exchange=ring"),
        pytest.param((*SPARSE, "topology.exchange=all_gather"), marks=pytest.mark.slow),
        pytest.param(
            ("sparsity=moba", "sparsity.block=16", "sparsity.chunk=64"), marks=pytest.mark.slow
        ),
    ],
    ids=" ".join,
    keep=(1, 2, 3),
)
def test_exchanges_and_patterns_on_two_workers(folder, words):
    pattern = tuple(word for word in words if word.startswith("sparsity"))
    expected = on_workers(0, 1, str(folder), pattern)
    for result in gloo.run(2, on_workers, str(folder), ("topology.workers=2", *words)):
        assert result["greedy"] == expected["greedy"]
        assert result["sampled"] == expected["sampled"]
        np.testing.assert_allclose(result["losses"], expected["losses"], atol=2e-5)


@mostly_slow(
    ("world", "words"),
    [
        (2, ()),
        (2, ("topology.tensor_chunks=3",)),
        (4, ("topology.layout=zigzag", "topology.exchange=ring")),
        pytest.param(4, SPARSE, marks=pytest.mark.slow),
    ],
    keep=(0, 2),
)
def test_tensor_groups_do_not_change_the_tokens(folder, alone, world, words):
    """Two workers share each layer. With four, two such groups share the prompts."""
    expected = alone
    if words == SPARSE:
        expected = on_workers(0, 1, str(folder), words)
    shared = (f"topology.workers={world}", f"{TENSOR_PARALLEL}=2", *words)
    results = gloo.run(world, on_workers, str(folder), shared)
    for result in results:
        assert result["greedy"] == expected["greedy"]
        assert result["sampled"] == expected["sampled"]
        np.testing.assert_allclose(result["losses"], expected["losses"], atol=1e-5)
    for first, second in zip(results[::2], results[1::2], strict=True):
        assert first["held"] == second["held"]
    held = np.sum([result["held"] for result in results[::2]], 0)
    assert held.tolist() == list(LENGTHS)


def caches(rank: int, world: int, folder: str) -> tuple[tuple[int, ...], int]:
    """Return the shape of a cached layer, and the number of this worker's weights in a layer."""
    found = engine(
        Path(folder), f"topology.workers={world}", f"{TENSOR_PARALLEL}={world}",
        environment=gloo.environment(rank, world, tp=world),
    )  # fmt: skip
    generate(found, [tokens(9)], Sampling())
    layer = found.decoder.layers[0]
    own = sum(own_part(one).numel() for one in layer.parameters() if one.ndim == 2)
    return tuple(found._kept.cache.keys[0].shape), own


def test_a_worker_of_a_tensor_group_holds_its_heads(folder):
    ((shape, weights),) = gloo.run(1, caches, str(folder))
    halves = gloo.run(2, caches, str(folder))
    for half, own in halves:
        assert half == (*shape[:2], shape[2] // 2, shape[3])
        assert own == weights // 2


def test_a_run_generates_in_tensor_groups(tmp_path):
    write_run(tmp_path / "run", "mask=prefix_lm", "mask.prefix=48")
    folder = str(tmp_path / "run")
    expected = on_workers(0, 1, folder, ())
    for result in gloo.run(2, on_workers, folder, ("topology.workers=2", f"{TENSOR_PARALLEL}=2")):
        assert result["greedy"] == expected["greedy"]
        assert result["sampled"] == expected["sampled"]


def with_another_choice(rank: int, world: int, folder: str) -> list[list[int]]:
    """Generate while all workers but the first choose other tokens."""
    if rank:
        Sampling.choose = lambda _, logits, __: logits.argmin(-1)  # in this process only
    return generate(
        engine(Path(folder), environment=gloo.environment(rank, world)), [tokens(40)], Sampling()
    )


def test_workers_take_the_tokens_of_the_first_worker(folder):
    """GPUs of different kinds may round differently."""
    expected = generate(engine(folder), [tokens(40)], Sampling())
    assert gloo.run(2, with_another_choice, str(folder)) == [expected, expected]


def test_batches_do_not_change_samples(folder, monkeypatch):
    found = engine(folder)
    prompts = [tokens(20 + n) for n in range(5)]
    together = generate(found, prompts)
    monkeypatch.setattr("mtrain_cli.inference.limits.MOST_TOGETHER", 2)
    assert generate(found, prompts) == together


def cached_logits(found: Engine, ids: list[int]) -> tuple[torch.Tensor, list[int]]:
    """Generate greedily. Return the logits of the prompt's end and of the new tokens, and the text.

    The logits are [NEW, vocabulary]; the text lacks the last of these tokens.
    """
    cache = KvCache(found.config.model, 1, len(ids) + NEW, torch.float32, found.device)
    step = DecodeStep(found.decoder, cache, found.choices.kernel, found.group, Sampling(), NEW)
    logits = [found.prefill(ids, cache, 0)]
    step.begin(logits[0], [len(ids)], [np.zeros(NEW)])
    whole = list(ids)
    for _ in range(NEW - 1):
        whole.append(int(step.tokens))
        step.run()
        logits.append(step.logits)
    return torch.cat(logits), whole


@pytest.mark.parametrize("length", LENGTHS)
def test_cached_logits_equal_those_of_a_whole_forward_pass(folder, length):
    found = engine(folder)
    logits, whole = cached_logits(found, tokens(length))
    x_1NC, _ = found.hidden(whole)
    expected = found.decoder.head(x_1NC[:, length - 1 : len(whole)])[0]
    torch.testing.assert_close(logits, expected, atol=1e-5, rtol=0)


def training_hidden(found: Engine, ids: list[int], words: tuple[str, ...]) -> torch.Tensor:
    """Return the hidden states of a forward pass as `Trainer` computes it."""
    config = source(found.source.path, *words).config
    config = type(config)(**{**vars(config), "seq": len(ids)})
    choices = resolve_run(config, found.environment)
    exchange = make_exchange(choices.exchange.name, choices.layout, ContextGroup())
    make = Batches(Layouts(exchange), attention_setups(config, choices), found.device)
    arrays = np.array(ids, np.int32), np.array(ids, np.int32), np.zeros(len(ids), np.int32)
    batch = make([Sample(*arrays)])
    set_execution(found.decoder, config, compile=False)
    return found.decoder.hidden(batch.tokens, batch.positions, batch.attention)


@pytest.mark.parametrize("length", [129, 1000])
@pytest.mark.parametrize("pattern", [SPARSE, ("sparsity=xattention",), ("sparsity=moba",), ()])
def test_the_prefill_is_bitwise_the_forward_pass_of_training(folder, pattern, length):
    found = engine(folder, *pattern)
    ids = tokens(length)
    got, _ = found.hidden(ids)
    assert torch.equal(got, training_hidden(found, ids, pattern))
    if pattern == SPARSE and length == 1000:
        dense, _ = engine(folder).hidden(ids)
        assert not torch.equal(got, dense)


@pytest.mark.parametrize("pattern", ["vertical_slash", "xattention", "moba"])
def test_every_pattern_reads_short_prompts(folder, pattern):
    found = engine(folder, f"sparsity={pattern}")
    for length in (1, 2, 130):
        assert len(generate(found, [tokens(length)])[0]) == NEW


def test_a_stop_id_ends_one_prompt_and_not_the_others(folder):
    found = engine(folder)
    prompts = [tokens(length) for length in LENGTHS]
    free = list(found.generate(prompts, NEW, Sampling()))
    stop = free[1].ids[2]
    stopped = list(found.generate(prompts, NEW, Sampling(), frozenset([stop])))
    for before, after in zip(free, stopped, strict=True):
        if stop in before.ids:
            assert after.ids == before.ids[: before.ids.index(stop)]
            assert after.finish == END
        else:
            assert (after.ids, after.finish) == (before.ids, LENGTH)
    assert stopped[1].finish == END


def test_tiles_of_a_long_prompt_do_not_change_its_logits(tmp_path):
    write_run(tmp_path / "run", "train.tile_mib=1", "model.intermediate_size=512")
    tiled, ids = engine(tmp_path / "run"), tokens(400)
    assert {layer.execution.tile_bytes for layer in tiled.decoder.layers} == {1 << 20}
    whole = engine(tmp_path / "run")
    for layer in whole.decoder.layers:
        layer.execution = dataclasses.replace(layer.execution, tile_bytes=0)
    torch.testing.assert_close(tiled.hidden(ids)[0], whole.hidden(ids)[0], atol=1e-5, rtol=0)


def test_tokens_are_reported_as_they_come(folder):
    reported: dict[int, list[int]] = {}
    found = engine(folder)
    ids = generate(
        found,
        [tokens(5), tokens(6)],
        on_token=lambda prompt, token: reported.setdefault(prompt, []).append(token),
    )
    assert [reported[0], reported[1]] == ids


def test_losses_equal_those_of_whole_logits(folder):
    found = engine(folder)
    ids = tokens(200)
    x_1NC, _ = found.hidden(ids)
    log_probabilities = found.decoder.head(x_1NC)[0, :199].double().log_softmax(-1)
    expected = -log_probabilities.gather(1, torch.tensor(ids[1:])[:, None]).squeeze(1)
    torch.testing.assert_close(found.token_losses(ids).double(), expected, atol=1e-5, rtol=0)


def test_a_cache_serves_later_calls_if_it_suffices(folder):
    found = engine(folder)
    first, second, third = tokens(100), tokens(80), tokens(300)
    generate(found, [first], Sampling())
    kept = found._kept
    for sampling, ids, reused in (
        (Sampling(seed=5), second, True),
        (Sampling(), tokens(20), False),
        (Sampling(), third, False),
        (SAMPLED, third, False),
    ):
        expected = generate(engine(folder), [ids], sampling)
        assert generate(found, [ids], sampling) == expected
        assert (found._kept is kept) == reused
        kept = found._kept


def batches(rank: int, world: int, folder: str) -> tuple[int, list[list[int]], str]:
    """Return the size of the cache, the texts, and the refusal, if memory differs by rank."""
    found = engine(
        Path(folder), f"topology.workers={world}", environment=gloo.environment(rank, world)
    )
    MemoryNeed.require_fit = lambda *_: 2 + rank
    texts = generate(found, [tokens(9), tokens(8), tokens(7)], Sampling())
    size = found._kept.cache.batch

    def refuse(*_) -> int:
        raise ConfigError("mine")

    if rank:
        MemoryNeed.require_fit = refuse
    with pytest.raises(ConfigError) as refused:
        generate(found, [tokens(9)], Sampling())
    return size, texts, str(refused.value)


def test_workers_of_unequal_memory_divide_prompts_alike(folder):
    expected = generate(engine(folder), [tokens(9), tokens(8), tokens(7)], Sampling())
    (size, first, other), (same, second, own) = gloo.run(2, batches, str(folder))
    assert (size, same) == (2, 2)
    assert first == second == expected
    assert "does not fit the memory of another worker" in other
    assert own == "mine"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("pattern", "tile_bytes", "compiled_functions"), [((), 0, 4), (SPARSE, 0, 4), ((), 1 << 15, 5)]
)
def test_no_length_of_prompt_compiles_the_layers_again(
    folder, pattern, tile_bytes, compiled_functions, monkeypatch
):
    """`project` and `finish` compile for prompts and for new tokens. Tiles split `finish` in two.

    There are more lengths than `torch.compile` would compile a function for.
    """
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    plain, compiled = engine(folder, *pattern), engine(folder, "train.compile=true", *pattern)
    for layer in compiled.decoder.layers:
        layer.execution = dataclasses.replace(layer.execution, tile_bytes=tile_bytes)
    shapes, stages = set(), ExecutedLayer._stages

    def recorded(layer, x_BNC, **rest):
        shapes.add(tuple(x_BNC.shape))
        return stages(layer, x_BNC, **rest)

    monkeypatch.setattr(ExecutedLayer, "_stages", recorded)
    for length in range(100, 1500, 130):
        ids = tokens(length)
        assert generate(compiled, [ids], Sampling()) == generate(plain, [ids], Sampling())
        assert counters["stats"]["unique_graphs"] == compiled_functions
    assert len(shapes) > torch._dynamo.config.recompile_limit
    assert not counters["graph_break"]
