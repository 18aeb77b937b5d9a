"""Names and URLs of models, data and runs, behind the entry point ``mtrain.places``."""
