"""The script that `python -m collage_neuron compare` runs by default.

A byte-level GPT with one layer and 30 000 parameters, trained on Python's own library.
"""

from __future__ import annotations

import argparse
import importlib.util
import sysconfig
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

import collage_neuron
from collage_neuron.passes.backends import torch_neuron

BATCH, BLOCK, WIDTH, STEPS, PRINTED = 8, 32, 32, 200, 10


class GPT(nn.Module):
    """Maps bytes ``[batch, time]`` to fp32 logits ``[batch, time, 256]`` of the byte that follows each."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = nn.Embedding(256, WIDTH)
        self.positions = nn.Parameter(torch.randn(BLOCK, WIDTH, dtype=torch.float32, device="cpu") * 0.02)
        layer = nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, 0.0, "gelu", batch_first=True, norm_first=True)
        self.layers = nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)
        self.head = nn.Linear(WIDTH, 256, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.bytes(tokens) + self.positions
        later = torch.ones(BLOCK, BLOCK, dtype=torch.bool, device=x.device).triu(1)
        logits: Tensor = self.head(self.layers(x, mask=later)).float()  # fp32: a softmax in bf16 is inaccurate
        return logits


def make() -> tuple[nn.Module, torch.optim.Optimizer, Callable[[], Tensor]]:
    """Returns the model, its optimizer, and a function that returns the loss of the next batch."""
    torch.set_num_threads(1)  # the tensors are so small that threads cost more than they gain
    text = _text()
    model = GPT().to(_device())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.999), weight_decay=0.1)

    def loss() -> Tensor:
        starts = torch.randint(len(text) - BLOCK, (BATCH, 1), dtype=torch.int64, device="cpu")
        batch = text[starts + torch.arange(BLOCK + 1, dtype=torch.int64, device="cpu")].long().to(_device())
        logits = model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    return model, optimizer, loss


def _text() -> Tensor:
    # Text that every machine has: nothing is downloaded.
    files = sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))
    return torch.frombuffer(bytearray(b"".join(file.read_bytes() for file in files)), dtype=torch.uint8)


def _device() -> torch.device:
    if torch_neuron.is_installed():
        return torch_neuron.open_device()
    if importlib.util.find_spec("libneuronxla") is None:
        return torch.device("cpu")
    import torch_xla

    device: torch.device = torch_xla.device()
    return device


def main(arguments: list[str] | None = None) -> None:
    """Trains, and prints the loss of every step."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--steps", type=int, default=STEPS)
    options = parser.parse_args(arguments)
    torch.manual_seed(options.seed)
    model, optimizer, loss = make()
    model, optimizer = collage_neuron.compile(model, optimizer)
    losses: list[Tensor] = []
    for step in range(1, options.steps + 1):
        optimizer.zero_grad()
        losses.append(loss())
        losses[-1].backward()
        optimizer.step()
        if _device().type == "xla":
            import torch_xla

            torch_xla.sync()
        if step % PRINTED == 0 or step == options.steps:  # to read a number waits for the device
            print("\n".join(f"loss {x.item():.6f}" for x in losses))
            losses.clear()


if __name__ == "__main__":
    main()
