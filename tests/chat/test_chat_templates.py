"""Which tokens of a conversation the loss counts, for the templates that TRL ships."""

from __future__ import annotations

import re
import warnings
from collections import Counter
from dataclasses import replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tokenizers
import transformers
import trl
from chat_tokenizers import TEMPLATES, template, write_tokenizer
from conversations import CALL, TOOLS, made_up, turns
from trl.chat_template_utils import is_chat_template_stop_token_trained

from mtrain_cli.config.schema import Config, ConfigError
from mtrain_cli.data.token_documents import TokenDocument
from mtrain_cli.data.tokenizers import open_tokenizer
from mtrain_extras.chat.encoder import Encoder, tokens_of
from mtrain_extras.chat.kind import ChatFields
from mtrain_extras.chat.template import open_template

NAMES = sorted(path.stem for path in TEMPLATES.glob("*.jinja"))
TALK = turns("One?", "Two.", "Three?", "Four.")
# What a row of the table in docs/data.md says, and how the message of a refusal names it.
REFUSALS = {
    "an answer changes when others follow": "differently when others follow",
    "no special token ends an answer": "with no special token",
    "a text or a tool call is left out": "leaves out",
    "the template raises an error": "refuses it",
}


def opened(folder: Path, config: Config, text: str, **data: Any) -> ChatFields:
    path = str(write_tokenizer(folder, text))
    settings = replace(config.data, kind="chat", tokenizer=path, **data)
    return ChatFields(settings, open_template("auto", path), Encoder(open_tokenizer(path)))


def read(fields: ChatFields, messages: list[Any], tools: list[Any] | None = None) -> TokenDocument:
    document = fields.read({"messages": messages, "tools": tools}, "chat.jsonl line 1")
    assert document is not None
    return document


def trained(fields: ChatFields, document: TokenDocument) -> list[str]:
    """Return the texts of the trained parts of a document."""
    tokenizer, targets = open_tokenizer(fields.data.tokenizer), document.targets
    assert targets is not None
    parts = np.split(np.arange(targets.size), np.flatnonzero(np.diff(targets)) + 1)
    return [tokenizer.decode(document.ids[part]) for part in parts if targets[part[0]]]


def outcome(fields: ChatFields, messages: list[Any], tools: list[Any] | None) -> str:
    try:
        parts = trained(fields, read(fields, messages, tools))
    except ConfigError as error:
        (problem,) = error.problems
        return next(row for row, words in REFUSALS.items() if words in problem)
    says = ["Two."] * bool(tools) or ["Two.", "Four."]
    assert all(any(one in part for part in parts) for one in says)
    assert not any("?" in part for part in parts)
    assert "add_up" in parts[0] or not tools
    return "marks" if fields.template.has_marks(tools) else "prefixes"


@pytest.mark.skipif(not trl.__version__.startswith("1.16."), reason="TRL ships other templates")
def test_the_table_of_templates_is_true(tmp_path: Path, base_config: Config) -> None:
    counts: dict[str, Counter[str]] = {"talk": Counter(), "tools": Counter()}
    for name in NAMES:
        fields = opened(tmp_path / name, base_config, template(name))
        counts["talk"][outcome(fields, TALK, None)] += 1
        counts["tools"][outcome(fields, CALL, TOOLS)] += 1
    page = Path(__file__).parents[2].joinpath("docs", "data.md").read_text(encoding="utf-8")
    rows = dict.fromkeys(("marks", "prefixes", *REFUSALS))
    for row in rows:
        found = re.search(rf"^\| {row}[^|]*\| (\d+) \| (\d+) \|$", page, re.MULTILINE)
        assert found, row
        assert (int(found[1]), int(found[2])) == (counts["talk"][row], counts["tools"][row]), row


def set_clock(monkeypatch: pytest.MonkeyPatch, now: datetime) -> None:
    """Set what transformers takes for now."""

    class Clock(datetime):
        @classmethod
        def now(cls, *_: Any) -> datetime:  # type: ignore[override]
            return now

    monkeypatch.setattr(transformers.utils.chat_template_utils, "datetime", Clock)


@pytest.mark.parametrize("name", [name for name in NAMES if "strftime_now" in template(name)])
def test_tokens_are_the_same_on_every_day(
    name: str, tmp_path: Path, base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    fields, text = opened(tmp_path, base_config, template(name)), []
    tokenizer = open_tokenizer(fields.data.tokenizer)
    for day in (1, 2):
        set_clock(monkeypatch, datetime(2030, 1, day))
        text.append(tokenizer.decode(read(fields, turns("One?", "Two.")).ids))
    assert text[0] == text[1]
    assert "26 Jul 2024" in text[0] or "2024-07-26" in text[0]
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert "2030" in theirs.apply_chat_template(TALK, tokenize=False)  # keeps its own clock
    set_clock(monkeypatch, datetime(2024, 7, 26))
    assert text[0] == theirs.apply_chat_template(turns("One?", "Two."), tokenize=False)


@pytest.mark.parametrize("name", [name for name in NAMES if name.endswith("_training")])
def test_marks_equal_those_of_transformers(
    name: str, tmp_path: Path, base_config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Or mtrain refuses what TRL does not train to stop, or what has no text."""
    set_clock(monkeypatch, datetime(2024, 7, 26))
    fields = opened(tmp_path, base_config, template(name))
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path)
    for messages in (TALK, *made_up(3)):
        try:
            own = read(fields, messages)
        except ConfigError as error:
            (problem,) = error.problems
            with warnings.catch_warnings(action="ignore"):
                stops = is_chat_template_stop_token_trained(theirs)
            assert not stops or "leaves out" in problem or "refuses it" in problem
            continue
        one = theirs.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=True
        )
        assert own.ids.tolist() == one["input_ids"]
        assert own.targets.astype(int).tolist() == one["assistant_masks"]


@pytest.mark.parametrize("name", ["qwen3_instruct_2507", "qwen3_vl", "gemma3"])
def test_prefixes_give_what_the_marked_template_marks(
    name: str, tmp_path: Path, base_config: Config
) -> None:
    """Without the line break after the end token, which nothing generates."""
    plain = opened(tmp_path / "plain", base_config, template(name))
    marked = opened(tmp_path / "marked", base_config, template(f"{name}_training"))
    for messages in (TALK, *made_up(3)):
        expected = [part.rstrip() for part in trained(marked, read(marked, messages))]
        assert trained(plain, read(plain, messages)) == expected


def test_messages_decide_for_themselves(tmp_path: Path, base_config: Config) -> None:
    text = template("qwen3_instruct_2507_training")
    messages = turns("One?", "Two.", "Three?", "Four.")

    def parts(train_on: str, **flags: bool) -> list[str]:
        fields = opened(tmp_path, base_config, text, train_on=train_on)
        given = [
            message | ({"train": flags[f"at{number}"]} if f"at{number}" in flags else {})
            for number, message in enumerate(messages)
        ]
        return [
            part.replace("<|im_end|>", ".").strip() for part in trained(fields, read(fields, given))
        ]

    assert parts("assistant") == ["Two..", "Four.."]
    assert parts("last") == ["Four.."]
    assert parts("assistant", at1=False) == ["Four.."]
    assert parts("last", at1=True) == ["Two..", "Four.."]
    assert parts("assistant", at2=True, at3=False) == ["Two..\n<|im_start|>user\nThree?."]
    (whole,) = parts("all")
    assert whole.count("<|im_start|>") == 4
    assert [("Three" in part, "One" in part) for part in parts("all", at2=False)] == [
        (False, True),
        (False, False),
    ]
    with pytest.raises(ConfigError, match=r"line 1: train: false in each message, so nothing"):
        parts("assistant", at1=False, at3=False)


def test_the_first_message_can_go_untrained(tmp_path: Path, base_config: Config) -> None:
    """Templates that look into the first message cannot write none."""
    untrained = [TALK[0] | {"train": False}, *TALK[1:]]
    for name in ("qwen2_5", "llama3_1", "qwen3_instruct_2507_training"):
        fields = opened(tmp_path / name, base_config, template(name), train_on="all")
        (part,) = trained(fields, read(fields, untrained))
        assert [said["content"] in part for said in TALK] == [False, True, True, True]
        assert "system" not in part


@pytest.mark.parametrize(
    ("name", "messages", "untrained", "way"),
    [
        ("qwen2_5", TALK[1:], 0, r"\(list .* 0\).*Give .*=FILE with {% generation %} around"),
        ("qwen3_6", [{"role": "system", "content": "Hm."}, *TALK], 0,
         r"\(No user query found in messages\).*Leave out \"train\" in it, or give another"),
    ],
)  # fmt: skip
def test_a_template_that_needs_the_messages_that_follow_is_named(
    name: str, messages: Any, untrained: int, way: str, tmp_path: Path, base_config: Config
) -> None:
    fields = opened(tmp_path, base_config, template(name), train_on="all")
    given = [m | {"train": n != untrained} for n, m in enumerate(messages)]
    expected = (
        r"line 1: the chat template of .* cannot write the conversation only up to message 1 "
    )
    with pytest.raises(ConfigError, match=expected + way):
        read(fields, given)


def test_special_tokens_are_ids_and_begin_comes_once(tmp_path: Path, base_config: Config) -> None:
    text = "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    fields = opened(tmp_path, base_config, text)
    ids = read(fields, turns("Hi", "Ho")).ids.tolist()
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert [ids[1], ids[4]] == tokenizer.convert_tokens_to_ids(["<|im_start|>", "<|im_end|>"])


def test_an_answer_must_end_with_a_special_token(tmp_path: Path, base_config: Config) -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}<|im_end|>{% endfor %}"
    )
    fields = opened(tmp_path, base_config, text)
    with pytest.raises(ConfigError, match=r"ends the trained 'Two\.' with no special token.*false"):
        read(fields, TALK)
    assert trained(fields, read(fields_of(fields, train_on_end=False), TALK)) == ["Two.", "Four."]


def test_a_template_must_mark_each_answer(tmp_path: Path, base_config: Config) -> None:
    """It may leave out an answer without text, which is a tool call."""
    text = (
        "{% for m in messages %}<|im_start|>{% if m.role == 'assistant' and CONDITION %}"
        "{% generation %}{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endgeneration %}"
        "{% else %}{{ m.content }}{{ m.tool_calls }}<|im_end|>{% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>{% endif %}"
    )
    last = opened(tmp_path / "last", base_config, text.replace("CONDITION", "loop.last"))
    problem = (
        r"^chat\.jsonl line 1: the chat template of .* marks 1 parts? for 2 answers, and not the "
        r"text of each.*data\.chat_template=FILE with .* or set data\.train_on=last"
    )
    for messages in (TALK, turns("One?", "Yes.", "Three?", "Yes."), turns("A?", "B", "C?", "ABC")):
        with pytest.raises(ConfigError, match=problem):
            read(last, messages)
        fields = fields_of(last, train_on="last")
        assert trained(fields, read(fields, messages)) == [messages[3]["content"] + "<|im_end|>"]
    texts = opened(tmp_path / "texts", base_config, text.replace("CONDITION", "m.content"))
    document = read(texts, CALL)
    assert trained(texts, document) == ["Two.<|im_end|>"]
    assert document.notes == ("with fewer parts that the chat template marks than answers",)


def test_a_special_token_elsewhere_does_not_end_an_answer(
    tmp_path: Path, base_config: Config
) -> None:
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}<|im_start|>"
        "{{ m.content }}END{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    for end, stops in (("", False), ("<|im_end|>!", False), ("<|im_end|>\n", True)):
        fields = opened(tmp_path, base_config, text.replace("END", end))
        if stops:
            assert len(trained(fields, read(fields, TALK))) == 2
            continue
        with pytest.raises(ConfigError, match="with no special token"):
            read(fields, TALK)


def test_an_answer_without_a_token_to_predict_is_refused(
    tmp_path: Path, base_config: Config
) -> None:
    """The first token of a document has none before it, so nothing predicts it."""
    text = (
        "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}"
        "{% endgeneration %}{% else %}{{ m.content }}{% endif %}{% endfor %}"
    )
    fields = fields_of(opened(tmp_path, base_config, text), train_on_end=False)
    silent = {"role": "assistant", "content": "", "reasoning_content": "Hm."}
    for messages in ([{"role": "assistant", "content": "B"}, TALK[0]], [TALK[0], silent]):
        with pytest.raises(
            ConfigError, match=r"line 1: .* marks no token of an answer, so nothing"
        ):
            read(fields, messages)


def test_a_token_has_the_white_space_before_it(tmp_path: Path) -> None:
    """Some tokenizers leave it out of the place of the token."""
    made = tokenizers.Tokenizer(
        tokenizers.models.BPE({"a": 0, "w": 1, "\u0120": 2, "\u0120w": 3}, [("\u0120", "w")])
    )
    made.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.post_processor = tokenizers.processors.ByteLevel(trim_offsets=True)
    made.save(str(tmp_path / "tokenizer.json"))
    ids, places = Encoder(open_tokenizer(str(tmp_path / "tokenizer.json"))).encode("a w", "")
    assert ids.tolist() == [0, 3]
    assert places.tolist() == [[0, 1], [1, 3]]
    assert tokens_of((1, 2), places).tolist() == [1]


def fields_of(fields: ChatFields, **data: Any) -> ChatFields:
    return replace(fields, data=replace(fields.data, **data))


def test_a_template_cannot_leave_its_sandbox(tmp_path: Path, base_config: Config) -> None:
    for code in ("{{ ''.__class__.__mro__ }}", "{{ messages.append(1) }}", "{% include 'a' %}"):
        fields = opened(tmp_path, base_config, code)
        with pytest.raises(ConfigError, match=r"line 1: the chat template of .* (refuses|leaves)"):
            read(fields, TALK)
