"""Other people's optimizers, as far as they can be imported: `make accuracy` installs those of the group `peers`.

Each computes AdamW with its own way to keep parameters and states. Where a package keeps a parameter in two words, its
own decoder reads them, or its documented meaning is written out here.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

from torch import Tensor
from torch.nn import Parameter
from torch.optim import Optimizer

from accuracy.contenders import Contender, Options

Build = Callable[[list[Parameter], Options], Optimizer]


@dataclass(frozen=True)
class Package:
    """A package, the module of it that has the optimizers, and a function that makes contenders from that module."""

    name: str
    module: str
    contenders: Callable[[Any], Iterator[Contender]]


def found() -> tuple[list[Contender], dict[str, str]]:
    """The contenders of all packages that can be used, and the reason for each package that cannot."""
    contenders: list[Contender] = []
    missing: dict[str, str] = {}
    for package in PACKAGES:
        try:
            contenders += package.contenders(importlib.import_module(package.module))
        except Exception as error:  # noqa: PERF203  # whatever another package raises on this machine
            missing[package.name] = str(error).splitlines()[0]
    return contenders, missing


def _heavyball(module: Any) -> Iterator[Contender]:
    """ECC: a bf16 word and an integer that counts fractions of half an ulp of it, for weights and both moments."""
    ulps: Any = importlib.import_module("heavyball.utils")
    ulps.compile_mode = None  # eager: the same operations, without a compiler that may skip roundings

    def contender(mode: str) -> Contender:
        def build(params: list[Parameter], options: Options) -> Optimizer:
            made: Optimizer = module.AdamW(params, ecc=mode, param_ecc=mode, **options)
            return made

        def value(optimizer: Optimizer, p: Parameter) -> Tensor:
            (correction,) = (x for key, x in _items(optimizer.state[p]) if key == "param::ecc")
            decoded: Tensor = ulps._ULPState(correction, ulps._ULPState._SMAX[correction.dtype]).decode(p.detach())
            return decoded

        return Contender(f"heavyball ECC {mode}", _title("heavyball"), build, value)

    return map(contender, ("bf16+16", "bf16+8"))


def _items(state: Any) -> Iterator[tuple[Any, Any]]:
    for key, value in state.items():
        if isinstance(value, dict):
            yield from _items(value)
        else:
            yield key, value


def _optimi(module: Any) -> Iterator[Contender]:
    """Kahan summation: the compensation is what the last addition lost, to be added to the next update."""

    def build(params: list[Parameter], options: Options) -> Optimizer:
        made: Optimizer = module.AdamW(params, kahan_sum=True, triton=False, **options)
        return made

    def value(optimizer: Optimizer, p: Parameter) -> Tensor:
        exact: Tensor = p.detach().float() + optimizer.state[p]["kahan_comp"].float()
        return exact

    yield Contender("optimi Kahan", _title("torch-optimi"), build, value)


def _torchao(module: Any) -> Iterator[Contender]:
    """8-bit and fp8 states by block, and bf16 parameters rounded to nearest or stochastically."""

    def build(name: str, stochastic: bool) -> Build:
        return lambda params, options: getattr(module, name)(params, bf16_stochastic_round=stochastic, **options)

    yield Contender("torchao SR", _title("torchao"), build("_AdamW", True))
    yield Contender("torchao 8-bit", _title("torchao"), build("AdamW8bit", False))
    yield Contender("torchao 8-bit SR", _title("torchao"), build("AdamW8bit", True))
    yield Contender("torchao fp8 SR", _title("torchao"), build("AdamWFp8", True))


def _flash_adamw(module: Any) -> Iterator[Contender]:
    """The port of flashoptim's FlashAdamW, with moments in bf16 or in 8 bits."""

    def contender(name: str, quantize: bool) -> Contender:
        def build(params: list[Parameter], options: Options) -> Optimizer:
            made: Optimizer = module.FlashAdamW(params, quantize=quantize, **options)
            return made

        def value(optimizer: Optimizer, p: Parameter) -> Tensor:
            decoded: Tensor = module.decode_weight(p.detach(), optimizer.state[p]["correction"])
            return decoded

        return Contender(name, "a port of flashoptim 0.1.4", build, value)

    yield contender("FlashAdamW bf16", False)
    yield contender("FlashAdamW 8-bit", True)


def _title(package: str) -> str:
    return f"{package} {version(package)}"


PACKAGES = (
    Package("heavyball", "heavyball", _heavyball),
    Package("torch-optimi", "optimi", _optimi),
    Package("torchao", "torchao.optim", _torchao),
    Package("FlashAdamW", "accuracy.flash_adamw", _flash_adamw),
)
