"""The entry point of `data=chat`."""

from __future__ import annotations

from mtrain_cli.config.data_kinds import DataKind

CHAT = DataKind()
