"""`mtrain profile kernels`, `links` and `non-attention`, by entry points: what a machine can do."""
