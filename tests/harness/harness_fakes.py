"""Stand-ins for the tasks of lm-eval, for tests without the package, and tasks as files with it."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mtrain_cli.inference.sampling import Sampling
from mtrain_extras.lm_eval.requests import Answers, Continuing, Plan

GREEDY, SAMPLED = Continuing(6, ("a",)), Continuing(4, (), Sampling(1.0))


@dataclass
class FakeTasks:
    """A task with questions of two choices each, and one with prompts.

    target: the right choice of each question.
    count: number of questions, up to four.
    asked: what `Answers` returned, of each evaluation.
    """

    target: int = 0
    count: int = 4

    def __post_init__(self) -> None:
        self.loaded = {"tasks": {"choices": None, "prompts": None}}
        self.asked: list[tuple[list, list, list]] = []

    def plan(self, codec: Any, plan: Plan) -> Plan:
        self.evaluate(codec, plan.positions, plan)
        self.asked.clear()
        return plan

    def evaluate(self, codec: Any, positions: int, answers: Answers) -> dict[str, Any]:  # noqa: ARG002
        questions = [codec.encode(f"Line {n} says") for n in range(4)]
        pairs = [(ids, codec.encode(rest)) for ids in questions for rest in (" yes", " no, no")]
        scores = answers.scores(pairs)
        texts = answers.texts([*questions, questions[0]], GREEDY)
        sampled = answers.texts([questions[0]] * 3, SAMPLED)
        self.asked.append((list(map(tuple, scores)), texts, sampled))
        first = [scores[2 * n][0] > scores[2 * n + 1][0] for n in range(self.count)]
        right = [float(one == (self.target == 0)) for one in first]
        samples = [
            {"doc_id": n, "target": self.target, "filtered_resps": scores[2 * n : 2 * n + 2],
             "filter": "none", "acc": one}
            for n, one in enumerate(right)
        ]  # fmt: skip
        return {
            "results": {"choices": {"acc,none": sum(right) / self.count, "sample_len": self.count}},
            "samples": {"choices": samples},
            "n-shot": {"choices": 0},
            "versions": {"choices": 1},
        }


def write_tasks(folder: Path) -> Path:
    """Write three tasks and a group for lm-eval, with their data. Return the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    lines = [
        {"question": f"What is {n} plus {m}?", "choices": [str(n + m), "the grass"], "gold": 0}
        for n in range(3)
        for m in range(2)
    ]
    (folder / "sums.json").write_text("\n".join(map(json.dumps, lines)))
    data = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "sums.json")}},
        "test_split": "test",
        "fewshot_split": "test",
        "doc_to_text": "Question: {{question}}\nAnswer:",
    }
    mean = {"aggregation": "mean", "higher_is_better": True}
    tasks: dict[str, dict[str, Any]] = {
        "local_sums": {
            "output_type": "multiple_choice", "doc_to_target": "gold",
            "doc_to_choice": "{{choices}}", "metric_list": [{"metric": "acc", **mean}],
        },
        "local_write": {
            "output_type": "generate_until", "doc_to_target": "{{choices[0]}}",
            "generation_kwargs": {"until": ["\n"], "max_gen_toks": 6},
            "metric_list": [{"metric": "exact_match", **mean}],
        },
        "local_rolling": {
            "output_type": "loglikelihood_rolling", "doc_to_text": "",
            "doc_to_target": "{{question}}", "metric_list": [{"metric": "bits_per_byte"}],
        },
    }  # fmt: skip
    for name, own in tasks.items():
        # A YAML file may be JSON.
        (folder / f"{name}.yaml").write_text(json.dumps({"task": name, **data, **own}))
    group = {"group": "local_group", "task": ["local_sums", "local_write"],
             "aggregate_metric_list": [{"metric": "acc", "weight_by_size": True}]}  # fmt: skip
    (folder / "group.yaml").write_text(json.dumps(group))
    return folder
