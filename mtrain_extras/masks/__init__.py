"""`mtrain mask show`, by an entry point: what a mask allows, and how layouts share its work."""
