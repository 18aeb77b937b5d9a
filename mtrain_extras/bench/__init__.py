"""`mtrain profile kernels`, `links`, `non-attention` and `step`, by entry points: measurements."""
