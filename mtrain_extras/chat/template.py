"""The chat template of a tokenizer, which writes a conversation as one text.

transformers renders it in a sandbox of Jinja, in which a template cannot run other code.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import date
from pathlib import Path
from typing import Any

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.checked_files import explain_read_errors

Span = tuple[int, int]
_MARKS = re.compile(r"\{%-?\s*generation\s*-?%\}")
REFUSES = " refuses it: "
_LONGEST_REASON = 300  # characters
# The day that a template takes for today, so that the tokens are the same on every day: the one
# that the templates of Llama 3.1 and 3.2 write where they cannot ask.
TODAY = date(2024, 7, 26)
_NOW = "strftime_now"  # the function that transformers gives to templates


@dataclass(frozen=True)
class Template:
    """A chat template.

    text: Jinja.
    with_tools: Jinja for conversations with tools; "" for the same.
    name: what the user calls it, for messages.
    variables: text of the special tokens, such as bos_token.
    """

    text: str
    name: str
    with_tools: str = ""
    variables: Mapping[str, str] = field(default_factory=dict)

    def has_marks(self, tools: Sequence[Any] | None) -> bool:
        """Return whether it marks the answers with ``{% generation %}``."""
        return bool(_MARKS.search(self._of(tools)))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Any] | None,
        location: str,
        *,
        prompt: bool = False,
    ) -> tuple[str, list[Span]]:
        """Return the text of a conversation, and begin and end of what the template marks.

        Args:
            location: file and record, for messages.
            prompt: whether the text ends with the beginning of an answer.

        Raises:
            ConfigError: the template refuses the conversation, or is wrong.
        """
        from transformers.utils.chat_template_utils import render_jinja_template

        source = self._of(tools)
        conversations: Any = [list(messages)]
        variables: dict[str, Any] = dict(self.variables)
        try:
            if _NOW in source:
                source = _dated(source)
            rendered: Any = render_jinja_template(
                conversations=conversations,
                tools=None if tools is None else list(tools),
                chat_template=source,
                return_assistant_tokens_mask=self.has_marks(tools),
                add_generation_prompt=prompt,
                **variables,
            )
        except Exception as error:  # a template can fail in any way
            reason = " ".join(str(error).split())[:_LONGEST_REASON] or type(error).__name__
            raise ConfigError(f"{location}: {self.name}{REFUSES}{reason}") from None
        (text,), marks = rendered
        return text, marks[0] if marks else []

    def _of(self, tools: Sequence[Any] | None) -> str:
        return self.with_tools or self.text if tools else self.text


def _dated(source: str) -> str:
    """Return a template of the same text, in which today is ``TODAY``."""
    from transformers.utils.chat_template_utils import _compile_jinja_template

    # transformers keeps what it compiles by its source, so a comment makes it our own. Jinja drops
    # the line break after a comment.
    own = f"{{# mtrain: today is {TODAY} #}}\n{source}"
    _compile_jinja_template(own).globals[_NOW] = TODAY.strftime
    return own


def open_template(choice: str, tokenizer: str) -> Template:
    """Open the template that the user chose.

    Args:
        choice: value of data.chat_template.
        tokenizer: value of data.tokenizer, whose folder has the template for ``auto``.
    """
    _require_packages()
    path = Path(tokenizer).expanduser()
    folder = None if tokenizer == "bytes" else path if path.is_dir() else path.parent
    settings = {} if folder is None else _settings(folder / "tokenizer_config.json")
    variables = {}
    for name, token in settings.items():
        text = token.get("content") if isinstance(token, dict) else token
        if name.endswith("_token") and isinstance(text, str):
            variables[name] = text
    if choice != "auto":
        given = f"data.chat_template={choice}"
        return Template(_read(Path(choice).expanduser(), given), given, variables=variables)
    name = f"the chat template of {tokenizer}"
    if folder is not None and (folder / "chat_template.jinja").is_file():
        file = folder / "chat_template.jinja"
        return Template(_read(file, str(file)), name, variables=variables)
    found = settings.get("chat_template")
    if isinstance(found, list):  # several by name
        found = {one.get("name"): one.get("template") for one in found if isinstance(one, dict)}
    named = found if isinstance(found, dict) else {"default": found}
    text, with_tools = named.get("default"), named.get("tool_use")
    if not isinstance(text, str):
        raise ConfigError(
            f"data.tokenizer={tokenizer}: has no chat template (chat_template.jinja beside it, or "
            "chat_template in tokenizer_config.json). Give data.chat_template=FILE.jinja, or the "
            "tokenizer of a model for chats."
        )
    return Template(text, name, with_tools if isinstance(with_tools, str) else "", variables)


def _require_packages() -> None:
    try:
        import jinja2
        import transformers
    except ImportError as error:
        needed = f"needs the {error.name} package: {install_command('chat')}"
        raise ConfigError(f"data=chat: {needed}") from None
    del jinja2, transformers


def _settings(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        settings = json.loads(_read(path, str(path)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not JSON ({error})") from None
    return settings if isinstance(settings, dict) else {}


def _read(path: Path, place: str) -> str:
    with explain_read_errors(f"{place}:", f"{place}: no such file. Give a Jinja file, or auto."):
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError:
            raise ConfigError(f"{place}: not UTF-8 text") from None
