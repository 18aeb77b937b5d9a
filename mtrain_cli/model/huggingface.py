"""Read, load and write the weights of a Hugging Face folder, and check stored tensors."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.config.documents import digest, reason
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.config.suggest import adapter_hint
from mtrain_cli.launch.failures import RunError, read_failure, write_failure
from mtrain_cli.launch.manifest import plain_name
from mtrain_cli.model import huggingface_config
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import reset_biases
from mtrain_cli.model.tokenizer_files import TokenizerFiles
from mtrain_cli.parallel.layer_groups import own_region
from mtrain_cli.printable import one_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUMS = "SHA256SUMS"  # `sha256sum -c SHA256SUMS` checks a folder, too
MAX_FILE_BYTES = 5 * 10**9
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")
_LAYER = re.compile(r"layers\.\d+\.mlp\.")
# The module that has the router and the experts, and an expert's gate, up and down projection.
_EXPERT_NAMES = {
    "qwen3_moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
}
Region = tuple[slice, ...]


class StoredPart(NamedTuple):
    """A tensor of a folder, with the region of the parameter that it holds.

    dims: dimensions of the tensor, the last of the parameter's.
    """

    name: str
    region: Region
    dims: int

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(one.stop - one.start for one in self.region[-self.dims :])

    def overlap(self, region: Region) -> tuple[Region, Region] | None:
        """Return the region of this tensor that a parameter's region covers, and where it lies."""
        cut = [
            slice(max(own.start, other.start), min(own.stop, other.stop))
            for own, other in zip(self.region, region, strict=True)
        ]
        if any(one.start >= one.stop for one in cut):
            return None
        return _from(self.region, cut)[-self.dims :], _from(region, cut)


def _from(start: Region, region: Sequence[slice]) -> Region:
    """Return a region, counted from the start of another one."""
    pairs = zip(start, region, strict=True)
    return tuple(slice(two.start - one.start, two.stop - one.start) for one, two in pairs)


def stored_parts(name: str, shape: tuple[int, ...], model: ModelConfig) -> list[StoredPart]:
    """Return the tensors of a folder that make up a parameter; each expert has its own."""
    stored = name if name.startswith("lm_head.") else f"model.{name}"
    layer = _LAYER.match(name)
    kind = name[layer.end() :] if layer is not None else ""
    if kind.startswith(("gate.", "experts.")):
        module, (gate, up, down) = _EXPERT_NAMES[model.family]
        stored = stored.replace(".mlp.", f".{module}.")
    if not kind.startswith("experts."):
        return [StoredPart(stored, whole(shape), len(shape))]
    experts, rows, columns = shape
    matrices = {down: slice(0, rows)}
    if kind == "experts.gate_up":
        matrices = {gate: slice(0, rows // 2), up: slice(rows // 2, rows)}
    return [
        StoredPart(
            f"{stored.removesuffix(kind)}experts.{expert}.{matrix}.weight",
            (slice(expert, expert + 1), of_matrix, slice(0, columns)),
            dims=2,
        )
        for expert in range(experts)
        for matrix, of_matrix in matrices.items()
    ]


def whole(shape: tuple[int, ...]) -> Region:
    return tuple(slice(0, size) for size in shape)


def overlaps(parts: list[StoredPart], region: Region) -> Iterator[tuple[str, Region, Region]]:
    """Yield the name of each tensor that a region of a parameter covers, with `overlap`."""
    for part in parts:
        if (covered := part.overlap(region)) is not None:
            yield part.name, *covered


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a file from which its weights are read."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def parameter_shapes(model: ModelConfig, *, biases: bool = False) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a decoder, and of biases of routers, by name."""
    with torch.device("meta"):
        decoder = Decoder(model)
    tensors = decoder.state_dict() if biases else dict(decoder.named_parameters())
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def check_tensors(
    stored: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    folder: object,
    given: object,
    file_of: Mapping[str, object] | None = None,
) -> None:
    """Raise ConfigError, which names the first wrong tensor, unless the stored ones are expected.

    Args:
        stored, expected: shapes of tensors by name.
        folder, given: where the tensors are, and the file of the configuration.
        file_of: the file of each tensor, if a folder has several.
    """
    wrong = {
        name: f"has shape {stored[name]}; {given} requires {shape}"
        if name in stored
        else f"is missing; {given} requires it"
        for name, shape in expected.items()
        if stored.get(name) != shape
    } | dict.fromkeys(sorted(stored.keys() - expected), f"is in no model of {given}")
    for name, why in wrong.items():
        more = f" ({len(wrong)} tensors are wrong)" if len(wrong) > 1 else ""
        raise ConfigError(f"{(file_of or {}).get(name, folder)}: tensor {name} {why}{more}")


class HuggingFaceFolder:
    """A Hugging Face folder: config.json, and model.safetensors or several files with an index.

    The constructor reads config.json and the headers of the weight files, but no weights. It raises
    ConfigError if a file is missing or corrupt, or if its tensors do not match config.json.
    """

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.model, self.max_position = huggingface_config.read_config(self.path)
        self._files: dict[str, Any] = {}
        self._file_of = self._locate()
        self._shapes = parameter_shapes(self.model)
        self._parts = {
            name: stored_parts(name, shape, self.model) for name, shape in self._shapes.items()
        }
        self._check()

    def read(self, name: str) -> Tensor:
        """Read a parameter to the CPU, in the dtype of the file."""
        shape = self._shapes[name]
        parts = list(self.read_region(name, whole(shape)))
        if len(parts) == 1:
            return parts[0][1].view(shape)
        result = torch.empty(shape, dtype=parts[0][1].dtype)
        for place, tensor in parts:
            result[place] = tensor
        return result

    def read_region(self, name: str, region: Region) -> Iterator[tuple[Region, Tensor]]:
        """Yield place in the region and values (CPU, dtype of the file) of each tensor in it."""
        for stored, rows, place in overlaps(self._parts[name], region):
            with _readable(self.path / self._file_of[stored]):
                tensor = self._slice(stored)[rows]
            yield place, tensor

    def unmap(self) -> None:
        """Let go of the weight files. Pages that were read no longer count as this process's."""
        self._files.clear()

    def _slice(self, stored: str) -> Any:
        return self._open(self._file_of[stored]).get_slice(stored)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            if not path.is_file():
                raise ConfigError(f"{path}: no such file")
            with _readable(path):
                self._files[file] = safe_open(path, framework="pt", device="cpu").__enter__()
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).is_file():
                hint = adapter_hint(self.path) or "; mtrain reads no other weight format"
                raise ConfigError(f"{self.path}: has neither {SINGLE} nor {INDEX}{hint}")
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        index = self.path / INDEX
        file_of = huggingface_config.read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
            raise ConfigError(f"{index}: weight_map must give a file for each tensor")
        if outside := [file for file in file_of.values() if not plain_name(file)]:
            raise ConfigError(
                f"{index}: weight_map names the file {outside[0]!r}, which is not in this folder"
            )
        stored = {file: set(self._open(file).keys()) for file in sorted(set(file_of.values()))}
        for name, file in sorted(file_of.items(), key=lambda item: item[1]):
            if name not in stored[file]:
                raise ConfigError(
                    f"{self.path / file}: tensor {name} is missing, though {INDEX} lists it here"
                )
        return file_of

    def _check(self) -> None:
        expected = {part.name: part.shape for parts in self._parts.values() for part in parts}
        # Old Llama folders also store rotary frequencies. Folders of tied models may store the
        # embedding a second time, as the LM head.
        ignored = {
            name
            for name in self._file_of.keys() - expected
            if name.endswith("rotary_emb.inv_freq") or (name == _HEAD and self._repeats_embedding())
        }
        kept = self._file_of.keys() - ignored
        actual = {name: tuple(self._slice(name).get_shape()) for name in kept}
        check_tensors(
            actual, expected, self.path, self.path / "config.json",
            {name: self.path / file for name, file in self._file_of.items()},
        )  # fmt: skip

    def _repeats_embedding(self) -> bool:
        """Return whether the LM head of a tied model is its embedding."""
        if not self.model.tie_word_embeddings or _EMBEDDING not in self._file_of:
            return False
        if not torch.equal(self._slice(_HEAD)[:], self._slice(_EMBEDDING)[:]):
            raise ConfigError(
                f"{self.path / self._file_of[_HEAD]}: tensor {_HEAD} differs from the embedding, "
                "but config.json has tie_word_embeddings=true. Set tie_word_embeddings=false to "
                "use it, or remove the tensor to use the embedding, as transformers does."
            )
        return True


def verify_sums(folder: Path, part: int = 0, parts: int = 1) -> None:
    """Compare every ``parts``-th file from ``part`` with the checksums of mtrain's exports."""
    sums = folder / SUMS
    if not sums.is_file():
        return
    try:
        lines = sums.read_text(encoding="utf-8").splitlines()
        found = [_SUM.fullmatch(line) for line in lines]
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"{sums}: cannot be read ({reason(error)})") from None
    expected = {match[2]: match[1] for match in found if match and plain_name(match[2])}
    if len(expected) < len(lines):
        raise ConfigError(f"{sums}: has a line that is not a checksum and a file of the folder")
    for name, checksum in _digests(folder, sorted(expected)[part::parts]):
        if checksum != expected[name]:
            raise ConfigError(
                f"{folder / name}: has changed since the export, as its sha256 in {SUMS} "
                f"shows. Copy it again. If you changed it yourself, delete its line in {SUMS}."
            )


def load_into(decoder: Decoder, folder: Path | str, part: int = 0, parts: int = 1) -> None:
    """Verify a Hugging Face folder, and load its weights into a decoder, sharded or not.

    Each worker reads only the rows of its shards. Rotary settings may differ, which extends a model
    to a longer context. part, parts: as in `verify_sums`. ConfigError leaves the
    decoder as it was.
    """
    source = HuggingFaceFolder(folder)
    verify_sums(source.path, part, parts)
    if differences := decoder.model_config.shape_differences(source.model):
        config = source.path / "config.json"
        raise ConfigError(
            *(f"{name}={ours}: {config} says {theirs}" for name, ours, theirs in differences)
        )
    reset_biases(decoder)
    with torch.no_grad():
        for name, parameter in decoder.named_parameters():
            _fill(parameter, partial(source.read_region, name))
            source.unmap()


def _fill(parameter: Tensor, read: Callable[[Region], Iterable[tuple[Region, Tensor]]]) -> None:
    local, region = parameter, whole(tuple(parameter.shape))
    if isinstance(parameter, DTensor):
        local, region = parameter.to_local(), own_region(parameter)
    if all(one.start < one.stop for one in region):
        for place, tensor in read(region):
            local[place].copy_(tensor)


def write_folder(
    path: Path,
    model: ModelConfig,
    read: Callable[[Sequence[str]], dict[str, Tensor]],
    *,
    rope_factor: float,
    seq: int,
    dtype: torch.dtype,
    mask: MaskSettings = CAUSAL,
    tokenizer: TokenizerFiles | None = None,
    max_file_bytes: int = MAX_FILE_BYTES,
) -> None:
    """Write a Hugging Face folder that transformers can open, whole or not at all.

    read: returns the whole parameters of the given names. Called once per weight file.
    rope_factor, seq, mask: as in `huggingface_config.config_json`.
    max_file_bytes: maximum size of a weight file. A single larger tensor gets its own file.

    Raises ConfigError if the folder is not empty or not writable, or no Hugging Face model has this
    shape, and RunError if the disk fails or is full.
    """
    huggingface_config.require_new_folder(path)
    config = huggingface_config.config_json(
        model, rope_factor=rope_factor, seq=seq, dtype=str(dtype).removeprefix("torch."), mask=mask
    )
    # If the ids of special tokens are missing, transformers assumes ids for some architectures,
    # such as 1 and 2. So write them, even those that are null.
    config |= (tokenizer or TokenizerFiles("none")).ids
    with writing(path) as folder:
        if tokenizer is not None:
            tokenizer.for_family(model.family).write(folder)
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
        _write_weights(folder, model, read, dtype, max_file_bytes)


@contextmanager
def writing(path: Path) -> Iterator[Path]:
    """Yield a new folder that gets checksums and the name ``path`` when it is complete."""
    partial_folder = path.parent / f".{path.name}.partial-{os.getpid()}"
    try:
        partial_folder.mkdir(parents=True)
        yield partial_folder
        names = sorted(file.name for file in partial_folder.iterdir())
        lines = [f"{checksum}  {name}\n" for name, checksum in _digests(partial_folder, names)]
        (partial_folder / SUMS).write_text("".join(lines), encoding="utf-8")
        if path.exists():
            path.rmdir()
        partial_folder.rename(path)
    except OSError as error:
        raise write_failure(
            error, f"{path}: could not be written ({error.strerror or error})"
        ) from None
    except SafetensorError as error:  # the folder could be made, so the disk is the problem
        raise RunError(one_line(f"{path}: could not be written ({error})")) from None
    finally:
        shutil.rmtree(partial_folder, ignore_errors=True)


def _write_weights(
    folder: Path,
    model: ModelConfig,
    read: Callable[[Sequence[str]], dict[str, Tensor]],
    dtype: torch.dtype,
    max_bytes: int,
) -> None:
    shapes = parameter_shapes(model)
    groups = list(_groups(shapes, dtype.itemsize, max_bytes))
    file_of: dict[str, str] = {}
    for number, names in enumerate(groups, 1):
        file = f"model-{number:05d}-of-{len(groups):05d}.safetensors"
        file = file if len(groups) > 1 else SINGLE
        tensors = {
            part.name: tensor[part.region].reshape(part.shape).to(dtype).contiguous()
            for name, tensor in read(names).items()
            for part in stored_parts(name, tuple(tensor.shape), model)
        }
        save_file(tensors, folder / file, {"format": "pt"})
        # safetensors lets only the owner read a file. An inference server may run as another user,
        # so give the file the permissions of config.json.
        (folder / file).chmod((folder / "config.json").stat().st_mode)
        file_of |= dict.fromkeys(tensors, file)
    if len(groups) > 1:
        total = sum(torch.Size(shape).numel() for shape in shapes.values()) * dtype.itemsize
        index = {"metadata": {"total_size": total}, "weight_map": file_of}
        (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def _digests(folder: Path, names: Sequence[str]) -> list[tuple[str, str]]:
    """Return name and sha256 of files; "" if a file is missing."""

    def of_file(name: str) -> str:
        try:
            return digest(folder / name)
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise read_failure(
                error, f"{folder / name}: cannot be read ({error.strerror})"
            ) from None

    with ThreadPoolExecutor() as pool:
        return list(zip(names, pool.map(of_file, names), strict=True))


def _groups(
    shapes: dict[str, tuple[int, ...]], item_bytes: int, max_bytes: int
) -> Iterator[list[str]]:
    """Yield the parameters of each weight file, of at most ``max_bytes`` or one larger tensor."""
    group, size = list[str](), 0
    for name, shape in shapes.items():
        tensor_bytes = torch.Size(shape).numel() * item_bytes
        if group and size + tensor_bytes > max_bytes:
            yield group
            group, size = [], 0
        group.append(name)
        size += tensor_bytes
    yield group


@contextmanager
def _readable(path: Path) -> Iterator[None]:
    try:
        yield
    except (OSError, SafetensorError) as error:
        raise ConfigError(f"{path}: truncated or corrupt safetensors file ({error})") from None
