"""The label of a position that the loss ignores."""

IGNORED = -100  # the default `ignore_index` of torch.nn.functional.cross_entropy
