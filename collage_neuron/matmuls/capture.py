"""A backend of torch.compile: plans the joint graph of each capture, rewrites its two halves, and runs them eagerly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any
from weakref import ref

import torch
from torch import Tensor
from torch.fx import GraphModule

from collage_neuron.matmuls.half import Half
from collage_neuron.matmuls.scales import Scales, size_of
from collage_neuron.passes.scaling.linear import results_of
from collage_neuron.passes.scaling.plan import Plan, plan
from collage_neuron.passes.scaling.sizes import Size

Keep = Callable[[str], bool]
"""Returns True for the name of a parameter whose matmuls stay as they are."""


class Backend:
    """Rewrites the linear layers of one model, in every graph that torch.compile captures of it."""

    def __init__(self, model: torch.nn.Module, keep: Keep | None, rescale: int) -> None:
        self._model = ref(model)  # what torch.compile holds must not keep the model
        self.keep = keep
        self.rescale = rescale
        self.scales = Scales()
        self.graphs: list[Captured] = []
        self.calls = 0

    def __call__(self, module: GraphModule, inputs: Sequence[Any]) -> Callable[..., Any]:
        """Compiles what torch.compile captured."""
        from functorch.compile import aot_module_simplified  # seconds, that `import collage_neuron` would take longer

        graph = Captured(self, inputs)
        compiled: Callable[..., Any] = aot_module_simplified(
            module,
            inputs,
            fw_compiler=graph.forward,
            bw_compiler=graph.backward,
            inference_compiler=graph.inference,
            partition_fn=graph.partition,
        )
        self.graphs.append(graph)
        graph.assume([Size(0.0)] * len(graph.plan.tangents))  # not before: while torch traces, tensors are fake
        return compiled

    def names(self, inputs: Sequence[Any]) -> list[str | None]:
        """Of each input, the name of the parameter that it is, or None."""
        model = self._model()
        named = {} if model is None else {id(p): name for name, p in model.named_parameters()}
        return [named.get(id(x)) for x in inputs]

    def reload(self) -> None:
        """Gives all graphs the scales as they are now."""
        for graph in self.graphs:
            for half in graph.halves:
                half.load()


class Captured:
    """One captured graph: for one shape of the inputs, with a backward half or without."""

    plan: Plan

    def __init__(self, backend: Backend, inputs: Sequence[Any]) -> None:
        self.backend = backend
        self.number = len(backend.graphs)
        self.names = backend.names(inputs)
        self.sizes = [_size(x) for x in inputs]
        self.device = _device(inputs)
        self.halves: list[Half] = []

    def partition(self, joint: GraphModule, inputs: Any, *, num_fwd_outputs: int, **options: Any) -> Any:
        """Plans the joint graph before torch cuts it in two."""
        from functorch.compile import default_partition

        self._make_plan(joint, num_fwd_outputs)
        return default_partition(joint, inputs, num_fwd_outputs=num_fwd_outputs, **options)

    def forward(self, module: GraphModule, inputs: Any) -> Half:
        """Compiles the forward half of a graph that is trained."""
        return self._half(module, self.backend.rescale)

    def backward(self, module: GraphModule, inputs: Any) -> Half:
        """Compiles the backward half."""
        return self._half(module, self.backend.rescale)

    def inference(self, module: GraphModule, inputs: Any) -> Half:
        """Compiles a graph without a backward half: it never measures, so that equal inputs give equal results."""
        (output,) = (n for n in module.graph.nodes if n.op == "output")
        self._make_plan(module, len(results_of(output)))
        return self._half(module, 0)

    def key(self, name: str) -> str:
        """The name of an operand among those of all graphs: the size of a gradient depends on the shape of a batch."""
        return f"{name}@{self.number}" if self.number and name in self.plan.gradients else name

    def assume(self, gradients: Sequence[Size]) -> None:
        """Sets the scales of operands that were not measured yet, for these gradients of the graph's outputs."""
        exponents = self.plan.exponents(dict(zip(self.plan.tangents, gradients, strict=True)))
        self.backend.scales.include({self.key(name): e for name, e in exponents.items()}, self.device)

    def _make_plan(self, module: GraphModule, forward_outputs: int) -> None:
        self.plan = plan(module.graph, self.names, self.sizes, forward_outputs, self.backend.keep)
        if not self.plan.products:
            left = f"; those of {', '.join(self.plan.kept)} stay as they are" if self.plan.kept else ""
            raise ValueError(
                f'matmul="fp8" finds no matmul of a linear layer that it could run in fp8{left}: name fewer layers in '
                "keep (keep=() for none), or leave matmul out"
            )

    def _half(self, module: GraphModule, rescale: int) -> Half:
        half = Half(self, module, rescale)
        self.halves.append(half)
        return half


def _size(x: Any) -> Size | None:
    return size_of(x) if isinstance(x, Tensor) and not x.is_complex() else None


def _device(inputs: Sequence[Any]) -> torch.device:
    return next((x.device for x in inputs if isinstance(x, Tensor) and x.is_floating_point()), torch.device("cpu"))
