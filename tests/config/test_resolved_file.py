"""Saving a configuration, and loading it again."""

import re

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config import keys
from mtrain_cli.config.resolved_file import annotated_yaml, load, save
from mtrain_cli.config.schema import ConfigError


def complaints(function, *arguments) -> tuple[str, ...]:
    with pytest.raises(ConfigError) as caught:
        function(*arguments)
    return caught.value.problems


def test_numbers_survive_saving_bit_for_bit(tmp_path):
    config = compose(
        [
            "optim.lr=0.1234567890123456",
            "optim.eps=1e-30",
            "optim.betas=[0,0.999]",
            "run.name=on",
            "seq=1m",
        ]
    )
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config
    assert not list(tmp_path.glob("*.part")), "no partial file is left"
    assert keys.nested(config)["optim"]["betas"] == [0.0, 0.999]


@pytest.mark.parametrize("value", ["2", "[0,2]", "every:3"])
def test_every_form_of_dense_layers_survives_saving(tmp_path, value):
    config = compose(["sparsity=moba", f"sparsity.dense_layers={value}"])
    save(config, tmp_path / "resolved.yaml")
    assert load(tmp_path / "resolved.yaml") == config
    assert keys.show(config.sparsity.dense_layers) == value


def test_a_broken_resolved_yaml_is_one_line_each(tmp_path):
    file = tmp_path / "resolved.yaml"
    assert "No such file" in complaints(load, file)[0]
    for text in ("a: [1", "\x00", "- 1\n", "", "3", "mask: {kind: [full]}"):
        file.write_text(text)
        assert complaints(load, file)[0].startswith(f"{file}: ")
    save(compose(), file)
    text = re.sub(r"(?m)^  lr: .*$", "  lr: fast\n  momentum: 1", file.read_text())
    file.write_text(re.sub(r"(?m)^seed: .*\n", "", text))
    *wrong, missing = complaints(load, file)
    assert wrong == [
        f"{file}: optim.lr=fast: expected a number or auto",
        f"{file}: no key is called optim.momentum",
    ]
    assert missing == f"{file}: seed: missing"


def test_offload_activations_is_a_bool_or_a_number_in_old_and_new_files(tmp_path):
    file = tmp_path / "resolved.yaml"
    for word, value in (("true", True), ("false", False), ("1", 1), ("0", 0)):
        save(compose([f"train.offload_activations={word}"]), file)
        assert f"  offload_activations: {word}\n" in file.read_text()
        found = load(file).train.offload_activations
        assert (found, type(found)) == (value, type(value))
    # Files of versions without these keys.
    file.write_text(
        re.sub(
            r"(?m)^  (offload_activations|gpu_memory_gib|shard|tile_mib|z_loss): .*\n",
            "",
            file.read_text(),
        )
    )
    assert load(file).train.offload_activations is False
    assert complaints(compose, ["train.offload_activations=most"]) == (
        "train.offload_activations=most: expected true, false or a whole number",
    )


def test_the_annotated_listing_loads_as_the_same_configuration(tmp_path):
    config = compose(
        [
            "model=qwen3b",
            "seq=32k",
            "optim.betas=[0.5,0.6]",
            "topology.layout=balanced",
            "topology.balanced_chunk=1k",
        ]
    )
    lines = list(annotated_yaml(config, compose()))
    (tmp_path / "listing.yaml").write_text("\n".join(line for line, _ in lines))
    assert load(tmp_path / "listing.yaml") == config
    marked = {line.split(":")[0].strip(): line for line, changed in lines if changed}
    assert marked["seq"] == f"seq: 32768  # default {compose().seq}"
    assert marked["betas"].endswith("# default [0.9,0.95]")
    assert marked["balanced_chunk"].strip() == "balanced_chunk: 1024  # default auto"
    assert "lr" not in marked
    assert not any(changed for _, changed in annotated_yaml(compose(), compose()))
