"""The activity record of a rank names the collectives of FSDP and the layers that need them."""

from __future__ import annotations

from pathlib import Path

import gloo
from training.masked_runs import SMALL

from mtrain_cli.composition.compose import compose
from mtrain_cli.launch import progress_record
from mtrain_cli.launch.progress_record import SEVERAL
from mtrain_cli.training.trainer import Trainer


def recorded(rank: int, world: int, words: list[str], folder: str) -> list[tuple[str, int | None]]:
    path = Path(folder) / f"rank-{rank}"
    progress_record.start_record(path)
    trainer = Trainer(compose([*words, f"topology.workers={world}"]), gloo.environment(rank, world))
    trainer.train_step(False)
    trainer.close()
    return [(a.doing, a.waits_for) for a in progress_record.read_history(path)]


def test_collectives_of_weights_and_gradients_are_recorded_by_layer(tmp_path):
    (tmp_path / "text.txt").write_text("long context " * 100)
    words = ["seq=64", "data.kind=text", f"data.path={tmp_path}/text.txt", "train.steps=1", *SMALL]
    for found in gloo.run(2, recorded, words, str(tmp_path)):
        for what in ("weights", "gradients"):
            waits = f"FSDP, layers.0: waits for {what} among 2 ranks"
            assert (waits, SEVERAL) in found
            assert found[found.index((waits, SEVERAL)) - 1] == ("FSDP, layers.0", None), "it ends"
