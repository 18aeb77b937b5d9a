"""Kinds of data of other packages, by entry points of the group mtrain.data."""

from __future__ import annotations

from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from mtrain_cli.commands.app import app
from mtrain_cli.composition.compose import compose
from mtrain_cli.config import data_kinds, keys, plugins, unused_settings, validate
from mtrain_cli.config.data_kinds import DataKind
from mtrain_cli.config.schema import Config, ConfigError, DataConfig
from mtrain_cli.data import open_dataset
from mtrain_cli.data.kinds import OWN
from mtrain_cli.data.store import StoreMeta, TokenStore


class Numbers(DataKind):
    """The file has the number of tokens, which count up."""

    expected = "a file with a number"
    keys = ("text_key",)
    tokenizes = False

    def source(self, config: Config, data: DataConfig, origin: str) -> TokenStore:
        assert origin == f"data.path={data.path}"
        count = int(Path(data.path or "").read_text())
        meta = StoreMeta(
            dtype="uint16",
            tokenizer="numbers",
            num_tokens=count,
            num_documents=1,
            sha256="",
            source="numbers",
        )
        ids = np.arange(count, dtype=np.uint16) % config.model.vocab_size
        return TokenStore(meta, ids, np.array([0, count]))


NUMBERS = Numbers()


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace the installed kinds by one of this module, and one that is none."""
    entries = [
        metadata.EntryPoint(name, f"{__name__}:{value}", plugins.DATA)
        for name, value in (("numbers", "NUMBERS"), ("broken", "Numbers"), ("text", "NUMBERS"))
    ]
    monkeypatch.setattr(plugins, "_all_installed", lambda: metadata.EntryPoints(entries))
    kinds = plugins.Plugins(plugins.DATA, "mtrain_cli.data.kinds:OWN", data_kinds._check)
    for module in (data_kinds, validate, unused_settings, open_dataset):
        monkeypatch.setattr(module, "KINDS", kinds)
    monkeypatch.setattr("mtrain_cli.composition.derived.KINDS", kinds)
    lines: list[str] = []
    monkeypatch.setattr(plugins, "on_broken", lines.append)
    keys.all_keys.cache_clear()
    yield lines
    keys.all_keys.cache_clear()


def test_a_kind_of_another_package_is_read(installed: list[str], tmp_path: Path) -> None:
    path = tmp_path / "count.txt"
    path.write_text("200")
    words = ["data.kind=numbers", f"data.path={path}", "seq=64", "data.text_key=x"]
    config = compose(words)
    dataset = open_dataset.open_dataset(config)
    assert dataset[0].tokens[:5].tolist() == [0, 1, 2, 3, 4]
    assert unused_settings.unused_keys(words, config) == []
    assert [line.partition(" of ")[0] for line in installed] == [
        "mtrain.data: broken = test_data_kinds:Numbers",
        "mtrain.data: text = test_data_kinds:NUMBERS",
    ]
    assert "it must be a DataKind" in installed[0]
    assert "this name is taken" in installed[1]
    with pytest.raises(
        ConfigError, match=r"data\.path=nowhere: no such file .*a file with a number"
    ):
        compose(["data.kind=numbers", "data.path=nowhere"])


@pytest.mark.usefixtures("installed")
def test_a_kind_that_cannot_be_loaded_is_one_line() -> None:
    with pytest.raises(ConfigError) as caught:
        compose(["data.kind=broken", "data.path=nowhere"])
    (line,) = caught.value.problems
    assert line == "data.kind=broken: its package cannot be loaded; a line above says why"


@pytest.mark.usefixtures("installed")
def test_a_checkout_without_the_kind_says_how_to_get_it(tmp_path: Path) -> None:
    refused = CliRunner().invoke(app, ["train", "data=chat", f"data.path={tmp_path}", "--dry-run"])
    assert refused.exit_code == 2
    expected = "data.kind=chat: expected one of stdlib, text, tokens, numbers"
    hint = "; this checkout has more: run `pip install --no-deps -e .` in it"
    assert f"{expected}, broken, text{hint}" in refused.stderr


def test_mtrain_names_its_own_kinds_without_loading_them() -> None:
    assert plugins.data_kinds()[: len(OWN)] == tuple(OWN)
