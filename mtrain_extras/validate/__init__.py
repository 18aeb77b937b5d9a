"""`mtrain simulate validate`, by an entry point: predictions compared with profiles."""
