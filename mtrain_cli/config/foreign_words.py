"""What the words of other trainers are called here."""

from __future__ import annotations

import re
from pathlib import Path

# {what to do here: keys of other trainers by their last part, in lower case without "_" and "-"}
_HERE = {
    "mtrain counts steps; use train.steps=N": "epochs epoch numtrainepochs numepochs maxepochs",
    "use train.steps=N": "maxsteps numsteps trainsteps trainiters",
    "use train.global_batch=N, the sequences of a step, and train.micro_batch=N for a worker": (
        "perdevicetrainbatchsize batchsize trainbatchsize microbatchsize globalbatchsize "
        "gradientaccumulationsteps accumulationsteps gradaccum"
    ),
    "use seq=N, the tokens of a sequence": (
        "maxseqlength maxseqlen seqlength seqlen sequencelength maxlength contextlength cutofflen"
    ),
    "use train.dtype=bfloat16 or train.dtype=float32": (
        "bf16 fp16 fp32 tf32 mixedprecision precision quantization loadin4bit loadin8bit"
    ),
    "mtrain trains all weights and has no adapters; merge an adapter into its model first": (
        "lora qlora lorar lorarank loraalpha peft"
    ),
    "use run.tensorboard=true; metrics.jsonl in the run's folder has a JSON object per step": (
        "wandb wandbproject reportto logger mlflow comet"
    ),
    "use train.checkpoint_every=N, and train.keep_checkpoints=N for how many to keep": (
        "savesteps saveevery saveinterval savetotallimit"
    ),
    "use train.init_from=FOLDER, a Hugging Face folder": (
        "modelnameorpath modelname modelpath basemodel"
    ),
    "use run.name=NAME, a folder in runs/, or run.dir=DIR": (
        "out output outputdir loggingdir savedir"
    ),
    'write settings as key=value, or into DIR/recipe/mine.yaml below a line "# @package _global_", '
    "and give --config-dir DIR recipe=mine": "config configfile configname",
    "use train.memory=auto, which chooses what to recompute and offload": (
        "gradientcheckpointing activationcheckpointing"
    ),
    "mtrain shards weights, gradients and optimizer by itself; see train.shard": (
        "fsdp deepspeed zerostage"
    ),
    "use optim.lr=X": "learningrate",
    "use optim.schedule=NAME": "lrschedulertype lrscheduler",
    "use optim.warmup_steps=N": "warmupratio",
    "use optim.clip_norm=X": "maxgradnorm gradientclipping",
    "use train.eval_every=N, with data.eval_sequences=N": "evalsteps",
    "use run.log_every=N": "loggingsteps",
    "use train.kernel=NAME and sparsity=NAME": "attnimplementation",
    "use data=text data.path=FOLDER; `hf download --repo-type dataset` gets files": "datasetname",
    "use --resume RUN": "resumefromcheckpoint",
    "use topology.workers=N": "numgpus",
    "mtrain always packs documents; see data.document_mask": "packing",
}
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def counterpart(key: str) -> str:
    """Return what a key of another trainer is called here, such as ``use optim.lr=X``, or ""."""
    word = re.sub(r"[_-]", "", key.rpartition(".")[2].lower())
    return next((here for here, words in _HERE.items() if word in words.split()), "")


def hub_hint(name: str, start: str = "; mtrain", then: str = "give the folder ") -> str:
    """Return what to do with ``org/name`` of the Hugging Face Hub; "" for other texts."""
    if not _HUB_NAME.fullmatch(name) or Path(name).parent.is_dir():
        return ""
    folder = name.partition("/")[2]
    return (
        f"{start} downloads nothing. Run `hf download {name} --local-dir {folder}`, then "
        f"{then}{folder}"
    )
