"""Check the keys under ``data``: whether the files exist, and whether the keys fit each other."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from mtrain_cli.config.keys import conflict, first_few
from mtrain_cli.config.problem import Problem
from mtrain_cli.config.schema import Config, ConfigError, DataConfig

BYTE_VOCABULARY = 264  # 256 bytes, begin, end and padding, rounded up to a multiple of 8
TEXT = "a .txt, .md, .py, .jsonl, .json or .parquet file, or a folder of them"
_INPUTS = {
    "text": TEXT,
    "tokens": "the output of `mtrain data prepare`, or a .npy or .bin of token ids",
    "mds": "a folder of MDS shards with an index.json",
}
# {data.kind: file that the folder must hold}
_MANIFESTS = {"tokens": "meta.json", "mds": "index.json"}


def require_manifest(data: DataConfig) -> None:
    """Check that data.path is a folder of token ids with its meta.json or index.json, or an array.

    Call this function before a run starts, but not for a plan, which needs no data. Opening the
    dataset checks the content of the file.

    Raises:
        ConfigError: the file is missing, or data.path is a file of another kind.
    """
    name = _MANIFESTS.get(data.kind)
    folder = Path(data.path or "").expanduser()
    if name is None or data.path is None or data.mix is not None:
        return
    arrays = (".npy", ".bin") if data.kind == "tokens" else ()
    if folder.is_file() and folder.suffix not in arrays:
        raise ConfigError(
            f"data.path={data.path}: is another kind of file; give {_INPUTS[data.kind]}"
        )
    if not folder.is_dir() or (folder / name).is_file():
        return
    line = f"data.path={data.path}: no {name} in it; give {_INPUTS[data.kind]}"
    if inside := sorted(path.parent.name for path in folder.glob(f"*/{name}")):
        line += f"; these folders in it have one: {', '.join(inside[:8])} (name them in data.mix)"
    raise ConfigError(line)


def problems(config: Config) -> Iterator[str]:
    """Yield the conflicts of the data, of their tokenizer, and of masks that come from them."""
    yield from _path(config)
    yield from _tokenizer(config)
    yield from _columns(config)


def _path(config: Config) -> Iterator[str]:
    data, expected = config.data, _INPUTS.get(config.data.kind, "")
    if data.kind == "stdlib":
        for name in ("path", "mix"):
            if getattr(data, name) is not None:
                yield (
                    f"{{data.{name}}}: data=stdlib has no {name}; add data=text, data=tokens or "
                    "data=mds"
                )
    elif data.mix is not None:
        yield from _mix(config, expected)
    elif data.path is None:
        line = f"data.path is not set: data={data.kind} needs it, or data.mix; give {expected}"
        yield Problem(line, "data.path", "data.mix")
    elif not Path(data.path).expanduser().exists():
        yield f"{{data.path}}: no such file or folder; give {expected}"


def _mix(config: Config, expected: str) -> Iterator[str]:
    """Yield what is wrong with ``data.mix``. Opening the data checks the content of its file."""
    mix, path = config.data.mix, config.data.path
    if isinstance(mix, str):
        if not Path(mix).expanduser().is_file():
            yield (
                "{data.mix}: no such file; give weights such as data.mix={{code: 0.3, book: 0.7}}, "
                "or a YAML file of them"
            )
        return
    assert mix is not None
    if not mix:
        yield "{data.mix}: names no corpus; give weights such as {{code: 0.3, book: 0.7}}, or null"
    for name, weight in mix.items():
        if weight <= 0:
            yield conflict(
                config,
                "{data.mix}: the weight of {name} must be above 0; leave out corpora you do not "
                "want",
                name=name,
            )
    missing = [name for name in mix if not Path(path or ".", name).expanduser().exists()]
    if missing:
        place = "here; if they are in one folder, add data.path=FOLDER"
        place = f"in data.path={path}" if path else place
        line = f"data.mix: {first_few(missing)}: no such folder or file {place}"
        yield Problem(f"{line}; each name must be {expected}", "data.mix", "data.path")


def _tokenizer(config: Config) -> Iterator[str]:
    data = config.data
    if data.kind in ("tokens", "mds"):
        return  # already tokenized; the vocabulary is checked when the data are opened
    if data.tokenizer == "bytes":
        if 2 <= config.model.vocab_size < BYTE_VOCABULARY:
            yield f"{{model.vocab_size}}: {{data.tokenizer}} needs at least {BYTE_VOCABULARY}"
        return
    tokenizer = Path(data.tokenizer).expanduser()
    if tokenizer.is_dir():
        inside = tokenizer / "tokenizer.json"
        yield conflict(
            config,
            "{data.tokenizer}: is a folder; give its tokenizer.json{inside}",
            inside=f", {inside}" if inside.is_file() else "",
        )
    elif not tokenizer.is_file():
        yield (
            "{data.tokenizer}: no such file; give the path of a Hugging Face tokenizer.json, or "
            "bytes"
        )


def _columns(config: Config) -> Iterator[str]:
    """Yield the conflicts of masks and positions that come from the data."""
    data = config.data
    columns = {"masks": "mask_key", "positions": "positions_key"}
    given = {what: name for what, name in columns.items() if getattr(data, name) is not None}
    shown, what = [f"{{data.{name}}}" for name in given.values()], " and ".join(given)
    if given and data.kind != "tokens":
        options = " ".join(f"--{name.replace('_', '-')}" for name in given.values())
        yield (
            f"{', '.join(shown)}: data={data.kind} has no {what} for its documents; give "
            f"data=tokens and what `mtrain data prepare --tokens-key {options}` wrote"
        )
    if given and not data.document_mask:
        verb = "gives" if len(given) == 1 else "give"
        yield (
            f"{{data.document_mask}}: {' and '.join(shown)} {verb} each document {what} of its "
            "own, so attention stays inside; give data.document_mask=true"
        )
    if data.mask_key is None:
        return
    if config.mask.kind != "causal":
        yield "{mask.kind}: {data.mask_key} takes the mask from the data; give mask=causal"
    if config.sparsity.pattern != "dense":
        yield (
            "{sparsity.pattern}: needs a mask in which each query sees one interval of keys up to "
            "itself, which {data.mask_key} does not promise; give sparsity=dense"
        )
