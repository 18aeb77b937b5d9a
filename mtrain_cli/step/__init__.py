"""A training step as a list of typed operations, and interpreters of such lists."""
