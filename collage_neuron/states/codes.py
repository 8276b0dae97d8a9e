"""Codes that other code writes between steps are rejected: they are integers, on which arithmetic means nothing.

`state["exp_avg"].fill_(1e-4)` makes integer codes 0, and `mul_(2)` of a fourth root is a factor of 16; torch raises for
few such writes. Nobody can tell what was meant, so the next step raises, and so do checkpoints and copies. A tensor of
values that is assigned has another type, and is encoded (`store.kept_format`). Codes that were moved or copied are as
they were.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch

from collage_neuron.states.sharding import local, version

Noted = tuple[torch.Tensor, int]
"""The codes that the last step left, and their version then."""


def check_unwritten(
    p: torch.Tensor, name: str, now: torch.Tensor, noted: Noted | None, record: Mapping[str, str]
) -> None:
    """Raises ValueError if the codes `now` are not those that were noted; of new ones (loaded, copied) none are."""
    if noted is None or now.dtype != noted[0].dtype:
        return
    before, its_version = noted
    if version(before) != its_version or (now is not before and not _equal(now, before)):
        raise ValueError(
            f"the state {name!r} of a parameter of shape {list(p.shape)} was written between steps, and it holds codes "
            f"({record.get(name, 'of blocks')}, {now.dtype}), not values. Nothing was updated: assign a floating-point "
            f"tensor of values, optimizer.state[p][{name!r}] = torch.zeros_like(p, dtype=torch.float32), which the "
            "next step encodes, or use optimizer.state_dict() and load_state_dict(), which hold values"
        )


def _equal(x: torch.Tensor, y: torch.Tensor) -> bool:
    return torch.equal(local(x).cpu(), local(y).cpu())
