"""The cache folder of the data tests."""

from data.conftest import base_config, cache_root, make_config

__all__ = ["base_config", "cache_root", "make_config"]
