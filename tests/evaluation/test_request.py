"""Requests survive the file that workers read; missing texts and tokenizers get a line."""

from __future__ import annotations

import dataclasses
import json

import pytest
from evaluation.evaluated_runs import configs_of, request_of, small_run, text_file
from inference.small_models import source, write_hf

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.evaluation.request import (
    NIAH,
    PERPLEXITY,
    PYTHON,
    EvaluationRequest,
    NeedleOptions,
    PerplexityOptions,
    RulerOptions,
    Weights,
    open_measurement,
)
from mtrain_cli.evaluation.results import Part, Result, ResultsFolder
from mtrain_cli.inference.text import TextCodec, open_codec


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("request"))


def test_workers_read_what_was_asked(run, tmp_path):
    both = ("dense", "vertical_slash")
    options = RulerOptions(tasks=("vt",), files=("a.jsonl",))
    request = request_of(run, NIAH, attentions=both, ruler=options, lengths=(1, 2))
    request.save(tmp_path, configs_of(run, both))
    loaded, configs = EvaluationRequest.load(tmp_path)
    assert loaded == request
    assert [config.sparsity.pattern for config in configs] == list(both)


def test_weights_differ_by_content(run, tmp_path):
    (own,) = request_of(run, NIAH).weights
    assert (own.step, own.is_folder) == (3, False)
    one, two = (
        Weights.of_folder(write_hf(tmp_path / name, init_std=0.1)) for name in ("one", "two")
    )
    assert one.identity != two.identity
    assert Weights.of_folder(tmp_path / "one") == one
    with pytest.raises(ConfigError, match=r"manifest\.json"):
        Weights.of_checkpoint(tmp_path)


def opened(run, kind, codec=None, **changes):
    found = source(run)
    return open_measurement(request_of(run, kind, **changes), found, codec or open_codec(found))


def test_a_model_without_tokenizer_gets_a_line(run):
    codec = TextCodec(None, frozenset(), "m: has no tokenizer (why). Give prompts as ids")
    message = r"m: has no tokenizer \(why\). Give --tokenizer FOLDER"
    with pytest.raises(ConfigError, match=message):
        opened(run, NIAH, codec)
    text = PerplexityOptions(str(text_file(run.parent)))
    with pytest.raises(ConfigError, match=message):
        opened(run, PERPLEXITY, codec, perplexity=text)


def test_key_tokens_come_from_dense_results(run, tmp_path):
    text = str(text_file(run.parent))
    with pytest.raises(ConfigError, match="holds no samples"):
        opened(run, PERPLEXITY, perplexity=PerplexityOptions(text, "text", 64, str(tmp_path)))
    folder = ResultsFolder.open(tmp_path / "out", "m")
    for key, attention in (("s", "moba"), ("d", "dense")):
        folder.add_result(Result(key, "perplexity", 512, attention, "", 1, 1, 1.0, None, "nats"))
    for index, (key, keys, short) in enumerate((("d", [5], 64), ("s", [6], 64), ("d", [7], 128))):
        row = {"key": key, "index": index, "score": 1.0, "text": "t", "keys": keys}
        folder.add_sample({**row, "short": short})
    options = PerplexityOptions(text, "text", 64, str(tmp_path / "out"))
    assert opened(run, PERPLEXITY, perplexity=options).keys == {"t": [5]}
    other = dataclasses.replace(options, short=128)
    assert opened(run, PERPLEXITY, perplexity=other).keys == {"t": [7]}
    with pytest.raises(ConfigError, match=r"--short 256: .* give --short 64 or 128"):
        opened(run, PERPLEXITY, perplexity=dataclasses.replace(options, short=256))
    lines = (tmp_path / "out" / "samples.jsonl").read_text().splitlines()
    plain = [{k: v for k, v in json.loads(line).items() if k != "keys"} for line in lines]
    (tmp_path / "out" / "samples.jsonl").write_text("\n".join(map(json.dumps, plain)))
    with pytest.raises(ConfigError, match="holds no key tokens"):
        opened(run, PERPLEXITY, perplexity=options)


def test_key_tokens_of_earlier_versions_have_the_short_context_of_their_result(run, tmp_path):
    folder = ResultsFolder.open(tmp_path, "m")
    keys = Part(64, 512, 1, 1.0)
    result = Result("d", "perplexity", 512, "dense", "", 1, 1, 1.0, None, "nats", key_tokens=keys)
    folder.add_result(result)
    folder.add_sample({"key": "d", "index": 0, "score": 1.0, "text": "t", "keys": [5]})
    options = PerplexityOptions(str(text_file(run.parent)), "text", 64, str(tmp_path))
    assert opened(run, PERPLEXITY, perplexity=options).keys == {"t": [5]}


@pytest.mark.parametrize("form", ["sentences", PYTHON])
def test_needles_have_the_length_and_the_number_that_was_asked(run, form):
    own = opened(run, NIAH, niah=NeedleOptions(form, needles=4), samples=2, lengths=(2048,))
    (cell,) = own.cells()
    items = list(own.items(cell))
    assert [len(item["answers"]) for item in items] == [4, 4]
    end = 0 if form == "sentences" else 1  # a document of Python ends with an end token
    assert [len(item["ids"]) + end for item in items] == [2048, 2048]
