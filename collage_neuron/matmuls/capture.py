"""A backend of torch.compile: plans the joint graph of each capture, rewrites its two halves, and runs them eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.fx import GraphModule

from collage_neuron import torch_privates
from collage_neuron.errors import warn_user
from collage_neuron.matmuls.advice import LOSS, SCALED_WELL, advice
from collage_neuron.matmuls.graph_half import BINADES, UNSTEADY, Half
from collage_neuron.matmuls.scales import Measurement, Scales, binades, finite_part, size_of, usable
from collage_neuron.passes.fp8_scaling.plan import Plan, plan, results_of
from collage_neuron.passes.fp8_scaling.sizes import Size


class WeightWrites:
    """The weights of one graph: other tensors than in the last call (`functional_call`), or written since then.

    It looks at how often tensors were written, not at values; writes to `p.data` are not counted.

    Args:
        every: True if writes count: of a graph without gradients, since a step writes the weights of others.
    """

    def __init__(self, every: bool) -> None:
        self._every = every
        self._there: list[ref[torch.Tensor]] = []
        self._writes: int | None = None

    def changed(self, weights: Sequence[torch.Tensor]) -> bool:
        """Returns True if weights were written since the last call, where that counts, or are other tensors."""
        writes = sum(torch_privates.version(p) for p in weights if not p.is_inference())
        there = [r() for r in self._there]
        others = len(weights) != len(there) or any(p is not q for p, q in zip(weights, there, strict=True))
        if others:
            self._there = [ref(p) for p in weights]
        before, self._writes = self._writes, writes
        if before is None or others:
            return before is not None
        return self._every and writes != before


class Backend:
    """Rewrites the linear layers of one model, in every graph that torch.compile captures of it."""

    def __init__(self, model: torch.nn.Module, keep: tuple[str, ...] | None, rescale: int) -> None:
        self._model = ref(model)  # what torch.compile holds must not keep the model
        self.keep = keep
        self.rescale = rescale
        self.scales = Scales()
        self.graphs: list[Captured] = []
        self.calls = 0
        self.warned = False

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles what torch.compile captured."""
        from functorch.compile import aot_module_simplified  # seconds, that `import collage_neuron` would take longer

        graph = Captured(self, inputs)
        compiled: Callable[..., Any] = aot_module_simplified(
            module,
            inputs,
            fw_compiler=graph.half,
            bw_compiler=graph.half,
            inference_compiler=graph.inference,
            partition_fn=graph.partition,
        )
        self.graphs.append(graph)
        graph.assume([Size(0.0)] * len(graph.plan.tangents))  # not before: while torch traces, tensors are fake
        self.reload()
        return compiled

    def names(self, inputs: Sequence[Any]) -> list[str | None]:
        """The name of the parameter that each input is, or None."""
        model = self._model()
        named = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        return [named.get(id(x)) for x in inputs]

    def kept(self) -> list[str] | None:
        """The names of the parameters that `keep` names, themselves or modules that they lie in; None for the heads."""
        model = self._model()
        if self.keep is None or model is None:
            return None
        # A tied weight has several names, and graphs know the first one.
        named = model.named_parameters(remove_duplicate=False)
        kept = {id(p) for name, p in named if any(f"{name}.".startswith(f"{asked}.") for asked in self.keep)}
        return [name for name, p in model.named_parameters() if id(p) in kept]

    def reload(self) -> None:
        """Gives all graphs the scales as they are now."""
        for graph in self.graphs:
            for half in graph.halves:
                half.load()

    def look_back(self) -> None:
        """Reads what calls have measured. If weights had drifted, other graphs measure in their next call too."""
        drifted = [half.graph for graph in self.graphs for half in graph.halves if half.look_back()]
        for graph in self.graphs if drifted else []:  # they have the weights in common
            if graph is not drifted[0]:
                graph.restart()

    def notice(self, names: Sequence[str], seen: Tensor, harmed: bool) -> bool:
        """Warns once of an operand that loses much and will go on doing so, or has done so since it was measured.

        Args:
            names: of operands.
            seen: what was measured of them.
            harmed: True if results were computed with the scales that were off, and not again.

        Returns:
            True if an operand lost much for such a scale.
        """
        bad = False
        limited = set(self.scales.beyond())  # waits for the device, as what calls this has done anyway
        for name, row in zip(names, seen.tolist(), strict=True):
            found = Measurement(*row)
            said = advice(name, found.binades, found.saturated, found.vanished, name in limited)
            was_off = abs(found.binades) > SCALED_WELL
            will_last = name in limited or (found.saturated >= LOSS and not was_off)
            if said and not self.warned and (will_last or (harmed and was_off)):
                self.warned = True
                warn_user(f"matmul='fp8': {said}. explain(model) shows all operands")
            bad = bad or (said is not None and harmed and was_off)
        return bad

    def restart(self) -> None:
        """Makes all graphs measure in their next call: weights were loaded."""
        for graph in self.graphs:
            graph.restart()

    def weights(self) -> list[Tensor]:
        """The parameters of the model as they are now: `functional_call` exchanges them."""
        model = self._model()
        return [] if model is None else list(model.parameters())


class Captured:
    """One captured graph: for one shape of the inputs, with a backward half or without."""

    plan: Plan
    writes: WeightWrites

    def __init__(self, backend: Backend, inputs: Sequence[Any]) -> None:
        self.backend = backend
        self.number = len(backend.graphs)
        self.names = backend.names(inputs)
        self.sizes = [_size(x) for x in inputs]
        self.device = _device(inputs)
        self.halves: list[Half] = []
        self.unsteady: set[str] = set()
        """Operands whose sizes change from call to call, so that they take their largest magnitude in each."""

    def partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        """Plans the joint graph before torch cuts it in two."""
        from functorch.compile import default_partition

        self._make_plan(joint, num_fwd_outputs)
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def half(self, module: GraphModule, inputs: Any, corrects: bool = False) -> Half:
        """Compiles the forward half of a graph that is trained, or the backward half."""
        torch_privates.donate_nothing()
        half = Half(self, module, self.backend.rescale, corrects)
        self.halves.append(half)
        return half

    def inference(self, module: GraphModule, inputs: Any) -> Half:
        """Compiles a graph without a backward half."""
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        self._make_plan(module, len(results_of(output)))
        return self.half(module, inputs, corrects=True)

    def key(self, name: str) -> str:
        """The name of an operand among those of all graphs: these have the weights in common, and little else."""
        return f"{name}@{self.number}" if self.number and name not in self.plan.weights else name

    def assume(self, gradients: Sequence[Size]) -> None:
        """Sets the scales of operands that were not measured yet, for these gradients of the graph's outputs."""
        exponents = self.plan.exponents(dict(zip(self.plan.tangents, gradients, strict=True)))
        own = {self.key(name): (e, self.plan.formats[name]) for name, e in exponents.items()}
        self.backend.scales.include(
            {key: e for key, (e, _) in own.items()}, {key: fmt for key, (_, fmt) in own.items()}, self.device
        )

    def restart(self) -> None:
        """Makes the next call measure."""
        for half in self.halves:
            half.restart()

    def look_at_weights(self) -> None:
        """Measures in this call if weights are others than in the last one."""
        if self.writes.changed(self.backend.weights()):
            self.restart()

    def take_largest(self, names: Sequence[str]) -> None:
        """Makes operands take their largest magnitude in each call: no scale of an earlier call fits them."""
        self.unsteady.update(names)
        self.backend.scales.measured.difference_update(map(self.key, names))  # what was seen last is not true any more
        why = f"its size changed by more than {BINADES:g} binades in each of {UNSTEADY} measurements"
        self.plan.reductions.update(dict.fromkeys(names, why))
        for half in self.halves:
            half.write()

    def correct(self, names: Sequence[str], seen: Tensor) -> bool:
        """Follows what a call without gradients measured, where scales were unknown or far off. Waits for the device.

        Returns True if any scale has changed.
        """
        scales, seen = self.backend.scales, seen.cpu()
        # Where a scale was never measured, the first size counts, however near the assumed one it is.
        off, found = binades(seen).tolist(), usable(seen[:, 0]).tolist()
        settled = [bool(scales.settled.cpu()[scales.places[self.key(name)]]) for name in names]
        new = [i for i in range(len(names)) if found[i] and (off[i] > BINADES or not settled[i])]
        if new:
            scales.follow([self.key(names[i]) for i in new], seen[new].to(self.device))
            self.backend.reload()
        return any(off[i] for i in new)

    def _make_plan(self, module: GraphModule, forward_outputs: int) -> None:
        self.plan = plan(module.graph, self.names, self.sizes, forward_outputs, self.backend.kept())
        self.writes = WeightWrites(every=not self.plan.tangents)
        if not self.plan.products:
            left = f"; those of {', '.join(self.plan.kept)} stay as they are" if self.plan.kept else ""
            raise ValueError(
                f'matmul="fp8" finds no matmul of a linear layer that it could run in fp8{left}: name fewer layers in '
                "keep (keep=() for none), or leave matmul out"
            )


def _size(x: Any) -> Size | None:
    return size_of(finite_part(x)) if isinstance(x, Tensor) and not x.is_complex() else None


def _device(inputs: Sequence[Any]) -> torch.device:
    return next((x.device for x in inputs if isinstance(x, Tensor) and x.is_floating_point()), torch.device("cpu"))
