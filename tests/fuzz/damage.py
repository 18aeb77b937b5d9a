"""Damage files: bytes, single values, structure."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path
from typing import Any

import yaml

VALUES = (
    None, [], {}, [[]], "", "x", "nan", -1, 0, 1e308, -1e308, float("inf"), float("nan"), 10**30,
    10**400, True, False, "1e999", "é" * 50, [1, "a", None], {"a": None}, {"value": None}, 0.5,
    "\x00", "\udcff", "../../../etc", 2**63, -(2**63),
)  # fmt: skip
DEEP = "[" * 4000 + "]" * 4000
DEEP_MAP = "{a: " * 2000 + "1" + "}" * 2000


def damage(draw: random.Random, path: Path) -> str:
    """Damage ``path`` and return a description of the damage."""
    kinds = ["cut", "flip", "insert", "empty", "nothing", "folder", "text", "tail", "binary"]
    structured = path.suffix in (".json", ".jsonl", ".yaml") or path.name in (".lock",)
    if structured:
        kinds += (
            ["value"] * 14 + ["key"] * 5 + ["deep", "deep_map", "list", "scalar", "tab", "anchor"]
        )
    kind = draw.choice(kinds)
    data = path.read_bytes()
    if kind in ("value", "key"):
        return f"{kind}: {_structure(draw, path, kind)}"
    if kind == "folder":
        path.unlink()
        path.mkdir()
    elif kind == "nothing":
        path.unlink()
    else:
        at = draw.randrange(len(data) + 1)
        path.write_bytes(
            {
                "cut": lambda: data[:at],
                "flip": lambda: bytes(
                    byte ^ (1 << draw.randrange(8))
                    if draw.random() < 3 / max(1, len(data))
                    else byte
                    for byte in data
                ),
                "insert": lambda: data[:at] + draw.randbytes(draw.choice((1, 4, 64))) + data[at:],
                "empty": lambda: b"",
                "text": lambda: b"this is no such file\n",
                "tail": lambda: data + b"\n}{ garbage \x00\n",
                "binary": lambda: draw.randbytes(300),
                "deep": lambda: DEEP.encode(),
                "deep_map": lambda: DEEP_MAP.encode(),
                "list": lambda: b"[1, 2, 3]",
                "scalar": lambda: draw.choice((b"3", b"null", b'"text"', b"1e999", b"true")),
                "tab": lambda: data[:at] + b"\n\t: : [\n" + data[at:],
                "anchor": lambda: b"a: &a [*a, *a]\nb: *nowhere\n" + data,
            }[kind]()
        )
    return kind


def _structure(draw: random.Random, path: Path, kind: str) -> str:
    text = path.read_text(errors="replace")
    if path.suffix == ".yaml":
        tree = yaml.safe_load(text)
        change = _change(draw, tree, kind)
        path.write_text(yaml.safe_dump(tree, allow_unicode=True), errors="surrogateescape")
        return change
    lines = text.splitlines() if path.suffix == ".jsonl" else [text]
    at = draw.randrange(max(1, len(lines)))
    try:
        tree = json.loads(lines[at])
    except (ValueError, IndexError):
        path.write_text(
            f"process {draw.choice(VALUES)} on {draw.choice(VALUES)}\n", errors="surrogateescape"
        )
        return "lock"
    change = _change(draw, tree, kind)
    lines[at] = json.dumps(tree)
    path.write_text("\n".join(lines) + "\n", errors="surrogateescape")
    return change


def _change(draw: random.Random, tree: Any, kind: str) -> str:
    """Replace, remove or rename something in a tree, and describe it."""
    places = list(_places(tree))
    if not places:
        return "nothing to change"
    holder, name = draw.choice(places)
    if kind == "value":
        value = draw.choice(VALUES)
        holder[name] = value
        return f"{name}={str(value)[:30]}"
    if isinstance(holder, dict) and draw.random() < 0.3:
        holder[f"{name}x"] = holder.pop(name)
        return f"renamed {name}"
    del holder[name]
    return f"without {name}"


def _places(tree: Any) -> Any:
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for name, value in items:
        yield tree, name
        yield from _places(value)


def copy_to(source: Path, target: Path) -> Path:
    """Copy ``source`` to ``target``, replacing it, and return the copy."""
    if target.is_dir():
        shutil.rmtree(target)
    elif target.exists():
        target.unlink()
    (shutil.copytree if source.is_dir() else shutil.copy)(source, target)
    return target
