"""Give the rows of a run to a tracker of experiments.

A thread of the first worker reads the files of the run as they grow. So a tracker that is slow,
hangs or fails neither stops nor slows training, and is left with a warning.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mtrain_cli.config import documents, keys
from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.evaluation.results import FOLDER, RESULTS
from mtrain_cli.records.metrics import METRICS_FILE
from mtrain_cli.training.callback import Callback, FinishedStep
from mtrain_cli.training.evaluation import EVALUATIONS_FILE

if TYPE_CHECKING:
    from mtrain_cli.launch.run_dir import RunDir
    from mtrain_cli.training.trainer import Trainer

_RESULTS = f"{FOLDER}/{RESULTS}"
_FILES = {METRICS_FILE: "train", EVALUATIONS_FILE: "held_out", _RESULTS: "eval"}
PAGE = "report.html"
_POLL = 1.0  # seconds between two readings
_PATIENCE = 30.0  # seconds to wait for a tracker when training ends
_PATIENCE_AFTER_ERROR = 5.0


@dataclass(frozen=True)
class TrackedRun:
    """A run as trackers see it. start_step: the step from which it resumes, or 0."""

    config: Config
    folder: Path
    start_step: int

    @property
    def settings(self) -> dict[str, Any]:
        return keys.values(self.config)

    def id_of(self, tracker: str, make: Callable[[], str]) -> tuple[str, bool]:
        """Return the id by which a tracker knows the run, and whether it is new."""
        path = self.folder / f"{tracker}.id"
        if is_new := not path.is_file():
            documents.replace_text(path, f"{make()}\n")
        return path.read_text(encoding="utf-8").strip(), is_new


OpenTracker = Callable[[TrackedRun], Any]
"""Makes an object with ``log(step, {name: number})`` and ``close(failed)``.

If it has ``keep(path)``, too, this gets the page of `mtrain report` before ``close``.
"""


class Follower(Callback):
    """Follows a run with one tracker. A resumed run sends what the tracker does not have yet."""

    def __init__(
        self,
        name: str,
        make: OpenTracker,
        trainer: Trainer,
        run_dir: RunDir,
        message: Callable[..., None],
    ) -> None:
        self._name, self._make, self._message = name, make, message
        self._run = TrackedRun(trainer.config, run_dir.path, trainer.step)
        self._thread = threading.Thread(target=self._follow, name=name, daemon=True)
        self._ended = threading.Event()
        self._failed, self._problem = False, ""
        self._offsets: dict[str, int] = {}
        self._back: int | None = None  # the step to which the run went back
        self._sent = run_dir.path / f"{name}.sent"  # {file: the last step that the tracker has}

    def before_training(self) -> None:
        self._thread.start()  # by now, the files have no rows of later steps any more

    def after_step(self, step: FinishedStep | None = None) -> None:  # noqa: ARG002 - a hook
        if self._problem:
            why, self._problem = self._problem, ""
            line = f"run.loggers: {self._name} is left ({why}); training goes on, and"
            self._message(f"{line} {METRICS_FILE} has all steps", warning=True)

    def on_rollback(self, step: int) -> None:
        self._back = step  # the files have no later steps any more

    def on_error(self, error: Exception) -> None:  # noqa: ARG002 - a hook
        self._failed = True
        self._end(_PATIENCE_AFTER_ERROR)

    def close(self) -> None:
        self._end(_PATIENCE)

    def _end(self, patience: float) -> None:
        self._ended.set()
        if self._thread.ident is not None:
            self._thread.join(patience)
        if self._thread.is_alive():
            self._problem = f"did not answer for {patience:g} seconds"
        self.after_step()

    def _follow(self) -> None:
        try:
            known = documents.read_json(self._sent) if self._sent.is_file() else {}
            start = self._run.start_step
            first = {name: min(known.get(name, -1), start) for name in _FILES}
            sent = dict(first)
            tracker = self._make(self._run)
            ended = False
            while not ended:
                ended = self._ended.wait(_POLL)
                before = dict(sent)
                back, self._back = self._back, None
                if back is not None:  # the steps after it come again
                    self._offsets.clear()
                    first = {name: min(step, back) for name, step in sent.items()}
                try:
                    for name, step, values in self._rows():
                        if step > first[name]:
                            tracker.log(step, values)
                            sent[name] = max(step, sent[name])
                finally:
                    if sent != before:
                        documents.replace_text(self._sent, json.dumps(sent) + "\n")
            try:
                if hasattr(tracker, "keep"):
                    with contextlib.suppress(ConfigError):  # a run that failed early has no page
                        tracker.keep(self._page())
            finally:
                tracker.close(self._failed)
        except BaseException as error:  # a tracker must never end a training
            self._problem = f"{type(error).__name__}: {error}"

    def _page(self) -> Path:
        """Write the page of `mtrain report` into the run's folder."""
        from mtrain_cli.reporting import html, report_source  # imports pandas

        source = report_source.open_source(self._run.folder)
        return html.write_page(self._run.folder / PAGE, [source])

    def _rows(self) -> Iterator[tuple[str, int, dict[str, float]]]:
        for name, prefix in _FILES.items():
            path = self._run.folder / name
            if not path.is_file():
                continue
            with path.open("rb") as file:
                file.seek(min(self._offsets.get(name, 0), path.stat().st_size))
                *lines, rest = file.read().split(b"\n")
                self._offsets[name] = file.tell() - len(rest)
            for line in lines:
                try:
                    row = json.loads(line)
                    step = int(row.pop("step"))
                except (ValueError, LookupError, AttributeError, TypeError):
                    continue  # damaged
                if name == _RESULTS:
                    case = f"{row.get('task')}/{row.get('length')}/{row.get('attention')}"
                    row = {case: row.get("score")}
                numbers = {f"{prefix}/{k}": v for k, v in row.items() if documents.is_number(v)}
                yield name, step, numbers


def follower(name: str, make: OpenTracker) -> Callable[..., Follower]:
    """Return what an entry point of `mtrain.trackers` names."""
    return partial(Follower, name, make)
