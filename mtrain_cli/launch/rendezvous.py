"""Let the workers of one machine find each other through a file in a private folder.

torch's own rendezvous opens a port on every interface and unpickles what anybody sends.
`SingleMachineRendezvous` opens no port.
"""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

from torch.distributed import FileStore, HashStore
from torch.distributed.elastic.rendezvous import api

from mtrain_cli.launch.temporary_folders import is_private

if TYPE_CHECKING:
    from torch.distributed import Store

STORE = "store"


class SingleMachineRendezvous(api.RendezvousHandler):
    """The rendezvous of a single elastic agent. It exists only in the memory of the agent."""

    def __init__(self, run_id: str) -> None:
        self._run_id = run_id
        self._closed = False

    def get_backend(self) -> str:
        return "one-machine"

    def next_rendezvous(self) -> api.RendezvousInfo:
        # Workers get this address in their environment, but nothing listens there.
        return api.RendezvousInfo(HashStore(), 0, 1, api.RendezvousStoreInfo("127.0.0.1", 0))

    def is_closed(self) -> bool:
        return self._closed

    def set_closed(self) -> None:
        self._closed = True

    def num_nodes_waiting(self) -> int:
        return 0

    def get_run_id(self) -> str:
        return self._run_id

    def shutdown(self) -> bool:
        self._closed = True
        return True


def open_store(folder: Path, workers: int, timeout: timedelta) -> Store:
    """Open the store that the workers of one machine share. Every worker calls this.

    Args:
        folder: the launcher's private folder.
        timeout: how long a worker waits for an entry of the store.

    Raises:
        OSError: other users can open the folder.
    """
    if not is_private(folder):
        raise PermissionError(f"{folder}: other users can open the folder")
    store = FileStore(str(folder / STORE), workers)
    store.set_timeout(timeout)
    return store
