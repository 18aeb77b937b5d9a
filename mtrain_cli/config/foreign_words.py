"""What the words of other trainers are called here, and what messages of libraries mean."""

from __future__ import annotations

import re
from pathlib import Path

_STEPS = "mtrain counts steps; use train.steps=N"
_BATCH = "use train.global_batch=N, the sequences of a step, and train.micro_batch=N for a worker"
_LENGTH = "use seq=N, the tokens of a sequence"
_DTYPE = "use train.dtype=bfloat16 or train.dtype=float32"
_ADAPTERS = "mtrain trains all weights and has no adapters; merge an adapter into its model first"
_LOGS = "use run.tensorboard=true; metrics.jsonl in the run's folder has a JSON object per step"
_SAVES = "use train.checkpoint_every=N, and train.keep_checkpoints=N for how many to keep"
_MODEL = "use train.init_from=FOLDER, a Hugging Face folder"
_FOLDER = "use run.name=NAME, a folder in runs/, or run.dir=DIR"
_FILE = (
    'write settings as key=value, or into DIR/recipe/mine.yaml below a line "# @package _global_", '
    "and give --config-dir DIR recipe=mine"
)
_MEMORY = "use train.memory=auto, which chooses what to recompute and offload"
_SHARDS = "mtrain shards weights, gradients and optimizer by itself; see train.shard"
# By the last part of the key, in lower case and without "_" and "-".
_HERE = {
    **dict.fromkeys(("epochs", "epoch", "numtrainepochs", "numepochs", "maxepochs"), _STEPS),
    **dict.fromkeys(("maxsteps", "numsteps", "trainsteps", "trainiters"), "use train.steps=N"),
    **dict.fromkeys(
        ("perdevicetrainbatchsize", "batchsize", "trainbatchsize", "microbatchsize",
         "globalbatchsize", "gradientaccumulationsteps", "accumulationsteps", "gradaccum"),
        _BATCH,
    ),
    **dict.fromkeys(
        ("maxseqlength", "maxseqlen", "seqlength", "seqlen", "sequencelength", "maxlength",
         "contextlength", "cutofflen"),
        _LENGTH,
    ),
    **dict.fromkeys(("bf16", "fp16", "fp32", "tf32", "mixedprecision", "precision"), _DTYPE),
    **dict.fromkeys(("lora", "qlora", "lorar", "lorarank", "loraalpha", "peft"), _ADAPTERS),
    **dict.fromkeys(("wandb", "wandbproject", "reportto", "logger", "mlflow", "comet"), _LOGS),
    **dict.fromkeys(("savesteps", "saveevery", "saveinterval", "savetotallimit"), _SAVES),
    **dict.fromkeys(("modelnameorpath", "modelname", "modelpath", "basemodel"), _MODEL),
    **dict.fromkeys(("out", "output", "outputdir", "loggingdir", "savedir"), _FOLDER),
    **dict.fromkeys(("gradientcheckpointing", "activationcheckpointing"), _MEMORY),
    **dict.fromkeys(("config", "configfile", "configname"), _FILE),
    **dict.fromkeys(("fsdp", "deepspeed", "zerostage"), _SHARDS),
    "learningrate": "use optim.lr=X",
    "lrschedulertype": "use optim.schedule=NAME",
    "lrscheduler": "use optim.schedule=NAME",
    "warmupratio": "use optim.warmup_steps=N",
    "maxgradnorm": "use optim.clip_norm=X",
    "gradientclipping": "use optim.clip_norm=X",
    "evalsteps": "use train.eval_every=N, with data.eval_sequences=N",
    "loggingsteps": "use run.log_every=N",
    "attnimplementation": "use train.kernel=NAME and sparsity=NAME",
    "datasetname": "use data=text data.path=FOLDER; `hf download --repo-type dataset` gets files",
    "resumefromcheckpoint": "use --resume RUN",
    "numgpus": "use topology.workers=N",
    "packing": "mtrain always packs documents; see data.document_mask",
    "quantization": "mtrain trains in bfloat16 or float32",
    "loadin4bit": "mtrain trains in bfloat16 or float32",
    "loadin8bit": "mtrain trains in bfloat16 or float32",
}  # fmt: skip
# Messages of OmegaConf and of the Rust library of tokenizers.
_MESSAGES = (
    (r"Environment variable '(.*)' not found", r"the environment variable \1 is not set"),
    (r"Interpolation key '(.*)' not found", r"no key is called \1"),
    (r"Unsupported interpolation type (.*)", r"no function is called \1"),
    (r"HydraConfig was not set", "mtrain uses Hydra only to compose configurations"),
    (
        r"(token recognition|no viable|mismatched|missing|extraneous) .*",
        "the ${...} is not complete",
    ),
    (r"Recursive interpolation detected", r"the value refers to itself through ${...}"),
    (r".* at line (\d+) column (\d+)", r"unexpected content at line \1, column \2"),
)
_HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")


def counterpart(key: str) -> str:
    """Return what a key of another trainer is called here, such as ``use optim.lr=X``, or ""."""
    return _HERE.get(re.sub(r"[_-]", "", key.rpartition(".")[2].lower()), "")


def in_plain_words(message: str) -> str:
    """Return what the message of a library means; other messages unchanged."""
    message = re.sub(r"^\w+ raised while resolving interpolation: ", "", message).strip('"')
    for words, meaning in _MESSAGES:
        if match := re.fullmatch(words, message):
            return match.expand(meaning)
    return message


def hub_hint(name: str, start: str = "; mtrain", then: str = "give the folder ") -> str:
    """Return what to do with ``org/name`` of the Hugging Face Hub; "" for other texts."""
    if not _HUB_NAME.fullmatch(name) or Path(name).parent.is_dir():
        return ""
    folder = name.partition("/")[2]
    return (
        f"{start} downloads nothing. Run `hf download {name} --local-dir {folder}`, then "
        f"{then}{folder}"
    )
