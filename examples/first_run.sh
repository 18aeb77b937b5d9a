#!/usr/bin/env bash
# Train a small decoder on the GPUs of this machine, or on its CPU, and report on the run.
#   examples/first_run.sh [key=value ...]
set -euo pipefail

small=()
if [[ -n ${MTRAIN_EXAMPLE_SMALL:-} ]]; then small=(seq=512 train.steps=2); fi

mtrain train run.name=first "${small[@]}" "$@"
mtrain report first    # a summary here, and runs/first/report.html
