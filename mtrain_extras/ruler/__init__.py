"""Benchmarks whose answers a model generates: RULER and InfiniteBench."""
