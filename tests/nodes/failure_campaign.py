"""Break runs at random moments in many ways, resume them, and compare them with undisturbed runs.

Start it as root on Linux; it takes a second seed and other files to go on::

    PYTHONPATH=.:tests python -m nodes.failure_campaign --seed 1 --out failures.json

Each failure breaks a run that trains a tiny model on the text of the documents, and `Outcome`
records what follows. `unmet` says what must hold, so a campaign is a test, too.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import dataclasses
import json
import os
import random
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from commands.test_entry_points import install
from docs.blocks import ROOT

from nodes import faulty_store, node_runs
from nodes.failure_kinds import KINDS, Kind, Moment
from nodes.node_network import Network, why_not

STEPS, EVERY, KEPT = 12, 3, 6
WORDS = [
    "model=tiny",
    "model.num_layers=2",
    "topology.device=cpu",
    "topology.exchange=ring",
    "seq=256",
    "data=text",
    f"train.steps={STEPS}",
    f"train.checkpoint_every={EVERY}",
    "run.log_every=1",
    "run.name=run",
    "train.callbacks=[pace]",
]
# A step takes at least this long, so that the moments of the failures differ.
PACE_S = 0.1
_PACE = """
import os, time
from mtrain_cli.training.callback import Callback

class Pace(Callback):
    def before_step(self):
        time.sleep(float(os.environ.get("PACE_S", "0")))

def pace(trainer, run_dir, message):
    return Pace()
"""
_LIMIT_S = 150.0
_ORPHANS_S = 5.0  # for processes that end after the last rank


@dataclass
class Outcome:
    """One failure, and what came of it.

    before: newest checkpoint when it came; -1 for none. reached: last step. resumed: step from
    which the run went on; -1 if it began again. lost: steps that were trained again.
    said: the first line on it. said_s, gone_s: seconds until that line, and until all processes
    had ended. left: files that a later start must remove. leftovers: those that it did not.
    equal: whether all losses are those of the undisturbed run. unmet: what should hold but does
    not.
    """

    kind: str
    seed: int
    nodes: int
    workers: int
    moment: str
    victim: str = ""
    before: int = -1
    reached: int = 0
    resumed: int = -1
    lost: int = 0
    codes: list[int] = field(default_factory=list)
    said: str = ""
    said_s: float | None = None
    gone_s: float | None = None
    orphans: int = 0
    left: list[str] = field(default_factory=list)
    leftovers: list[str] = field(default_factory=list)
    traceback: bool = False
    equal: bool = False
    unmet: list[str] = field(default_factory=list)


@dataclass
class Attempt:
    """A run while it is watched."""

    network: Network
    folder: Path
    pids: list[int]
    outputs: list[Path]
    wait: Callable[[float], list[int] | None]
    begun: float = field(default_factory=time.monotonic)

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs/run"


class Campaign:
    """Undisturbed runs of each shape, and the files that all runs share, in one folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._packages = folder / "packages"
        self._packages.mkdir()
        (self._packages / "pace.py").write_text(_PACE)
        shutil.copy(faulty_store.__file__, self._packages / "faulty_store.py")
        points = {
            "mtrain.callbacks": {"pace": "pace:pace"},
            "fsspec.specs": {"faulty": "faulty_store:FaultyFileSystem"},
        }
        install(self._packages, "pace", "1", **{"entry-points": points})
        sys.path.insert(0, str(self._packages))
        self.text = folder / "text.txt"
        pages = sorted((ROOT / "docs").glob("*.md"))
        self.text.write_text("\n".join(page.read_text() for page in pages))
        self._expected: dict[tuple[int, int], list[Any]] = {}

    def words(self, *more: str) -> list[str]:
        return [*WORDS, f"data.path={self.text}", *more]

    def expected(self, nodes: int, per_node: int) -> list[Any]:
        """Return the losses and gradient norms of an undisturbed run."""
        if (nodes, per_node) not in self._expected:
            place = self.folder / f"whole-{nodes}-{per_node}"
            with Network(nodes) as network:
                node_runs.train(network, self.words(), place, per_node)
            self._expected[nodes, per_node] = numbers(place / "runs/run")
        return self._expected[nodes, per_node]

    def break_one(self, name: str, seed: int) -> Outcome | None:
        """Break a run, resume it, and return what came of it. None if it ended too early."""
        kind, rng = KINDS[name], random.Random(f"{name} {seed}")
        nodes, per_node = rng.choice(kind.shapes)
        moment = kind.moment(rng, STEPS, EVERY)
        outcome = Outcome(name, seed, nodes, nodes * per_node, moment.text)
        expected = self.expected(nodes, per_node)
        folder = self.folder / f"{name.replace(' ', '-')}-{seed}"
        folder.mkdir()
        with contextlib.ExitStack() as stack:
            if kind.disk_kib:  # before the nodes, which see the mounts of now
                disk = folder / ("store" if kind.full_store else "runs")
                stack.enter_context(small_disk(disk, kind.disk_kib))
            network = stack.enter_context(Network(nodes))
            case = Case(self, kind, rng, network, folder, per_node, outcome)
            stack.callback(case.close)
            if not case.disturb(moment):
                return None
            case.resume(expected)
            if outcome.unmet:
                (folder / "outcome.json").write_text(json.dumps(dataclasses.asdict(outcome)))
                if kind.disk_kib:
                    shutil.copytree(disk, folder / "disk", ignore=shutil.ignore_patterns("filler"))
        if not outcome.unmet:
            shutil.rmtree(folder)
        return outcome


class Case:
    """One failure of one run."""

    def __init__(
        self,
        campaign: Campaign,
        kind: Kind,
        rng: random.Random,
        network: Network,
        folder: Path,
        per_node: int,
        outcome: Outcome,
    ) -> None:
        self.campaign, self.kind, self.rng, self.network = campaign, kind, rng, network
        self.folder, self.per_node, self.outcome = folder, per_node, outcome
        self.temporary = folder / "tmp"
        self.temporary.mkdir()
        self.controls = [folder / f"control-{node}.json" for node in range(network.count)]
        self.store = folder / "store"
        self._undo: list[Callable[[], object]] = []
        self._children: list[subprocess.Popen[bytes]] = []
        for node in range(network.count):
            mount = ["mount", "-t", "tmpfs", "tmpfs", "/dev/shm"]
            subprocess.run(network.command(node, mount), check=True)
        self.words = campaign.words(*kind.words)
        if kind.store:
            url = kind.store.format(store=self.store)
            kept = ["train.keep_checkpoints=1", f"train.keep_every={KEPT}"]
            self.words += [f"run.remote={url}", *kept]
        self.variables = {"PACE_S": str(kind.pace_s or PACE_S)}
        for prepare in kind.prepare:
            self._undo.append(prepare(self))

    def close(self) -> None:
        for child in self._children:
            child.kill()
        for child in self._children:
            child.wait()
        for undo in reversed(self._undo):
            undo()

    # What kinds of failures use.

    @property
    def run_dir(self) -> Path:
        return self.folder / "runs/run"

    @property
    def rank_pids(self) -> list[int]:
        """Return the processes of the workers, in the order of ranks."""
        if self.kind.how == "ranks":
            return self.attempt.pids
        found = {}
        for node in range(self.network.count):
            for pid in self.network.processes(node):
                with contextlib.suppress(OSError, ValueError, IndexError):
                    content = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
                    ranks = [word[5:] for word in content if word.startswith(b"RANK=")]
                    found[int(ranks[0])] = pid
        return [found[rank] for rank in sorted(found)]

    def fault(self, name: str | None, number: float = 0, node: int | None = None) -> None:
        """Let the store fail, or end that. node: for which alone; None for all."""
        for control in self.controls if node is None else [self.controls[node]]:
            if name is None:
                control.unlink(missing_ok=True)
            else:
                partial = control.with_suffix(".new")
                partial.write_text(json.dumps({"fault": name, "number": number}))
                partial.rename(control)

    def own(self, **more: str) -> dict[int, dict[str, str]]:
        """Return the variables of each rank."""
        return {
            rank: {
                **self.variables,
                faulty_store.VARIABLE: str(self.controls[rank // self.per_node]),
                **more,
            }
            for rank in range(self.outcome.workers)
        }

    # The course of a case.

    def disturb(self, moment: Moment) -> bool:
        """Start the run, break it, and watch it. Return False if it ended before the moment."""
        outcome, kind = self.outcome, self.kind
        attempt = self.attempt = self._start(self.words)
        seen: dict[Path, int] = {}
        broken: float | None = None
        undo: tuple[float, Callable[[], object]] | None = None
        codes = None
        while codes is None:
            codes = attempt.wait(0.005)
            now = time.monotonic()
            if broken is None and codes is None and moment.has_come(self, now - attempt.begun):
                outcome.before = max(committed(self.run_dir), default=-1)
                for path in attempt.outputs:
                    seen[path] = path.stat().st_size if path.exists() else 0
                broken = time.monotonic()
                undo = kind.act(self)
            elif broken is None:
                if codes is None and now - attempt.begun > _LIMIT_S:
                    raise TimeoutError(f"{kind} {moment.text}: the moment never came")
            else:
                if undo is not None and now - broken > undo[0]:
                    undo[1]()
                    undo = None
                if outcome.said_s is None and (line := self._said(seen)):
                    outcome.said, outcome.said_s = line, round(now - broken, 2)
                if codes is None and now - broken > _LIMIT_S:
                    outcome.unmet.append(f"still runs after {_LIMIT_S:g} s")
                    for node in range(self.network.count):
                        self.network.kill(node)
        if broken is None:
            if any(codes):
                outputs = "".join(path.read_text()[-500:] for path in attempt.outputs)
                raise RuntimeError(f"{moment.text}: it failed before: {codes}: {outputs}")
            return False
        if undo is not None:
            undo[1]()
        if outcome.said_s is None and (line := self._said(seen)):
            outcome.said, outcome.said_s = line, round(time.monotonic() - broken, 2)
        outcome.codes = codes
        left = self._orphans()
        outcome.gone_s = round(time.monotonic() - broken, 2)
        outcome.orphans = len(left)
        text = "".join(path.read_text() for path in attempt.outputs)
        # torchrun ends with one of its own.
        frames = re.search(r"^Traceback .*\n(?:  .*\n)*?  File .*/mtrain_cli/", text, re.MULTILINE)
        outcome.traceback = frames is not None
        outcome.reached = len(numbers(self.run_dir, loose=True))
        outcome.left = self._leftovers()
        return True

    def resume(self, expected: list[Any]) -> None:
        """Resume the run, and compare it with the undisturbed one."""
        outcome, kind = self.outcome, self.kind
        for node in range(self.network.count):
            self.network.mend(node)
        for filler in (self.run_dir.parent / "filler", self.store / "filler"):
            filler.unlink(missing_ok=True)
        before, is_done = outcome.before, outcome.reached == STEPS and not any(outcome.codes)
        if kind.loses_machine:
            self.fault(None)
            there = committed(self.store / "run")
            before = max(there, default=-1)
            if kind.keeps and (missing := sorted({*range(KEPT, STEPS + 1, KEPT)} - {*there})):
                outcome.unmet.append(f"the store does not keep steps {missing}")
            shutil.rmtree(self.run_dir)
            is_done = False
        text = ""
        if not is_done:
            words = [*self.words, "--resume", "auto"]
            if "S3 server ends" in outcome.kind:
                words = [word for word in words if not word.startswith("run.remote=")]
            again = node_runs.start(
                self.network, words, self.folder, self.per_node, again="again-",
                own=self.own(PACE_S="0"), temporary=self.temporary,
            )  # fmt: skip
            codes = again.wait(_LIMIT_S)
            if codes is None:
                outcome.unmet.append("the resumed run hangs")
                for node in range(self.network.count):
                    self.network.kill(node)
                codes = again.wait()
            text = "".join(path.read_text() for path in again.outputs)
            already = "already at step" in text or "nothing left" in text
            if any(codes or ()) and not already:
                lines = [line for line in text.splitlines() if line][-3:]
                outcome.unmet.append(f"the resumed run ends with {codes}: {lines}")
            found = re.findall(r"resumed from the checkpoint of step (\d+)", text)
            outcome.resumed = int(found[0]) if found else STEPS if already else -1
            outcome.lost = max(0, outcome.reached - max(0, outcome.resumed))
        else:
            outcome.resumed = STEPS
            file = self.run_dir / "restarts.jsonl"
            rows = [json.loads(line) for line in file.open()] if file.exists() else []
            outcome.lost = sum(row["reached"] - row["step"] for row in rows)
        outcome.leftovers = self._leftovers()
        outcome.equal = numbers(self.run_dir, loose=True) == expected
        if outcome.resumed < before:
            outcome.unmet.append(f"the checkpoint of step {before} is lost")
        outcome.unmet += list(unmet(outcome, kind))

    def _start(self, words: Sequence[str]) -> Attempt:
        kind, folder = self.kind, self.folder
        if kind.how == "ranks":
            started = node_runs.start(
                self.network, words, folder, self.per_node, own=self.own(), temporary=self.temporary
            )
            return Attempt(self.network, folder, started.pids, started.outputs, started.wait)
        outputs = []
        for node in range(self.network.count):
            command = [sys.executable, "-m", "mtrain_cli", "train", *words]
            if kind.how == "launcher":
                command.append(f"topology.workers={self.per_node}")
            else:
                command[2:3] = f"""torch.distributed.run --nnodes {self.network.count}
                    --nproc-per-node {self.per_node} --rdzv-backend static --master-port 29500
                    --master-addr {self.network.address(0)} --node-rank {node}
                    -m mtrain_cli""".split()
            output = folder / f"node-{node}.txt"
            outputs.append(output)
            environment = {
                **os.environ,
                "OMP_NUM_THREADS": "1",
                "GLOO_SOCKET_IFNAME": "eth0",
                "PYTHONPATH": os.pathsep.join(sys.path),
                "PYTHONUNBUFFERED": "1",
                "TMPDIR": str(self.temporary),
                **self.variables,
            }
            environment.pop("TRITON_INTERPRET", None)
            with output.open("wb") as file:
                child = subprocess.Popen(
                    self.network.command(node, command, folder),
                    env=environment,
                    stdin=subprocess.DEVNULL,
                    stdout=file,
                    stderr=file,
                )
            self._children.append(child)

        def wait(timeout: float) -> list[int] | None:
            time.sleep(timeout)
            codes = [child.poll() for child in self._children]
            return None if None in codes else [code for code in codes if code is not None]

        return Attempt(self.network, folder, [c.pid for c in self._children], outputs, wait)

    def _said(self, seen: dict[Path, int]) -> str:
        """Return the first new line that speaks of a failure, "" if there is none."""
        pattern = self.kind.says_pattern
        for path in self.attempt.outputs:
            if path.exists():
                with path.open("rb") as file:
                    file.seek(seen.get(path, 0))
                    lines = file.read().decode(errors="replace").split("\n")[:-1]
                for line in lines:
                    if pattern.search(line):
                        return line.strip().replace(str(self.folder), "FOLDER")[:300]
        return ""

    def _orphans(self) -> list[int]:
        until = time.monotonic() + _ORPHANS_S
        while True:
            left = [p for n in range(self.network.count) for p in self.network.processes(n)]
            left = [pid for pid in left if pid not in self.kind.servers(self)]
            if not left or time.monotonic() > until:
                break
            time.sleep(0.02)
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        return left

    def _leftovers(self) -> list[str]:
        """Return temporary files, half checkpoints, requests, and shared memory."""
        run, found = self.run_dir, []
        patterns = (
            "checkpoints/*.tmp*", "checkpoints/*.replaced", "uploading-*", "*.tmp*", ".*.tmp*",
            "stop_request", "save_requests",
        )  # fmt: skip
        for pattern in patterns:
            found += [path.relative_to(self.folder).as_posix() for path in run.glob(pattern)]
        # torch keeps the cache that it makes when it is imported, torchrun its logs.
        temporary = [path.name for path in self.temporary.iterdir()]
        foreign = "torchinductor_", "torchelastic_"
        found += [f"tmp/{name}" for name in temporary if not name.startswith(foreign)]
        found += [path.relative_to(self.folder).as_posix() for path in run.parent.glob(".*")]
        for node in range(self.network.count):
            memory = Path(f"/proc/{self.network.pid(node)}/root/dev/shm")
            found += [f"/dev/shm/{path.name}" for path in memory.iterdir()]
        return sorted(found)


def unmet(outcome: Outcome, kind: Kind) -> Iterator[str]:
    """Yield what should hold of a failure of this kind, and does not."""
    if outcome.orphans:
        yield f"{outcome.orphans} orphans"
    if outcome.leftovers:
        yield f"leftovers: {', '.join(outcome.leftovers)}"
    if not outcome.equal:
        yield "other losses than those of the undisturbed run"
    if outcome.traceback:
        yield "a traceback"
    if kind.says and outcome.said_s is None:
        yield f"nobody says {kind.says!r}"
    if kind.names_victim and outcome.victim not in outcome.said:
        yield f"the line does not name {outcome.victim}"
    limit = kind.within_s
    if kind.says and outcome.said_s is not None and outcome.said_s > limit:
        yield f"said after {outcome.said_s} s, later than {limit:g} s"
    if kind.ends_within_s and (outcome.gone_s or 0) > kind.ends_within_s:
        yield f"processes for {outcome.gone_s} s, longer than {kind.ends_within_s:g} s"
    if not set(outcome.codes) <= set(kind.codes):
        yield f"exit codes {outcome.codes}"
    if kind.loses_nothing and outcome.lost:
        yield f"{outcome.lost} steps are lost"
    if kind.is_clean and outcome.left:
        yield f"left behind: {', '.join(outcome.left)}"


@contextlib.contextmanager
def small_disk(folder: Path, kib: int) -> Iterator[None]:
    """Mount a file system of this size."""
    folder.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", f"size={kib}k", "tmpfs", str(folder)]
    subprocess.run(mount, check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def numbers(run_dir: Path, *, loose: bool = False) -> list[Any]:
    """Return number, loss and gradient norm of each step. loose: without a file, none."""
    file = run_dir / "metrics.jsonl"
    if loose and not file.exists():
        return []
    rows = []
    for line in file.read_text().split("\n")[:-1]:
        with contextlib.suppress(ValueError):
            rows.append(json.loads(line))
    return [(row["step"], row["loss"], row["grad_norm"]) for row in rows]


def committed(run_dir: Path) -> list[int]:
    """Return the steps of the complete checkpoints of a run, here or at a store."""
    return [
        int(file.parent.name.removeprefix("step-"))
        for file in run_dir.glob("checkpoints/step-*/manifest.json")
        if file.parent.name.removeprefix("step-").isdigit()
    ]


def table(outcomes: Sequence[dict[str, Any]]) -> list[str]:
    """Return the rows of the documents' table: a line for each kind, medians and (largest)."""
    lines = [
        "| what fails | times | said after, s | gone after, s | steps lost | unmet |",
        "|---|---|---|---|---|---|",
    ]

    def spread(values: Sequence[float | None], digits: int = 1) -> str:
        known = sorted(value for value in values if value is not None)
        if not known:
            return "-"
        return f"{statistics.median(known):.{digits}f} ({known[-1]:.{digits}f})"

    by_kind = collections.defaultdict(list)
    for outcome in outcomes:
        by_kind[outcome["kind"]].append(outcome)
    for name, kind in KINDS.items():
        if rows := by_kind.get(name):
            said = spread([row["said_s"] for row in rows]) if kind.says else "-"
            ends = kind.ends_within_s or set(kind.codes) != {0}
            gone = spread([row["gone_s"] for row in rows]) if ends else "-"
            lost = max(row["lost"] for row in rows)
            broken = sum(bool(row["unmet"]) for row in rows)
            lines.append(f"| {name} | {len(rows)} | {said} | {gone} | {lost} | {broken} |")
    return lines


def run(folder: Path, seed: int, kinds: Sequence[str], scale: float = 1.0) -> Iterator[Outcome]:
    """Break runs of each kind, as often as the kind says times ``scale``, at least once."""
    campaign = Campaign(folder)
    for name in kinds:
        done, tried = 0, 0
        while done < max(1, round(KINDS[name].count * scale)) and tried < 3 * KINDS[name].count + 3:
            outcome = campaign.break_one(name, 1000 * seed + tried)
            tried += 1
            if outcome is not None:
                done += 1
                yield outcome


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the failures")
    parser.add_argument("--kinds", default="", help="begin of the names, by commas")
    parser.add_argument("--out", type=Path, help="file for the outcomes")
    parser.add_argument("--keep", type=Path, help="folder for the files of runs with unmet claims")
    parser.add_argument("--table", type=Path, help="print the table of a file, and nothing else")
    words = parser.parse_args()
    if words.table:
        print("\n".join(table(json.loads(words.table.read_text())["failures"])))
        return
    if (reason := why_not()) is not None:
        sys.exit(reason)
    kinds = [name for name in KINDS if name.startswith(tuple(words.kinds.split(",")))]
    outcomes, began = [], time.monotonic()
    with contextlib.ExitStack() as stack:
        folder = words.keep
        if folder is None:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="failures-")))
        folder.mkdir(parents=True, exist_ok=True)
        for outcome in run(folder, words.seed, kinds, words.scale):
            outcomes.append(dataclasses.asdict(outcome))
            mark = "; ".join(outcome.unmet) or "ok"
            print(
                f"{len(outcomes):4} {outcome.kind} {outcome.seed}, {outcome.moment}: said "
                f"{outcome.said_s} s, gone {outcome.gone_s} s, lost {outcome.lost}: {mark}",
                flush=True,
            )
            if words.out:
                document = {
                    "command": f"python -m nodes.failure_campaign --seed {words.seed}",
                    "hardware": f"{os.cpu_count()} CPU cores",
                    "minutes": round((time.monotonic() - began) / 60, 1),
                    "failures": outcomes,
                }
                rows = ",\n".join(json.dumps(row) for row in outcomes)
                text = json.dumps({**document, "failures": []}, indent=1)
                words.out.write_text(text.replace("[]", f"[\n{rows}\n]") + "\n")
    print("\n".join(table(outcomes)))
    sys.exit(any(outcome["unmet"] for outcome in outcomes))


if __name__ == "__main__":
    main()
