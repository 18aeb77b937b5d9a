"""Requests survive the file that workers read; missing texts and tokenizers get a line."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest
from data.framed_tokenizers import write_framed
from evaluation.evaluated_runs import configs_of, request_of, small_run, text_file
from inference.small_models import source, write_hf

from mtrain_cli.config import resolved_file
from mtrain_cli.config.schema import NIAH, PERPLEXITY, ConfigError
from mtrain_cli.data.open_dataset import open_dataset
from mtrain_cli.data.prepare import prepare_store
from mtrain_cli.data.store import TokenStore
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.evaluation.request import (
    EvaluationRequest,
    NeedleOptions,
    PerplexityOptions,
    Weights,
    open_measurement,
)
from mtrain_cli.evaluation.results import Part, Result, ResultsFolder
from mtrain_cli.evaluation.retrieval import PYTHON
from mtrain_cli.inference.text import TextCodec, open_codec


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    return small_run(tmp_path_factory.mktemp("request"))


def test_workers_read_what_was_asked(run, tmp_path):
    both = ("dense", "vertical_slash")
    options = {"tasks": ["vt"], "max_new": 2}
    request = request_of(run, NIAH, attentions=both, options=options, lengths=(1, 2))
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
    codec = TextCodec(None, frozenset(), "m: has no tokenizer (why)")
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
    with pytest.raises(ConfigError, match=r"holds no key tokens with --short 256"):
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


@pytest.fixture
def framed(tmp_path) -> tuple[Path, Path]:
    """A tokenizer with a begin token, and a text."""
    return write_framed(tmp_path / "framed"), text_file(tmp_path)


def starts_of(run, text: Path) -> list[list[int]]:
    """Return the first ids of each kind of text of a run: in training, evaluated and generated."""
    found = source(run)
    codec = open_codec(found)
    python = NeedleOptions(form=PYTHON, haystack=str(text), needles=2)
    sentences = NeedleOptions(haystack=str(text), needles=2)
    perplexity = PerplexityOptions(str(text))
    requests = [
        request_of(run, NIAH, niah=sentences),
        request_of(run, NIAH, niah=python),
        request_of(run, PERPLEXITY, perplexity=perplexity),
    ]
    items = [
        item["ids"]
        for request in requests
        for measurement in [open_measurement(request, found, codec)]
        for cell in measurement.cells()
        for item in measurement.items(cell)
    ]
    assert all(len(ids) == 512 for ids in items[:3]), "needles and windows keep the length"
    trained = open_dataset(dataclasses.replace(found.config, seq=64))[0].tokens
    return [ids[:3] for ids in (trained.tolist(), codec.encode("Line 0 says"), *items)]


def test_every_text_starts_as_in_training(tmp_path, framed):
    tokenizer, text = framed
    words = ["data=text", f"data.path={text}", f"data.tokenizer={tokenizer}"]
    vocabulary = ["model.vocab_size=auto", "data.shuffle=false"]
    kinds = {}
    for name, bos in (("with", "auto"), ("without", "false")):
        run = small_run(tmp_path / name, *words, *vocabulary, f"data.bos={bos}")
        kinds[name] = starts_of(run, text)
        codec = open_codec(source(run))
        begin = codec.encode_plain("<begin>")
        assert [ids[:1] == begin for ids in kinds[name]] == [name == "with"] * len(kinds[name])
        starts = "each document starts with" if name == "with" else "documents start without"
        assert codec.starts.startswith(f"{starts} id {begin[0]} (<begin>)")
        assert begin[0] not in [number for ids in kinds[name] for number in ids[1:]]
        # A run of an earlier version recorded no choice, and had no begin token.
        file = run / "resolved.yaml"
        file.write_text(file.read_text().replace(f"  bos: {bos}\n", ""))
        assert open_codec(source(run)).begin == ()


def test_evaluations_follow_the_store_that_a_run_was_trained_on(tmp_path, framed):
    tokenizer, text = framed
    stores = {}
    for bos in ("auto", False):
        corpus = text_corpus(str(text), "text", "SOURCE", "--text-key")
        store = prepare_store(
            corpus, tmp_path / f"{bos}", str(tokenizer), None, lambda _: None, bos=bos
        )
        words = ["data=tokens", f"data.path={store.folder}", "model.vocab_size=auto"]
        stores[bos] = small_run(tmp_path / f"of-{bos}", *words)
    begin = open_codec(source(stores["auto"])).begin
    first = {bos: TokenStore.open(tmp_path / f"{bos}").tokens[0] for bos in stores}
    assert (first["auto"] == begin[0], first[False] == begin[0]) == (True, False)
    assert open_codec(source(stores[False])).begin == ()
    assert open_codec(source(stores[False]), tokenizer.parent).begin == ()
    assert open_codec(source(stores["auto"]), tokenizer.parent).begin == begin
    # A store of an earlier version has no begin token, and does not say so.
    meta = tmp_path / "False" / "meta.json"
    content = json.loads(meta.read_text())
    assert content.pop("begin") == {"ids": [], "name": ""}
    meta.write_text(json.dumps(content))
    assert open_codec(source(stores[False])).begin == ()
    described = open_dataset(resolved_file.load(stores[False] / "resolved.yaml")).describe()
    assert f"documents start without id {begin[0]} (<begin>), which their token" in described
    described = open_dataset(resolved_file.load(stores["auto"] / "resolved.yaml")).describe()
    assert f"each document starts with id {begin[0]} (<begin>)" in described
