"""The label that marks a position for the loss to ignore."""

IGNORED = -100  # the default `ignore_index` of torch.nn.functional.cross_entropy
