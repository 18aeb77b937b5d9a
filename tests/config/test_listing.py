"""A configuration as YAML with its defaults in comments."""

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.resolved_file import annotated_yaml, load
from mtrain_cli.config.sizes import format_size

CHUNK = ("topology.layout=balanced", "topology.balanced_chunk=1k")


def test_the_annotated_listing_loads_as_the_same_configuration(tmp_path):
    config = compose(["model=qwen3b", "seq=32k", "optim.betas=[0.5,0.6]", *CHUNK])
    lines = list(annotated_yaml(config, compose()))
    (tmp_path / "listing.yaml").write_text("\n".join(line for line, _ in lines))
    assert load(tmp_path / "listing.yaml") == config
    marked = {line.split(":")[0].strip(): line for line, changed in lines if changed}
    assert marked["seq"] == f"seq: 32768  # 32k; default {format_size(compose().seq)}"
    assert marked["betas"].endswith("# default [0.9,0.95]")
    assert marked["balanced_chunk"].strip() == "balanced_chunk: 1024  # 1k; default auto"
    assert "lr" not in marked
    assert not any(changed for _, changed in annotated_yaml(compose(), compose()))
