"""Write the events that TensorBoard shows."""

from __future__ import annotations

from collections.abc import Mapping

from torch.utils.tensorboard import SummaryWriter

from mtrain_extras.trackers.follower import TrackedRun, follower


class TensorBoard:
    def __init__(self, run: TrackedRun) -> None:
        # It hides later steps of an earlier attempt.
        folder, hidden = str(run.folder / "tensorboard"), run.start_step + 1
        self._events = SummaryWriter(log_dir=folder, purge_step=hidden)

    def log(self, step: int, values: Mapping[str, float]) -> None:
        for name, value in values.items():
            self._events.add_scalar(name, value, step)
        self._events.flush()

    def close(self, _: bool) -> None:
        self._events.close()


follow = follower("tensorboard", TensorBoard)
