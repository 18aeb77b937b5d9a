"""The fixtures of the data tests."""

from data.conftest import base_config, bpe_file, cache_root, jsonl, make_config

__all__ = ["base_config", "bpe_file", "cache_root", "jsonl", "make_config"]
