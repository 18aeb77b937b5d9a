"""The texts of the experiment: sources of installed packages, and needles between their lines.

A package is a document. Whole packages are held out. A file of a held-out package is dropped if it
shares a block of 256 bytes with the training text: copies of a file are common among packages.
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

from mtrain_cli.config import documents
from mtrain_cli.config.documents import replace_text
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.config.sizes import format_size
from mtrain_cli.data.checked_files import explain_read_errors
from mtrain_cli.data.needles import NeedleSettings, needle_documents
from mtrain_cli.data.prepare import PreparationProgress, prepare_store
from mtrain_cli.data.text_files import text_corpus
from mtrain_cli.data.tokenizers import Tokenizer, open_tokenizer
from mtrain_extras.studies.tiers import Tier

BLOCK = 256  # bytes
CODE, HELD_OUT, ABOUT, TOKENIZER = "code", "held_out.jsonl", "corpus.json", "tokenizer.json"
NEEDLES_BASE, NEEDLES_LONG = "needles_base", "needles_long"
NEEDLE_SHARE = 0.25  # of the training sequences
# Shares of the sequences of a base, and the documents that they are made of: from one needle, a
# model first learns to copy a number, and from several to tell names apart.
_LESSONS = {
    "needles_short": (0.2, NeedleSettings(256, 1, 0.0, 3, 5)),
    "needles_middle": (0.2, NeedleSettings(1024, 6, 0.0, 4, 3)),
}
_MOST_OF_LESSON = 20_000  # documents
# Links from one name to another are another skill, which small models learn late or never.
CHAINS = 0.0
_MOST_OF_PACKAGE = 16 << 20  # bytes, so that no package is a large part of the text
_HELD_OUT_SHARE = 8  # one of this number of packages
_SKIPPED = {"__pycache__", "test", "tests"}
_HASH_BASE = 0x9E3779B97F4A7C15  # odd, so that it has an inverse modulo 2^64


@dataclass(frozen=True)
class CorpusFacts:
    """What the corpus holds.

    held_out: names of the held-out packages that have text left.
    dropped: number of their files that share a block with the training text.
    kept: number of their other files.
    """

    packages: int
    bytes: int
    held_out: tuple[str, ...]
    held_out_bytes: int
    dropped: int
    kept: int
    sha256: str


def build(
    folder: Path,
    tier: Tier,
    packages: Path | None = None,
    before_writing: Callable[[], None] = lambda: None,
    report: Callable[[PreparationProgress], None] = lambda _: None,
) -> CorpusFacts:
    """Write the texts of a tier, unless the folder has them.

    Args:
        packages: folder of the packages; None for those of this Python.
    """
    if (facts := read(folder)) is not None:
        before_writing()
        return facts
    root = packages or Path(sysconfig.get_path("purelib"))
    training, held_out = _split(root, tier)
    blocks = block_hashes(text for _, files in training for text in files)
    own = [
        (name, [text for text in files if not shares_block(text, blocks)])
        for name, files in held_out
    ]
    whole = sum(len(files) for _, files in own)
    dropped = sum(len(files) for _, files in held_out) - whole
    kept = [(name, files) for name, files in own if sum(map(len, files)) >= tier.long_seq]
    if not kept or not training:
        raise ConfigError(
            f"--packages {root}: too little Python text: no held-out package has "
            f"{tier.long_seq:,} bytes of its own. Give a folder with more packages"
        )
    before_writing()
    (folder / CODE).mkdir(parents=True, exist_ok=True)
    _write(folder / CODE / f"{CODE}.jsonl", training)
    _write(folder / HELD_OUT, kept)
    tokenizer = _tokenizer(folder, tier, report)
    _write_needles(folder, tier, tokenizer, report)
    found = CorpusFacts(
        packages=len(training),
        bytes=sum(len(text) for _, files in training for text in files),
        held_out=tuple(name for name, _ in kept),
        held_out_bytes=sum(len(text) for _, files in kept for text in files),
        dropped=dropped,
        kept=whole,
        sha256=_digest(folder),
    )
    replace_text(folder / ABOUT, json.dumps(asdict(found), indent=1) + "\n")
    return found


def read(folder: Path) -> CorpusFacts | None:
    """Return what the texts in a folder hold; None if they are not complete."""
    about = folder / ABOUT
    if not about.is_file():
        return None
    again = (
        f"or delete {folder} and run the same command again, which writes the same texts, if the "
        "packages are the same"
    )
    try:
        facts = documents.checked(CorpusFacts, documents.read_json(about))
    except documents.UnreadableError as error:
        raise ConfigError(f"{about}: damaged ({error}). Mend it, {again}") from None
    with explain_read_errors(f"--out {folder.parent}:"):
        if _digest(folder) != facts.sha256:
            raise ConfigError(
                f"--out {folder.parent}: the texts in {folder} have changed since the study began. "
                f"Put them back, {again}"
            )
    return facts


def _digest(folder: Path) -> str:
    digest = hashlib.sha256()
    for file in sorted(folder.rglob("*.jsonl")):
        digest.update(file.read_bytes())
    return digest.hexdigest()


def mix(*, is_base: bool) -> dict[str, float]:
    """Return the share of each part of the texts in the training of a base or of other cells."""
    needles = {NEEDLES_BASE if is_base else NEEDLES_LONG: NEEDLE_SHARE}
    if is_base:
        needles |= {name: share for name, (share, _) in _LESSONS.items()}
    return {CODE: 1 - sum(needles.values()), **needles}


def tokenizer_path(folder: Path, tier: Tier) -> str:
    """Return the value of data.tokenizer."""
    return str((folder / TOKENIZER).resolve()) if tier.vocabulary else "bytes"


def block_hashes(texts: Iterable[bytes]) -> np.ndarray:
    """Return the hashes of the blocks of texts, uint64, ascending. The rest of a text has none."""
    found = [rolling_hashes(text)[::BLOCK] for text in texts]
    return np.unique(np.concatenate([np.empty(0, np.uint64), *found]))


def shares_block(text: bytes, blocks: np.ndarray) -> bool:
    """Return whether a text has one of the blocks, at any offset."""
    hashes = rolling_hashes(text)
    if not len(hashes) or not len(blocks):
        return False
    places = np.minimum(np.searchsorted(blocks, hashes), len(blocks) - 1)
    return bool((blocks[places] == hashes).any())


def rolling_hashes(text: bytes) -> np.ndarray:
    """Return the hash of the `BLOCK` bytes at each offset, uint64 [bytes - BLOCK + 1].

    The hash is a polynomial modulo 2^64 in an odd base.
    """
    count = len(text) - BLOCK + 1
    if count < 1:
        return np.empty(0, np.uint64)
    values = np.frombuffer(text, np.uint8).astype(np.uint64) + np.uint64(1)
    sums = np.cumsum(values * _powers(_HASH_BASE, len(text)), dtype=np.uint64)
    windows = sums[BLOCK - 1 :].copy()
    windows[1:] -= sums[: count - 1]
    # Divide each window by the power at its start, so that equal blocks have equal hashes.
    return windows * _powers(pow(_HASH_BASE, -1, 1 << 64), count)


def _powers(base: int, count: int) -> np.ndarray:
    powers = np.full(count, base, np.uint64)
    powers[0] = 1
    return np.cumprod(powers, dtype=np.uint64)


def _split(
    root: Path, tier: Tier
) -> tuple[list[tuple[str, list[bytes]]], list[tuple[str, list[bytes]]]]:
    training: list[tuple[str, list[bytes]]] = []
    held_out: list[tuple[str, list[bytes]]] = []
    wanted, total, spare = tier.corpus_mib << 20, 0, 0
    names = {name: hashlib.sha256(name.encode()).hexdigest() for name in _packages(root)}
    for name in sorted(names, key=lambda name: names[name]):
        hold = int(names[name], 16) % _HELD_OUT_SHARE == 0
        if (spare if hold else total) >= (wanted // 4 if hold else wanted):
            continue
        files = list(_sources(root, name, min(_MOST_OF_PACKAGE, wanted // 4)))
        size = sum(map(len, files))
        # A package without a whole sequence gives no held-out text.
        if hold and size >= tier.long_seq:
            held_out.append((name, files))
            spare += size
        elif not hold and size:
            training.append((name, files))
            total += size
    return training, held_out


def _packages(root: Path) -> Iterator[str]:
    for entry in sorted(os.scandir(root), key=lambda entry: entry.name):
        if entry.is_dir() and not entry.name.endswith((".dist-info", "__pycache__")):
            yield entry.name


def _sources(root: Path, package: str, most: int) -> Iterator[bytes]:
    """Yield the files of a package, each below a line with its path, up to ``most`` bytes."""
    total = 0
    for folder, folders, files in os.walk(root / package):
        folders[:] = sorted(name for name in folders if name not in _SKIPPED)
        for name in sorted(file for file in files if file.endswith(".py")):
            path = Path(folder, name)
            try:
                text = path.read_text(encoding="utf-8").strip()
            except (OSError, UnicodeDecodeError):
                continue
            if not text:
                continue
            yield f"# {path.relative_to(root).as_posix()}\n{text}\n".encode()
            if (total := total + len(text)) > most:
                return


def _write(path: Path, packages: Iterable[tuple[str, list[bytes]]]) -> None:
    lines = (
        json.dumps({"package": name, "text": b"".join(files).decode()}) + "\n"
        for name, files in packages
    )
    replace_text(path, "".join(lines))


def _tokenizer(
    folder: Path, tier: Tier, report: Callable[[PreparationProgress], None]
) -> Tokenizer:
    if tier.vocabulary:
        code = text_corpus(str(folder / CODE), "text")
        prepare_store(code, folder / "store", "bpe", tier.vocabulary, report)
        (folder / TOKENIZER).write_bytes((folder / "store" / TOKENIZER).read_bytes())
    return open_tokenizer(tokenizer_path(folder, tier), "the tokenizer")


def _write_needles(
    folder: Path, tier: Tier, tokenizer: Tokenizer, report: Callable[[PreparationProgress], None]
) -> None:
    haystack = text_corpus(str(folder / CODE), "text")
    base, cells = tier.base_steps * tier.base_batch, tier.steps * tier.batch
    of_base, of_cells = (tier.base_seq, tier.base_pairs), (tier.long_seq, tier.long_pairs)
    # As many documents as training reads, up to a limit for the short ones.
    sequences: dict[str, tuple[NeedleSettings, float]] = {
        NEEDLES_BASE: (NeedleSettings(*of_base, CHAINS, 1, tier.questions), NEEDLE_SHARE * base),
        NEEDLES_LONG: (NeedleSettings(*of_cells, CHAINS, 2, tier.questions), NEEDLE_SHARE * cells),
    }
    for name, (share, settings) in _LESSONS.items():
        read = share * base * tier.base_seq / settings.length
        sequences[name] = settings, min(_MOST_OF_LESSON, read)
    for name, (settings, read) in sequences.items():
        count = max(8, int(read) + 1)
        stage = f"needles of {format_size(settings.length)}"
        lines, done = [], 0
        for number, document in enumerate(
            needle_documents(haystack, tokenizer, settings, count), 1
        ):
            lines.append(document.line())
            done += len(document.text)
            size = done * count // number  # estimated: only tokens are equal
            report(PreparationProgress(stage, done, size, number * document.length, number))
        (folder / name).mkdir(parents=True, exist_ok=True)
        replace_text(folder / name / "needles.jsonl", "".join(lines))
