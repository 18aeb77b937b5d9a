"""InfiniteBench's scores, by cases computed by hand."""

from __future__ import annotations

import pytest

from mtrain_extras.ruler import infinitebench_scores as scores

MC = ["Walking Georgie", "B"]


@pytest.mark.parametrize(
    ("score", "text", "answers", "value"),
    [
        (scores.first_integer, "The key is 71432.", ["71432"], 1),
        (scores.first_integer, "1. The key is 71432.", ["71432"], 0),
        (scores.first_integer, "none", ["71432"], 0),
        (scores.first_integer, "071432", ["71432"], 0),  # digits, not their value
        (scores.first_number, "about 88.50 or 3", ["88.5"], 1),
        (scores.first_number, "3, then 88.5", ["88.5"], 0),
        (scores.first_number, "", ["88"], 0),
        (scores.last_integer, "f(2) is `-5`.", ["-5"], 1),
        (scores.last_integer, "-5 is it", ["-5"], 0),
        (scores.last_integer, " ", ["-5"], 0),
        (scores.whole_word, 'It is: "c14c-1a".', ["c14c-1a"], 1),
        (scores.whole_word, "c14c-1abc", ["c14c-1a"], 0),
        (scores.whole_name, "I guess Ace!", ["ACE", "ACE ROTHSTEIN"], 1),
        (scores.whole_name, "Rothstein", ["ACE", "ACE ROTHSTEIN"], 0),  # only the first name
        (scores.listed_numbers, "[5, 7, 4, 9]", ["5", "7", "3", "9"], 0.5),
        (scores.listed_numbers, "5", ["5", "7", "3", "9"], 0.25),
        (scores.listed_numbers, "", ["5"], 0),
        (scores.chosen_option, " B", MC, 1),
        (scores.chosen_option, "A. Walking Georgie", MC, 0),  # a first letter decides
        (scores.chosen_option, "Walking Georgie", MC, 1),
        (scores.chosen_option, "the answer is: B.", MC, 1),
        (scores.chosen_option, "the answer is Walking Georgie", MC, 1),
        (scores.chosen_option, "the answer is C, not B", MC, 0),
        (scores.chosen_option, "it could be C or B", MC, 0),
        (scores.chosen_option, "surely\nB!", MC, 1),
        (scores.chosen_option, "the answer is:", MC, 0),
        (scores.chosen_option, "", MC, 0),
        (scores.chosen_function, "B. parse", ["parse", "B"], 1),
        (scores.chosen_function, "C: parse", ["parse", "B"], 0),
        (scores.chosen_function, "The correct option is:\n\n**B**", ["parse", "B"], 1),
        (scores.chosen_function, "The error is: parse", ["parse", "B"], 1),
        (scores.chosen_function, "B", ["parse", "B"], 0),  # a letter alone does not count
    ],
)  # fmt: skip
def test_matches(score, text, answers, value):
    assert score(text, answers) == value


def test_english_words_have_an_f1_without_articles_and_case():
    # "fighting in war" and "fighting in world war 1": 3 of 3 and of 5, so 2 * 3 / 8.
    assert scores.english_f1("Fighting, in the war.", ["fighting in world war 1"]) == 0.75
    assert scores.english_f1("Water", ["rain", "the water"]) == 1
    assert scores.english_f1("snow snow", ["snow"]) == pytest.approx(2 / 3)
    assert scores.english_f1("", ["snow"]) == 0


def test_chinese_characters_have_an_f1_without_punctuation():
    assert scores.chinese_f1("田归农。", ["商老太", "田归农"]) == 1
    assert scores.chinese_f1("是田 农", ["田归农"]) == pytest.approx(2 / 3)
    assert scores.chinese_f1("！？", ["田归农"]) == 0


def test_rouge_lsum_unites_the_subsequences_of_all_sentences():
    # Lin (2004), section 3.2: w1..w5 against "w1 w2 w6 w7 w8" and "w1 w3 w8 w9 w5" shares
    # {w1, w2} and {w1, w3, w5}, so 4 of 5 wanted words and 4 of 10 given ones.
    text, answer = "w1 w2 w6 w7 w8\nw1 w3 w8 w9 w5", "w1 w2 w3 w4 w5"
    assert scores.rouge_lsum(text, [answer]) == pytest.approx(2 * 4 / 15)
    assert scores.rouge_lsum("The cat sat.", ["no", "the CAT sat"]) == 1  # the best answer
    assert scores.rouge_lsum("sat cat", ["cat sat"]) == 0.5  # order counts
    # One given word stands for one wanted word, though two sentences have it.
    assert scores.rouge_lsum("cat", ["a cat\nno cat"]) == pytest.approx(2 * 1 / 5)
    assert scores.rouge_lsum("", ["cat"]) == 0
