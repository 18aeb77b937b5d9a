"""The sizes of the runs of `end_to_end.py`: one GPU, two CPU cores, and a toy."""

from __future__ import annotations

from dataclasses import dataclass

# Kinds of text. The last four have needles.
CODE, HELD_OUT, SHORT, MIDDLE, WHOLE, LONG = "code", "held_out", "short", "middle", "whole", "long"


@dataclass(frozen=True)
class Needles:
    """Documents of `mtrain data needles`: tokens, needles, questions about each, and number."""

    length: int
    pairs: int
    questions: int
    documents: int


@dataclass(frozen=True)
class Training:
    """A training: tokens of a sequence, sequences of a step, steps, mix, settings, most seconds."""

    seq: int
    batch: int
    steps: int
    mix: dict[str, float]
    words: tuple[str, ...] = ()
    limit_s: float = 600.0


@dataclass(frozen=True)
class Preset:
    """One size of the run.

    megabytes: most text to train on.
    model: settings of the model.
    machine: settings of the machine, of all trainings.
    base: training on short sequences that the other one continues; None for one training.
    needles: documents by their name.
    lengths: tokens of the samples of the needle map.
    pairs: needles of a sample.
    samples, texts: samples of the needle map, and sequences of the perplexity.
    sparsity: settings of vertical_slash.
    scores: tokens of the sequence whose scores are compared with rotary embedding.
    limit_s: most seconds of all.
    """

    megabytes: float
    model: tuple[str, ...]
    machine: tuple[str, ...]
    base: Training | None
    training: Training
    needles: dict[str, Needles]
    lengths: tuple[int, ...]
    pairs: int
    samples: int
    texts: int
    sparsity: tuple[str, ...]
    scores: int
    max_new: int
    limit_s: float

    @property
    def yarn(self) -> tuple[str, ...]:
        """Settings that stretch positions from those of the base."""
        if self.base is None:
            return ()
        return ("model.rope.scaling=yarn", f"model.rope.original_max_position={self.base.seq}")


def _shape(hidden: int, layers: int, heads: int, kv_heads: int, mlp: int) -> tuple[str, ...]:
    sizes = {
        "hidden_size": hidden, "num_layers": layers, "num_heads": heads, "num_kv_heads": kv_heads,
        "head_dim": hidden // heads, "intermediate_size": mlp,
    }  # fmt: skip
    return tuple(f"model.{name}={size}" for name, size in sizes.items())


# A model first learns to copy a number from one needle, and from several to tell names apart.
_LESSONS = {CODE: 0.4, SHORT: 0.15, MIDDLE: 0.15, WHOLE: 0.3}
PRESETS = {
    "gpu": Preset(
        megabytes=40,
        model=(*_shape(512, 6, 8, 2, 1536), "model.rope.theta=1000000"),
        machine=("topology.workers=1", "topology.device=cuda", "train.activation_checkpoint=none"),
        # Of the model with 8 layers, an H200 takes 0.08 s for 4 sequences of 8K, and 0.27 s for one
        # of 64K. With 6 layers that makes 85 s and 48 s.
        base=Training(
            8192, 4, 1400, _LESSONS, ("optim.lr=1e-3", "optim.warmup_steps=90"), limit_s=165
        ),
        training=Training(
            65536, 1, 240, {CODE: 0.6, LONG: 0.4}, ("optim.lr=3e-4", "optim.warmup_steps=16"),
            limit_s=115,
        ),
        needles={
            SHORT: Needles(256, 1, 5, 12000),
            MIDDLE: Needles(1024, 6, 3, 4000),
            WHOLE: Needles(8192, 32, 4, 1700),
            LONG: Needles(65536, 96, 4, 100),
        },
        lengths=(8192, 16384, 32768, 65536),
        pairs=32,
        samples=4,
        texts=8,
        sparsity=(),
        scores=131072,
        max_new=200,
        limit_s=410,
    ),
    "cpu": Preset(
        megabytes=10,
        model=(),
        machine=(),
        base=None,
        training=Training(4096, 1, 200, _LESSONS, limit_s=540),
        needles={
            SHORT: Needles(256, 1, 5, 600),
            MIDDLE: Needles(1024, 6, 3, 150),
            WHOLE: Needles(4096, 16, 4, 80),
        },
        lengths=(1024, 2048, 4096),
        pairs=8,
        samples=4,
        texts=8,
        sparsity=(),
        scores=4096,
        max_new=160,
        limit_s=1800,
    ),
    "toy": Preset(
        megabytes=0.3,
        model=_shape(64, 2, 2, 1, 128),
        machine=("topology.workers=1", "topology.device=cpu"),
        base=Training(256, 4, 6, _LESSONS, ("optim.warmup_steps=2",)),
        training=Training(1024, 1, 3, {CODE: 0.6, LONG: 0.4}, ("optim.warmup_steps=1",)),
        needles={
            SHORT: Needles(256, 1, 2, 20),
            MIDDLE: Needles(256, 2, 1, 20),
            WHOLE: Needles(256, 2, 1, 20),
            LONG: Needles(1024, 6, 1, 8),
        },
        lengths=(512, 1024),
        pairs=4,
        samples=2,
        texts=2,
        sparsity=("sparsity.block=32", "sparsity.last_q=32"),
        scores=2048,
        max_new=20,
        limit_s=600,
    ),
}  # fmt: skip
