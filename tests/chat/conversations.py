"""Conversations, and files of them."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

USER, ASSISTANT = "user", "assistant"
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "add_up",
            "description": "Add.",
            "parameters": {
                "type": "object",
                "properties": {"a": {"type": "number"}},
                "required": ["a"],
            },
        },
    }
]
CALL = [
    {"role": USER, "content": "One?"},
    {
        "role": ASSISTANT,
        "content": "",
        "tool_calls": [
            {
                "type": "function",
                "id": "abcdefghi",
                "function": {"name": "add_up", "arguments": {"a": 1}},
            }
        ],
    },
    {"role": "tool", "name": "add_up", "tool_call_id": "abcdefghi", "content": "2"},
    {"role": ASSISTANT, "content": "Two."},
]


def turns(*texts: str) -> list[dict[str, Any]]:
    """Return messages of a user and an assistant in turn."""
    return [
        {"role": ASSISTANT if number % 2 else USER, "content": text}
        for number, text in enumerate(texts)
    ]


def made_up(count: int, seed: int = 0) -> list[list[dict[str, Any]]]:
    """Return conversations of one to three answers, some with characters of several bytes."""
    rng = random.Random(seed)

    def say() -> str:
        words = (
            "".join(rng.choices("abcdefé😀", k=rng.randint(1, 5))) for _ in range(rng.randint(1, 8))
        )
        return " ".join(words)

    return [turns(*(say() for _ in range(2 * rng.randint(1, 3)))) for _ in range(count)]


def write(path: Path, conversations: list[Any], key: str = "messages") -> Path:
    """Write a .jsonl file with a conversation on each line. Return it."""
    lines = (json.dumps({key: conversation}) + "\n" for conversation in conversations)
    path.write_text("".join(lines), encoding="utf-8")
    return path
