"""What a reader must know about the steps of a `metrics.jsonl`: missing ones, repeated ones.

A run that resumes or restarts first removes the steps after its checkpoint. So the steps of an
intact file have the numbers 1, 2, 3, ..., however often the run stopped.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

from mtrain_cli.grouping import show_spans, spans
from mtrain_cli.records.metrics import StepMetrics

_ALL = 0.995  # share of the allowed pairs from which a pattern leaves nothing out


def step_remarks(steps: Sequence[StepMetrics], last: int = 0) -> list[str]:
    """Return what is wrong with the steps of a file, for example "step 5 is missing".

    A step without a label has no loss, and no remark: its update was skipped.

    Args:
        last: a step that the run has reached. The file must have the steps up to it.
    """
    numbers = [step.step for step in steps]
    present = sorted(set(numbers))
    ends = [0, *present, max(last, *present, 0) + 1]
    missing = [range(low + 1, high) for low, high in pairwise(ends) if high > low + 1]
    repeated = {number for number, after in pairwise(sorted(numbers)) if number == after}
    remarks = [
        _remark(missing, "is missing", "are missing"),
        _remark(spans(sorted(repeated)), "appears more than once", "appear more than once"),
        loss_remark(step.step for step in steps if _lacks_loss(step)),
    ]
    if any(after < number for number, after in pairwise(numbers)):
        remarks.append("the steps are not in order")
    return [remark for remark in remarks if remark]


def _lacks_loss(step: StepMetrics) -> bool:
    return not is_finite(step.loss) and not (step.loss is None and step.skipped)


def loss_remark(numbers: Iterable[int]) -> str:
    """Return a remark on steps without a finite loss; "" without such steps."""
    return _remark(spans(sorted(set(numbers))), "has no finite loss", "have no finite loss")


def nothing_left_out(step: StepMetrics) -> str:
    """Return a note if a sparse step computed nearly all pairs that the mask allows, else ""."""
    allowed = step.dense_density
    if not allowed or step.density < _ALL * allowed:
        return ""
    share = "" if allowed > _ALL else ", as with dense attention"
    return f"density {step.density:.0%}{share}: the pattern leaves nothing out at this length"


def is_finite(loss: float | None) -> bool:
    return loss is not None and math.isfinite(loss)


def _remark(found: Sequence[range], is_one: str, are_several: str) -> str:
    if not found:
        return ""
    one = sum(map(len, found)) == 1
    return f"step{'s' * (not one)} {show_spans(found)} {is_one if one else are_several}"


def line_on_file(file: Path, damage: str, remarks: Sequence[str]) -> str:
    """Return a line on a file. damage: a line that names the file, or ""."""
    text = "; ".join(filter(None, (damage, *remarks)))
    return f"{file}: {text}" if text and not damage else text
