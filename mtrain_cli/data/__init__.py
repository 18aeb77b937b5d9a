"""Corpora, token stores and samplers. Bad input raises a `ConfigError` of one line."""
