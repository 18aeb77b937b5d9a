"""The same tests whichever way they are started. Triton kernels run through Triton's interpreter where there is no GPU."""

import os
import signal

import pytest
import torch

# Tests share the cores with each other: more threads, here or in the processes that they start, would only wait for one another.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
# A width that a shell, or readline in the process that started this one, leaves behind would break lines of what commands print.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    os.environ.setdefault(
        "FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0"
    )  # no folder for it beside those of tests

MOST_PROCESSES = 8  # of tests at a time, each of which may start up to five more


def pytest_configure() -> None:
    """Signals that the starter ignores, as a shell does for SIGINT in the background, would be ignored by every process of the tests."""
    for signum, usual in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, usual)


def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Processes that the tests are spread over, file by file; 0: none but this one.

    One file has nothing to spread. Tests of GPUs take them all.
    """
    cores = len(os.sched_getaffinity(0))
    one_file = len(config.args) == 1 and ".py" in config.args[0]
    if cores == 1 or one_file or torch.cuda.is_available():
        return 0
    return min(cores, MOST_PROCESSES)
