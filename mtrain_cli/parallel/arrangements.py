"""What an operation `program.Arrange` does: the values of its ``what``."""

from __future__ import annotations

PACK = "pack"  # stack k and v into one message
PICK = "pick"  # copy single columns out of this rank's keys
DELTA = "delta"  # sum out * dout over each row, and start the sum of dq at 0
MESSAGE = "message"  # pack what others need to compute gradients of these queries
ZERO = "zero"  # start the sum of this rank's key gradients
TAKE_SUM = "take_sum"  # take a buffer, which the next `Merge` fills
RESULT = "result"  # convert the output, or a part of its heads, to the compute dtype
GRADIENTS = "gradients"  # convert the gradients to the compute dtype
TAKE = "take"  # copy one part of the heads from this rank's keys
ORDER = "order"  # bring gathered keys into sequence order
JOIN_OUT = "join_out"  # concatenate out over all parts of the heads
CUT = "cut"  # copy one part of the heads from lse
PLACE = "place"  # write one part's gradients into the whole tensor
SHARDS = "shards"  # cut key gradients into the ranks' shards
MERGE_ROWS = "merge_rows"  # bring own keys and those of a group cast into sequence order
SPLIT_ROWS = "split_rows"  # bring key gradients into the order in which the rows arrived
ZERO_ROWS = "zero_rows"  # start the gradients of own rows and received rows
OWN_ROWS = "own_rows"  # take this rank's rows out of the summed gradients
ADD_DQ = "add_dq"  # add dq over the stages of a group cast
OWN = "own"  # concatenate the key gradients that returned
JOIN = "join"  # concatenate dq over all parts of the heads
TO_HEADS, FROM_TOKENS = "to_heads", "from_tokens"  # before and after tokens are traded for heads
TO_TOKENS, FROM_HEADS = "to_tokens", "from_heads"  # before and after heads are traded for tokens
ADD_HEADS = "add_heads"  # concatenate heads, and add the gradients of repeated ones
