#!/usr/bin/env bash
# Train on two nodes with torchrun. Start it on each node; the disk is shared.
#   MASTER_ADDR=10.0.0.5 NODE_RANK=0 examples/torchrun_two_nodes.sh [key=value ...]
#   MASTER_ADDR=10.0.0.5 NODE_RANK=1 examples/torchrun_two_nodes.sh [key=value ...]
# MASTER_ADDR: an address of node 0 on a private network. Messages are not encrypted.
set -euo pipefail

: "${MASTER_ADDR:?Set it to an address of node 0}" "${NODE_RANK:?Set it to 0 or 1}"
nodes=2
per_node=8
what=(model=qwen3b seq=512k sparsity=vertical_slash train.memory=auto train.steps=1000)
if [[ -n ${MTRAIN_EXAMPLE_SMALL:-} ]]; then
    nodes=1
    per_node=2
    what=(topology.device=cpu seq=512 train.steps=2)
fi

# If a worker is lost, torchrun restarts all workers, and they continue the run.
torchrun --nnodes "$nodes" --nproc-per-node "$per_node" --node-rank "$NODE_RANK" \
    --rdzv-backend static --master-addr "$MASTER_ADDR" --master-port "${MASTER_PORT:-29500}" \
    --max-restarts 3 -m mtrain_cli train run.name=two-nodes "${what[@]}" "$@"
