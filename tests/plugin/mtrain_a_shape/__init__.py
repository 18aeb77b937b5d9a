"""A pattern, a mask, an exchange, a callback and a command for mtrain."""
