#!/usr/bin/env bash
# Train on your own text: tokenize it once, train, and export a Hugging Face folder.
#   examples/own_data.sh FOLDER [key=value ...]
set -euo pipefail

folder=${1:?Give a folder of .txt, .md, .py, .jsonl or .parquet files}
shift

vocabulary=16000
small=()
if [[ -n ${MTRAIN_EXAMPLE_SMALL:-} ]]; then
    vocabulary=300
    small=(seq=256 topology.block_size=16 train.steps=2)
fi

# If interrupted, this continues. To use the tokenizer of a model, give its tokenizer.json, not bpe.
mtrain data prepare "$folder" prepared --tokenizer bpe --vocab-size "$vocabulary"
mtrain data show prepared

mtrain train run.name=own data=tokens data.path=prepared model.vocab_size=auto \
    "${small[@]}" "$@"
mtrain checkpoint export own own-hf    # weights and tokenizer
