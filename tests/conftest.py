"""The same tests whichever way they are started. Triton kernels run through Triton's interpreter where there is no GPU."""

import os
import signal

import torch

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")


def pytest_configure() -> None:
    """Signals that the starter ignores, as a shell does for SIGINT in the background, would be ignored by every process of the tests."""
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, usual)
