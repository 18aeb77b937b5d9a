"""The standard library as a corpus, how text is cut into pieces, and filters."""

from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import EVERYTHING, Corpus, Filters, split_text, stdlib_corpus


def _texts(corpus: Corpus) -> dict[str, str]:
    return {
        document.name: "".join(document.pieces)
        for unit in corpus.units
        for document in unit.documents(0)
    }


@pytest.fixture
def library(tmp_path: Path) -> Path:
    """A small folder with the layout of a standard library."""
    files = {
        "abc.py": "A = 1\n",
        "pkg/__init__.py": "B = 2\n\n\n",
        "pkg/sub/deep.py": "D = 'é'\n",
        "pkg/a.py": "C = 3\r\n",
        "pkg/test/test_a.py": "skipped\n",
        "test/test_abc.py": "skipped\n",
        "site-packages/other.py": "skipped\n",
        "dist-packages/other.py": "skipped\n",
        "__pycache__/x.py": "skipped\n",
        "_sysconfigdata_linux.py": "skipped\n",
        "notes.txt": "skipped\n",
    }
    for name, text in files.items():
        path = tmp_path / "lib" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode())
    (tmp_path / "lib" / "latin.py").write_bytes(
        "# -*- coding: latin-1 -*-\nE = 'é'\n".encode("latin-1")
    )
    (tmp_path / "lib" / "broken.py").write_bytes(b"x = '\xff'\n")
    return tmp_path / "lib"


def test_stdlib_is_one_document_per_package_with_its_files_in_order(library: Path) -> None:
    assert _texts(stdlib_corpus(str(library))) == {
        "abc": "# abc.py\nA = 1\n",
        "latin": "# latin.py\n# -*- coding: latin-1 -*-\nE = 'é'\n",
        "pkg": "# pkg/__init__.py\nB = 2\n# pkg/a.py\nC = 3\n# pkg/sub/deep.py\nD = 'é'\n",
    }


def test_stdlib_signature_changes_with_contents_and_paths_only(library: Path) -> None:
    before = stdlib_corpus(str(library)).signature
    (library / "abc.py").touch()
    assert stdlib_corpus(str(library)).signature == before
    (library / "abc.py").write_text("A = 2\n")
    changed = stdlib_corpus(str(library)).signature
    assert changed != before
    (library / "abc.py").rename(library / "abd.py")
    assert stdlib_corpus(str(library)).signature not in (before, changed)


def test_stdlib_without_sources_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data=stdlib: no Python sources in .*data=text"):
        stdlib_corpus(str(tmp_path))


def _blocks(text: str, size: int) -> list[str]:
    return [text[start : start + size] for start in range(0, len(text), size)]


def test_pieces_stay_within_the_size_if_lines_are_short() -> None:
    text = "some words\n" * 1000
    for block in (1, 50, len(text)):
        assert {len(piece) for piece in split_text(_blocks(text, block), 100)} == {
            99,
            len(text) % 99,
        }


@given(
    text=st.text(st.sampled_from("ab \n\t\u2028é"), max_size=400),
    block=st.integers(1, 50),
    size=st.integers(1, 50),
)
def test_pieces_join_to_the_text_and_are_cut_between_plain_lines(
    text: str, block: int, size: int
) -> None:
    pieces = list(split_text(_blocks(text, block), size))
    assert "".join(pieces) == text
    assert all(pieces)
    for left, right in pairwise(pieces):
        if len(left) < 16 * size:
            assert left[-1] == "\n"
            assert not left[-2].isspace()
            assert not right[0].isspace()
    assert all(len(piece) <= 16 * size for piece in pieces)


def test_contradicting_filters_are_refused():
    with pytest.raises(ConfigError, match=r"^--max-tokens 8: is below --min-tokens 9"):
        Filters(min_tokens=9, max_tokens=8)


def test_a_minimum_without_a_maximum_is_allowed():
    assert Filters(min_tokens=9, max_tokens=0).max_tokens == 0
    assert Filters(min_tokens=9, max_tokens=9).max_tokens == 9


def test_the_recipe_tells_filters_apart_and_is_empty_without_any():
    assert EVERYTHING.recipe == {} == Filters().recipe
    recipes = [Filters(min_tokens=3), Filters(max_tokens=3), Filters(domains=("code",))]
    assert len({filters.recipe["filters"] for filters in recipes}) == 3
