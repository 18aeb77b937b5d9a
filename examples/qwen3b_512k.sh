#!/usr/bin/env bash
# Continue Qwen2.5-3B at 512K tokens with sparse attention, on the GPUs of this machine.
#   examples/qwen3b_512k.sh WEIGHTS DATA [key=value ...]
# WEIGHTS: the Hugging Face folder of Qwen2.5-3B.
# DATA: a folder that `mtrain data prepare` wrote with the tokenizer.json of Qwen2.5-3B. The recipe
# is for ProLong's documents, but any long documents will do.
set -euo pipefail

weights=${1:?Give the Hugging Face folder of Qwen2.5-3B}
data=${2:?Give the folder that mtrain data prepare wrote}
shift 2

small=()
if [[ -n ${MTRAIN_EXAMPLE_SMALL:-} ]]; then
    small=(model=tiny seq=512 topology.device=cpu topology.workers=2 train.dtype=float32
        train.init_from=null train.global_batch=1 train.steps=2 train.memory=manual
        model.rope.scaling=none)
else
    # Print whether it fits, and the kernel, exchange and memory settings. Exit if it does not fit.
    mtrain train recipe=qwen3b_512k data.path="$data" train.init_from="$weights" --dry-run "$@"
fi

mtrain train recipe=qwen3b_512k run.name=qwen3b-512k \
    data.path="$data" train.init_from="$weights" "${small[@]}" "$@"
