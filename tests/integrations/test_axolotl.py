"""The plug-in of axolotl, with the parts of axolotl that call it written out here.

They do what axolotl 0.18.0 does: `BasePlugin` has the hooks, and `AxolotlTrainer` looks for a
number of labels where there is none.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace

import pytest

from mtrain_cli import api

for package in ("transformers", "trl", "peft", "accelerate", "datasets", "pydantic"):
    pytest.importorskip(package)

from integrations import loops  # noqa: E402


class BasePlugin:
    pass


class AxolotlTrainer(loops.Trainer):
    def __init__(self, *args, dataset_tags=None, **kwargs):
        assert dataset_tags == ["a data set"]
        super().__init__(*args, **kwargs)
        self.model_accepts_loss_kwargs = False


@pytest.fixture
def plugin(monkeypatch):
    names = {"axolotl.integrations.base": BasePlugin, "axolotl.core.trainers.base": AxolotlTrainer}
    for name, part in names.items():
        folder = name
        while folder:
            monkeypatch.setitem(sys.modules, folder, ModuleType(folder))
            folder = folder.rpartition(".")[0]
        setattr(sys.modules[name], part.__name__, part)
    monkeypatch.delitem(sys.modules, "mtrain_cli.integrations.axolotl", raising=False)
    loops.start(0, 1)
    return importlib.import_module("mtrain_cli.integrations.axolotl").MtrainPlugin()


def settings(**keys) -> SimpleNamespace:
    return SimpleNamespace(sequence_len=loops.SEQ, mtrain=keys)


def test_a_run_equals_one_of_transformers(plugin, tmp_path, monkeypatch):
    module, _, name = plugin.get_input_args().rpartition(".")
    given = getattr(sys.modules[module], name)(mtrain={"size": 1, "layout": "zigzag"})
    expected = loops.hf_trainer(tmp_path, True)
    loops.start(0, 1)
    model = loops.model_of("llama", True)
    plugin.post_model_build(settings(**given.mtrain, settings=["topology.block_size=16"]), model)
    trainer_class = plugin.get_trainer_cls(None)
    monkeypatch.setattr(
        loops, "Trainer", lambda _, *args, **words: trainer_class(
            model, *args, dataset_tags=["a data set"], **words
        )
    )  # fmt: skip
    found = loops.hf_trainer(tmp_path, True)
    assert found == [pytest.approx(step, rel=1e-6, abs=1e-6) for step in expected]
    assert plugin._cp.config.topology.layout == "zigzag"


@pytest.mark.parametrize(
    ("keys", "problem"),
    [
        (
            {"pattern": "moba"},
            "mtrain.pattern: unknown key; allowed: size, settings, layout, exchange, sparsity, "
            "mask, kernel",
        ),
        ({"size": 3}, "mtrain.size=3: must divide 1 processes: 1"),
        ({"sparsity": "mobo"}, "sparsity=mobo: "),
    ],
)
def test_wrong_keys_are_refused(plugin, keys, problem):
    model = loops.model_of("llama", True)
    with pytest.raises(api.ConfigError) as raised:
        plugin.post_model_build(settings(**keys), model)
    assert raised.value.problems[0].startswith(problem)
    assert model.config._attn_implementation == "sdpa"
