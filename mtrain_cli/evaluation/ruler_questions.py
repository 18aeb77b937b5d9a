"""RULER's question answering (arXiv:2404.06654, section 3): documents that distract."""

from __future__ import annotations

from random import Random

from mtrain_cli.evaluation.fitting import Draft, Prompts, Stream
from mtrain_cli.evaluation.ruler_templates import DOCUMENT, QUESTIONS
from mtrain_cli.evaluation.sources import Question, Questions


class QuestionPrompts(Prompts):
    """Prompts of the tasks qa_1 and qa_2.

    seed: seed of the order of the documents.
    """

    step = first = 10
    reserved = reserved_in_search = QUESTIONS.tokens

    def __init__(self, content: Questions, seed: int) -> None:
        self._content, self._seed = content, seed

    def draw(self, stream: Stream, size: int, index: int) -> Draft:
        """Return question number ``index`` with ``size`` documents."""
        asked, documents = self._content.questions[index], self._content.documents
        if size < len(documents):
            chosen = [documents[number] for number in self._choose(stream, asked, size)]
        else:
            chosen = (list(documents) * -(-size // len(documents)))[:size]
        Random(self._seed).shuffle(chosen)
        context = "\n\n".join(
            DOCUMENT.format(i=number, document=document)
            for number, document in enumerate(chosen, 1)
        )
        prompt = QUESTIONS.prompt.format(context=context, query=asked.text)
        return Draft(prompt, asked.outputs)

    def _choose(self, stream: Stream, asked: Question, size: int) -> list[int]:
        """Return the numbers of ``size`` documents, those of the question among them."""
        own, related = list(asked.documents), list(asked.related)
        missing = size - len(own)
        if missing <= len(related):
            return own + stream.python.sample(related, missing)
        taken = {*own, *related}
        others = [number for number in range(len(self._content.documents)) if number not in taken]
        return own + related + stream.python.sample(others, max(0, missing - len(related)))
