"""Commands, formats and services beside the engine, each by an entry point of pyproject.toml."""
