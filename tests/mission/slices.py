"""Print 40 documents of random ids, each with its mask: a prefix that all see, then causal."""

import json
import random

draw = random.Random(0)
for _ in range(40):
    tokens = draw.randint(40, 200)
    prefix = tokens // 3
    # Slices: first and last query, first and last key (the last ones excluded), kind.
    mask = [
        [0, tokens, 0, prefix, "full"],
        [prefix, tokens, prefix, tokens, "causal"],
    ]
    print(json.dumps({"ids": [draw.randrange(256) for _ in range(tokens)], "mask": mask}))
