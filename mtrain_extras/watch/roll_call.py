"""While a job starts, rank 0 names the ranks that it waits for, and notices if one has ended.

The others show in the job's store that they live, from the start of the command until they are
connected to rank 0's hub. Without this, nobody would miss a rank that ends on another node.
"""

from __future__ import annotations

import contextlib
import os
import socket
import threading
import time
from collections.abc import Callable, Iterable
from itertools import count, islice
from typing import TYPE_CHECKING

from mtrain_cli.grouping import grouped, show_spans, spans
from mtrain_cli.launch import job as jobs
from mtrain_cli.launch.failures import RunError
from mtrain_cli.launch.guarded_streams import print_error
from mtrain_cli.launch.progress_record import own_activity

if TYPE_CHECKING:
    from torch.distributed import Store

FIRST_S, BEAT_S = 10.0, 2.0
# A rank may hold the GIL for long, in a cold dlopen or cuInit. torchrun starts all ranks at once,
# and until they sign in they only import. Others may come later.
UNSEEN_S = 180.0
_MOST = 8  # most groups of ranks in a line
_signs_in = False  # whether the ranks of this command sign in


def sign_in() -> None:
    """Open the job's store on rank 0; on the others, show there from now on that they live.

    Without a job of several ranks, do nothing. Raises ConfigError as `jobs.job_store` does.
    """
    job = jobs.current_job()
    if job is None or job.world_size == 1:
        return
    jobs.shared_key("")  # they refuse what nobody should wait for
    jobs.hub_port()
    # As in workers of mtrain's launcher: c10d would print long warnings when rank 0 ends.
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    if job.rank == 0:
        global _signs_in
        _signs_in = True
        jobs.open_store(job)
    else:
        import torch.distributed  # noqa: F401 - here, since two threads must not import it

        threading.Thread(target=_show_life, args=(job,), daemon=True).start()


def _show_life(job: jobs.Job) -> None:
    with contextlib.suppress(Exception):  # `jobs.job_store` reports what is wrong with the store
        store = jobs.connect(job, jobs.STORE_TIMEOUT)
        for number in count():
            key = _key(jobs.current_job() or job)  # it may continue with fewer ranks
            store.set(key, jobs.seal(key, f"{number} {socket.gethostname()}"))
            time.sleep(BEAT_S)
            if own_activity() is not None:  # rank 0 is connected, and notices by itself
                return


def _key(job: jobs.Job, rank: int | None = None) -> str:
    return f"sign of life/{job.world_size}/{job.rank if rank is None else rank}"


class RollCall:
    """What rank 0 knows of the ranks that it waits for."""

    def __init__(self, job: jobs.Job, store: Store) -> None:
        self._job, self._store = job, store
        self._began = self._looked = time.monotonic()
        self._next_line_s = FIRST_S
        self._all_start_at_once = _signs_in and jobs.torchrun_serves()
        # The last sign of life of a rank, and when it was new.
        self._signs: dict[int, tuple[str, float]] = {}

    def check(self, missing: Callable[[], Iterable[int]]) -> None:
        """Print now and then which ranks are missing. Raise RunError if one of them has ended."""
        now = time.monotonic()
        if now - self._looked < BEAT_S:
            return
        self._looked, ranks = now, [*missing()]
        for rank in ranks:
            key = _key(self._job, rank)
            sign = jobs.unseal(key, self._store.get(key)) if self._store.check([key]) else ""
            if sign and sign != self._signs.get(rank, ("", 0))[0]:
                self._signs[rank] = sign, now
            if sign and now - self._signs[rank][1] > UNSEEN_S:
                raise RunError(
                    f"rank {rank} on {sign.partition(' ')[2]} is gone: it showed no sign of life "
                    f"for {UNSEEN_S:g} s before it met rank 0. See its output."
                )
            if not sign and self._all_start_at_once and now - self._began > UNSEEN_S:
                raise RunError(
                    f"rank {rank} was not seen for {UNSEEN_S:g} s after rank 0 had started: it "
                    "ended, or cannot reach rank 0. See its output."
                )
        if ranks and now - self._began >= self._next_line_s:
            self._next_line_s *= 2
            groups = grouped(ranks, lambda rank: self._state(rank, now))
            shown = ", ".join(
                f"rank {show_spans(spans(of_state))} ({state})"
                for state, of_state in islice(groups.items(), _MOST)
            )
            more = " and more" * (len(groups) > _MOST)
            print_error(f"rank 0 waits for {shown}{more}, {now - self._began:.0f} s so far")

    def _state(self, rank: int, now: float) -> str:
        if rank not in self._signs:
            return "not seen yet"
        sign, since = self._signs[rank]
        is_silent = now - since > 2 * BEAT_S
        return ("no sign of life on " if is_silent else "starting on ") + sign.partition(" ")[2]
