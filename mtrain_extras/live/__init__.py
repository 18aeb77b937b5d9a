"""The page of `mtrain report --serve`, by an entry point: a run in a browser as it trains."""
