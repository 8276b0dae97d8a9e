"""A model under `torch.compile`: the model's graph is torch's, the update is ours, in either order.

Run it like this::

    python examples/trainers/compiled_model.py
"""

from collections.abc import Sequence

import torch
from tiny import Bytes, TinyLM, report, settings
from torch.utils.data import DataLoader

import collage_neuron

FORMS = ("before torch.compile", "after torch.compile")


def main(argv: Sequence[str] | None = None, engine: str = "inductor") -> list[float]:
    """Trains and reports; returns the loss of every step. `engine` is torch.compile's backend."""
    chosen = settings(__doc__ or "", FORMS, argv)
    torch.manual_seed(0)
    model: torch.nn.Module = TinyLM()
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    if chosen.form == "before torch.compile":
        model, optimizer = collage_neuron.compile(model, optimizer, strategy=chosen.strategy)
        model.compile(backend=engine)
    else:
        model.compile(backend=engine)
        model, optimizer = collage_neuron.compile(model, optimizer, strategy=chosen.strategy)
    losses: list[float] = []
    loader = DataLoader(Bytes(), batch_size=16, shuffle=True)
    for _, batch in zip(range(chosen.steps), loader, strict=False):
        optimizer.zero_grad()
        loss = model(**batch)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    report(f"torch.compile, {chosen.form}", losses, optimizer)
    return losses


if __name__ == "__main__":
    main()
