"""Run `mtrain` with one worker that kills or suspends itself where FAULT says (see `Fault`)."""

from __future__ import annotations

import functools
import json
import os
import time
from dataclasses import asdict, dataclass
from pathlib import Path

VARIABLE = "FAULT"
HANGS = 0  # instead of a signal


@dataclass(frozen=True)
class Fault:
    """A fault of one rank, just before it posts a message: of an exchange, a pipeline, or others.

    On CPUs the fault waits until the other ranks have gone as far as they can.

    rank: the rank that fails.
    signum: the signal it sends itself, or HANGS.
    training_step: number of the training step.
    what: such as ``ring, layer 1, forward``, or ``pipeline, stage 1, micro-batch 0``. Empty for
        the messages of a tensor group.
    exchange_step: such as ``step 2 of 3``, or ``sends gradients to rank 0``. ``message 5`` is the
        fifth that a tensor group gathers in the step.
    later: steps in which it fails again after restarts.
    once: whether it stops failing after those.
    fewer: whether the launcher then finds a single device only.
    to_launcher: whether the signal goes to the launcher instead.
    """

    rank: int
    signum: int
    training_step: int
    what: str
    exchange_step: str
    later: tuple[int, ...] = ()
    once: bool = False
    fewer: bool = False
    to_launcher: bool = False

    def variable(self) -> dict[str, str]:
        return {VARIABLE: json.dumps(asdict(self))}


def train(config, run_dir, environment, resume):
    """Run the trainer with the fault in it."""
    import torch.distributed as dist

    from mtrain_cli.launch import progress_record
    from mtrain_cli.parallel.layer_groups import ExpertGroup, TensorGroup
    from mtrain_cli.parallel.transport import Transport
    from mtrain_cli.training import loop
    from mtrain_cli.training.trainer import Trainer

    fault = Fault(**json.loads(os.environ[VARIABLE]))
    (run_dir.path / f"pid-{environment.rank}").write_text(str(os.getpid()))
    at, gathered = [0], [0]
    step, start_hop, message = Trainer.train_step, Transport.start_hop, dist.P2POp
    start_rows = ExpertGroup.start
    start_gather = TensorGroup.start_gather

    def counted(self, *requests):
        at[0], gathered[0] = self.step + 1, 0
        return step(self, *requests)

    def faulty_gather(self, rows):
        gathered[0] += 1
        fail_if_due("", f"message {gathered[0]}")
        return start_gather(self, rows)

    def faulty(self, *arguments):
        fail_if_due(self.pass_name, f"step {self.at + 1} of {self.steps}")
        start_hop(self, *arguments)

    def faulty_message(*arguments):
        here = progress_record.own_activity()
        if here is not None and here.doing.startswith("pipeline"):
            fail_if_due(*here.doing.split(": "))
        return message(*arguments)

    def faulty_rows(self, *arguments, **named):
        fail_if_due("expert parallelism", "sends rows")
        return start_rows(self, *arguments, **named)

    def fail_if_due(what, exchange_step):
        before = len(list(run_dir.path.glob("fault*")))
        steps = [fault.training_step, *fault.later]
        due = steps[min(before, len(steps) - 1)] if before < len(steps) or not fault.once else -1
        here = (environment.rank, at[0], what, exchange_step)
        if here == (fault.rank, due, fault.what, fault.exchange_step):
            if environment.device == "cpu":
                _wait_for_others(
                    progress_record.record_pattern(run_dir.logs, environment.launcher),
                    environment,
                    config.topology.timeout_s,
                )
            (run_dir.path / f"fault{before or ''}").touch()
            _wait_for_checkpoint(config, run_dir, due)
            if fault.signum == HANGS:
                time.sleep(600)
            os.kill(os.getppid() if fault.to_launcher else os.getpid(), fault.signum)

    Trainer.train_step, Transport.start_hop, dist.P2POp = counted, faulty, faulty_message
    ExpertGroup.start = faulty_rows
    TensorGroup.start_gather = faulty_gather
    return loop.train(config, run_dir, environment, resume)


def _wait_for_others(records, environment, timeout_s):
    """Wait until the other ranks stop moving, at most half their timeout.

    A rank killed earlier would leave the others anywhere, but tests must know where they wait.
    """
    from mtrain_cli.launch import progress_record

    others = [
        Path(records.format(rank=rank))
        for rank in range(environment.dims.workers)
        if rank != environment.rank
    ]
    deadline = time.monotonic() + timeout_s / 2
    before = None
    while time.monotonic() < deadline:
        activities = [progress_record.read_activity(path) for path in others]
        # After the ring they wait for the parameters of a layer, which is not recorded.
        if activities == before and all(
            record and (record.waits_for is not None or record.doing.startswith("after "))
            for record in activities
        ):
            return
        before = activities
        time.sleep(0.2)


def _wait_for_checkpoint(config, run_dir, step):
    """Wait for the checkpoint before a step, which is written in the background."""
    last = (
        (step - 1) // config.train.checkpoint_every * config.train.checkpoint_every
        if config.train.checkpoint_every
        else 0
    )
    deadline = time.monotonic() + 30
    while (
        last and not (run_dir.checkpoints / f"step-{last}").exists() and time.monotonic() < deadline
    ):
        time.sleep(0.01)


def main():
    """Run the command line with the fault in it."""
    from mtrain_cli import __main__
    from mtrain_cli.launch import local

    local.launch = functools.partial(local.launch, target="faulty_train:train")
    if json.loads(os.environ[VARIABLE])["fewer"]:
        from mtrain_cli.launch import restart

        restart.RestartPolicy._choose_workers = lambda self, before: restart.shrink_environment(
            self._config, before, ["0"], "1"
        )
    __main__.main()


if __name__ == "__main__":
    main()
