"""The probe: tests once per process whether a backend on a device keeps every rounding, and adds every number.

Testing two_sum alone is not enough: on XLA it is correct even where a sum that is multiplied, or widened, loses its
rounding. The probe tests these too, and compares bits with the reference backend on the CPU. An instruction that drops
the number it should add (aws-neuron-sdk#1296) takes eps from the divisor of Adam: the probe adds numbers as Adam does.
Strategies with integers need sums of 32 bits too, which a trn1 computes in fp32: a second update stores and reads them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from functools import cache, lru_cache

import torch
import torch.fx as fx
from torch import Tensor

from collage_neuron.errors import UnsafeEnvironment
from collage_neuron.numerics.eft import bf16, narrow, split, sqrt, two_prod, two_sum, widen
from collage_neuron.numerics.formats import BUILT_IN, FORMATS
from collage_neuron.numerics.strategies import StrategyLike, has_integers
from collage_neuron.passes.backends.protocol import Backend, Launch
from collage_neuron.passes.backends.registry import get
from collage_neuron.passes.ir.scalars import Scalar, ScalarProgram
from collage_neuron.passes.ir.update import Update

INTEGERS = "words of integers"
CHECKS = {
    "two_sum": ("two_sum_hi", "two_sum_lo"),
    "sum meets product": ("sum_mul",),
    "sum is widened": ("sum_float",),
    "split of an fp32 value": ("split_hi", "split_lo"),
    "two_prod": ("two_prod_hi", "two_prod_lo"),
    "a number is added": ("number_added", "number_added_to_root"),
    INTEGERS: ("int16", "int16_lo", "int8", "int8_lo", "int16_read", "int8_read"),
}
"""The checks, each with the outputs that show its result."""


@lru_cache(maxsize=1)
def probe_update() -> Update:
    """The probe as an update in explicit-rounding form, lowered like any other: a, b are bf16, x is fp32."""
    graph = fx.Graph()
    tracer = fx.proxy.GraphAppendingTracer(graph)
    a, b, x, c, large = (fx.Proxy(graph.placeholder(name), tracer) for name in ("a", "b", "x", "c0", "c1"))
    a, b, x = widen(a), widen(b), widen(x)
    total = bf16(a + b)
    words = [*two_sum(a, b), bf16(total * a), *split(x), *two_prod(a, b)]
    outputs = [narrow(w, "bf16") for w in words] + [narrow(total * c, "fp32"), narrow(x + large, "fp32")]
    outputs.append(narrow(bf16(1.0 / (sqrt(x * x) * c + large)), "bf16"))  # 1 / large, whatever the root's last bits
    last = ("sum is widened", "a number is added")  # whose outputs come last
    order = [*(check for check in CHECKS if check not in (*last, INTEGERS)), *last]
    names = [name for check in order for name in CHECKS[check]]
    graph.output(tuple(o.node for o in outputs))
    program = ScalarProgram([("fp32", Scalar("*", (3, 1))), ("fp32", Scalar("*", (2**16, 1)))])
    fp32 = ("x", "sum_float", "number_added")
    formats = {n: FORMATS["fp32" if n in fp32 else "bf16"] for n in ("a", "b", "x", *names)}
    return Update.elementwise(graph, ("a", "b", "x"), tuple(names), program, formats)


@lru_cache(maxsize=1)
def integer_update() -> Update:
    """The words of x as a bf16 number and an integer, and the values of such words."""
    graph, stored = fx.Graph(), {name: BUILT_IN[f"bf16+{name}"] for name in ("int16", "int8")}
    tracer = fx.proxy.GraphAppendingTracer(graph)
    keys = {name: fmt.keys(name) for name, fmt in stored.items()}
    values = {key: fx.Proxy(graph.placeholder(key), tracer) for key in ("x", *keys["int16"], *keys["int8"])}
    results = {k: w for n, f in stored.items() for k, w in zip(keys[n], f.encode(widen(values["x"])), strict=True)}
    for name, fmt in stored.items():
        results[f"{name}_read"] = narrow(fmt.decode([values[key] for key in keys[name]]), "fp32")
    graph.output(tuple(result.node for result in results.values()))
    formats = {**stored, **dict.fromkeys(("x", "int16_read", "int8_read"), BUILT_IN["fp32"])}
    return Update.elementwise(graph, tuple(values), tuple(results), ScalarProgram([]), formats)


def failures(backend: Backend, device: torch.device, integers: bool = True) -> list[str]:
    """Names of the checks in which `backend` on `device` gets a bit wrong; of integers where they are `asked`."""
    lost = _lost(backend, device, probe_update())
    return _lost(backend, device, integer_update()) if integers and asked(INTEGERS, backend, lost) else lost


def asked(check: str, backend: Backend, lost: Sequence[str]) -> bool:
    """Returns True if it is asked of the backend where others are `lost`: what loses none, and draws, has integers."""
    return check != INTEGERS or (not lost and backend.draws and backend.supports(integer_update()) is None)


def _lost(backend: Backend, device: torch.device, update: Update) -> list[str]:
    expected, found = _results(get("reference"), torch.device("cpu"), update), _results(backend, device, update)
    wrong = {key for key, word in expected.items() if not torch.equal(found[key], word)}
    return [check for check, names in CHECKS.items() if wrong.intersection(names)]


def _results(backend: Backend, device: torch.device, update: Update) -> dict[str, Tensor]:
    """What a backend stores on a device, on the CPU, by name."""
    given = _inputs()
    components = [given[key].to(device) for key in update.inputs]
    scalars = torch.tensor(update.scalars.run([]), dtype=torch.float32, device="cpu")
    types = {k: c.type for n, fmt in update.formats.items() for k, c in zip(fmt.keys(n), fmt.components, strict=True)}
    results = [torch.zeros_like(components[0], dtype=types[key].dtype) for key in update.outputs]
    with backend.apart():
        backend.run([Launch(update, scalars, [components], [results])])
        if device.type == "xla":
            import torch_xla.core.xla_model as xm

            xm.unlazy(results)  # one program for all: fetched one by one, each would be compiled alone
        return {key: word.cpu() for key, word in zip(update.outputs, results, strict=True)}


def _inputs() -> dict[str, Tensor]:
    """What both updates read, on the CPU."""
    g = torch.Generator().manual_seed(0)
    # Of many sizes beside those of a: two_sum has to be exact whichever operand is the larger one.
    scale = torch.exp2(torch.randint(-6, 7, (4096,), generator=g, dtype=torch.int64, device="cpu").float())
    a = torch.randn(4096, generator=g, dtype=torch.float32, device="cpu").bfloat16()
    b = (torch.randn(4096, generator=g, dtype=torch.float32, device="cpu") * scale).bfloat16()
    x = torch.randn(4096, generator=g, dtype=torch.float32, device="cpu")
    words = {name: BUILT_IN[f"bf16+{name}"].encode(x.flip(0)) for name in ("int16", "int8")}
    lower = {f"{name}_lo": low for name, (_, low) in words.items()}
    return {"a": a, "b": b, "x": x, **{name: high for name, (high, _) in words.items()}, **lower}


@cache
def _failures_once(backend: Backend, device: torch.device, integers: bool) -> tuple[str, ...]:
    return tuple(failures(backend, device, integers))


def require_sound(backend: Backend, device: torch.device, strategy: StrategyLike) -> None:
    """Raises UnsafeEnvironment if the compensation would vanish on `device`; of integers if the strategy has them.

    While neuron_parallel_compile only collects graphs every result is zero, so nothing is probed then.
    """
    if os.environ.get("NEURON_EXTRACT_GRAPHS_ONLY") or backend.is_exact_on(device):
        return
    failed = _failures_once(backend, device, has_integers(strategy))
    if failed:
        raise UnsafeEnvironment(
            f"backend {backend.name!r} on {device} loses roundings or added numbers ({', '.join(failed)}): a step "
            "would be wrong there. Use backend='auto', and see `python -m collage_neuron doctor`"
        )
