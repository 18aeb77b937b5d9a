"""Prices of a pass in which nothing takes time, to override."""

from __future__ import annotations


class Prices:
    direction: str

    def work(self, step):  # noqa: ARG002
        return {}

    def copy(self, op):  # noqa: ARG002
        return 0.0

    def index_us(self):
        return 0.0

    def host(self, what):  # noqa: ARG002
        return 0.0

    @property
    def costs(self):
        return self
