"""The scores of InfiniteBench, from 0 to 1, as its compute_scores.py defines them.

Each function takes the text of the model and the answers of a sample.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Sequence

_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～｟｠｢｣､、〃"
    "》「」『』【】〔〕〖〗〘〙〚〛〜〝〞〟〰〾〿–—‘’‛“”„‟…‧﹏."
)


def first_integer(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first digits in the text are the answer."""
    return float(re.findall("[0-9]+", text)[:1] == [*answers[:1]])


def first_number(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first number in the text has the value of the answer."""
    found = re.search(r"\d+(\.\d+)?", text)
    return float(found is not None and float(found[0]) == float(answers[0]))


def last_integer(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the last word of the text is the answer, a whole number."""
    words = _words(text, "\n.`'\":")
    try:
        return float(int(words[-1]) == float(answers[0]))
    except (IndexError, ValueError):
        return 0.0


def whole_word(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the answer is a word of the text."""
    return float(answers[0] in _words(text))


def whole_name(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the first answer is a word of the text in capitals."""
    return float(answers[0] in _words(text.upper()))


def listed_numbers(text: str, answers: Sequence[str]) -> float:
    """Return the share of the answers before the first that differs. Signs do not count."""
    right = 0
    for number, answer in zip(re.findall("[0-9]+", text), answers, strict=False):
        if float(number) != float(answer):
            break
        right += 1
    return right / len(answers)


def chosen_option(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text chooses the right option. answers: its text and its letter."""
    text = text.strip()
    if not text:
        return 0.0
    if text[0] in "ABCD":
        return float(text[0] in answers)
    if text in answers:
        return 1.0
    text = _plain(text, "\n\"'.,?!{}")
    rest = _after(text, ("answer is:", "answer:", "answer is", "option is"))
    if rest is not None:
        return float(rest.startswith(tuple(answers)))
    words = [word for word in text.split() if word in "ABCD"]
    return float(bool(words) and words[0] in answers)


def chosen_function(text: str, answers: Sequence[str]) -> float:
    """Return 1 if the text chooses the wrong function. answers: its name and its letter."""
    text, letter = text.strip(), answers[1]
    if text[:2] in (f"{letter}.", f"{letter}:"):
        return 1.0
    text = _plain(re.sub("[Oo]ption", " ", text), "\n`'\"-*")
    rest = _after(text, ("answer is:", "is:", "answer:"))
    return float(rest is not None and rest.startswith((letter, answers[0])))


def english_f1(text: str, answers: Sequence[str]) -> float:
    """Return the largest F1 of words over the answers, without case, articles and punctuation."""
    return max(_f1(_english(text), _english(answer)) for answer in answers)


def chinese_f1(text: str, answers: Sequence[str]) -> float:
    """Return the largest F1 of characters over the answers, without case and punctuation."""
    return max(_f1(_chinese(text), _chinese(answer)) for answer in answers)


def rouge_lsum(text: str, answers: Sequence[str]) -> float:
    """Return the largest F1 of ROUGE-Lsum over the answers, without stemming.

    A line is a sentence. For each sentence of the answer, the union of its longest common
    subsequences with the sentences of the text counts (Lin 2004, section 3.2).
    """
    given = _sentences(text)
    return max(_rouge(given, _sentences(answer)) for answer in answers)


def _rouge(given: list[list[str]], wanted: list[list[str]]) -> float:
    available = Counter(word for sentence in given for word in sentence)
    shared: Counter[str] = Counter()
    for sentence in wanted:
        places = {place for other in given for place in _common_places(sentence, other)}
        shared.update(sentence[place] for place in places)
    hits = (shared & available).total()
    return _harmonic(hits, available.total(), sum(map(len, wanted)))


def _common_places(sentence: list[str], other: list[str]) -> list[int]:
    """Return the places in ``sentence`` of a longest common subsequence."""
    lengths = [[0] * (len(other) + 1)]
    for word in sentence:
        above, row = lengths[-1], [0]
        for column, candidate in enumerate(other):
            same = word == candidate
            row.append(above[column] + 1 if same else max(above[column + 1], row[column]))
        lengths.append(row)
    places, row_number, column = [], len(sentence), len(other)
    while row_number and column:
        if sentence[row_number - 1] == other[column - 1]:
            row_number, column = row_number - 1, column - 1
            places.append(row_number)
        elif lengths[row_number][column - 1] > lengths[row_number - 1][column]:
            column -= 1
        else:
            row_number -= 1
    return places


def _f1(given: Sequence[str], wanted: Sequence[str]) -> float:
    return _harmonic((Counter(given) & Counter(wanted)).total(), len(given), len(wanted))


def _harmonic(hits: int, given: int, wanted: int) -> float:
    """Return the harmonic mean of ``hits / given`` and ``hits / wanted``."""
    return 2 * hits / (given + wanted) if hits else 0.0


def _english(text: str) -> list[str]:
    plain = text.lower().translate(str.maketrans("", "", string.punctuation))
    return re.sub(r"\b(a|an|the)\b", " ", plain).split()


def _chinese(text: str) -> str:
    marks = string.punctuation + _CHINESE_PUNCTUATION
    return "".join(text.lower().translate(str.maketrans("", "", marks)).split())


def _sentences(text: str) -> list[list[str]]:
    return [re.findall("[a-z0-9]+", line) for line in text.lower().split("\n")]


def _plain(text: str, marks: str) -> str:
    """Return a text with spaces for marks, and one space for several."""
    return re.sub(" +", " ", text.translate(str.maketrans(marks, " " * len(marks))))


def _words(text: str, marks: str = "\n:\"'.,?!{}") -> list[str]:
    return _plain(text, marks).split()


def _after(text: str, beginnings: Sequence[str]) -> str | None:
    """Return what follows the first of the beginnings that the text has, and a character."""
    for beginning in beginnings:
        _, there, rest = text.partition(beginning)
        if there:
            return rest[1:]
    return None
