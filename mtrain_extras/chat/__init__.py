"""`data=chat`, by an entry point: conversations, with the loss on the answers."""
