"""Five answers of seven tokens, asked in the last 128 of 2,048 tokens. Only p is not default."""

import torch
from planted import kept, make_head

SEQ, HEADS = 2048, 6

shares, densities = [], []
for seed in range(HEADS):
    draw = torch.Generator().manual_seed(seed)
    places = (8 + 8 * torch.randperm((SEQ - 512) // 8, generator=draw)[:5]).tolist()
    first = SEQ - 128 + int(torch.randint(0, 3, (1,), generator=draw))
    asked = [[first + 14 * slot] for slot in torch.randperm(9, generator=draw)[:5].tolist()]
    head = make_head(SEQ, places, asked, 7, draw)
    found, density = kept(head, "sparsity.p_v=0.6", "sparsity.p_s=0.6")
    shares.append(float(found.mean()))
    densities.append(density)
print(
    f"asked at the end: kept {100 * sum(shares) / HEADS:.0f} % of the columns "
    f"at a density of {100 * sum(densities) / HEADS:.1f} %"
)
