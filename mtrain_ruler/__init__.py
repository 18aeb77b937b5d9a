"""Benchmarks whose answers a model generates, so far RULER: `mtrain eval ruler`, `data ruler`."""
