"""The texts of RULER's prompts.

The strings below are copied from NVIDIA/RULER, commit c3f5e3b, scripts/data/synthetic (constants.py
and the generators): Copyright (c) 2024 NVIDIA CORPORATION, Apache License 2.0, see LICENSE. Samples
are comparable with published results only if every character stays, mistakes included.
"""

# ruff: noqa: E501
from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Template:
    """The prompt of a task."""

    question: str  # text with {context} and the question
    answer: str  # beginning of the answer, at the end of the prompt
    tokens: int  # number of tokens reserved for the answer

    @property
    def prompt(self) -> str:
        """The whole prompt, with its fields in braces."""
        return self.question + self.answer

    def split(self, prompt: str) -> tuple[str, str]:
        """Split a prompt into its input and the beginning of the answer."""
        cut = prompt.rfind(self.answer[:10])
        return prompt[:cut], prompt[cut:]


NEEDLES = Template(
    "Some special magic {type_needle_v} are hidden within the following text. Make sure to memorize it. I will quiz you about the {type_needle_v} afterwards.\n{context}\nWhat are all the special magic {type_needle_v} for {query} mentioned in the provided text?",
    " The special magic {type_needle_v} for {query} mentioned in the provided text are",
    128,
)
NEEDLE = "One of the special magic {type_needle_v} for {key} is: {value}."
NOISE = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again."
# A question about one needle: replaced in the whole prompt, in this order.
SINGULAR = (("Some", "A"), ("are all", "is"), ("are", "is"), ("answers", "answer"))

TRACKING = Template(
    "Memorize and track the chain(s) of variable assignment hidden in the following text.\n\n{context}\nQuestion: Find all variables that are assigned the value {query} in the text above.",
    " Answer: According to the chain(s) of variable assignment in the text above, {num_v} variables are assigned the value {query}, they are: ",
    30,
)
COMMON_WORDS = Template(
    "Below is a numbered list of words. In these words, some appear more often than others. Memorize the ones that appear most often.\n{context}\nQuestion: What are the 10 most common words in the above list?",
    " Answer: The top 10 words that appear most often in the list are:",
    120,
)
FREQUENT_WORDS = Template(
    "Read the following coded text and track the frequency of each coded word. Find the three most frequently appeared coded words. {context}\nQuestion: Do not provide any explanation. Please ignore the dots '....'. What are the three most frequently appeared words in the above coded text?",
    " Answer: According to the coded text above, the three most frequently appeared words are:",
    50,
)
QUESTIONS = Template(
    "Answer the question based on the given documents. Only give me the answer and do not output any other words.\n\nThe following are given documents.\n\n{context}\n\nAnswer the question based on the given documents. Only give me the answer and do not output any other words.\n\nQuestion: {query}",
    " Answer:",
    32,
)
DOCUMENT = "Document {i}:\n{document}"
