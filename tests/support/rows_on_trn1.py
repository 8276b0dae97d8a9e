"""Steps by rows on XLA's device and on CPU tensors, both with kernels: run by `played_trn1.py`, prints what differs."""

from __future__ import annotations

import torch
import torch_xla
from rowed import Came
from torch import Tensor

import collage_neuron
from collage_neuron.passes.backends.nki import custom_op
from collage_neuron.states.bookkeeping import bookkeeping


def trained(device: torch.device, backend: str) -> dict[str, Tensor]:
    """Parameters and states after two steps, on the CPU."""
    g = torch.Generator().manual_seed(0)
    params = [torch.nn.Parameter(torch.randn(s, generator=g).bfloat16().to(device)) for s in ((24, 40), (3, 5, 37))]
    optimizer = collage_neuron.compile(Came(params), strategy="fp32", backend=backend, verbose=False, validate="off")
    for _ in range(2):
        for p in params:
            p.grad = torch.randn(p.shape, generator=g).bfloat16().to(device)
        optimizer.step()
    assert not bookkeeping(optimizer).as_written
    return {
        f"{key} {i}": x.detach().cpu()
        for i, p in enumerate(params)
        for key, x in {**optimizer.state[p], "param": p}.items()
        if isinstance(x, Tensor)
    }


def main() -> None:
    """CAME's three reductions, of two shapes."""
    found = trained(torch_xla.device(), "auto")
    assert custom_op._programs, "no kernel has run"
    wanted = trained(torch.device("cpu"), "nki")
    for key, x in found.items():
        off = (x.float() - wanted[key].float()).abs().max() / wanted[key].float().abs().max()
        assert off <= 2**-20 or (key.startswith("param ") and off <= 2**-8), (key, off)
    print(f"Came: {len(found)} tensors agree")


if __name__ == "__main__":
    main()
