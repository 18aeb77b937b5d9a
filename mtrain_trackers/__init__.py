"""Trackers of `run.loggers`, by entry points: each is called with a `TrackedRun`."""
