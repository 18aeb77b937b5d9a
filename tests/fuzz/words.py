"""Draw random command lines with valid and invalid values, misspelled names and huge numbers."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

import typer

from mtrain_cli.commands.app import app
from mtrain_cli.config.groups import open_groups
from mtrain_cli.config.keys import ConfigKey, all_keys

HUGE = (
    "1e20", "999999999999999999999", "1e308", "1e999999999", "9" * 400, "9" * 5000, "1e15",
    "4611686018427387904", "inf", "1e24",
)  # fmt: skip
NUMBERS = (
    "1", "2", "4", "16", "32", "64", "128", "256", "0", "0.5", "0.1", "1k", "auto", "3", "1e-3",
)  # fmt: skip
SMALL = (
    "1", "2", "3", "4", "0.05", "5%", "256,512", "8,32", "16/2", "zigzag", "ring", "dense",
    "seq=256,512 nodes=1", "worker=1.2", "bytes", "20b", "auto",
)  # fmt: skip
ODD = (
    "", " ", "null", "none", "~", "nan", "-nan", "-inf", "true", "-1", "0", "-0", "0x10", "1_000",
    "1__0", "0.5", "1e-320", "[1]", "[", "]", "{a: 1}", "{", "[[[[", "é", "²", "٣", "a b", "a=b",
    "a,b", "1,2", "1:2", "${seq}", "${nothing}", "${oc.env:HOME}", "???", "'", '"', "\\", "%s",
    "%d", "{}", "{0}", "[red]x[/red]", "[/]", "\x1b[31m", "\udcff", "\u202e", "🙂", "x" * 3000,
    "auto", "1k", "1kk", "1g", "/", "/dev/null", "/proc/self/mem", ".", "..", "~root",
    "~nobodyhere/x", "choice(1,2)", "range(3)", "0b1", "1e", "e1", "+", "-", "--",
    "!!python/object:os.system", "*a", "&a", "|", ">", "#", "@", "a#b", "\t", "\n", "\r", "a\nb",
    "1\n", " 4 ",
)  # fmt: skip
OVERRIDES = ("overrides",)
LETTERS = "abcdefghijklmnopqrstuvwxyz_."


@dataclass
class Line:
    """A command line.

    typos: its words that name nothing, or numbers beyond every limit. With any it must fail.
    """

    words: list[str]
    typos: list[str] = field(default_factory=list)


class Words:
    """Draws command lines. files: paths to draw from, such as a finished run."""

    def __init__(self, seed: int, files: list[str]) -> None:
        self.random = random.Random(seed)
        self.files = files
        self.keys = all_keys()
        self.groups = open_groups().options
        self.commands = dict(_commands(typer.main.get_command(app), ()))

    def line(self) -> Line:
        """Draw a command line."""
        draw = self.random
        names = list(self.commands)
        train = ("train",)
        name = train if draw.random() < 0.4 else draw.choice(names)
        line = Line(list(name))
        params = self.commands[name]
        if draw.random() < 0.02:
            word = self.misspell(line.words[-1], {n[-1] for n in names})
            line.words[-1] = word
            line.typos.append(word)
            return line
        for param in params:
            if param.param_type_name == "argument":
                self._arguments(param, line)
        options = [p for p in params if p.param_type_name == "option"]
        for param in draw.sample(options, min(len(options), draw.choice((0, 0, 1, 1, 2, 3)))):
            self._option(param, line)
        if options and draw.random() < 0.05:
            word = "--" + self.misspell("zz" + draw.choice(options).name, set()).replace("_", "-")
            line.words.append(word)
            line.typos.append(word)
        if name == train and draw.random() < 0.9:
            line.words.append(draw.choice(("--dry-run", "--cfg", "--cfg")))
        # If a key is given twice, the last value wins, with a warning about the first.
        last = {word.partition("=")[0]: word for word in line.words}
        line.typos = [word for word in line.typos if last.get(word.partition("=")[0], word) == word]
        return line

    def override(self) -> tuple[str, bool]:
        """Draw an override, and whether it must be refused."""
        draw = self.random
        kind = draw.random()
        key = self.keys[draw.choice(list(self.keys))]
        if kind < 0.25:
            return f"{key.name}={self.fitting(key)}", False
        if kind < 0.35:
            group = draw.choice(list(self.groups))
            return f"{group}={draw.choice(list(self.groups[group]))}", False
        if kind < 0.45:
            group = draw.choice(list(self.groups))
            options = self.groups[group]
            return f"{group}={self.misspell(draw.choice(list(options)), set(options))}", True
        if kind < 0.6:
            return (
                f"{self.misspell(key.name, {*self.keys, *self.groups})}={self.fitting(key)}",
                True,
            )
        if kind < 0.75:
            number = bool({int, float} & set(key.types)) and not key.is_text
            value = draw.choice(HUGE)
            # A seed may be any number below 2^63.
            allowed = key.name == "seed" and value in ("1e15", "4611686018427387904")
            return f"{key.name}={value}", number and not allowed
        if kind < 0.95:
            return f"{key.name}={draw.choice(ODD)}", False
        name = key.name
        odd = (f"~{name}", f"+{name}=1", name, f"{name}==1", f"={name}", f"hydra.{name}=1")
        return draw.choice((draw.choice(ODD), *odd)), False

    def fitting(self, key: ConfigKey) -> str:
        """Draw a value that may be valid."""
        draw = self.random
        if key.choices:
            return draw.choice(key.choices)
        if bool in key.types:
            return draw.choice(("true", "false"))
        if int in key.types or float in key.types:
            return draw.choice(NUMBERS)
        return draw.choice([*self.files, "auto", "bytes", "name", "[0.9,0.95]", "{a: 0.5, b: 0.5}"])

    def misspell(self, word: str, taken: set[str]) -> str:
        """Misspell ``word`` by one letter, without giving one of ``taken``."""
        draw = self.random
        while True:
            at = draw.randrange(len(word) + 1)
            letter = draw.choice(LETTERS[:-1])
            before, after = word[:at], word[at + 1 :]
            changed = draw.choice(
                (before + letter + word[at:], before + after, before + letter + after)
            )
            if {changed, changed.strip(), "." + changed}.isdisjoint({word, *taken}):
                return changed

    def _arguments(self, param: Any, line: Line) -> None:
        if param.name in OVERRIDES:
            for _ in range(self.random.choice((0, 1, 1, 2, 2, 3, 5))):
                word, typo = self.override()
                line.words.append(word)
                if typo:
                    line.typos.append(word)
        elif self.random.random() < 0.9:
            line.words.append(self._path())

    def _path(self) -> str:
        return (
            self.random.choice(self.files)
            if self.random.random() < 0.7
            else self.random.choice(ODD)
        )

    def _option(self, param: Any, line: Line) -> None:
        draw = self.random
        line.words.append(draw.choice([*param.opts, *param.secondary_opts]))
        if param.is_flag:
            return
        kind = draw.random()
        number = any(kind in str(param.type_descriptor.annotation) for kind in ("int", "float"))
        if kind < 0.4:
            value = draw.choice([*SMALL, *self.files])
        elif kind < 0.65:
            value = draw.choice(HUGE)
            if number:
                line.typos.append(value)
        else:
            value = draw.choice(ODD)
        line.words.append(value)


def _commands(group: Any, prefix: tuple[str, ...]) -> list[tuple[tuple[str, ...], list[Any]]]:
    """Return every visible command with its parameters."""
    commands = []
    for name, command in group.commands.items():
        if hasattr(command, "commands"):
            commands += _commands(command, (*prefix, name))
        elif not command.hidden:
            commands.append(
                (
                    (*prefix, name),
                    [p for p in command.params if p.name not in ("help", "watch", "show", "check")],
                )
            )
    return commands
