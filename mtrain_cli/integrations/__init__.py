"""mtrain's attention in training loops of other libraries. Nothing here is imported by mtrain."""
