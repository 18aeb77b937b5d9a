"""Documents with needles: a reader without a model answers every question."""

from __future__ import annotations

import re

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import Corpus, Document, Unit, split_text
from mtrain_cli.data.needles import (
    NeedleDocument,
    NeedleSettings,
    needle_documents,
)
from mtrain_cli.data.tokenizers import ByteTokenizer, Tokenizer, open_tokenizer, train_bpe

_TEXT = "".join(f"def f{n}(x):\n    return x + {n}  # {'long ' * (n % 12)}\n\n" for n in range(900))
_STATED = re.compile(r'magic\["([a-z-]+)"\] = (?:magic\["([a-z-]+)"\]|(\d{7}))')
_ASKED = re.compile(r'expected\["([a-z-]+)"\] = (\d{7})')


def _corpus(*texts: str) -> Corpus:
    def documents(_skip: int):
        return (Document(str(n), split_text([text]), n, 0) for n, text in enumerate(texts, 1))

    return Corpus("test", "--haystack test", "", (Unit("test", 0, documents),))


@pytest.fixture(scope="module")
def bpe(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    path = tmp_path_factory.mktemp("bpe") / "tokenizer.json"
    train_bpe([_TEXT], 500, path)
    return open_tokenizer(str(path))


def _answers(text: str) -> list[tuple[int, str, int]]:
    """Answer each question of a text by reading it up to there.

    Return (offset of the number, number, links) of each question.
    """
    known: dict[str, tuple[str, int]] = {}
    found, offset = [], 0
    for line in text.splitlines(keepends=True):
        if stated := _STATED.fullmatch(line.rstrip("\n")):
            name, other, number = stated.groups()
            assert name not in known
            known[name] = (number, 0) if number else (known[other][0], known[other][1] + 1)
        if asked := _ASKED.fullmatch(line.rstrip("\n")):
            number, links = known[asked[1]]
            assert number == asked[2]
            found.append((offset + asked.start(2), number, links))
        offset += len(line)
    return found


def _check(document: NeedleDocument, settings: NeedleSettings, tokenizer: Tokenizer) -> None:
    text = document.text
    answers = [(q.start, q.answer, q.links) for q in document.questions]
    assert _answers(text) == answers
    assert len(answers) == settings.pairs * settings.questions
    assert len({start for start, _, _ in answers}) == len(answers)
    links = round(settings.chains * settings.pairs) * settings.questions
    assert sum(q.links for q in document.questions) == links
    for question in document.questions:
        assert text.startswith(question.answer, question.start)
        assert text.startswith(question.answer, question.needle)
        assert question.needle < question.start
        assert text.count(question.answer) == 1 + settings.questions
    pieces = tokenizer.encode(list(split_text([text])))
    assert sum(map(len, pieces)) + 1 == document.length == settings.length
    tail = [question for question in document.questions if question.in_tail]
    assert len(tail) == -(-settings.pairs // 2)
    for question in tail:
        (after,) = tokenizer.encode([text[text.rfind("\n", 0, question.start) + 1 :]])
        assert len(after) <= settings.tail * (1 if tokenizer.name == "bytes" else 1.02)


@settings(deadline=None, max_examples=40)
@given(
    length=st.integers(3000, 9000),
    pairs=st.integers(1, 20),
    chains=st.floats(0, 1),
    seed=st.integers(0, 2**40),
    questions=st.integers(1, 3),
)
def test_a_reader_answers_every_question(
    length: int, pairs: int, chains: float, seed: int, questions: int
) -> None:
    assume(pairs * (105 + 50 * questions) <= length)  # their lines, at most
    settings_ = NeedleSettings(length, pairs, chains, seed, questions)
    for document in needle_documents(_corpus(_TEXT), ByteTokenizer(), settings_, 2):
        _check(document, settings_, ByteTokenizer())


@pytest.mark.parametrize("length", [2048, 4001, 8192])
def test_documents_of_a_bpe_have_the_exact_length(bpe: Tokenizer, length: int) -> None:
    settings_ = NeedleSettings(length, 16, 0.25, 1)
    for document in needle_documents(_corpus(_TEXT), bpe, settings_, 4):
        _check(document, settings_, bpe)


def test_the_lines_between_needles_are_those_of_the_corpus_in_order() -> None:
    settings_ = NeedleSettings(4096, 10, 0.5, 1)
    corpus, starts = _TEXT * 2, []
    for document in needle_documents(_corpus(_TEXT), ByteTokenizer(), settings_, 6):
        _padding, *lines = document.text.splitlines(keepends=True)
        kept = "".join(line for line in lines if not line.startswith(("magic[", "expected[")))
        assert kept.count("\n") > 50
        starts.append(corpus.index(kept))
    assert starts == sorted(set(starts))


def test_questions_far_from_the_end_stand_anywhere_behind_their_needle() -> None:
    settings_ = NeedleSettings(8192, 32, 0.25, 1)
    places, gaps = [], []
    for document in needle_documents(_corpus(_TEXT), ByteTokenizer(), settings_, 20):
        for question in document.questions:
            if not question.in_tail:
                places.append(question.start / 8192)
                gaps.append((question.start - question.needle) / 8192)
    assert min(places) < 0.1
    assert max(places) > 0.9
    assert min(gaps) < 0.05
    assert max(gaps) > 0.8
    assert 0.2 < sum(gaps) / len(gaps) < 0.5


def test_lines_that_could_disturb_are_left_out() -> None:
    corpus = _corpus('good\nmagic["calm-otter"] = 5\nné\n' + "x" * 161 + "\nno line break")
    settings_ = NeedleSettings(1000, 2, 0, 1)
    (document,) = needle_documents(corpus, ByteTokenizer(), settings_, 1)
    _padding, *lines = document.text.splitlines()
    assert {line for line in lines if not line.startswith(("magic[", "expected["))} == {
        "good",
        "no line break",
    }


@pytest.mark.parametrize(("length", "pairs"), [(1000, 20), (65536, 300)])
def test_too_many_pairs_are_refused(length: int, pairs: int) -> None:
    settings_ = NeedleSettings(length, pairs, 0, 1)
    with pytest.raises(ConfigError, match=rf"^--pairs {pairs}: .*tokens of bytes have no room"):
        next(needle_documents(_corpus(_TEXT), ByteTokenizer(), settings_, 1))
