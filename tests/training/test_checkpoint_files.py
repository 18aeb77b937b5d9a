"""Foreign checkpoints with matching checksums: nothing in them runs, and one line says why."""

from __future__ import annotations

import io
import os
import pickle
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import command
import pytest
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
)
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition import compose
from mtrain_cli.config import resolved_file
from mtrain_cli.launch.manifest import Manifest, checksum
from mtrain_cli.training.checkpointer import (
    Checkpointer,
    NoCheckpointError,
    load_model_state,
    write_model_state,
)

MODEL = [
    "model.hidden_size=32",
    "model.num_layers=2",
    "model.head_dim=8",
    "model.intermediate_size=48",
]
PAYLOAD = "__0_0.distcp"
WEIGHT = "model.weight"


class Bomb:
    """Creates a folder when it is unpickled."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.marker),)


def state() -> dict[str, Any]:
    model = {"weight": torch.arange(6.0).view(2, 3)}
    return {
        "model": model,
        "optimizer": {"param_groups": [{"lr": 0.5, "betas": (0.9, 0.95)}]},
        "trainer": {"step": 1},
    }


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    Checkpointer(tmp_path / "checkpoints", keep=1).save(1, state(), asynchronous=False)
    return tmp_path / "checkpoints" / "step-1"


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    return tmp_path / "code-ran"


def sealed(folder: Path) -> None:
    """Recompute the manifest's checksums of the files in the folder."""
    old = Manifest.read(folder)
    replace(old, files={name: checksum(folder / name) for name in old.files}).write(folder)


def change_metadata(folder: Path, change: Callable[[Metadata], object]) -> None:
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    change(metadata)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))
    sealed(folder)


def put(folder: Path, name: str, content: bytes) -> None:
    """Append `content` to a file and make it the stored value of `name`."""

    def change(metadata: Metadata) -> None:
        file = folder / PAYLOAD
        index = next(index for index in metadata.storage_data if index.fqn == name)
        info = metadata.storage_data[index]
        metadata.storage_data[index] = replace(
            info, offset=file.stat().st_size, length=len(content)
        )
        file.write_bytes(file.read_bytes() + content)

    change_metadata(folder, change)


def saved_bytes(value: object) -> bytes:
    file = io.BytesIO()
    torch.save(value, file)
    return file.getvalue()


def refused(folder: Path) -> str:
    with pytest.raises(NoCheckpointError) as caught:
        Checkpointer(folder.parent, keep=1).load(state())
    (problem,) = caught.value.problems
    assert "\n" not in problem
    return problem


def test_metadata_that_names_a_function_is_refused_and_runs_nothing(folder, marker):
    change_metadata(folder, lambda metadata: setattr(metadata, "planner_data", Bomb(marker)))
    assert (
        refused(folder)
        == f"{folder}: .metadata names {os.mkdir.__module__}.mkdir, which mtrain does not load"
    )
    with pytest.raises(NoCheckpointError, match=r"\.metadata names"):
        load_model_state(folder)
    assert not marker.exists()


def test_a_value_that_names_a_function_is_refused_and_runs_nothing(folder, marker):
    put(folder, "optimizer.param_groups.0.lr", saved_bytes(Bomb(marker)))
    assert refused(folder).endswith(
        "optimizer.param_groups.0.lr holds data other than plain values"
    )
    assert not marker.exists()


@pytest.mark.parametrize("declared", ["tensor", "value"])
def test_a_tensor_that_names_a_function_is_refused_and_runs_nothing(folder, marker, declared):
    put(folder, WEIGHT, saved_bytes(Bomb(marker)))
    if declared == "value":
        change_metadata(
            folder,
            lambda metadata: metadata.state_dict_metadata.update({WEIGHT: BytesStorageMetadata()}),
        )
    refused(folder)
    if declared == "tensor":
        with pytest.raises(NoCheckpointError):
            load_model_state(folder)
    assert not marker.exists()


def test_per_rank_metadata_is_never_read(folder, marker):
    (folder / "__0.metadata").write_bytes(pickle.dumps(Bomb(marker)))
    (folder / ".metadata").write_bytes(b"no pickle")
    sealed(folder)
    assert refused(folder).endswith(".metadata cannot be read: it is damaged")
    assert not marker.exists()


@pytest.mark.parametrize("name", ["../step-2/__0_0.distcp", "/etc/passwd", ".."])
def test_files_outside_the_folder_are_refused(folder, name):
    def change(metadata: Metadata) -> None:
        for index, info in metadata.storage_data.items():
            metadata.storage_data[index] = replace(info, relative_path=name)

    change_metadata(folder, change)
    assert refused(folder).endswith(
        f".metadata names the file {name!r}, which is not in this folder"
    )


def test_a_manifest_that_names_files_outside_the_folder_is_refused(folder):
    old = Manifest.read(folder)
    replace(old, files={**old.files, "../../outside": checksum(folder / PAYLOAD)}).write(folder)
    assert refused(folder).endswith(
        "manifest.json names the file '../../outside', which is not in this folder"
    )


def test_tensors_larger_than_the_files_are_refused_before_allocation(folder):
    def change(metadata: Metadata) -> None:
        (index,) = (index for index in metadata.storage_data if index.fqn == WEIGHT)
        info = metadata.storage_data.pop(index)
        metadata.storage_data[replace(index, offset=torch.Size([0]))] = info
        metadata.state_dict_metadata[WEIGHT].size = torch.Size([2**40])
        metadata.state_dict_metadata[WEIGHT].chunks = [
            ChunkStorageMetadata(torch.Size([0]), torch.Size([2**40]))
        ]

    change_metadata(folder, change)
    with pytest.raises(
        NoCheckpointError, match="claims 4,398,046,511,104 bytes of tensors, but the files hold"
    ):
        load_model_state(folder)


@pytest.mark.parametrize("chunks", ["none", "half", "columns", "twice", "elsewhere"])
def test_a_tensor_with_missing_parts_is_refused(folder, chunks):
    """Otherwise the missing parts would hold uninitialised memory."""

    def change(metadata: Metadata) -> None:
        entry = metadata.state_dict_metadata[WEIGHT]
        (chunk,) = entry.chunks
        half = torch.Size([entry.size[0] // 2, *entry.size[1:]])
        columns = torch.Size([entry.size[0], entry.size[1] // 2])
        entry.chunks = {
            "none": [],
            "half": [replace(chunk, sizes=half)],
            "columns": [replace(chunk, sizes=columns)],
            "twice": [chunk, chunk],
            "elsewhere": [chunk],
        }[chunks]
        if chunks == "elsewhere":
            metadata.storage_data = {
                index: info for index, info in metadata.storage_data.items() if index.fqn != WEIGHT
            }

    change_metadata(folder, change)
    with pytest.raises(NoCheckpointError, match=f"does not say where all parts of {WEIGHT} are$"):
        load_model_state(folder)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"cbuiltins\nrange\n(I0\nI68719476736\ntR.", "names builtins.range"),
        (b"]r\xff\xff\xff\x0f.", "claims more objects than a file of its size can hold"),
        (b"]p268435455\n.", "claims more objects than a file of its size can hold"),
        (b"", "cannot be read"),
    ],
)
def test_small_metadata_cannot_allocate_much_memory(folder, content, reason):
    (folder / ".metadata").write_bytes(content)
    sealed(folder)
    assert f".metadata {reason}" in refused(folder)


def test_a_tensor_that_unpacks_to_more_than_its_file_is_refused(folder):
    packed = io.BytesIO()
    with (
        zipfile.ZipFile(io.BytesIO(saved_bytes(torch.zeros(1 << 20)))) as plain,
        zipfile.ZipFile(packed, "w", zipfile.ZIP_DEFLATED) as tight,
    ):
        for entry in plain.namelist():
            tight.writestr(entry, plain.read(entry))
    put(folder, WEIGHT, packed.getvalue())
    assert "holds an entry that unpacks to more than its" in refused(folder)


@pytest.mark.parametrize(
    "change",
    [
        lambda metadata: setattr(metadata, "state_dict_metadata", None),
        lambda metadata: setattr(metadata, "storage_data", []),
        lambda metadata: setattr(metadata.state_dict_metadata[WEIGHT], "size", (2, 3)),
        lambda metadata: setattr(metadata.state_dict_metadata[WEIGHT], "chunks", 5),
        lambda metadata: setattr(
            metadata.state_dict_metadata[WEIGHT].properties, "dtype", torch.strided
        ),
        lambda metadata: metadata.storage_data.clear(),
        lambda metadata: metadata.__dict__.clear(),
    ],
)
def test_malformed_metadata_is_refused_in_one_line(folder, change):
    change_metadata(folder, change)
    refused(folder)
    with pytest.raises(NoCheckpointError):
        load_model_state(folder)


@pytest.fixture
def foreign_run(tmp_path: Path, marker: Path) -> Path:
    """Create a run whose only checkpoint has malicious metadata."""
    run = tmp_path / "foreign"
    run.mkdir()
    words = [*MODEL, "seq=512", "topology.device=cpu", "topology.workers=2", "train.steps=2"]
    words.append("run.restarts=0")
    resolved_file.save(compose.compose(words), run / "resolved.yaml")
    change_metadata(
        write_model_state(run / "checkpoints", 1, {"weight": torch.zeros(3)}),
        lambda metadata: setattr(metadata, "planner_data", Bomb(marker)),
    )
    return run


@pytest.mark.parametrize("words", [["export", "RUN", "OUT"], ["verify", "RUN", "--tokens", "8"]])
def test_a_foreign_checkpoint_is_neither_exported_nor_verified(
    foreign_run, marker, tmp_path, words
):
    if words[0] == "verify":
        pytest.importorskip("transformers")
    named = {"RUN": str(foreign_run), "OUT": str(tmp_path / "out")}
    result = CliRunner().invoke(app, ["checkpoint", *(named.get(word, word) for word in words)])
    assert result.exit_code == 2, result.output
    assert "Traceback" not in result.output
    assert "which mtrain does not load" in " ".join(result.output.split())
    assert not marker.exists()


def test_a_run_does_not_resume_from_a_foreign_checkpoint(foreign_run, marker, tmp_path):
    result = command.mtrain(tmp_path, "train", "--resume", str(foreign_run))
    assert not marker.exists()
    assert result.returncode == 2, result.stderr
    assert result.stderr.count("which mtrain does not load") == 1
    assert "Traceback" not in result.stderr
