"""Trackers of `run.loggers`, by entry points: callbacks that follow the files of a run."""
