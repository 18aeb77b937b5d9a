"""Unpickle without running code that the pickle chooses: only classes on a list are created.

torch writes the metadata of a checkpoint as a pickle, and ranks exchange objects as pickles.
"""

from __future__ import annotations

import builtins
import dataclasses
import enum
import io
import pickle
import pickletools
import sys
from pathlib import PurePosixPath, PureWindowsPath
from typing import IO, Any

import torch


def _allowed(table: str) -> dict[str, set[str]]:
    """Parse lines of ``module: names``."""
    lines = (line.partition(":") for line in table.strip().splitlines())
    return {module.strip(): set(names.split()) for module, _, names in lines}


# Classes in the .metadata files of torch.distributed.checkpoint. _get_layout looks up a name in a
# table. `range` is missing: a few bytes could create range(2**36), which fills memory when listed.
METADATA = _allowed("""
builtins: set
collections: OrderedDict
torch.distributed.checkpoint.metadata: Metadata TensorStorageMetadata BytesStorageMetadata \
    ChunkStorageMetadata TensorProperties _MEM_FORMAT_ENCODING MetadataIndex StorageMeta
torch.distributed.checkpoint.filesystem: _StorageInfo
torch: Size
torch.serialization: _get_layout
""")
# Classes that ranks exchange while they save a checkpoint.
MESSAGES = METADATA | _allowed("""
builtins: set frozenset complex bytearray slice range list dict tuple int float str
collections: OrderedDict defaultdict Counter deque
torch.distributed.checkpoint.filesystem: _StorageInfo _StoragePrefix
torch.distributed.checkpoint.planner: SavePlan WriteItem WriteItemType TensorWriteData \
    BytesIOWriteData LoadPlan ReadItem LoadItemType
torch.distributed.checkpoint.storage: WriteResult
torch.distributed.checkpoint.api: CheckpointException
traceback: StackSummary FrameSummary
numpy: ndarray dtype
numpy.core.multiarray: _reconstruct scalar
numpy._core.multiarray: _reconstruct scalar
numpy.core.numeric: _frombuffer
numpy._core.numeric: _frombuffer
""")
_PATHS = dict.fromkeys(("PosixPath", "PurePosixPath"), PurePosixPath) | dict.fromkeys(
    ("WindowsPath", "PureWindowsPath"), PureWindowsPath
)


class RefusedError(pickle.UnpicklingError):
    """A pickle names a class that is not on the list, or claims too many objects."""


def _member(found: Any, name: Any) -> Any:
    if isinstance(found, enum.EnumMeta) and isinstance(name, str):
        return found[name]
    raise RefusedError("names builtins.getattr, which mtrain loads for enumerations only")


class MetadataUnpickler(pickle.Unpickler):
    """Creates the classes in `METADATA`, torch's dtypes and paths, and nothing else."""

    allowed = METADATA

    def find_class(self, module: str, name: str) -> Any:
        if name in self.allowed.get(module, ()):
            return super().find_class(module, name)
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        if module in ("pathlib", "pathlib._local") and name in _PATHS:
            return _PATHS[name]
        if (module, name) == ("builtins", "getattr"):
            return _member  # Python 3.11.0 to 3.11.3 pickle members of enumerations with it
        raise RefusedError(f"names {module}.{name}, which mtrain does not load")

    def persistent_load(self, pid: Any) -> Any:  # noqa: ARG002
        raise RefusedError("holds a persistent id, which mtrain does not load")


class MessageUnpickler(MetadataUnpickler):
    """Creates the classes in `MESSAGES`, and imported exceptions and records of mtrain."""

    allowed = MESSAGES

    def find_class(self, module: str, name: str) -> Any:
        home = builtins if module == "builtins" else sys.modules.get(module)
        found = getattr(home, name, None) if "." not in name else None
        if isinstance(found, type):
            is_record = dataclasses.is_dataclass(found) or issubclass(found, enum.Enum | tuple)
            is_own = is_record and module.startswith("mtrain_cli.")
            if is_own or issubclass(found, BaseException):
                return found
        return super().find_class(module, name)


def load_metadata(file: IO[bytes]) -> Any:
    """Return the object in a pickled .metadata file, or raise ValueError for a foreign one."""
    content = file.read()
    try:
        # The unpickler allocates a table as long as the largest memo index.
        for opcode, argument, _ in pickletools.genops(content):
            if opcode.name in ("PUT", "LONG_BINPUT") and int(argument or 0) > len(content):
                raise RefusedError("claims more objects than a file of its size can hold")
        return MetadataUnpickler(io.BytesIO(content)).load()
    except RefusedError as error:
        raise ValueError(str(error)) from error
    # With arguments from a damaged file, the constructors of these classes may raise any error.
    except Exception as error:
        raise ValueError("cannot be read: it is damaged") from error


def guard_collectives() -> None:
    """Make torch's collectives of Python objects unpickle with `MessageUnpickler`."""
    import torch.distributed.distributed_c10d as c10d

    assert hasattr(c10d, "_unpickler"), "this torch unpickles messages elsewhere"
    c10d._unpickler = MessageUnpickler
