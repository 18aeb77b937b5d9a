"""The texts of RULER's prompts."""

from __future__ import annotations

import hashlib

import pytest

from mtrain_cli.evaluation import ruler_templates
from mtrain_cli.evaluation.ruler_templates import Template

_TEMPLATES = {
    name: value for name, value in vars(ruler_templates).items() if isinstance(value, Template)
}


def test_no_character_of_the_templates_changes() -> None:
    texts = [template.prompt for template in _TEMPLATES.values()]
    texts += [ruler_templates.NEEDLE, ruler_templates.NOISE, ruler_templates.DOCUMENT]
    digest = hashlib.sha256("\0".join(texts).encode()).hexdigest()
    assert digest == "cb9cc1a86fd7c7598bc2f68594766ecffe30e1b480ac96c4f2395185e468f451"


@pytest.mark.parametrize("name", _TEMPLATES)
def test_a_prompt_splits_before_its_last_answer(name: str) -> None:
    template = _TEMPLATES[name]
    question = f"Answer this.{template.answer} no.\nWhat is it?"
    assert template.split(question + template.answer) == (question, template.answer)
