"""Find the trained messages in the text of a conversation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import with_count
from mtrain_extras.chat.messages import ASSISTANT, Conversation
from mtrain_extras.chat.template import REFUSES, Span, Template

_REASONING = ("reasoning_content", "thinking", "reasoning")  # the names that transformers knows
_CHECKED = 32  # characters at the end of an answer that the text must have


def render(
    template: Template, conversation: Conversation, tools: list[Any] | None, location: str
) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and begin and end of each part that the loss counts.

    The template's marks tell where an answer is. Without them, the text up to an answer, with the
    generation prompt, and the text up to its end must begin the text of the whole conversation.

    Raises:
        ConfigError: neither way works, or the template refuses the conversation, or it leaves out
            what an answer says or does not mark it.
    """
    text, marks = template.render(conversation.messages, tools, location)
    spans = list(_spans(template, conversation, tools, text, marks, location))
    wanted = [number for number, one in enumerate(conversation.trained) if one]
    whole = [(0, len(text))] * len(wanted)
    parts = whole if conversation.whole or len(spans) != len(wanted) else spans
    for number, part in zip(wanted, parts, strict=True):
        if lost := left_out(conversation.messages[number], text[slice(*part)]):
            raise ConfigError(
                f"{location}: {template.name} leaves out {lost} of message {number + 1}. Give "
                "data.chat_template=FILE with a template that writes it."
            )
    marked = "".join(text[slice(*span)] for span in spans)
    if parts is whole and not conversation.whole and not _holds(marked, conversation, wanted):
        count = with_count(len(spans), "part")
        raise ConfigError(
            f"{location}: {template.name} marks {count} for {len(wanted)} answers, and not the "
            "text of each. Give data.chat_template=FILE with {% generation %} around each, or set "
            "data.train_on=last."
        )
    return text, spans


def _holds(marked: str, conversation: Conversation, wanted: list[int]) -> bool:
    """Return whether a text has those of messages in their order. A template may mark no calls."""
    begin = 0
    for number in wanted:
        for said in _said(conversation.messages[number]):
            found = marked.find(said, begin)
            if found < 0:
                return False
            begin = found + len(said)
    return True


def _spans(
    template: Template,
    conversation: Conversation,
    tools: list[Any] | None,
    text: str,
    marks: list[Span],
    location: str,
) -> Iterator[Span]:
    """Yield the parts that the loss counts. marks: what the template marks."""
    answers = [n for n, one in enumerate(conversation.messages) if one["role"] == ASSISTANT]
    flags = conversation.trained
    if len(marks) != len(answers):  # a template may mark an answer and its end one by one
        marks = _joined(marks)
    marked = dict(zip(answers, marks, strict=True)) if len(marks) == len(answers) else {}
    if marks and not conversation.whole and [n for n, one in enumerate(flags) if one] == answers:
        yield from marks
        return
    begin = 0
    for number, flag in enumerate(flags):
        if flag != conversation.whole:
            first, last = marked.get(number) or _by_prefixes(
                template, conversation, tools, number, text, location
            )
            if not conversation.whole:
                yield first, last
            elif first > begin:
                yield begin, first
            begin = last
    if conversation.whole and begin < len(text):
        yield begin, len(text)


def _joined(spans: list[Span]) -> list[Span]:
    """Join parts that touch."""
    joined: list[Span] = []
    for begin, end in spans:
        if joined and joined[-1][1] == begin:
            begin = joined.pop()[0]
        joined.append((begin, end))
    return joined


def left_out(message: Mapping[str, Any], text: str) -> str:
    """Return what a message has and the text of its conversation lacks; "" if nothing."""
    if any(said[-_CHECKED:] not in text for said in _said(message)):
        return "the text"
    calls = message.get("tool_calls")
    for call in calls if isinstance(calls, list) else ():
        function = call.get("function", call) if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        if isinstance(name, str) and name not in text:
            return "a tool call"
    return ""


def _said(message: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts of a message without reasoning.

    A template may write reasoning elsewhere, or leave out that of earlier answers.
    """
    content = message.get("content")
    for part in content if isinstance(content, list) else [content]:
        said = part.get("text") if isinstance(part, dict) else part
        if isinstance(said, str):
            yield said.rpartition("</think>")[2].strip()


def lacks_reasoning(message: Mapping[str, Any], text: str) -> bool:
    """Return whether the text of a conversation lacks the reasoning of an answer."""
    given = (message.get(key) for key in _REASONING)
    return any(isinstance(one, str) and one.strip()[-_CHECKED:] not in text for one in given)


def _by_prefixes(
    template: Template,
    conversation: Conversation,
    tools: list[Any] | None,
    number: int,
    text: str,
    location: str,
) -> Span:
    messages = conversation.messages
    is_answer = messages[number]["role"] == ASSISTANT
    way = "Give data.chat_template=FILE with {% generation %} around the answers."
    if not is_answer:
        way = 'Leave out "train" in it, or give another data.chat_template=FILE.'
    begin = ""  # what a template writes before the first message belongs to that, untrained
    try:
        if number or is_answer or not conversation.whole:
            begin, _ = template.render(messages[:number], tools, location, prompt=is_answer)
        end, _ = template.render(messages[: number + 1], tools, location)
    except ConfigError as error:
        reason = str(error).rpartition(REFUSES)[2].rstrip(".")
        raise ConfigError(
            f"{location}: {template.name} cannot write the conversation only up to message "
            f"{number + 1} ({reason}), so its tokens cannot be told apart. {way}"
        ) from None
    if not (text.startswith(end) and end.startswith(begin)):
        raise ConfigError(
            f"{location}: {template.name} writes message {number + 1} differently when others "
            f"follow it, so its tokens cannot be told apart. {way}"
        )
    return len(begin), max(len(begin), len(end.rstrip()))
