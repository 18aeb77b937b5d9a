"""The questions of `mtrain init` on a terminal."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.markup import escape
from rich.prompt import InvalidResponse, Prompt

from mtrain_cli.config.schema import ConfigError
from mtrain_extras.start.jobs import JOBS, WITH_MODEL

_ALL = "all"


class _Existing(Prompt):
    """Asks for a file or folder. Nothing is an answer if it is the default."""

    def process_response(self, value: str) -> str:
        path = value.strip()
        if not path or not Path(path).expanduser().exists():
            raise InvalidResponse(f"[red]{escape(path) or 'nothing'}: no such file or folder")
        return path


class _Count(Prompt):
    """Asks for a number of GPUs, or all."""

    def process_response(self, value: str) -> str:
        if value.strip() != _ALL and not value.strip().isdecimal():
            raise InvalidResponse(f"[red]give a number, or {_ALL}")
        return value.strip()


def ask(
    data: str | None, model: str | None, gpus: int | None
) -> tuple[str, str | None, str | None, int | None]:
    """Ask for the job, and for what it needs and the user has not given.

    Returns job, data, model and GPUs, as the options of the command.
    Raises ConfigError if the user gives no answer (Ctrl-D).
    """
    console = Console(highlight=False)
    for name, what in JOBS.items():
        console.print(f"  [bold]{name:<8}[/bold] {what}")
    try:
        job = Prompt.ask(
            "What do you want to do?", choices=[*JOBS], default="text", console=console
        )
        if model is None and job in WITH_MODEL:
            model = _Existing.ask("Folder of the Hugging Face model", console=console)
        if data is None and job == "chat":
            data = _Existing.ask("File with your conversations (.jsonl)", console=console)
        elif data is None and job != "profile":
            own = "Python's own sources"
            data = _Existing.ask("Your data, a file or folder", default=own, console=console)
            data = None if data == own else data
        if gpus is None:
            count = _Count.ask("Number of GPUs (0: CPU)", default=_ALL, console=console)
            gpus = None if count == _ALL else int(count)
    except EOFError:
        raise ConfigError("no answer; give --job NAME, or run the command again") from None
    return job, data, model, gpus
