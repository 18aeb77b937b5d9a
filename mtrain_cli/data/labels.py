"""The label of a token without a target."""

IGNORED = -100  # the default `ignore_index` of torch.nn.functional.cross_entropy
