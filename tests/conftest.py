"""The same tests whichever way they are started."""

import signal


def pytest_configure() -> None:
    """Signals that the starter ignores, as a shell does for SIGINT in the background, would be ignored by every process of the tests."""
    for signum, usual in ((signal.SIGINT, signal.default_int_handler), (signal.SIGTERM, signal.SIG_DFL), (signal.SIGHUP, signal.SIG_DFL)):
        if signal.getsignal(signum) == signal.SIG_IGN:
            signal.signal(signum, usual)
