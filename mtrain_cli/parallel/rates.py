"""The rates at which GPUs compute attention and move rows, for choices that compare times."""

from __future__ import annotations

from typing import NamedTuple

from mtrain_cli.config.cluster import Cluster

_KERNEL_SHARE = 0.55  # of the GPU's peak


class Rates(NamedTuple):
    """Rates of one GPU. The defaults hold for H200s; without NVLink between nodes.

    flops: FLOP/s of an attention kernel.
    inner, outer: bytes/s that a GPU receives inside its node, and from other nodes.
    memory: bytes/s of a copy in the GPU's memory, reads plus writes.
    inner_latency, outer_latency: seconds of a collective without its bytes.
    inner_share, outer_share: share of the computing power that a message in flight takes.
    """

    flops: float = 550e12
    inner: float = 310e9
    outer: float = 52e9
    memory: float = 4.2e12
    inner_latency: float = 79e-6
    outer_latency: float = 90e-6
    inner_share: float = 0.23
    outer_share: float = 0.03

    @staticmethod
    def on(cluster: Cluster | None) -> Rates:
        if cluster is None:
            return Rates()
        inner, outer = cluster.inner, cluster.outer
        rates = Rates(
            flops=_KERNEL_SHARE * 1e12 * cluster.gpu.peak_tflops.value,
            inner=1e9 * inner.collective_bandwidth_gbps.value,
            memory=1e9 * cluster.gpu.hbm_gbps.value,
            inner_latency=1e-6 * inner.collective_latency_us.value,
            inner_share=inner.gpu_share.value,
        )
        if outer is None:
            return rates
        return rates._replace(
            outer=1e9 * outer.collective_bandwidth_gbps.value / outer.shared_by.value,
            outer_latency=1e-6 * outer.collective_latency_us.value,
            outer_share=outer.gpu_share.value,
        )

    def collective(self, *, outer: bool) -> tuple[float, float, float]:
        """Return latency, bandwidth and share of a collective in a node, or between nodes."""
        if outer:
            return self.outer_latency, self.outer, self.outer_share
        return self.inner_latency, self.inner, self.inner_share
