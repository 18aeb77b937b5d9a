"""The experiment as data: which models are trained, with which attention, and what is measured.

A tier is one size of the experiment. Each seed of a tier has a base, which is a dense model of
short sequences, and cells, which continue the base on long sequences. This module does not import
torch.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace

from mtrain_cli.config.schema import ConfigError

BASE = "base"
DENSE_LAYERS = "dense-layers"  # end of the names of cells whose last layers are dense
DENSE, AGAIN, UNTRAINED, FIXED, EQUAL_TIME = (
    "dense", "dense-again", "untrained", "fixed", "equal-time",
)  # fmt: skip
OTHER_ORDER = 1000  # added to the seed of a cell that reads its data in another order


@dataclass(frozen=True)
class Variant:
    """One way to continue a base.

    words: settings of the attention in training; without any, attention is dense.
    is_trained: whether the cell trains at all.
    other_order: whether the data have another order than those of the other cells.
    density_of: the cell whose density this cell takes; "" for none.
    time_of: the cell whose seconds of training this cell takes; "" for as many steps as others.
    pace_of: with time_of, the cell whose seconds a step give the number of steps.
    """

    name: str
    words: tuple[str, ...] = ()
    is_trained: bool = True
    other_order: bool = False
    density_of: str = ""
    time_of: str = ""
    pace_of: str = ""
    about: str = ""

    @property
    def needs(self) -> tuple[str, ...]:
        """Names of the cells that must end first: all need the key tokens of the dense cell."""
        own = (self.density_of, self.time_of, self.pace_of)
        dense = () if self.name == DENSE else (DENSE,)
        return tuple(dict.fromkeys(name for name in (*dense, *own) if name))


@dataclass(frozen=True)
class Tier:
    """One size of the experiment.

    seeds: a base and all cells are trained with each.
    machine: settings of the workers and of their memory.
    vocabulary: ids of a BPE that is trained on the corpus; 0 for bytes.
    corpus_mib: most MiB of code to train on.
    base_seq, long_seq: tokens of a sequence of the base, and of the cells.
    base_steps, base_batch, base_lr: training of a base.
    steps, batch, lr: training of a cell.
    base_pairs, long_pairs: needles of a document, in training and in the questions.
    questions: questions about each needle in training.
    probe: tokens at the end of a sequence among which vertical_slash probes queries.
    short: tokens of the short context that key tokens are compared with.
    texts, documents: sequences of held-out code, and of needles, to measure.
    gate: least percent of needles that a base must find at ``base_seq``; None for no gate.
    base_flops, flops: assumed FLOP/s of a base and of the cells, for estimates of time.
    """

    name: str
    seeds: tuple[int, ...]
    model: tuple[str, ...]
    machine: tuple[str, ...]
    vocabulary: int
    corpus_mib: int
    base_seq: int
    long_seq: int
    base_steps: int
    base_batch: int
    base_lr: float
    steps: int
    batch: int
    lr: float
    base_pairs: int
    long_pairs: int
    questions: int
    probe: int
    short: int
    texts: int
    documents: int
    gate: float | None
    base_flops: float
    flops: float
    variants: tuple[Variant, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the base and of the variants."""
        return (BASE, *(variant.name for variant in self.variants))

    def variant(self, name: str) -> Variant:
        return next(each for each in self.variants if each.name == name)


@dataclass(frozen=True)
class Cell:
    """A base (variant None), or a variant of the same seed."""

    seed: int
    variant: Variant | None = None

    @property
    def name(self) -> str:
        return BASE if self.variant is None else self.variant.name

    @property
    def key(self) -> str:
        """The name of the cell for users and in the folder, such as ``dense/seed-0``."""
        return f"{self.name}/seed-{self.seed}"


# The cells of vertical_slash were measured when this was the default, which no word named.
HALF_A_BLOCK = "sparsity.last_q=64"


def _vertical_slash(share: float, *more: str) -> tuple[str, ...]:
    words = ("sparsity=vertical_slash", f"sparsity.p_v={share}", f"sparsity.p_s={share}", *more)
    return words if any("last_q" in word for word in more) else (*words, HALF_A_BLOCK)


_SPARSE = "vertical_slash-0.6"
_WITH_DENSE_LAYERS = f"{_SPARSE}-{DENSE_LAYERS}"
_BEFORE_AGAIN = 2  # variants of a tier that come before the repetition of dense


def _block_topk(*settings: str) -> tuple[str, ...]:
    return ("sparsity=block_topk", *(f"sparsity.{setting}" for setting in settings))


def _toy_slash(*more: str) -> tuple[str, ...]:
    sizes = ("block=32", "last_q=32", "min_columns=8", "max_columns=64")
    return _vertical_slash(0.6, *(f"sparsity.{size}" for size in sizes), *more)


def _variants(sparse: tuple[str, ...], *own: Variant) -> tuple[Variant, ...]:
    """Return the variants of a tier, in the order of what they tell."""
    return (
        Variant(DENSE, about="the yardstick"),
        Variant(_SPARSE, sparse, about="columns and slashes hold 60 % of the probed attention"),
        Variant(
            FIXED, ("sparsity=fixed",), density_of=_SPARSE,
            about=f"random keys at the density of {_SPARSE}: a control that must fail",
        ),
        Variant(UNTRAINED, is_trained=False, about="the base, stretched without training"),
        *own[:_BEFORE_AGAIN],
        Variant(AGAIN, other_order=True, about="dense with another order of the data: the spread"),
        *own[_BEFORE_AGAIN:],
        Variant(
            EQUAL_TIME, sparse, time_of=DENSE, pace_of=_SPARSE,
            about=f"{_SPARSE} for as many seconds as dense",
        ),
    )  # fmt: skip


def _dense_layers(number: int, sparse: tuple[str, ...]) -> tuple[Variant, Variant]:
    """Return the variant whose last layers are dense, and its control with random keys."""
    layers = "the last layer" if number == 1 else f"the last {number} layers"
    return (
        Variant(_WITH_DENSE_LAYERS, sparse, about=f"{layers} dense"),
        Variant(
            f"{FIXED}-{DENSE_LAYERS}", ("sparsity=fixed", f"sparsity.dense_layers={number}"),
            density_of=_WITH_DENSE_LAYERS,
            about=f"{layers} dense, random keys in the others at their density: a control",
        ),
    )  # fmt: skip


_TINY = Tier(
    name="tiny",
    seeds=(0, 1),
    model=(
        "model.hidden_size=64", "model.num_layers=2", "model.num_heads=2", "model.num_kv_heads=1",
        "model.head_dim=32", "model.intermediate_size=128",
    ),
    machine=("topology.device=cpu", "topology.workers=1"),
    vocabulary=0,
    corpus_mib=1,
    base_seq=256,
    long_seq=1024,
    base_steps=60,
    base_batch=4,
    base_lr=3e-3,
    steps=12,
    batch=1,
    lr=1e-3,
    base_pairs=2,
    long_pairs=6,
    questions=1,
    probe=32,
    short=64,
    texts=4,
    documents=8,
    gate=None,
    base_flops=2e9,
    flops=2e9,
    variants=_variants(
        _toy_slash(),
        Variant(f"{_SPARSE}-windows", _toy_slash("sparsity.windows=4"), about="4 probe windows"),
        *_dense_layers(1, _toy_slash("sparsity.dense_layers=1")),
    ),
)  # fmt: skip

# 24.3 M parameters with bytes, the model of recipe=stdlib_64k.
_A = Tier(
    name="a",
    seeds=(0, 1, 2),
    model=(
        "model.hidden_size=512", "model.num_layers=8", "model.num_heads=8", "model.num_kv_heads=2",
        "model.head_dim=64", "model.intermediate_size=1536", "model.rope.theta=1000000",
        "model.init_std=0.04",  # about 1 / sqrt(hidden_size)
    ),
    machine=("train.activation_checkpoint=none",),  # 64K tokens take 11 GiB
    vocabulary=0,
    corpus_mib=64,
    base_seq=8192,
    long_seq=65536,
    base_steps=2500,
    base_batch=4,
    base_lr=1e-3,
    steps=200,
    batch=1,
    lr=3e-4,
    base_pairs=32,
    long_pairs=96,
    questions=4,
    probe=128,
    short=4096,
    texts=16,
    documents=32,
    gate=95.0,
    base_flops=1.6e14,  # on an H100: 187 s
    flops=2.2e14,  # on an H100, dense attention with sdpa: 106 s, and about 40 to measure
    variants=_variants(
        _vertical_slash(0.6),
        Variant(
            "vertical_slash-0.9", _vertical_slash(0.9),
            about="columns and slashes hold 90 % of it",
        ),
        Variant(
            "moba", ("sparsity=moba", "sparsity.chunk=1024", "sparsity.top_k=8"),
            about="8 chunks of 1024 keys for each query",
        ),
        Variant(
            f"{_SPARSE}-windows", _vertical_slash(0.6, "sparsity.windows=16"),
            about="16 probe windows",
        ),
        *_dense_layers(2, _vertical_slash(0.6, "sparsity.dense_layers=2")),
        Variant("xattention", ("sparsity=xattention",), about="blocks by antidiagonal sums"),
        *(
            Variant(
                f"vertical_slash-{share}-last-block",
                _vertical_slash(share, "sparsity.last_q=128"),
                about=f"p = {share}, probing every query of the last block",
            )
            for share in (0.6, 0.9)
        ),
        Variant(
            "released-0.9",
            _vertical_slash(
                0.9, "sparsity.slash_unit=token", "sparsity.last_q=64", "sparsity.max_slashes=4096",
                "sparsity.min_slashes=1", "sparsity.sink_tokens=0", "sparsity.min_columns=0",
            ),
            about="p = 0.9 by the rule of MTraining's released code",
        ),
        *(
            Variant(f"block_topk-{name}", _block_topk(*settings), about=about)
            for name, settings, about in (
                ("exact-15", ("score=exact", "density=0.15"), "15 % of the pairs by exact scores"),
                ("15", ("score=learned", "density=0.15"), "15 % by learned scores"),
                ("10", ("score=learned", "density=0.1"), "10 % by learned scores"),
                ("5", ("score=learned", "density=0.05"), "5 % by learned scores"),
                (
                    f"10-{DENSE_LAYERS}",
                    ("score=learned", "density=0.1", "dense_layers=2"),
                    "10 % by learned scores, and the last 2 layers dense",
                ),
                (
                    "10-middle",
                    ("score=learned", "density=0.1", "dense_layers=middle:2"),
                    "10 % by learned scores, and the middle 2 layers dense",
                ),
            )
        ),
        Variant(
            f"block_topk-15-{EQUAL_TIME}", _block_topk("score=learned", "density=0.15"),
            time_of=DENSE, pace_of="block_topk-15",
            about="block_topk-15 for as many seconds as dense",
        ),
    ),
)  # fmt: skip

# 88 M parameters with a BPE of 16K ids.
_B = replace(
    _A,
    name="b",
    seeds=(0,),
    model=(
        "model.hidden_size=768", "model.num_layers=12", "model.num_heads=12",
        "model.num_kv_heads=4", "model.head_dim=64", "model.intermediate_size=2048",
        "model.rope.theta=1000000", "model.vocab_size=16384", "model.init_std=0.036",
    ),
    vocabulary=16384,
    base_steps=6000,
    base_lr=6e-4,
    base_flops=1.4e14,  # on two H100s: 718 s
    flops=2.5e14,  # on an H100, dense attention with sdpa: 227 s, and 70 to measure
    variants=_variants(
        _vertical_slash(0.6),
        _A.variant("moba"),
        *_dense_layers(3, _vertical_slash(0.6, "sparsity.dense_layers=3")),
        *map(_A.variant, ("block_topk-15", "block_topk-10", f"block_topk-15-{EQUAL_TIME}")),
    )[:-1],  # without vertical_slash for equal time
)  # fmt: skip

TIERS = {tier.name: tier for tier in (_TINY, _A, _B)}


def cells_of(tier: Tier, only: Sequence[str] = (), seeds: Sequence[int] = ()) -> list[Cell]:
    """Return the cells to compute, each after the cells that it needs.

    Args:
        only: names of variants, or ``base``; () for all. The cells that they need come in addition.
        seeds: some of the tier's; () for all.
    """
    known = tier.names
    for name in only:
        if name not in known:
            raise ConfigError(f"--only {name}: no such cell; allowed: {', '.join(known)}")
        if only.count(name) > 1:
            raise ConfigError(f"--only {','.join(only)}: {name} appears twice; give each name once")
    for seed in seeds:
        if seed not in tier.seeds:
            allowed = ", ".join(map(str, tier.seeds))
            raise ConfigError(f"--seeds {seed}: tier {tier.name} has the seeds {allowed}")
        if seeds.count(seed) > 1:
            given = ",".join(map(str, seeds))
            raise ConfigError(f"--seeds {given}: {seed} appears twice; give each seed once")
    wanted = _with_needs(tier, only or known)
    # One seed after another, so that a first sitting already gives whole comparisons.
    return [
        Cell(seed, variant)
        for seed in seeds or tier.seeds
        for variant in (None, *(v for v in _ordered(tier) if v.name in wanted))
    ]


def _with_needs(tier: Tier, names: Iterable[str]) -> set[str]:
    found: set[str] = set()
    waiting = [name for name in names if name != BASE]
    while waiting:
        if (name := waiting.pop()) not in found:
            found.add(name)
            waiting += tier.variant(name).needs
    return found


def _ordered(tier: Tier) -> list[Variant]:
    done: list[Variant] = []
    while len(done) < len(tier.variants):
        names = [variant.name for variant in done]
        done += [v for v in tier.variants if v not in done and set(v.needs) <= set(names)][:1]
    return done


def digest(tier: Tier, cell: Cell) -> str:
    """Return the hash of all that determines the results of a cell, apart from its data."""
    facts = {
        name: value
        for name, value in asdict(tier).items()
        if name not in ("variants", "seeds", "base_flops", "flops", "name")
    }
    if cell.variant is None:
        facts = {k: v for k, v in facts.items() if k not in ("steps", "batch", "lr")}
    own = asdict(cell)
    if cell.variant is not None:
        del own["variant"]["about"]
        words = own["variant"]["words"]
        own["variant"]["words"] = tuple(word for word in words if word != HALF_A_BLOCK)
    text = json.dumps([facts, own], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]
