"""Documents with questions that only a model with a long memory answers, in the words of Python.

Lines of a corpus surround three kinds of lines:

    magic["calm-otter"] = 4817263
    magic["old-heron"] = magic["calm-otter"]
    expected["old-heron"] = 4817263

A line of ``expected`` is a question: a model that has read its beginning knows the number only from
an earlier line, the needle. A line with two names is a link, which some questions must follow.
Each document has the same number of tokens, so each training sequence of that length is one. With
several questions about few needles, small models learn to retrieve from fewer tokens.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from random import Random

from mtrain_cli.config.problem import ConfigError, cli_option, if_has, setting
from mtrain_cli.data.corpora import Corpus, split_text, stdlib_corpus
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import Tokenizer

_ADJECTIVES = """
able amber big blue bold brave brief brisk broad busy calm clean clear cold cool crisp damp dark
deep dry dull early easy fair fast fine firm flat fond free fresh gentle glad gold good grand gray
great green happy hard high keen kind large late lean light live long loud low mild neat new nice
odd old open pale pink plain proud quick
"""
_ANIMALS = """
ant ape bat bear bee bird boar bull calf camel cat clam cobra cow crab crane crow deer dog dove
duck eagle eel elk emu ewe finch fish fly fox frog gecko gnat goat goose gull hare hawk hen heron
horse ibis jay koala lamb lark lion llama lynx mole moose moth mouse mule newt otter owl panda
pig pony puma quail ram raven
"""
# 4,096 names such as calm-otter.
NAMES = tuple(f"{first}-{second}" for first in _ADJECTIVES.split() for second in _ANIMALS.split())
STDLIB = "stdlib"
TAIL = 2048  # tokens at the end with the last questions of half of the needles; see `tail`
_LONGEST_LINE = 160  # characters of a line from the corpus
_OWN_LINES = ("magic[", "expected[")


@dataclass(frozen=True)
class NeedleSettings:
    """What the documents hold.

    length: tokens of a document, with its end token.
    pairs: needles.
    chains: share of the needles whose questions need a link, from 0 to 1.
    seed: determines names, numbers and places.
    questions: questions about each needle.
    """

    length: int
    pairs: int
    chains: float
    seed: int
    questions: int = 1

    @property
    def tail(self) -> int:
        """Tokens at the end of a document with the last question about every other needle."""
        return min(TAIL, self.length // 4)


@dataclass(frozen=True)
class NeedleQuestion:
    """One question of a document. Offsets count characters, which are also bytes.

    answer: the number.
    start, needle: offset of the number in the question, and in the needle.
    links: links between the needle and the question.
    in_tail: whether the question is placed near the end.
    """

    answer: str
    start: int
    needle: int
    links: int
    in_tail: bool


@dataclass(frozen=True)
class NeedleDocument:
    """A document and its questions, in the order of the text.

    length: tokens of the document, with its end token.
    """

    text: str
    length: int
    questions: tuple[NeedleQuestion, ...]

    def line(self) -> str:
        """Return the document as a line of JSON that ``data=text`` reads."""
        # `asdict` copies deeply, which took as long as to make the document.
        questions = [vars(question) for question in self.questions]
        return json.dumps({**vars(self), "questions": questions}) + "\n"


@dataclass(frozen=True)
class _Pair:
    """One needle. lines: needle, perhaps a link, and questions, in the order of the text."""

    lines: tuple[str, ...]
    links: int
    answer: str
    in_tail: bool


def open_haystack(haystack: str) -> Corpus:
    """Open the text around the needles: `STDLIB` or a path. Raises ConfigError if it is missing."""
    if haystack == STDLIB:
        return stdlib_corpus(origin=f"--haystack {STDLIB}")
    return text_corpus(haystack, "text", "--haystack", "the haystack's key")


def needle_documents(
    corpus: Corpus, tokenizer: Tokenizer, settings: NeedleSettings, count: int
) -> Iterator[NeedleDocument]:
    """Yield ``count`` documents: needles among lines of the corpus, which keep their order.

    The corpus repeats if it is too short. Lines that are long or not ASCII are skipped.
    """
    lines = _lines(corpus)
    for number in range(count):
        yield _Builder(tokenizer, settings, Random(f"{settings.seed} {number}")).build(lines)


class _Builder:
    def __init__(self, tokenizer: Tokenizer, settings: NeedleSettings, random: Random) -> None:
        self._tokenizer, self._settings, self._random = tokenizer, settings, random
        self._target = settings.length - len(tokenizer.begin.ids) - (tokenizer.eos is not None)

    def build(self, lines: Iterator[str]) -> NeedleDocument:
        pairs = self._pairs()
        placed, space = self._places(pairs)
        text = self._pad(self._fill(placed, space, lines))
        return NeedleDocument(text, self._settings.length, tuple(_locate(text, pairs)))

    def _pairs(self) -> list[_Pair]:
        settings, random = self._settings, self._random
        names = iter(random.sample(NAMES, 2 * settings.pairs))
        linked = set(random.sample(range(settings.pairs), round(settings.chains * settings.pairs)))
        pairs = []
        for number in range(settings.pairs):
            name, answer = next(names), str(random.randint(1_000_000, 9_999_999))
            lines = [f'magic["{name}"] = {answer}\n']
            if number in linked:
                other = next(names)
                lines.append(f'magic["{other}"] = magic["{name}"]\n')
                name = other
            links = len(lines) - 1
            lines += [f'expected["{name}"] = {answer}\n'] * settings.questions
            pairs.append(_Pair(tuple(lines), links, answer, in_tail=number % 2 == 0))
        return pairs

    def _places(self, pairs: Sequence[_Pair]) -> tuple[list[tuple[int, str]], int]:
        """Return (tokens of corpus before it, line), sorted, and the corpus's tokens."""
        settings = self._settings
        lines = [line for pair in pairs for line in pair.lines]
        tokens = dict(self._counted(lines))
        taken = sum(tokens[line] for line in lines)  # a question may stand several times
        last = sum(tokens[pair.lines[-1]] for pair in pairs if pair.in_tail)
        space = self._target - taken
        if space < 0 or last > settings.tail:
            raise ConfigError(
                f"{cli_option('pairs', settings.pairs)}: {settings.length:,} tokens of "
                f"{self._tokenizer.name} have no room for them: they take {taken:,}, and the "
                f"questions at the end {last:,} of {settings.tail:,}. Give fewer {setting('pairs')}"
                f"{if_has('questions', ', fewer questions')} or a larger length."
            )
        free = [pair for pair in pairs if not pair.in_tail]
        placed = [entry for pair in free for entry in self._scatter(pair.lines, 0, space)]
        # Other lines may fall among the last questions, and take some of the room there.
        room = min(space, settings.tail - last)
        room -= sum(tokens[line] for place, line in placed if place >= space - room)
        border = space - max(0, room)
        for pair in pairs:
            if pair.in_tail:
                placed += self._scatter(pair.lines[:-1], 0, border)
                placed += self._scatter(pair.lines[-1:], border, space)
        placed.sort(key=lambda entry: entry[0])  # stable: a pair's lines keep their order
        return placed, space

    def _scatter(self, lines: Sequence[str], low: int, high: int) -> list[tuple[int, str]]:
        places = sorted(self._random.randint(low, high) for _ in lines)
        return list(zip(places, lines, strict=True))

    def _fill(
        self, placed: Sequence[tuple[int, str]], space: int, lines: Iterator[str]
    ) -> list[str]:
        """Return the lines of the document: those placed, and ``space`` tokens of the corpus."""
        chosen: list[tuple[str, int]] = []
        total = 0
        while total < space:
            for line, tokens in self._counted([next(lines) for _ in range(32)]):
                chosen.append((line, tokens))
                total += tokens
        while total > space:
            total -= chosen.pop(0)[1]
        body, waiting, passed = [], list(reversed(placed)), space - total
        for line, tokens in chosen:
            while waiting and waiting[-1][0] <= passed:
                body.append(waiting.pop()[1])
            body.append(line)
            passed += tokens
        return body + [line for _, line in reversed(waiting)]

    def _pad(self, body: list[str]) -> str:
        """Return the text with a first line that fills the document up to its length."""
        target, text = self._target, "".join(body)
        while (count := self._count(text)) > target:
            # Tokens at the ends of lines can differ in the whole text: drop a line of the corpus.
            line = next((line for line in body if not line.startswith(_OWN_LINES)), None)
            if line is None:
                raise self._no_length()
            body.remove(line)
            text = "".join(body)
        if count == target:
            return text
        tokens_of_x = self._count(" x" * 64) / 64
        for head in ("", "#", "##"):
            letters = 0
            for _ in range(8):
                padded = f"{head}{' x' * letters}\n{text}"
                missing = target - self._count(padded)
                if missing == 0:
                    return padded
                letters += round(missing / tokens_of_x) if abs(missing) > 1 else missing
                if letters < 0:
                    break
        raise self._no_length()

    def _no_length(self) -> ConfigError:
        return ConfigError(
            f"{cli_option('tokenizer')}: no document of {self._tokenizer.name} gets exactly "
            f"{self._settings.length:,} tokens; give another {cli_option('length')}"
        )

    def _count(self, text: str) -> int:
        """Return the tokens of a text, cut into pieces as `mtrain data prepare` does."""
        return sum(map(len, self._tokenizer.encode(list(split_text([text])))))

    def _counted(self, lines: list[str]) -> list[tuple[str, int]]:
        return list(zip(lines, map(len, self._tokenizer.encode(lines)), strict=True))


def _locate(text: str, pairs: Sequence[_Pair]) -> list[NeedleQuestion]:
    located = []
    for pair in pairs:
        needle, questions = pair.lines[0], pair.lines[1 + pair.links :]
        place = text.index(needle) + len(needle) - len(pair.answer) - 1
        end = 0
        for number, question in enumerate(questions, 1):
            end = text.index(question, end) + len(question)
            in_tail = pair.in_tail and number == len(questions)
            start = end - len(pair.answer) - 1
            located.append(NeedleQuestion(pair.answer, start, place, pair.links, in_tail))
    return sorted(located, key=lambda question: question.start)


def _lines(corpus: Corpus) -> Iterator[str]:
    """Yield the usable lines of a corpus again and again."""
    while True:
        usable = 0
        for unit in corpus.units:
            for document in unit.documents(0):
                for line in _whole_lines(document.pieces):
                    is_own = any(own in line for own in _OWN_LINES)
                    if line.isascii() and len(line) <= _LONGEST_LINE and not is_own:
                        usable += 1
                        yield line
        if not usable:
            raise ConfigError(
                f"{corpus.origin}: holds no line of text of at most {_LONGEST_LINE} characters"
            )


def _whole_lines(pieces: Iterable[str]) -> Iterator[str]:
    rest = ""
    for piece in pieces:
        *whole, rest = (rest + piece).split("\n")
        yield from (f"{line}\n" for line in whole)
    if rest:
        yield f"{rest}\n"
