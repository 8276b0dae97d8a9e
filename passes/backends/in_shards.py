"""Runs the stages before the last of all launches in step with each other, for parameters in shards.

Given (LAMB, two launches)::

    launch 0, stage 0:  totals of squares of param and of update, in this process's shards
    launch 1, stage 0:  the same
    both:               one vector of all totals, added up over processes
    launch 0, stage 1:  norms -> ratios
    launch 1, stage 1:  the same

What one stage of all launches has found is sent at once, so that a step needs as many collectives as its longest update
has reductions, for each mesh dimension over which parameters are sharded.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from collage_neuron.numerics.tensor_sums import totals
from collage_neuron.passes.backends.protocol import Found, Launch, Shard
from collage_neuron.passes.backends.staged import Search, SumGroups, computed, reductions_of, searching


def found_in_shards(launches: Sequence[Launch], sum_groups: SumGroups) -> list[Found | None]:
    """What the stages before the last one find; None of launches without shards, and of those that are skipped."""
    searches = {i: searching(x, computed) for i, x in enumerate(launches) if _is_shared(x)}
    found: list[Found | None] = [None] * len(launches)
    answers: dict[int, Sequence[Tensor] | None] = dict.fromkeys(searches)
    while answers:
        asked: dict[int, tuple[Launch, Tensor]] = {}
        for i, answer in answers.items():
            said = _said(searches[i], answer)
            if isinstance(said, Found):
                found[i] = said
            else:
                asked[i] = said
        answers = dict(zip(asked, _answers(list(asked.values()), sum_groups), strict=True))
    return found


def _is_shared(launch: Launch) -> bool:
    is_skipped = launch.finite is not None and not bool(launch.finite)  # the same in all processes
    return launch.update.is_staged and bool(launch.shards) and not is_skipped


def _said(search: Search, answer: Sequence[Tensor] | None) -> tuple[Launch, Tensor] | Found:
    """What a search asks for next, given the answer to what it asked before (None: nothing); or what it has found."""
    try:
        return next(search) if answer is None else search.send(answer)
    except StopIteration as end:
        found: Found = end.value
        return found


def _answers(asked: Sequence[tuple[Launch, Tensor]], sum_groups: SumGroups) -> list[list[Tensor]]:
    """The numbers of one reduction of each launch, for each of its results."""
    own = [[totals(groups) for groups in zip(*sum_groups(*each), strict=True)] for each in asked]
    shards = [shard for (part, _), sums in zip(asked, own, strict=True) for _ in sums for shard in part.shards]
    flat = iter(added(shards, [x for sums in own for of_result in sums for x in of_result]))
    return [
        [
            _rounded([kind.finish(next(flat), shard.size) for shard in part.shards], rows.device)
            for kind in reductions_of(part.update.stages[0])
        ]
        for part, rows in asked
    ]


def added(shards: Sequence[Shard], of_shards: Sequence[float]) -> list[float]:
    """The totals of whole parameters, from those of the shards of this process."""
    found = list(of_shards)
    for adds in dict.fromkeys(shard.adds for shard in shards):
        places = [i for i, shard in enumerate(shards) if shard.adds == adds]
        x = torch.tensor([found[i] for i in places], dtype=torch.float64, device="cpu")
        for add in adds:
            x = add(x)
        for i, value in zip(places, x.tolist(), strict=True):
            found[i] = value
    return found


def _rounded(values: Sequence[float], device: torch.device) -> Tensor:
    return torch.tensor(values, dtype=torch.float64, device="cpu").to(torch.float32).to(device)
