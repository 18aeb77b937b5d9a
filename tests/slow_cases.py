"""Mark most cases of a test as slow: a few of them show whether it passes, the rest tell more."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import pytest


def mostly_slow(
    names: str | Sequence[str], cases: Iterable[Any], *, keep: tuple[int, ...], **more: Any
) -> pytest.MarkDecorator:
    """Return `pytest.mark.parametrize`, with the marker `slow` on all cases but some.

    keep: numbers of the cases that run by default, from 0.

    Raises:
        AssertionError: there is no case of such a number.
    """
    one = isinstance(names, str) and "," not in names
    marked = []
    for number, case in enumerate(cases):
        if number in keep:
            marked.append(case)
        elif hasattr(case, "values") and hasattr(case, "marks"):  # a pytest.param
            marks = [*case.marks, pytest.mark.slow]
            marked.append(pytest.param(*case.values, id=case.id, marks=marks))
        else:
            values = (case,) if one else case
            marked.append(pytest.param(*values, marks=pytest.mark.slow))
    assert keep
    assert max(keep) < len(marked)
    return pytest.mark.parametrize(names, marked, **more)
