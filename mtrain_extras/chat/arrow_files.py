"""Read .arrow files, in which the package datasets keeps its tables."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from mtrain_cli import install_command
from mtrain_cli.config.schema import ConfigError
from mtrain_cli.data.corpora import Document
from mtrain_cli.data.text_files import DOMAIN, document_of, values_of
from mtrain_cli.data.token_documents import Fields


def read_arrow(
    path: Path, label: str, fields: Fields, skip: int, _alone: bool
) -> Iterator[Document]:
    """Yield the documents of a file after its first ``skip`` rows."""
    try:
        import pyarrow
        import pyarrow.ipc
    except ImportError:
        needed = f"reading arrow needs the pyarrow package: {install_command('data')}"
        raise ConfigError(f"{label}: {needed}") from None
    size, row = path.stat().st_size, 0
    try:
        with pyarrow.memory_map(str(path)) as source:
            for batch in _batches(pyarrow, source):
                names = batch.schema.names
                if key := fields.absent(names):
                    raise key.missing_error(str(path), names)
                wanted = dict.fromkeys([*(key.name for key in fields.keys), *fields.others, DOMAIN])
                columns = [name for name in wanted if name in names]
                values = [values_of(batch.column(name)) for name in columns]
                for cells in zip(*values, strict=True):
                    row += 1
                    if row > skip:
                        get = partial(dict[str, Any], zip(columns, cells, strict=True))
                        end = min(size, source.tell())
                        yield document_of(fields, get, path, row, end, "row")
    except pyarrow.ArrowException as error:
        reason = " ".join(str(error).split())[:200]
        raise ConfigError(f"{label}: not a readable arrow file ({reason})") from None


def _batches(pyarrow: Any, source: Any) -> Iterator[Any]:
    """Yield the batches of a stream, as datasets writes it, or of a file."""
    if source.read(6) == b"ARROW1":
        file = pyarrow.ipc.open_file(source)
        yield from map(file.get_batch, range(file.num_record_batches))
    else:
        source.seek(0)
        yield from pyarrow.ipc.open_stream(source)
