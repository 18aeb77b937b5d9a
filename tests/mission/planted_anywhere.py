"""Seven answers of six tokens, each asked four times, anywhere in 4,096 tokens.

python planted_anywhere.py [sparsity.KEY=VALUE ...]
"""

import sys

import torch
from planted import kept, make_head

SEQ = 4096

draw = torch.Generator().manual_seed(0)
slots = 8 + 8 * torch.randperm(SEQ // 8 - 2, generator=draw)[: 7 * 5].view(7, 5)
slots = slots.sort(1).values.tolist()
head = make_head(SEQ, [first for first, *_ in slots], [later for _, *later in slots], 6, draw)
found, density = kept(head, *sys.argv[1:])
outside = torch.tensor(head.rows) < SEQ - 128  # of the block that a default probe sees
print(
    f"asked anywhere: kept {100 * float(found[outside].mean()):.0f} % of the columns "
    f"at a density of {100 * density:.1f} %"
)
