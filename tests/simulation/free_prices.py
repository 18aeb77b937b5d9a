"""Prices of a pass in which nothing takes time, to override."""

from __future__ import annotations


class Prices:
    direction: str

    def work(self, step):  # noqa: ARG002
        return None, None

    def copy(self, op):  # noqa: ARG002
        return 0.0

    def index(self):
        return 0.0

    def dispatch(self, what):  # noqa: ARG002
        return 0.0
