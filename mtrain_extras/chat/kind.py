"""The entry point of `data=chat`."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from mtrain_cli.config.data_kinds import DataKind
from mtrain_cli.config.schema import Config, ConfigError, DataConfig
from mtrain_cli.data.corpora import Corpus
from mtrain_cli.data.text_files import record_corpus
from mtrain_cli.data.token_documents import Fields, RecordKey, TokenDocument, TokenFields
from mtrain_cli.data.tokenizers import NO_BEGIN, Tokenizer
from mtrain_extras.chat.arrow_files import read_arrow
from mtrain_extras.chat.encoder import Encoder, tokens_of
from mtrain_extras.chat.messages import (
    ASSISTANT,
    SHAREGPT,
    SYSTEM,
    USUAL_TOOLS,
    names_of_tools,
    read_conversation,
    read_tools,
)
from mtrain_extras.chat.spans import lacks_reasoning, left_out, render
from mtrain_extras.chat.template import TODAY, Template, open_template

REASONING = "with reasoning that the chat template leaves out"
LEFT_OUT = "with a message that the chat template leaves out"
UNMARKED = "with fewer parts that the chat template marks than answers"
TOOLS = "with tools that the chat template leaves out"
SPECIAL = "with a special token in the text of a message other than an answer"
_SHOWN = 40  # characters of the end of an answer in a message


@dataclass(frozen=True)
class ChatFields(Fields):
    """Reads conversations from records, as token ids and targets."""

    data: DataConfig
    template: Template
    encoder: Encoder
    skips: bool = False

    @property
    def keys(self) -> tuple[RecordKey, ...]:
        return (RecordKey(self.data.messages_key, "data.messages_key"),)

    @property
    def others(self) -> tuple[str, ...]:  # type: ignore[override]
        return (SHAREGPT, SYSTEM, self.data.tools_key)

    @property
    def identity(self) -> str:
        data, template = self.data, self.template
        settings = data.messages_key, data.tools_key, data.train_on, data.train_on_end, self.skips
        written = str(TODAY), template.text, template.with_tools, template.variables
        return repr(("chat 1", settings, written))

    def absent(self, present: Iterable[str]) -> RecordKey | None:
        return None if SHAREGPT in present else super().absent(present)

    def read(self, record: Mapping[str, Any], location: str) -> TokenDocument | None:
        value = record.get(self.data.messages_key)
        if value is None:
            value = record.get(SHAREGPT)
            if isinstance(value, list) and record.get(SYSTEM):  # beside ShareGPT's messages
                value = [{"from": SYSTEM, "value": record[SYSTEM]}, *value]
        if value is None:
            return None
        conversation = read_conversation(value, self.data.train_on, location)
        tools = read_tools(record.get(self.data.tools_key), location)
        text, spans = render(self.template, conversation, tools, location)
        ids, places = self.encoder.encode(text, location)
        targets = np.zeros(ids.size, bool)
        for span in spans:
            tokens = tokens_of(span, places)
            targets[tokens] = True
            if self.data.train_on_end and not conversation.whole:
                self._require_end(ids[tokens], text[slice(*span)], location)
        if not targets[1:].any():
            raise ConfigError(
                f"{location}: {self.template.name} marks no token of an answer, so nothing would "
                "be trained"
            )
        notes = [*conversation.notes]
        if self.data.tools_key != USUAL_TOOLS and self.data.tools_key not in record:
            notes.append(f"without the key data.tools_key={self.data.tools_key}")
        if any(name not in text for name in names_of_tools(tools)):
            notes.append(TOOLS)
        if any(lacks_reasoning(message, text) for message in conversation.messages):
            notes.append(REASONING)
        questions = zip(conversation.messages, conversation.trained, strict=True)
        if any(left_out(message, text) for message, trained in questions if not trained):
            notes.append(LEFT_OUT)
        if len(spans) < sum(conversation.trained) and not conversation.whole:
            notes.append(UNMARKED)
        special = self.encoder.special_texts(ids)
        others = (m.get("content") for m in conversation.messages if m["role"] != ASSISTANT)
        if any(one in said for said in others if isinstance(said, str) for one in special):
            notes.append(SPECIAL)
        return TokenDocument(ids, targets=targets, notes=tuple(notes))

    def _require_end(self, ids: np.ndarray, text: str, location: str) -> None:
        """Raise ConfigError unless a part of a text ends with a special token."""
        if not self.encoder.specials.size or not ids.size:
            return
        is_special = np.isin(ids, self.encoder.specials)
        after = text[len(text.rstrip()) :]
        blank = self.encoder.encode(after, location)[0].size if after else 0
        if is_special[-1 - blank :].any():
            return
        raise ConfigError(
            f"{location}: {self.template.name} ends the trained {text[-_SHOWN:]!r} with no special "
            "token, so the model would not learn to stop. Give data.chat_template=FILE with the "
            "end token inside {% generation %}, or set data.train_on_end=false."
        )


class _Chat(DataKind):
    expected = "a .jsonl, .json, .parquet or .arrow file of conversations, or a folder of them"
    keys = (
        "messages_key", "tools_key", "chat_template", "train_on", "train_on_end", "too_long",
        "on_error",
    )  # fmt: skip

    def problems(self, config: Config) -> Iterator[str]:
        if config.data.bos != "auto":
            yield "{data.bos}: the chat template writes the begin token; leave it out"
        choice = config.data.chat_template
        if choice != "auto" and not Path(choice).expanduser().is_file():
            yield "{data.chat_template}: no such file; give a Jinja file, or auto"

    def corpus(self, data: DataConfig, tokenizer: Tokenizer) -> Corpus:
        assert data.path is not None
        template = open_template(data.chat_template, data.tokenizer)
        tokenizer.eos, tokenizer.begin = None, NO_BEGIN  # the template writes both
        fields = ChatFields(data, template, Encoder(tokenizer), data.on_error == "skip")
        corpus = record_corpus(data.path, "data.path", fields, {".arrow": read_arrow})
        if not fields.skips:  # a wrong template or file ends the run before its workers start
            next(corpus.units[0].documents(0), None)
        key = fields.keys[0]
        signature = hashlib.sha256(f"{corpus.signature}\n{fields.identity}".encode()).hexdigest()
        stored = TokenFields(key, targets=key, whole=True)
        return replace(corpus, fields=stored, signature=signature)


CHAT = _Chat()
