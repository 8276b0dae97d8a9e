"""Steps of an optimizer on a device beside the same steps on the CPU: which words differ, and how long a step takes."""

import statistics
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron.cli import doctor
from collage_neuron.numerics.strategies import STRATEGIES
from collage_neuron.passes.backends.nki.target import installed

Json = dict[str, Any]

LR = 2.0**-10
STEPS = 3
OPTIMIZERS: dict[str, Callable[[list[Tensor]], Optimizer]] = {
    "SGD": lambda ps: SGD(ps, lr=LR, momentum=0.875),  # no root and no quotient: every bit must be the same
    "AdamW": lambda ps: AdamW(ps, lr=LR),
}

LOOPED = 3 * 128 * 2048 + 77
"""Elements of which a kernel updates three tiles in a loop, and what is left."""
SHAPES = ((1000,), (257, 384), (LOOPED,))
FEW = ((1000,), (9, 256))


class Place(NamedTuple):
    """A backend, and where it runs."""

    backend: str
    device: torch.device

    def __str__(self) -> str:
        return f"{self.backend} on {self.device}"


def places() -> Iterator[Place]:
    """The backends for a Trainium, each on its device; kernels in a simulator where there is an NKI and no device."""
    found = {backend.name: opens for backend, opens in doctor.devices() if backend.name in ("xla", "nki")}
    yield from (Place(name, opens()) for name, opens in found.items())
    if "nki" not in found and installed() is not None:
        yield Place("nki", torch.device("cpu"))


class Stepped(NamedTuple):
    """What some steps made of parameters and states: every word, and the exact values of the parameters."""

    words: dict[str, Tensor]
    values: list[Tensor]


def wait_for(p: Tensor) -> None:
    """Until a parameter has been updated."""
    if p.device.type != "xla":
        p.detach().flatten()[:1].cpu()
        return
    import torch_xla
    import torch_xla.core.xla_model as xm

    torch_xla.sync()
    xm.wait_device_ops()


def stepped(name: str, strategy: str, place: Place, shapes: Sequence[Sequence[int]], steps: int = STEPS) -> Stepped:
    """`steps` steps from seeded weights and gradients. Not validated: a difference shall be measured, not raised."""
    g = torch.Generator().manual_seed(0)
    ps = [torch.nn.Parameter(torch.randn(*s, generator=g).to(place.device)) for s in shapes]
    made = OPTIMIZERS[name](list(ps))
    optimizer = collage_neuron.compile(made, strategy=strategy, backend=place.backend, validate="off")
    for _ in range(steps):
        for p in ps:
            p.grad = torch.randn(*p.shape, generator=g).bfloat16().to(place.device)
        optimizer.step()
        wait_for(ps[0])
    words = {f"{i}.{key}": x.cpu() for i, p in enumerate(ps) for key, x in words_of(optimizer, p).items()}
    return Stepped(words, [collage_neuron.exact_value(optimizer, p).cpu() for p in ps])


def words_of(optimizer: Optimizer, p: Tensor) -> dict[str, Tensor]:
    """The words of a parameter and of its states, by name."""
    states = {key: x.detach() for key, x in optimizer.state[p].items() if isinstance(x, Tensor) and x.numel() > 1}
    return {"param": p.detach(), **states}


def bits(x: Tensor) -> Tensor:
    """The bits of a word: -0 is not 0, and a NaN is itself."""
    return x.contiguous().view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.dtype.itemsize])


def compared(name: str, strategy: str, place: Place, shapes: Sequence[Sequence[int]]) -> Json:
    """How the words differ from those of the reference on the CPU, in words and numbers."""
    found = stepped(name, strategy, place, shapes)
    expected = stepped(name, strategy, Place("reference", torch.device("cpu")), shapes)
    start = stepped(name, strategy, Place("reference", torch.device("cpu")), shapes, steps=0).values
    differing = {k: int((bits(x) != bits(expected.words[k])).sum()) for k, x in found.words.items()}
    pairs = list(zip(found.values, expected.values, start, strict=True))
    off = max(float((x - y).abs().max() / (y - z).abs().max()) for x, y, z in pairs)
    wrong = {key: n for key, n in differing.items() if n}
    return {"answer": in_words(wrong, off, draws_apart(strategy, place)), "differing": wrong, "off": off}


def draws_apart(strategy: str, place: Place) -> bool:
    """Returns True if the kernels draw random bits of their own, which are no other backend's."""
    return place.backend == "nki" and strategy.startswith("stochastic")


def in_words(wrong: dict[str, int], off: float, draws: bool) -> str:
    """The answer in a line."""
    if not wrong:
        return "the same bits"
    names = ", ".join(sorted({key.partition(".")[2] for key in wrong}))
    why = " (kernels draw bits of their own)" if draws else ""
    return f"{names} differ{why}; parameters are off by up to {off:.1e} of the way that the farthest one went"


def every_optimizer(strategy: str, shapes: Sequence[Sequence[int]]) -> Json:
    """A strategy, wherever it can run."""
    return {f"{place}, {name}": attempted(name, strategy, place, shapes) for place in places() for name in OPTIMIZERS}


def attempted(name: str, strategy: str, place: Place, shapes: Sequence[Sequence[int]]) -> Json:
    """What `compared` returns, or what it raises: that is an answer too."""
    try:
        return compared(name, strategy, place, shapes)
    except Exception as error:  # whatever the compiler or the runtime raises
        return {"answer": "error", "error": f"{type(error).__name__}: {error}"[:2000]}


def timed(strategy: str, elements: int, turns: int = 10) -> Json:
    """Times of AdamW's step on one long parameter, wherever it can run, with the fewest bytes that it can move."""
    return {str(place): _timed(strategy, place, elements, turns) for place in places()}


def _timed(strategy: str, place: Place, elements: int, turns: int) -> Json:
    p = torch.nn.Parameter(torch.ones(elements, device=place.device))
    optimizer = collage_neuron.compile(AdamW([p], lr=LR), strategy=strategy, backend=place.backend, validate="off")
    p.grad = torch.ones_like(p)
    seconds = []
    for _ in range(turns + 3):
        wait_for(p)
        began = perf_counter()
        optimizer.step()
        wait_for(p)
        seconds.append(perf_counter() - began)
    written = sum(x.numel() * x.itemsize for x in words_of(optimizer, p).values())
    read = written + p.numel() * p.itemsize
    return {
        "seconds": statistics.median(seconds[3:]),
        "elements": elements,
        "least read": read,
        "least written": written,
    }


ALL = tuple(STRATEGIES)
