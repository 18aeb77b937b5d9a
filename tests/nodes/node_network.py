"""Nodes on one machine: network namespaces that are joined by a switch.

Each node has its own host name, address, loopback and /etc/hosts. Its link to the switch can be
limited in rate, cut, and read: the kernel counts the bytes. Needs Linux, root, and `ip`, `tc`,
`nsenter`, `unshare` and `setpriv`.

The namespaces have no names. Processes hold them, which the kernel kills when their parent ends,
also after a crash, so nothing is left behind and two networks cannot collide.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

_TOOLS = ("ip", "tc", "nsenter", "unshare", "setpriv", "hostname", "mount")
_KINDS = ("net", "uts", "mnt")
_START_S = 10.0


class NodesError(RuntimeError):
    """A command that builds the network failed."""


def why_not() -> str | None:
    """Return why this machine cannot make nodes, or None if it can."""
    if sys.platform != "linux" or os.geteuid() != 0:
        return "network namespaces need Linux and root"
    if missing := [tool for tool in _TOOLS if shutil.which(tool) is None]:
        return f"network namespaces need {', '.join(missing)}"
    try:
        with Network(1, rate="1gbit"):
            return None
    except NodesError as error:
        return f"network namespaces are not permitted: {error}"


class Network:
    """A context manager for `count` nodes, `node0` and so on, with addresses 10.77.0.1 and so on.

    rate: of each link in each direction, in the words of `tc`, such as ``200mbit``; None for no
        limit.
    """

    def __init__(self, count: int, *, rate: str | None = None) -> None:
        self.count, self.rate = count, rate
        self._holders: list[subprocess.Popen[bytes]] = []
        self._folder = tempfile.TemporaryDirectory(prefix="nodes-")

    def __enter__(self) -> Network:
        try:
            self._build()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def close(self) -> None:
        for holder in self._holders:
            holder.kill()
            holder.wait()
        self._folder.cleanup()

    @staticmethod
    def name(node: int) -> str:
        return f"node{node}"

    @staticmethod
    def address(node: int, *, ipv6: bool = False) -> str:
        return f"fd77::{node + 1}" if ipv6 else f"10.77.0.{node + 1}"

    def pid(self, node: int) -> int:
        """Return the process that holds the namespaces of a node."""
        return self._holders[1 + node].pid

    def namespaces(self, node: int) -> list[Path]:
        """Return the files of a node's namespaces, for `setns`. That of mounts comes last."""
        return [Path(f"/proc/{self.pid(node)}/ns/{kind}") for kind in _KINDS]

    def command(self, node: int, words: Sequence[str], folder: Path | None = None) -> list[str]:
        """Return a command that runs `words` on a node, in `folder`, and ends with this process."""
        into = [f"--{kind}" for kind in ("net", "uts", "mount")]
        start = ["setpriv", "--pdeathsig", "KILL", "nsenter", "-t", str(self.pid(node)), *into]
        return [*start, f"--wd={folder or Path.cwd()}", *words]

    def send_once(self) -> None:
        """Let TCP wait 30 s for an answer: it repeats segments early to a node that is busy."""
        for node in range(self.count):
            lines = [
                "echo 0 > /proc/sys/net/ipv4/tcp_early_retrans",
                "echo 0 > /proc/sys/net/ipv4/tcp_recovery",
                f"ip route change 10.77.0.0/24 dev eth0 src {self.address(node)} rto_min 30s",
            ]
            _run(self.command(node, ["sh", "-e", "-c", "\n".join(lines)]))

    def cut(self, node: int) -> None:
        """Cut the link of a node."""
        self._on_switch("ip", "link", "set", f"port{node}", "down")

    def mend(self, node: int) -> None:
        """Join the link of a node again after `cut`."""
        self._on_switch("ip", "link", "set", f"port{node}", "up")

    def slow(self, node: int, rate: str = "") -> None:
        """Limit the rate at which a node receives; "" ends it. For a network without a rate."""
        limit = ["root", "tbf", "rate", rate, "burst", "16kb", "latency", "400ms"]
        port = ["dev", f"port{node}"]
        words = ["add", *port, *limit] if rate else ["del", *port, "root"]
        self._on_switch("tc", "qdisc", *words)

    def lose_power(self, node: int) -> None:
        """Cut the link of a node, then kill its processes: they say goodbye to nobody."""
        self.cut(node)
        self.kill(node)

    def kill(self, node: int, signum: int = signal.SIGKILL) -> None:
        """Send a signal to all processes of a node. Its system closes their connections."""
        for process in self.processes(node):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, signum)

    def workers(self, node: int, script: Path) -> list[int]:
        """Return the processes of a node that run a script, without those that start it."""
        start = [sys.executable, "-u", str(script)]
        found = ((pid, Path(f"/proc/{pid}/cmdline")) for pid in self.processes(node))
        return [pid for pid, file in found if file.read_text().split("\0")[: len(start)] == start]

    def processes(self, node: int) -> list[int]:
        """Return the processes on a node."""
        own, found = self.namespaces(node)[0].readlink(), []
        for process in Path("/proc").glob("[0-9]*"):
            with contextlib.suppress(OSError):
                if (process / "ns/net").readlink() == own and int(process.name) != self.pid(node):
                    found.append(int(process.name))
        return found

    def replace_file(self, node: int, file: Path, by: Path) -> None:
        """Give a node another content of a file."""
        _run(self.command(node, ["mount", "--bind", str(by), str(file)]))

    def counted(self) -> list[tuple[int, int]]:
        """Return the bytes that each node has sent and received, as the kernel counts them.

        A packet counts with its Ethernet header, here of up to 64 KiB (segmentation offload).
        """
        text = self._on_switch("ip", "-s", "-j", "link", "show", "master", "bridge")
        ports = {port["ifname"]: port["stats64"] for port in json.loads(text)}
        # A port of the switch receives what its node sends.
        counts = (ports[f"port{node}"] for node in range(self.count))
        return [(count["rx"]["bytes"], count["tx"]["bytes"]) for count in counts]

    def _build(self) -> None:
        for _ in range(1 + self.count):
            hold = ["unshare", "--net", "--uts", "--mount", "sleep", "infinity"]
            self._holders.append(subprocess.Popen(["setpriv", "--pdeathsig", "KILL", *hold]))
        for holder in self._holders:
            _wait_for_namespaces(holder)
        self._on_switch("ip", "link", "add", "bridge", "type", "bridge", "mcast_snooping", "0")
        self._on_switch("ip", "link", "set", "bridge", "up")
        hosts = Path(self._folder.name) / "hosts"
        names = [f"{self.address(node)} {self.name(node)}\n" for node in range(self.count)]
        hosts.write_text("127.0.0.1 localhost\n::1 localhost\n" + "".join(names))
        for node in range(self.count):
            self._join(node, hosts)

    def _join(self, node: int, hosts: Path) -> None:
        port, peer = f"port{node}", ["type", "veth", "peer", "name", "eth0"]
        self._on_switch("ip", "link", "add", port, *peer, "netns", str(self.pid(node)))
        self._on_switch("ip", "link", "set", port, "master", "bridge", "up")
        addresses = [self.address(node) + "/24", self.address(node, ipv6=True) + "/64 nodad"]
        lines = [
            f"hostname {self.name(node)}",
            f"mount --bind {hosts} /etc/hosts",
            "ip link set lo up",
            *(f"ip addr add {address} dev eth0" for address in addresses),
            "ip link set eth0 up",
        ]
        limit = f"root tbf rate {self.rate} burst 64kb latency 50ms"
        if self.rate is not None:
            lines.append(f"tc qdisc add dev eth0 {limit}")
            self._on_switch("tc", "qdisc", "add", "dev", port, *limit.split())
        _run(self.command(node, ["sh", "-e", "-c", "\n".join(lines)]))

    def _on_switch(self, *words: str) -> str:
        return _run(["nsenter", "-t", str(self._holders[0].pid), "--net", *words])


def _wait_for_namespaces(holder: subprocess.Popen[bytes]) -> None:
    """Wait until a holder has left the namespaces of this process and runs `sleep`."""
    end = time.monotonic() + _START_S
    while Path(f"/proc/{holder.pid}/comm").read_text().strip() != "sleep":
        if holder.poll() is not None:
            raise NodesError(f"unshare ended with code {holder.returncode}")
        if time.monotonic() > end:
            raise NodesError(f"unshare did not start within {_START_S:g} s")
        time.sleep(0.005)


def _run(words: Sequence[str]) -> str:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise NodesError(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")
    return done.stdout
