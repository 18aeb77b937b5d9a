"""Read, load and write the weights of a Hugging Face folder.

A folder has config.json and either the file model.safetensors, or several safetensors files and an
index that names the file of each tensor.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from torch.distributed.tensor import DTensor

from mtrain_cli.attention.named_masks import CAUSAL
from mtrain_cli.config.documents import reason
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.schema import ConfigError, ModelConfig
from mtrain_cli.config.suggest import adapter_hint
from mtrain_cli.launch.failures import RunError, read_failure, write_failure
from mtrain_cli.launch.manifest import plain_name
from mtrain_cli.model import huggingface_config
from mtrain_cli.model.decoder import Decoder
from mtrain_cli.model.experts import reset_biases
from mtrain_cli.model.stored_tensors import Region, overlaps, stored_parts, whole
from mtrain_cli.model.tokenizer_files import TokenizerFiles
from mtrain_cli.parallel.parameter_shards import own_region
from mtrain_cli.printable import one_line

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SUMS = "SHA256SUMS"  # `sha256sum -c SHA256SUMS` checks a folder, too
MAX_FILE_BYTES = 5 * 10**9
_SHOWN_PROBLEMS = 8
_HEAD, _EMBEDDING = "lm_head.weight", "model.embed_tokens.weight"
_SUM = re.compile(r"([0-9a-f]{64}) [ *](.+)")


def has_weights(folder: Path) -> bool:
    """Return whether a folder has a file from which its weights are read."""
    return (folder / INDEX).is_file() or (folder / SINGLE).is_file()


def parameter_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every parameter of a decoder, by name. Allocate no parameter."""
    with torch.device("meta"):
        decoder = Decoder(model)
    return {name: tuple(parameter.shape) for name, parameter in decoder.named_parameters()}


def state_shapes(model: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Return the shape of every tensor of a checkpoint: parameters and the biases of routers."""
    with torch.device("meta"):
        decoder = Decoder(model)
    return {name: tuple(tensor.shape) for name, tensor in decoder.state_dict().items()}


def parameter_problems(
    actual: Mapping[str, tuple[int, ...]],
    expected: Mapping[str, tuple[int, ...]],
    *,
    where: Callable[[str], object],
    expected_by: str,
) -> list[str]:
    """Return a line for each tensor that is missing, unexpected or has the wrong shape.

    If there are more than eight problems, return eight lines and a line that counts the rest.

    Args:
        actual: shape of each tensor in the files, by name.
        expected: shape of each tensor that the model needs, by name.
        where: function that returns the file or folder of a tensor, for the message.
        expected_by: source of the expected shapes, for the message.
    """
    problems = []
    for name, shape in expected.items():
        if name not in actual:
            problems.append(f"{where(name)}: tensor {name} is missing")
        elif actual[name] != shape:
            problems.append(
                f"{where(name)}: tensor {name} has shape {actual[name]}; {expected_by} requires "
                f"{shape}"
            )
    problems += [
        f"{where(name)}: unexpected tensor {name}; {expected_by} describes no such tensor"
        for name in sorted(actual.keys() - expected)
    ]
    more = len(problems) - _SHOWN_PROBLEMS
    if more > 0:
        problems[_SHOWN_PROBLEMS:] = [f"... and {more} more like these"]
    return problems


class HuggingFaceFolder:
    """A Hugging Face folder that has been checked.

    The constructor reads config.json and the headers of the weight files, but no weights.

    model: the model that config.json describes.
    max_position: max_position_embeddings of config.json, in tokens.

    Raises:
        ConfigError: a file is missing, truncated or corrupt, or its tensors do not match
            config.json. The message names the file and the tensor.
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
        """Read a region of a parameter, one tensor of the folder after another.

        Yield the place of each tensor in the region, and its values on the CPU in the dtype of the
        file. Experts outside the region are not read.
        """
        for stored, rows, place in overlaps(self._parts[name], region):
            with _readable(self.path / self._file_of[stored]):
                tensor = self._slice(stored)[rows]
            yield place, tensor

    def verify(self, part: int = 0, parts: int = 1) -> None:
        """Compare the files with the checksums in `SUMS`. Only exports of mtrain have them.

        Several callers can share the work: this one checks every ``parts``-th file, from ``part``.

        Raises:
            ConfigError: a file is missing or has changed, or `SUMS` is damaged.
        """
        sums = self.path / SUMS
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
        for name, digest in _digests(self.path, sorted(expected)[part::parts]):
            if digest != expected[name]:
                raise ConfigError(
                    f"{self.path / name}: has changed since the export, as its sha256 in {SUMS} "
                    f"shows. Copy it again. If you changed it yourself, delete its line in {SUMS}."
                )

    def unmap(self) -> None:
        """Let go of the weight files. Pages that were read no longer count as this process's."""
        self._files.clear()

    def _slice(self, stored_name: str) -> Any:
        return self._open(self._file_of[stored_name]).get_slice(stored_name)

    def _open(self, file: str) -> Any:
        if file not in self._files:
            path = self.path / file
            if not path.is_file():
                raise ConfigError(f"{path}: no such file")
            with _readable(path):
                self._files[file] = safe_open(path, framework="pt", device="cpu").__enter__()
        return self._files[file]

    def _locate(self) -> dict[str, str]:
        """Return the file name of every stored tensor, by the tensor's name in the files."""
        if not (self.path / INDEX).is_file():
            if not (self.path / SINGLE).is_file():
                hint = adapter_hint(self.path)
                raise ConfigError(
                    f"{self.path}: has neither {SINGLE} nor {INDEX}"
                    + (hint or "; mtrain reads no other weight format")
                )
            return dict.fromkeys(self._open(SINGLE).keys(), SINGLE)
        index = self.path / INDEX
        file_of = huggingface_config.read_json(index).get("weight_map")
        if not isinstance(file_of, dict) or not all(isinstance(f, str) for f in file_of.values()):
            raise ConfigError(f"{index}: weight_map must give a file for each tensor")
        for file in file_of.values():
            if not plain_name(file):
                raise ConfigError(
                    f"{index}: weight_map names the file {file!r}, which is not in this folder"
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
        problems = huggingface_config.wrong_sizes(self.path, self.model, actual)
        problems = problems or parameter_problems(
            actual,
            expected,
            where=lambda name: self.path / self._file_of.get(name, ""),
            expected_by=str(self.path / "config.json"),
        )
        if problems:
            raise ConfigError(*problems)

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


def load_into(decoder: Decoder, folder: Path | str, part: int = 0, parts: int = 1) -> None:
    """Verify a Hugging Face folder, and load its weights into a decoder.

    The parameters may be plain tensors or sharded by FSDP2, on any device. Each worker reads only
    the rows of its shards. The decoder and the folder may have different rotary settings, which
    extends a model to a longer context.

    Args:
        part, parts: as in `HuggingFaceFolder.verify`.

    Raises:
        ConfigError: the folder cannot be read or is damaged, or the decoder has another shape. No
            parameter has changed.
    """
    source = HuggingFaceFolder(folder)
    source.verify(part, parts)
    differences = decoder.model_config.shape_differences(source.model)
    if differences:
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
    """Write a Hugging Face folder that transformers can open.

    The files are written to a temporary folder, which gets the name ``path`` at the end.

    Args:
        read: function that returns the whole parameters of the given names. Called once per weight
            file.
        rope_factor: factor by which positions are stretched (`rope.rope_factor`).
        seq: tokens per sequence in training.
        dtype: dtype of the written weights.
        mask: the mask of the run. Only sliding windows without global tokens are written.
        tokenizer: tokenizer to write to the folder. None writes no tokenizer.
        max_file_bytes: maximum size of a weight file. A single larger tensor gets its own file.

    Raises:
        ConfigError: the folder is not empty or cannot be written, or no Hugging Face model has this
            shape.
        RunError: the disk fails or is full.
    """
    huggingface_config.require_new_folder(path)
    config = huggingface_config.config_json(
        model, rope_factor=rope_factor, seq=seq, dtype=str(dtype).removeprefix("torch."), mask=mask
    )
    # If the ids of special tokens are missing, transformers assumes ids for some architectures,
    # such as 1 and 2. So write them, even those that are null.
    config |= (tokenizer or TokenizerFiles("none")).ids
    huggingface_config.require_accepted(config)
    partial_folder = path.parent / f".{path.name}.partial-{os.getpid()}"
    try:
        partial_folder.mkdir(parents=True)
        if tokenizer is not None:
            tokenizer.for_family(model.family).write(partial_folder)
        (partial_folder / "config.json").write_text(
            json.dumps(config, indent=2) + "\n", encoding="utf-8"
        )
        _write_weights(partial_folder, model, read, dtype, max_file_bytes)
        names = sorted(file.name for file in partial_folder.iterdir())
        lines = [f"{digest}  {name}\n" for name, digest in _digests(partial_folder, names)]
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
            stored: part.to(dtype).contiguous()
            for name, tensor in read(names).items()
            for stored, part in _split(name, tensor, model)
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
    """Return name and sha256 of files of a folder. A missing file has an empty sha256."""

    def digest(name: str) -> str:
        try:
            with (folder / name).open("rb") as file:
                return hashlib.file_digest(file, "sha256").hexdigest()
        except FileNotFoundError:
            return ""
        except OSError as error:
            raise read_failure(
                error, f"{folder / name}: cannot be read ({error.strerror})"
            ) from None

    with ThreadPoolExecutor() as pool:
        return list(zip(names, pool.map(digest, names), strict=True))


def _split(name: str, tensor: Tensor, model: ModelConfig) -> Iterator[tuple[str, Tensor]]:
    """Yield name and values of the stored tensors of a parameter."""
    shape = tuple(tensor.shape)
    for part in stored_parts(name, shape, model):
        if part.expert is None:
            yield part.name, tensor
        else:
            yield part.name, tensor[part.expert, part.start : part.start + part.shape[0]]


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
