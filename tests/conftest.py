"""Make test results independent of how tests are started.

Without a GPU, Triton kernels run in Triton's interpreter.
"""

import contextlib
import functools
import gc
import os
import signal

import pytest
import torch
import typer.testing

# Tests share the cores, so more threads, here or in child processes, would only compete.
torch.set_num_threads(int(os.environ.setdefault("OMP_NUM_THREADS", "1")))
# A terminal width inherited from a shell or from readline would wrap the output of commands.
for name in ("COLUMNS", "LINES"):
    os.environ.pop(name, None)
os.environ["HF_HUB_OFFLINE"] = "1"  # no test asks the real Hub
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    # Triton reads the variable when its functions are defined, and some tests remove the variable.
    with contextlib.suppress(ImportError):
        import triton_interpreter

        triton_interpreter.remember_types()
    # Create no kernel cache next to the tests' temporary folders.
    os.environ.setdefault("FLASH_ATTENTION_CUTE_DSL_CACHE_ENABLED", "0")

# Derive the options of the command line from its functions once, not in each call of `CliRunner`.
typer.testing._get_command = functools.cache(typer.testing._get_command)

MAX_PROCESSES = 8  # each test may start up to five more
# The files that take longest begin first, so that no process has one of them left at the end.
LONGEST = (
    "mission/test_mission.py",
    "parallel/test_context_attention.py",
    "config/test_plugins.py",
    "evaluation/test_in_training.py",
    "training/test_learned_index.py",
    "golden/test_golden.py",
    "attention/test_sparse_kernels.py",
    "docs/test_commands.py",
    "launch/test_local.py",
    "training/test_trainer.py",
    "training/test_transformers_training.py",
    "training/test_pipeline.py",
    "training/test_expert_parallel_training.py",
    "integrations/test_loops.py",
    "library/test_context_parallel.py",
    "training/test_state_memory.py",
    "inference/test_engine.py",
    "library/test_learning_scores.py",
    "training/test_sparse_training.py",
    "training/test_router_batches.py",
    "training/test_planning.py",
)


def pytest_configure() -> None:
    """Restore default signal handlers, and collect no garbage while tests are collected.

    A shell ignores SIGINT for background jobs, and all processes of the tests would inherit that.
    """
    gc.disable()
    for signum, default in (
        (signal.SIGINT, signal.default_int_handler),
        (signal.SIGTERM, signal.SIG_DFL),
        (signal.SIGHUP, signal.SIG_DFL),
    ):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, default)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of the longest files first."""
    order = {name: number for number, name in enumerate(LONGEST)}
    items.sort(key=lambda item: order.get("/".join(item.path.parts[-2:]), len(order)))


def pytest_collection_finish() -> None:
    """Collect garbage again, but do not visit the modules and tests of the session each time."""
    gc.collect()
    gc.freeze()
    gc.enable()


@pytest.hookimpl(optionalhook=True)  # GPU tests also run without pytest-xdist
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Return the number of worker processes, which take whole files; 0 runs in this process.

    One file cannot be split, and GPU tests need the GPUs to themselves.
    """
    cores = len(os.sched_getaffinity(0))
    one_file = len(config.args) == 1 and ".py" in config.args[0]
    if cores == 1 or one_file or torch.cuda.is_available():
        return 0
    return min(cores, MAX_PROCESSES)
