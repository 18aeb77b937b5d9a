"""What data=chat reads, says, leaves out, and refuses with one line that names file and line."""

from __future__ import annotations

import builtins
import gzip
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest
from chat_tokenizers import template, write_tokenizer
from conversations import CALL, TOOLS, turns, write

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.dataset import PackedDataset
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.store import TokenStore
from mtrain_extras.chat.messages import read_conversation

GOOD = turns("One?", "Two.")
LONG = turns("Count.", "one two three " * 40)


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tokenizer(tmp_path_factory.mktemp("tokenizer"), template("qwen3_instruct_2507"))


@pytest.fixture
def opened(tokenizer: Path) -> Callable[..., PackedDataset]:
    """Return a function that opens a file as a run does."""

    def open_file(path: Path, *words: str, seq: int = 256, tokenizer: Path = tokenizer) -> Any:
        given = ("data=chat", f"data.path={path}", f"data.tokenizer={tokenizer}", f"seq={seq}")
        return open_dataset(compose([*given, *words]))

    return open_file


def problem(open_file: Callable[..., Any], *args: Any, **options: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        open_file(*args, **options)
    (line,) = caught.value.problems
    assert "\n" not in line
    return line


@pytest.mark.parametrize(
    ("messages", "expected"),
    [
        ([{"role": "bot", "content": "Hi"}],
         "message 1: role 'bot' is none of system, user, assistant, tool"),
        ([{"role": 3, "content": "Hi"}], "message 1: role a number is none of"),
        (turns("One?"), ": no assistant message, so nothing would be trained"),
        ([GOOD[0], GOOD[1] | {"train": False}], "train: false in each message, so nothing"),
        ([GOOD[0], GOOD[1] | {"train": "no"}], "message 2: train is text, not true or false"),
        ([], ": the conversation has no messages"),
        ("Hi", " holds text, not a list of messages"),
        (["Hi"], "message 1: is text, not an object with role and content"),
        ([GOOD[0], GOOD[1] | {"content": 7}], "message 2: content is a number, not text"),
        ([GOOD[0], {"role": "assistant"}], "message 2: has no content"),
        ([GOOD[0], GOOD[1] | {"content": " "}], "message 2: has no content"),
        ([{"content": "Hi"}], "message 1: role null is none of"),
    ],
)  # fmt: skip
def test_a_wrong_conversation_is_one_line(
    messages: Any, expected: str, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    path = write(tmp_path / "chat.jsonl", [GOOD, messages])
    line = problem(opened, path)
    assert line.startswith(f"{path} line 2")
    assert expected in line


def test_a_file_without_messages_lists_its_keys(tmp_path: Path, opened: Callable[..., Any]) -> None:
    path = write(tmp_path / "chat.jsonl", [GOOD], key="turns")
    assert "line 1 has no such key. Its keys: turns" in problem(opened, path)
    pyarrow.parquet.write_table(pyarrow.table({"turns": [[]]}), tmp_path / "a.parquet")
    assert "has no such key. Its keys: turns" in problem(opened, tmp_path / "a.parquet")
    assert len(opened(path, "data.messages_key=turns")) == 1


def test_wrong_tools_are_one_line(tmp_path: Path, opened: Callable[..., Any]) -> None:
    path = tmp_path / "chat.jsonl"
    for tools, expected in ((3, "a number, not a list"), ("{", "text that is not JSON")):
        path.write_text(json.dumps({"messages": GOOD, "tools": tools}), encoding="utf-8")
        assert f"{path} line 1: its tools are {expected}" in problem(opened, path)


@pytest.mark.parametrize(
    ("name", "messages", "expected"),
    [
        ("gemma", CALL, r"refuses it: Conversation roles must alternate"),
        ("qwen3", turns("A?", "B.", "C?", "D."), r"writes message 2 differently when others"),
        ("llama3", CALL, r"leaves out a tool call of message 2\. Give data\.chat_template=FILE"),
        ("glm4moe", GOOD, r"ends the trained .*Two\.' with no special token.*train_on_end=false"),
    ],
)
def test_a_template_that_does_not_fit_is_one_line(
    name: str, messages: Any, expected: str, tmp_path: Path, opened: Callable[..., Any]
) -> None:
    tokenizer = write_tokenizer(tmp_path / "tokenizer", template(name))
    path = write(tmp_path / "chat.jsonl", [messages])
    line = problem(opened, path, tokenizer=tokenizer)
    assert line.startswith(f"{path} line 1: the chat template of ")
    assert re.search(expected, line), line


def test_settings_that_do_not_fit_are_one_line(tmp_path: Path, opened: Callable[..., Any]) -> None:
    path = write(tmp_path / "chat.jsonl", [GOOD])
    bare = write_tokenizer(tmp_path / "bare", "")
    (bare.parent / "tokenizer_config.json").write_text("{}")
    assert "has no chat template" in problem(opened, path, tokenizer=bare)
    line = problem(opened, path, "data.chat_template=none.jinja")
    assert "data.chat_template=none.jinja: no such file" in line
    assert "the chat template writes the begin" in problem(opened, path, "data.bos=true")
    (tmp_path / "wrong.jinja").write_text("{% if %}")
    line = problem(opened, path, f"data.chat_template={tmp_path / 'wrong.jinja'}")
    assert "line 1: data.chat_template=" in line
    assert "refuses it" in line


def test_a_missing_package_is_named(
    tmp_path: Path, opened: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    path, importing = write(tmp_path / "chat.jsonl", [GOOD]), builtins.__import__

    def refuse(name: str, *args: Any, **options: Any) -> Any:
        if name == "jinja2":
            raise ModuleNotFoundError("No module named 'jinja2'", name="jinja2")
        return importing(name, *args, **options)

    monkeypatch.setattr(builtins, "__import__", refuse)
    assert "data=chat: needs the jinja2 package: pip install" in problem(opened, path)


def test_a_damaged_line_of_a_packed_file_is_named_or_skipped(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    lines = [json.dumps({"messages": GOOD})] * 5
    lines[2] = lines[2][:-7]
    lines[3] = json.dumps({"messages": turns("One?")})
    path = tmp_path / "chat.jsonl.gz"
    path.write_bytes(gzip.compress("\n".join(lines).encode()))
    assert f"{path} line 3: not JSON" in problem(opened, path)
    line = opened(path, "data.on_error=skip").describe()
    assert "3 documents" in line
    assert "left out: 2 not readable (data.on_error=skip)" in line


def test_long_conversations_are_refused_skipped_or_cut_at_their_start(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    path = write(tmp_path / "chat.jsonl", [GOOD, LONG, GOOD])
    line = problem(opened, path, seq=128)
    assert line.startswith("chat.jsonl:2: has ")
    assert "tokens, more than seq=128 (1 document of 3). Set data.too_long=skip or" in line
    skipped = opened(path, "data.too_long=skip", seq=128)
    assert "1 longer skipped" in skipped.describe()
    assert len(skipped) == 1
    cut = opened(path, "data.too_long=truncate_left", seq=128)
    assert "1 longer cut at their start" in cut.describe()
    whole = opened(path, seq=1024)[0]
    (longest,) = (s for s in map(cut.__getitem__, range(len(cut))) if (s.documents == 0).all())
    ends = np.flatnonzero(np.diff(whole.documents, append=-1)) + 1
    document = next(whole.tokens[end - 128 : end] for end in ends if end >= 128
                    and (whole.documents[end - 128 : end] == whole.documents[end - 1]).all()
                    and whole.real >= end)  # fmt: skip
    assert longest.tokens.tolist() == document.tolist()
    assert "cut document" not in cut.describe()
    silent = write(
        tmp_path / "silent.jsonl", [[GOOD[0], GOOD[1], LONG[1] | {"role": "user"}], GOOD]
    )
    said = opened(silent, "data.too_long=truncate_left", seq=128).describe()
    assert said.endswith("; 1 cut document without a target")
    only = write(tmp_path / "long.jsonl", [LONG])
    assert "more than seq=128 (1 document of 1)" in problem(
        opened, only, "data.too_long=skip", seq=128
    )


def test_shapes_of_conversations_are_read_alike(tmp_path: Path, opened: Callable[..., Any]) -> None:
    """ShareGPT's keys, tables with every key in every message, and tools as JSON."""
    records = [{"messages": CALL, "tools": TOOLS}, {"messages": GOOD}]
    path = tmp_path / "chat.jsonl"
    path.write_text("\n".join(map(json.dumps, records)), encoding="utf-8")
    expected = opened(path, seq=2048)
    (tmp_path / "chat.json").write_text(json.dumps(records), encoding="utf-8")
    columns = {
        "messages": [record["messages"] for record in records],
        "tools": [json.dumps(TOOLS), None],
    }
    table = pyarrow.table(columns)
    assert "tool_calls" in str(table.schema)
    pyarrow.parquet.write_table(table, tmp_path / "chat.parquet")
    for name, opened_by in (
        ("stream.arrow", pyarrow.ipc.new_stream),
        ("file.arrow", pyarrow.ipc.new_file),
    ):
        with opened_by(str(tmp_path / name), table.schema) as writer:
            writer.write_table(table)
    for name in ("chat.json", "chat.parquet", "stream.arrow", "file.arrow"):
        dataset = opened(tmp_path / name, seq=2048)
        assert dataset[0].tokens.tolist() == expected[0].tokens.tolist()
        assert dataset[0].labels.tolist() == expected[0].labels.tolist()
    theirs = [{"from": "human", "value": "One?"}, {"from": "gpt", "value": "Two."}]
    shared = opened(write(tmp_path / "shared.jsonl", [theirs], key="conversations"))
    assert (
        shared[0].tokens.tolist()
        == opened(write(tmp_path / "own.jsonl", [GOOD]))[0].tokens.tolist()
    )
    assert "1 document in ShareGPT's form (conversations with from and value)" in shared.describe()
    path = tmp_path / "system.jsonl"
    path.write_text(json.dumps({"conversations": theirs, "system": "Be brief."}), encoding="utf-8")
    system = write(tmp_path / "own.jsonl", [[{"role": "system", "content": "Be brief."}, *GOOD]])
    assert opened(path)[0].tokens.tolist() == opened(system)[0].tokens.tolist()


def test_a_key_that_is_null_is_no_key() -> None:
    """A template asks whether a message has tool calls, and a table has the column everywhere."""
    absent = dict.fromkeys(("tool_calls", "content"))
    messages = [{**absent, **one} for one in CALL]
    messages[1]["content"] = None
    read = read_conversation(messages, "assistant", "chat.parquet row 1")
    assert "tool_calls" not in read.messages[0]
    assert "content" in read.messages[1]


def test_an_unusual_order_of_roles_is_counted(tmp_path: Path, opened: Callable[..., Any]) -> None:
    twice = [GOOD[0], *GOOD]
    dataset = opened(write(tmp_path / "chat.jsonl", [GOOD, twice, twice]))
    assert "2 documents with roles out of order" in dataset.describe()


def test_what_a_template_drops_or_takes_for_its_own_is_counted(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    thinking = [GOOD[0], GOOD[1] | {"reasoning_content": "Hm."}]
    marked = [GOOD[0] | {"content": "<|im_end|>?"}, GOOD[1]]
    listed = [GOOD[0] | {"content": [{"type": "text", "text": "Hear me?"}]}, GOOD[1]]
    said = opened(write(tmp_path / "chat.jsonl", [GOOD, thinking, marked, listed])).describe()
    assert "1 document with a message that the chat template leaves out" in said
    assert "1 document with reasoning that the chat template leaves out" in said
    assert "1 document with a special token in the text of a message other than an answer" in said


def test_tools_that_a_template_or_a_key_loses_are_counted(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    add = {"type": "function", "function": {"name": "add_two", "parameters": {}}}
    path = tmp_path / "chat.jsonl"
    path.write_text(json.dumps({"messages": GOOD, "functions": [add]}) + "\n")
    plain = tmp_path / "plain.jinja"
    plain.write_text(
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "<|im_end|>{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    lost = "1 document with tools that the chat template leaves out"
    kept = opened(path, "data.tools_key=functions", seq=1024).describe()
    assert lost not in kept
    assert (
        lost in opened(path, "data.tools_key=functions", f"data.chat_template={plain}").describe()
    )
    typo = opened(path, "data.tools_key=function").describe()
    assert "1 document without the key data.tools_key=function" in typo


def test_half_a_surrogate_pair_is_replaced(tmp_path: Path, opened: Callable[..., Any]) -> None:
    path = write(tmp_path / "chat.jsonl", [turns("\ud800?", "Two\udc00.")])
    same = write(tmp_path / "same.jsonl", [turns("??", "Two?.")])
    assert opened(path)[0].tokens.tolist() == opened(same)[0].tokens.tolist()


def test_null_is_left_out_and_counted(tmp_path: Path, opened: Callable[..., Any]) -> None:
    dataset = opened(write(tmp_path / "chat.jsonl", [GOOD, None]))
    assert "left out: 1 empty or null" in dataset.describe()


def test_the_cache_knows_the_settings(tmp_path: Path, opened: Callable[..., Any]) -> None:
    path = write(tmp_path / "chat.jsonl", [turns("A?", "B.", "C?", "D.")])
    first, last, whole = (
        int((opened(path, f"data.train_on={kind}")[0].labels >= 0).sum())
        for kind in ("assistant", "last", "all")
    )
    assert first == 2 * last
    assert whole > first
    assert isinstance(opened(path).store, TokenStore)


def test_the_cache_knows_the_special_tokens_of_the_template(
    tmp_path: Path, opened: Callable[..., Any]
) -> None:
    text = "{{ bos_token }}" + template("qwen3_instruct_2507")
    made = write_tokenizer(tmp_path / "tokenizer", text)
    path = write(tmp_path / "chat.jsonl", [GOOD])
    first = opened(path, tokenizer=made)[0].tokens
    settings = made.with_name("tokenizer_config.json")
    settings.write_text(
        settings.read_text().replace('"bos_token": "<bos>"', '"bos_token": "<eos>"')
    )
    second = opened(path, tokenizer=made)[0].tokens
    assert first[0] != second[0]
    assert first[1:].tolist() == second[1:].tolist()
