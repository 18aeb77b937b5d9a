"""`mtrain init`, by an entry point: recipes to start from."""
