"""`mtrain init`: write a recipe for one of five jobs."""


def init() -> None:
    """Write a recipe."""
