"""mtrain's attention for other models and other training loops."""
