"""What a storage format, a strategy or a backend of your own is made of; `docs/extending.md` adds one of each.

A format is an entry of `FORMATS`, a strategy one of `STRATEGIES`: both are checked as they are entered. A backend is
an object that is given to `register_backend`. Conversions of formats are written in the error-free operations below,
on tensors and on graphs alike.
"""

from collage_neuron.numerics.eft import (
    STORAGE_TYPES,
    StorageType,
    Value,
    fast_two_sum,
    narrow,
    round_to,
    split,
    sqrt,
    stochastic_round,
    two_prod,
    two_sum,
    widen,
)
from collage_neuron.numerics.formats import FORMATS, Component, Format
from collage_neuron.numerics.strategies import STRATEGIES, Strategy
from collage_neuron.passes.backends.protocol import Backend, Launch, Measure
from collage_neuron.passes.backends.registry import register as register_backend
from collage_neuron.passes.backends.registry import unregister as unregister_backend
from collage_neuron.passes.ir.update import Update

__all__ = [
    "FORMATS", "STORAGE_TYPES", "STRATEGIES", "Backend", "Component", "Format", "Launch", "Measure", "StorageType",
    "Strategy", "Update", "Value", "fast_two_sum", "narrow", "register_backend", "round_to", "split", "sqrt",
    "stochastic_round", "two_prod", "two_sum", "unregister_backend", "widen",
]  # fmt: skip
