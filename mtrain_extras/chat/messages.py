"""Check the messages of a conversation, and tell which of them the loss counts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mtrain_cli.config.schema import ConfigError

ASSISTANT, SYSTEM = "assistant", "system"
ROLES = (SYSTEM, "user", ASSISTANT, "tool")
_OTHER_ROLES = ("developer", "function")  # if the template knows them
SHAREGPT = "conversations"  # ShareGPT's key, whose messages have `from` and `value`
_ROLE_OF = {"human": "user", "gpt": ASSISTANT, "observation": "tool"}
USUAL_TOOLS = "tools"  # data.tools_key by default
OUT_OF_ORDER = "with roles out of order"
IN_SHAREGPT = "in ShareGPT's form (conversations with from and value)"
# {role: roles before it; None is the start}
_EARLIER = {
    "user": (None, "system", "developer", ASSISTANT),
    ASSISTANT: ("user", "tool", "function"),
    "tool": (ASSISTANT, "tool"),
    "function": (ASSISTANT, "function"),
    "system": (None,),
    "developer": (None, "system"),
}


@dataclass(frozen=True)
class Conversation:
    """A checked conversation.

    messages: as the template gets them.
    trained: whether the loss counts each message.
    whole: whether it also counts what the template writes between messages.
    notes: peculiarities, as in `StoreMeta.notes`.
    """

    messages: list[dict[str, Any]]
    trained: list[bool]
    whole: bool = False
    notes: tuple[str, ...] = ()


def read_conversation(value: Any, train_on: str, location: str) -> Conversation:
    """Return the conversation in a value of a record.

    Args:
        value: list of messages.
        train_on: value of data.train_on.
        location: file and record, for messages.

    Raises:
        ConfigError: a message is wrong, or the loss would count none.
    """
    if not isinstance(value, list):
        raise ConfigError(f"{location} holds {_kind(value)}, not a list of messages")
    if not value:
        raise ConfigError(f"{location}: the conversation has no messages")
    notes = set[str]()
    messages, flags = [], []
    value = _whole(value)
    for number, given in enumerate(value, 1):
        place = f"{location}, message {number}"
        if not isinstance(given, Mapping):
            raise ConfigError(f"{place}: is {_kind(given)}, not an object with role and content")
        message = _from_sharegpt(given) if "role" not in given and "from" in given else dict(given)
        if "from" in given and "role" not in given:
            notes.add(IN_SHAREGPT)
        flags.append(message.pop("train", None))
        if flags[-1] not in (None, True, False):
            raise ConfigError(f"{place}: train is {_kind(flags[-1])}, not true or false")
        # A table has every key in every message.
        messages.append({k: v for k, v in message.items() if v is not None or k == "content"})
        _check(messages[-1], place)
    if _out_of_order([message["role"] for message in messages]):
        notes.add(OUT_OF_ORDER)
    chosen = _chosen(messages, train_on)
    trained = [one if flag is None else bool(flag) for one, flag in zip(chosen, flags, strict=True)]
    if not any(trained):
        why = "no assistant message" if not any(chosen) else "train: false in each message"
        raise ConfigError(f"{location}: {why}, so nothing would be trained")
    return Conversation(messages, trained, train_on == "all", tuple(sorted(notes)))


def read_tools(value: Any, location: str) -> list[dict[str, Any]] | None:
    """Return the tools of a conversation, a list of objects or its JSON; None without."""
    if isinstance(value, str) and value.strip():
        try:
            value = json.loads(value)
        except (ValueError, RecursionError):
            raise ConfigError(f"{location}: its tools are text that is not JSON") from None
    if not value:
        return None
    value = _whole(value)
    if not isinstance(value, list) or not all(isinstance(tool, dict) for tool in value):
        raise ConfigError(f"{location}: its tools are {_kind(value)}, not a list of objects")
    return value


def names_of_tools(tools: list[dict[str, Any]] | None) -> Iterator[str]:
    """Yield the names of the functions that a conversation can call."""
    for tool in tools or ():
        function = tool.get("function", tool)
        if isinstance(function, dict) and isinstance(name := function.get("name"), str):
            yield name


def _whole(value: Any) -> Any:
    """Replace half of a surrogate pair, which JSON can hold and no tokenizer takes."""
    if isinstance(value, str):
        return value if value.isascii() else value.encode("utf-8", "replace").decode("utf-8")
    if isinstance(value, list):
        return [_whole(one) for one in value]
    if isinstance(value, dict):
        return {_whole(key): _whole(one) for key, one in value.items()}
    return value


def _from_sharegpt(given: Mapping[str, Any]) -> dict[str, Any]:
    rest = {key: item for key, item in given.items() if key not in ("from", "value")}
    role = given["from"]
    known = _ROLE_OF.get(role, role) if isinstance(role, str) else role
    return {"role": known, "content": given.get("value"), **rest}


def _check(message: Mapping[str, Any], place: str) -> None:
    role, content = message.get("role"), message.get("content")
    if role not in (*ROLES, *_OTHER_ROLES):
        shown = repr(role) if isinstance(role, str) else _kind(role)
        raise ConfigError(f"{place}: role {shown} is none of {', '.join(ROLES)}")
    others = message.keys() - {"role", "content"}
    is_empty = isinstance(content, str) and role == ASSISTANT and not content.strip()
    if (content is None or is_empty) and not others:
        raise ConfigError(f"{place}: has no content")
    if content is not None and not isinstance(content, str):
        parts = content if isinstance(content, list) else [None]
        if not all(isinstance(part, str | dict) for part in parts):
            raise ConfigError(f"{place}: content is {_kind(content)}, not text")


def _chosen(messages: Sequence[Mapping[str, Any]], train_on: str) -> list[bool]:
    """Return which messages ``data.train_on`` counts."""
    if train_on == "all":
        return [True] * len(messages)
    answers = [message["role"] == ASSISTANT for message in messages]
    if train_on == "last" and any(answers):
        last = len(answers) - 1 - answers[::-1].index(True)
        return [number == last for number in range(len(answers))]
    return answers


def _out_of_order(roles: Sequence[str]) -> bool:
    pairs: Iterator[tuple[str | None, str]] = zip((None, *roles), roles, strict=False)
    return any(before not in _EARLIER[role] for before, role in pairs)


def _kind(value: Any) -> str:
    names = {bool: "a boolean", int: "a number", float: "a number", list: "a list"}
    names |= {dict: "an object", str: "text", type(None): "null"}
    return names.get(type(value), f"a {type(value).__name__}")
