"""Find the trained messages in the text of a conversation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from mtrain_chat.messages import ASSISTANT, Conversation
from mtrain_chat.template import Span, Template
from mtrain_cli.config.schema import ConfigError


def render(
    template: Template, conversation: Conversation, tools: list[Any] | None, location: str
) -> tuple[str, list[Span]]:
    """Return the text of a conversation, and begin and end of each part that the loss counts.

    The template's marks tell where an answer is. Without them, the text up to an answer, with the
    generation prompt, and the text up to its end must begin the text of the whole conversation.

    Raises:
        ConfigError: neither way works, or the template refuses the conversation.
    """
    messages, trained = conversation.messages, conversation.trained
    text, marks = template.render(messages, tools, location)
    answers = [number for number, one in enumerate(messages) if one["role"] == ASSISTANT]
    wanted = [number for number, one in enumerate(trained) if one]
    if wanted == answers and template.has_marks(tools) and not conversation.whole:
        return text, marks
    marked = dict(zip(answers, marks, strict=True)) if len(marks) == len(answers) else {}

    def span(number: int) -> Span:
        if number in marked:
            return marked[number]
        return _by_prefixes(template, conversation, tools, number, text, location)

    if conversation.whole:
        left_out = [span(number) for number, one in enumerate(trained) if not one]
        return text, list(_between(left_out, len(text)))
    return text, [span(number) for number in wanted]


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
    begin, _ = template.render(messages[:number], tools, location, prompt=is_answer)
    end, _ = template.render(messages[: number + 1], tools, location)
    if not (text.startswith(end) and end.startswith(begin)):
        raise ConfigError(
            f"{location}: {template.name} writes message {number + 1} differently when others "
            "follow it, so its tokens cannot be told apart. Give data.chat_template=FILE with "
            "{% generation %} around the answers."
        )
    return len(begin), max(len(begin), len(end.rstrip()))


def _between(spans: list[Span], end: int) -> Iterator[Span]:
    """Yield the parts of a text of ``end`` characters that are in no span."""
    begin = 0
    for first, last in (*spans, (end, end)):
        if first > begin:
            yield begin, first
        begin = last
