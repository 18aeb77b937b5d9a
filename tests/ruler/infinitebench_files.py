"""Small files like those that InfiniteBench releases, a line each, with answers of each form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_NOISE = "The grass is green. " * 20
_OPTIONS = ["read", "parse", "write", "close"]
LINES: dict[str, dict[str, Any]] = {
    "passkey": {
        "context": f"{_NOISE}The pass key is 71432. {_NOISE}", "input": "What is the pass key?",
        "answer": ["71432"],
    },
    "number_string": {
        "context": f"{_NOISE}The sequence of digits is 30077.", "answer": "30077",
        "input": "What is the sequence of digits?",
    },
    "kv_retrieval": {
        "context": 'JSON data:\n{"a-1": "b-2"}', "answer": ["b-2"],
        "input": '\nKey: "a-1"\nThe value associated with the specified key is: ',
    },
    "longbook_sum_eng": {
        "context": f"{_NOISE}A cat sat.", "input": "", "answer": ["A cat sat on a mat."],
    },
    "longbook_qa_eng": {
        "context": f"{_NOISE}It rained.", "input": "What fell?", "answer": ["the rain", "Water"],
    },
    "longbook_choice_eng": {
        "context": f"{_NOISE}She closed it.", "input": "What did she do?", "answer": ["close"],
        "options": _OPTIONS,
    },
    "longdialogue_qa_eng": {
        "context": "$$MASK$$: Hello, I am Ace.\nNICKY: Hello.", "input": "Which character?",
        "answer": ["ACE", "ACE ROTHSTEIN"],
    },
    "longbook_qa_chn": {"context": "他是田归农。", "input": "他是谁？", "answer": ["田归农"]},
    "code_debug": {
        "context": "def parse(): return x{1}", "input": "Which function has deliberate error?",
        "answer": ["parse", "B"], "options": _OPTIONS,
    },
    "code_run": {
        "context": "def func_1(x): return x + 2", "answer": [-5],
        "input": "Please give me the exact number of the return value of func_1(-7).",
    },
    "math_calc": {"context": "5 + 2 - 4", "input": "", "answer": [[5, 7, 3]]},
    "math_find": {
        "context": "[3, 88.5, 1]", "input": "You should answer with only one number. "
        "The largest number of the list is:", "answer": 88.5,
    },
}  # fmt: skip
# A right answer of each task, as a model would write it.
RIGHT = {
    "passkey": " 71432.", "number_string": " 30077, again 1", "kv_retrieval": ' "b-2"}',
    "longbook_sum_eng": " A cat sat on a mat.", "longbook_qa_eng": " Rain",
    "longbook_choice_eng": " D", "longdialogue_qa_eng": " Ace.", "longbook_qa_chn": "田归农。",
    "code_run": " is -5.", "math_calc": " [5, 7, 3]", "math_find": " 88.5",
    "code_debug": " B. parse",
}  # fmt: skip


def write_files(folder: Path) -> Path:
    """Write a file of one line for each task, and return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    for task, line in LINES.items():
        text = json.dumps({"id": 0, **line}, ensure_ascii=False)
        (folder / f"{task}.jsonl").write_text(text + "\n", encoding="utf-8")
    return folder
