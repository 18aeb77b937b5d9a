"""The exchange of ``topology.exchange=mirrored_ring``."""

from dataclasses import replace

from mtrain_cli.config.exchanges import ExchangeTraits
from mtrain_cli.parallel.schedule import PerRank, Schedule, ScheduleOptions, ScheduleStep, Transfer

MIRRORED_RING = ExchangeTraits(
    gathers=False, hierarchical=False, schedule="mtrain_a_shape.exchange:mirrored_ring"
)


def mirrored_ring(options: ScheduleOptions) -> Schedule:
    """A ring in which rank r computes the shards r, r + 1, r + 2, ..."""
    from mtrain_cli.parallel.ring import ring

    base, last = ring(options), options.workers - 1

    def shards(numbers: tuple[int, ...]) -> tuple[int, ...]:
        return tuple(last - n for n in numbers)

    def message(t: Transfer) -> Transfer:
        return replace(
            t,
            sends=shards(t.sends),
            receives=shards(t.receives),
            to=None if t.to is None else last - t.to,
            source=None if t.source is None else last - t.source,
        )

    def step(s: ScheduleStep) -> ScheduleStep:
        return replace(
            s,
            queries=shards(s.queries),
            keys=shards(s.keys),
            post=tuple(map(message, s.post)),
            send=tuple(map(message, s.send)),
        )

    def mirrored(of_ranks):
        return PerRank(options.workers, lambda r: tuple(map(step, of_ranks[last - r])))

    keeps = PerRank(options.workers, lambda r: shards(base.keeps[last - r]))
    return replace(
        base,
        exchange="mirrored_ring",
        forward=mirrored(base.forward),
        backward=mirrored(base.backward),
        keeps=keeps,
    )
