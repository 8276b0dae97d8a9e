"""What to do about an operand of an fp8 matmul that loses much: measure more often, or keep its layer as it is."""

from __future__ import annotations

from collections.abc import Mapping

from collage_neuron.passes.fp8_scaling.scaled_matmul import LIMITS

LOSS = 0.05
"""The part of an operand that saturates, or becomes 0, from which on something should be done."""
SCALED_WELL = 2.0
"""Binades: a loss beside so small a drift does not come from the scale, but from values of too many sizes."""


def advice(name: str, drift: float, saturated: float, vanished: float, limited: bool = False) -> str | None:
    """One sentence about an operand; None if it loses little.

    Args:
        name: of the operand, as `explain` has it: `layers.3.mlp.gradient`.
        drift: by how many binades its scale was off.
        saturated: the part of its squares that was lost to elements that were too large.
        vanished: the part of its elements, of those that were not 0, that became 0.
        limited: True if its scale is the largest or smallest that there is.
    """
    if max(saturated, vanished) < LOSS:
        return None
    lost = f"{vanished:.0%} of {name} become 0" if vanished >= saturated else f"{saturated:.0%} of {name} saturate"
    if limited:
        return (
            f"{lost}: scales reach {_REACH} binades, and its values lie beyond; scale the loss, or the model's inputs"
        )
    if abs(drift) > SCALED_WELL:
        return f"{lost}: its scale was off by {abs(drift):.0f} binades; measure more often (a smaller rescale)"
    # Without the number of the graph (`@1`), that of the call (`#2`), and the operand.
    layer = name.partition("@")[0].partition("#")[0].rpartition(".")[0]
    return f"{lost} though its scale fits: its values differ too much in size; name {layer!r} in keep"


_REACH = ", ".join(f"{limit} ({fmt})" for fmt, limit in LIMITS.items())


def worst(operands: Mapping[str, Mapping[str, float]]) -> str | None:
    """The sentence about the operand that loses most; None if none loses much."""
    most = max(operands, key=lambda n: max(operands[n]["saturated"], operands[n]["vanished"]), default=None)
    if most is None:
        return None
    found = operands[most]
    return advice(most, found["drift"], found["saturated"], found["vanished"])
