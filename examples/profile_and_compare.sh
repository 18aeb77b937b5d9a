#!/usr/bin/env bash
# Measure which worker waits under two layouts, and compare them. The report marks what is noise.
#   examples/profile_and_compare.sh [key=value ...]
set -euo pipefail

what=(seq=4k sparsity=fixed sparsity.density=0.1 sparsity.columns=64 topology.exchange=ring)
steps=5
if [[ -n ${MTRAIN_EXAMPLE_SMALL:-} ]]; then
    what+=(seq=512 sparsity.block=16 topology.block_size=16)
    steps=1
fi

for layout in zigzag striped; do
    mtrain profile imbalance --steps "$steps" run.name="$layout" topology.layout="$layout" \
        "${what[@]}" "$@"
done
mtrain report zigzag striped --out compared    # ratios here, and compared/report.html
mtrain profile what-if striped --workers 4,8   # count the same index's work on more workers
