"""Combinations of exchange options that the tests try, on CPU processes and on GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Way:
    """One combination of options for `make_exchange` and `make_context_group`."""

    exchange: str
    per_node: int = 8
    chunks: int = 1
    prefetch: int = 1
    circulates: str = "kv"
    heads: int = 1
    shared_columns: bool = True
    stages: int = 1

    def __str__(self) -> str:
        more = (
            f"{self.chunks}c {self.prefetch}p {self.circulates} {self.heads}h {self.stages}s"
            + "" * self.shared_columns
        )
        return f"{self.exchange} nodes of {self.per_node} {more}"

    def fits(self, world: int, kv_heads: int) -> bool:
        if world % self.heads or (self.per_node < world and world % self.per_node):
            return False
        if self.per_node < world and self.per_node % self.heads and self.heads % self.per_node:
            return False
        if self.chunks > 1 and max(1, kv_heads // self.heads) % self.chunks:
            return False
        return self.heads == 1 or kv_heads % self.heads == 0 or self.heads % kv_heads == 0
