"""The mask of ``mask=pages``."""

from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from mtrain_cli.attention.mask import SliceKind
from mtrain_cli.config.mask_settings import MaskSettings
from mtrain_cli.config.option import POSITIVE, option


@dataclass(frozen=True)
class Pages(MaskSettings):
    """Query q sees key k <= q of its own page and of the page before.

    page: number of tokens per page
    """

    kind: ClassVar[str] = "pages"
    keeps_causal_intervals: ClassVar[bool] = True

    page: int = option(POSITIVE, tokens=True)

    def slices(self, seq: int) -> np.ndarray:
        starts = range(0, seq, self.page)
        stops = [min(start + self.page, seq) for start in starts]
        return np.array(
            [
                (start, stop, max(start - self.page, 0), stop, SliceKind.CAUSAL)
                for start, stop in zip(starts, stops, strict=True)
            ]
        )
