"""`mtrain simulate methods`, by an entry point: methods of parallelism, each used alone."""
