"""Mistakes in `train.eval_tasks` and `eval` are reported with key, value and what is allowed."""

from __future__ import annotations

import pytest

from mtrain_cli.composition.compose import compose
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.validate import without_effect

NIAH = "train.eval_tasks=[niah]"


def test_a_length_is_one_several_or_that_of_training():
    lengths = [
        compose([NIAH, "seq=2k", *words]).eval.lengths(2048)
        for words in ([], ["eval.length=1k"], ["eval.length=[512,1k,512]"])
    ]
    assert lengths == [(2048,), (1024,), (512, 1024)]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["train.eval_tasks=[nia]"],
            "train.eval_tasks=[nia]: nia: no such task (did you mean niah?); allowed: perplexity, "
            "niah",
        ),
        (
            ["train.eval_tasks=niah"],
            "train.eval_tasks=niah: expected a list of tasks such as [niah,perplexity]",
        ),
        (
            ["train.eval_tasks=[3]"],
            "train.eval_tasks=[3]: expected a list of tasks such as [niah,perplexity]",
        ),
        ([NIAH, "eval.length=[]"], "eval.length=[]: must be from 2 to 64m tokens"),
        ([NIAH, "eval.length=[1k,1]"], "eval.length=[1024,1]: must be from 2 to 64m tokens"),
        (
            [NIAH, "eval.length=long"],
            "eval.length=long: expected auto, a number of tokens such as 8k, or a list such as "
            "[8k,64k]",
        ),
        ([NIAH, "eval.samples=0"], "eval.samples=0: must be at least 1"),
        ([NIAH, "eval.chains=0.5"], "eval.chains=0.5: only with eval.form=python"),
        (
            [NIAH, "eval.form=prose"],
            "eval.form=prose: expected one of sentences, python",
        ),
        (
            ["train.eval_tasks=[perplexity]"],
            "train.eval_tasks=[perplexity]: perplexity needs held-out sequences; add "
            "data.eval_sequences=4",
        ),
        (
            [NIAH, "sparsity=fixed"],
            "train.eval_tasks=[niah]: sparsity=fixed chooses keys without regard to the text, so "
            "the tasks would measure another text",
        ),
        (
            [NIAH, "topology.pipeline_parallel=2", "topology.workers=2", "train.global_batch=2"],
            "topology.pipeline_parallel=2: does not support train.eval_tasks=[niah]; give "
            "train.eval_tasks=[]",
        ),
    ],
)
def test_mistakes_name_the_key_and_what_is_allowed(words, message):
    with pytest.raises(ConfigError) as caught:
        compose(words)
    assert caught.value.problems == (message,)


def test_tasks_without_held_out_text_allow_an_interval():
    assert compose([NIAH, "train.eval_every=5"]).train.eval_every == 5


def test_keys_of_other_tasks_have_no_effect():
    unused = dict(without_effect(compose()))
    assert unused["eval.length"] == "train.eval_tasks=[] names no task"
    assert len(unused) == 7
    text = compose(["train.eval_tasks=[perplexity]", "data.eval_sequences=1"])
    assert dict(without_effect(text)) == {
        f"eval.{name}": "train.eval_tasks=[perplexity] does not contain niah"
        for name in ("form", "haystack", "needles", "chains", "seed")
    }
    assert not dict(without_effect(compose([NIAH])))


@pytest.mark.parametrize(("allowed", "refused"), [("2", "1"), ("64m", "67108865")])
def test_a_length_ends_at_its_last_allowed_value(allowed, refused):
    compose([NIAH, f"eval.length={allowed}"])
    with pytest.raises(ConfigError, match=r"eval\.length="):
        compose([NIAH, f"eval.length={refused}"])
