"""The command `mtrain study`: an experiment on learning, and published tables."""
