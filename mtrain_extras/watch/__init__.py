"""Stragglers and flight records of runs, behind the entry point ``mtrain.watch``."""
