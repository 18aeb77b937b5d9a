#!/usr/bin/env bash
# Predict a training on a cluster that you do not have: the best configuration, then how it scales.
#   examples/simulate_a_cluster.sh [CLUSTER] [key=value ...]
# CLUSTER: a name in conf/cluster, or a YAML file of that form.
set -euo pipefail

cluster=${1:-h100_4x8}
if (($#)); then shift; fi

seq=1m
sizes="nodes=1,2,4"
search=(recommend)
if [[ -n ${MTRAIN_EXAMPLE_SMALL:-} ]]; then
    seq=64k
    sizes="nodes=1,2"
    search=(run --exchange ring)
fi

mtrain simulate "${search[@]}" model=qwen3b seq="$seq" --cluster "$cluster" --density 5% \
    --no-files "$@"
mtrain simulate model=qwen3b seq="$seq" "$sizes" --cluster "$cluster" --density 5% \
    --layout striped --exchange ring --out measurements/scaling "$@"
mtrain report scaling
