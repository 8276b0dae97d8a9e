"""Averages of weights (EMA, SWA) in fp32, over the exact values that a compiled optimizer keeps.

`torch.optim.swa_utils.AveragedModel` copies the model, which is bf16: at a decay of 0.999 most of what is added to such
a copy is rounded away, and it does not see the low words. `AveragedModel` here has the same methods, arguments and
`state_dict`, and averages exact values in fp32.
"""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch.optim import Optimizer

from collage_neuron import torch_privates
from collage_neuron.conversion.model_casting import check_together
from collage_neuron.eager.codec import decoded
from collage_neuron.exact import owners_of, words_kept
from collage_neuron.numerics.formats import Format
from collage_neuron.optimizer.pending_models import require_settled
from collage_neuron.runtime.preconditions import is_left_alone
from collage_neuron.states import external_writes
from collage_neuron.states.sharding import ORDINARY, like, local, rewrite_data
from collage_neuron.states.store import kept_format, read_exact

Optimizers = Optimizer | Sequence[Optimizer]

AverageOne = Callable[[torch.Tensor, torch.Tensor, Any], torch.Tensor]
"""(average, value, number averaged so far) -> the new average, as torch's `get_ema_avg_fn` returns it."""

AverageMany = Callable[[list[torch.Tensor], list[torch.Tensor], Any], None]
"""The same over lists and in place, as torch's `get_ema_multi_avg_fn` returns it."""

Pair = tuple[torch.Tensor, torch.Tensor]


class AveragedModel(torch.nn.Module):
    """A copy of a model in fp32 whose parameters are averages of the exact values that compiled optimizers keep.

    ::

        model, optimizer = collage_neuron.compile(model, optimizer)
        average = collage_neuron.AveragedModel(model, optimizer, decay=0.999)
        ...                                  # train; after each step:
        average.update_parameters(model)
        ...
        average(inputs.float())              # the averaged model, in fp32: average.module

    As with torch's, the first update copies the parameters, and `update_bn`, `state_dict`, pickling and copying work;
    checkpoints of either load into the other. Nothing is fetched from the device. Each process averages its own shards
    of sharded parameters (DTensor).

    Args:
        model: the model; later updates may pass it or a wrapper of it (DDP).
        optimizer: the compiled optimizer, or several, that hold its parameters; those of other compiled optimizers are
            found. It may be an optimizer that `compile(model)` will compile at its first step.
        device: the device of the averages; by default that of the model.
        avg_fn: as in torch; the default is the mean.
        multi_avg_fn: the same for lists of tensors, in place.
        use_buffers: average floating-point buffers too; otherwise they are copied from the model in each update.
        decay: of an exponential moving average: `average += (1 - decay) * (value - average)`.
        module: a second model, built and wrapped in the same way, to use for the averages where the model cannot be
            copied (`fully_shard`).

    Raises:
        ValueError: more than one of `avg_fn`, `multi_avg_fn` and `decay`; a decay that is not between 0 and 1; a module
            with other parameters than the model.
    """

    n_averaged: torch.Tensor
    _collage_averages_exactly = True  # `live_objects`: this copy of a model is no concern

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: Optimizers,
        device: int | torch.device | None = None,
        avg_fn: AverageOne | None = None,
        multi_avg_fn: AverageMany | None = None,
        use_buffers: bool = False,
        *,
        decay: float | None = None,
        module: torch.nn.Module | None = None,
    ) -> None:
        super().__init__()
        if sum(x is not None for x in (avg_fn, multi_avg_fn, decay)) > 1:
            raise ValueError("avg_fn, multi_avg_fn and decay each say how to average; give one of them")
        if decay is not None and not 0 <= decay <= 1:
            raise ValueError(f"decay is {decay!r}; give a number from 0 to 1")
        self.module = _copied(model) if module is None else module
        _make_fp32(self.module)
        if device is not None:
            self.module = self.module.to(device)
        self.register_buffer("n_averaged", torch.tensor(0, dtype=torch.int64, device="cpu"))
        self.avg_fn, self.multi_avg_fn, self.decay, self.use_buffers = avg_fn, multi_avg_fn, decay, use_buffers
        self._optimizers = _weakly(optimizer)
        _check_alike(self.module, model)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The averaged model's."""
        return self.module(*args, **kwargs)

    @torch.no_grad()
    def update_parameters(self, model: torch.nn.Module, optimizer: Optimizers | None = None) -> None:
        """Updates the averages with the exact values of the parameters of `model`; call it after each step.

        Raises:
            TypeError: an optimizer is not compiled; or this average was copied or unpickled and does not know its
                optimizers (pass `optimizer` once).
            ValueError: the model has other parameters than the one that was copied, or an optimizer holds none of them.
        """
        if optimizer is not None:
            self._optimizers = _weakly(optimizer)
        _reshard(self.module, model)
        owners = _owners(self._living_optimizers(), model)
        if self.n_averaged == 0:  # once, since all objects of the process may have to be looked at
            require_settled(p for p in model.parameters() if p not in owners)
        _check_alike(self.module, model)
        both: list[Pair] = list(zip(self.module.parameters(), model.parameters(), strict=True))
        trained = [(a, p) for a, p in both if not is_left_alone(p)]  # frozen ones in int8 or fp8 have no average
        params = [(a, v) for (a, _), v in zip(trained, _exact(owners, [p for _, p in trained]), strict=True)]
        buffers = list(zip(self.module.buffers(), model.buffers(), strict=True))
        copied: list[Pair] = [(a, p) for a, p in both if is_left_alone(p)]
        averaged = [b for b in buffers if self.use_buffers and b[0].is_floating_point()]
        self._average([(local(a.detach()), local(v.detach()).to(a.device, a.dtype)) for a, v in (*params, *averaged)])
        copied += [b for b in buffers if not (self.use_buffers and b[0].is_floating_point())]
        for mine, its in copied:
            local(mine.detach()).copy_(local(its.detach()))
        self.n_averaged += 1

    def _average(self, pairs: list[Pair]) -> None:
        n = int(self.n_averaged)  # on the host: see `_apply`
        if n == 0:
            for average, value in pairs:
                average.copy_(value)
        elif self.multi_avg_fn is not None:
            for averages, values in _by_kind(pairs):
                self.multi_avg_fn(averages, values, self.n_averaged.to(averages[0].device))
        elif self.avg_fn is not None:
            for average, value in pairs:
                average.copy_(self.avg_fn(average, value, self.n_averaged.to(average.device)))
        else:
            _move(pairs, 1 - self.decay if self.decay is not None else 1 / (n + 1))

    def _living_optimizers(self) -> list[Optimizer]:
        found = [o for o in (weak() for weak in self._optimizers) if o is not None]
        if not found or len(found) < len(self._optimizers):
            raise TypeError(
                "this AveragedModel is a copy, was loaded, or outlived its optimizer, and does not know whose values "
                "to average: call update_parameters(model, optimizer) once"
            )
        return found

    def _apply(self, fn: Any, recurse: bool = True) -> AveragedModel:
        """Moves everything but `n_averaged`."""
        count = self.n_averaged  # it stays on the host, so that reading it does not wait for a device
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]  # torch does not annotate it
        self.n_averaged = count
        return self

    def __getstate__(self) -> dict[str, Any]:
        """The state for copies and pickles, without the optimizers."""
        return vars(self) | {"_optimizers": []}  # weak references cannot be pickled, and a copy has no optimizer


def _weakly(optimizers: Any) -> list[ref[Optimizer]]:
    is_one = isinstance(optimizers, Optimizer) or not isinstance(optimizers, Iterable)
    each = [optimizers] if is_one else [*optimizers]
    for given in each:
        if not isinstance(given, Optimizer):
            raise TypeError(f"the optimizer is a {type(given).__name__}; give the compiled one, or several in a list")
    return [*map(ref, each)]


def _copied(model: torch.nn.Module) -> torch.nn.Module:
    try:
        return copy.deepcopy(model)
    except (AssertionError, NotImplementedError, RuntimeError, TypeError) as error:
        raise TypeError(
            f"this {type(model).__name__} cannot be copied ({error}): build a second one, wrapped alike, and pass it "
            "as AveragedModel(model, optimizer, module=second)"
        ) from error


def _make_fp32(module: torch.nn.Module) -> None:
    for t in chain(module.parameters(), module.buffers()):
        if t.dtype == torch.bfloat16:
            rewrite_data(t, local(t.detach()).float())


def _check_alike(module: torch.nn.Module, model: torch.nn.Module) -> None:
    own, given = ([(*p.shape,) for p in m.parameters()] for m in (module, model))
    if own != given:
        raise ValueError(
            f"the averaged module has {len(own)} parameters and the {type(model).__name__} {len(given)}, or their "
            "shapes differ; nothing was averaged: give the model that it was made from"
        )


def _owners(optimizers: Sequence[Optimizer], model: torch.nn.Module) -> dict[torch.Tensor, Optimizer]:
    """Maps each parameter to the optimizer that keeps it."""
    owners = owners_of(model.parameters(), optimizers)
    for optimizer in optimizers:
        check_together(model, optimizer)
    return owners


def _exact(owners: dict[torch.Tensor, Optimizer], params: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """The exact values of `params`, in fp32; those in the memory of the CPU are read together."""
    there = [p for p in params if p.dtype == torch.bfloat16 and p.is_cpu and type(p) in ORDINARY]
    words = [_words(p, owners.get(p)) for p in there]
    found = dict(zip(map(id, there), decoded(words), strict=True))
    values = [(p, owners.get(p), found[id(p)] if id(p) in found else _exact_one(owners, p)) for p in params]
    return [v if owner is None else external_writes.without_stale(owner, p, v) for p, owner, v in values]


def _words(p: torch.Tensor, owner: Optimizer | None) -> tuple[Format, list[torch.Tensor]]:
    state, record = words_kept(p, owner)
    fmt = kept_format(p, state, "param", record)
    return fmt, [p.detach() if key == "param" else state[key] for key in fmt.keys("param")]


def _exact_one(owners: dict[torch.Tensor, Optimizer], p: torch.Tensor) -> torch.Tensor:
    """The exact value of `p`, in fp32."""
    if p.dtype != torch.bfloat16:
        return p
    owner = owners.get(p)
    state, record = words_kept(p, owner)
    if "param_master" in state and p.device.type == "xla":
        # Comparing it with its rounding, as `read_exact` does, is what a lazy device may leave out; what counts after a
        # write, `without_stale` says.
        return like(local(state["param_master"]), p)
    return read_exact(p, state, "param", record)


def _move(pairs: Sequence[Pair], weight: float) -> None:
    """Moves averages toward values by the fraction `weight`."""
    # As a tensor: XLA would compile another program for each number of Python's.
    on_host = torch.tensor([weight], dtype=torch.float32, device="cpu")
    weights = {device: on_host.to(device) for device in {average.device for average, _ in pairs}}
    for average, value in pairs:
        moved = average + (value - average) * weights[average.device].to(average.dtype)
        average.copy_(moved.reshape(average.shape))  # one of a single number is broadcast to the weight's shape


def _by_kind(pairs: Sequence[Pair]) -> Iterator[tuple[list[torch.Tensor], list[torch.Tensor]]]:
    """Groups averages and values by device and dtype, as torch's own averaging functions require."""
    found: defaultdict[Any, list[Pair]] = defaultdict(list)
    for pair in pairs:
        found[pair[0].device, pair[0].dtype].append(pair)
    for alike in found.values():
        yield [a for a, _ in alike], [v for _, v in alike]


def _reshard(*models: torch.nn.Module) -> None:
    # After an evaluation the modules of FSDP2 hold gathered parameters, which optimizers do not know.
    for module in chain.from_iterable(model.modules() for model in models):
        reshard: Any = getattr(module, "reshard", None)
        if torch_privates.is_fully_sharded(module) and reshard is not None:
            reshard()
