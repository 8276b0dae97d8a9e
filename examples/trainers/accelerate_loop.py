"""A training loop with accelerate: compile before `prepare`.

Run it like this::

    python examples/trainers/accelerate_loop.py

Where torch_xla is installed accelerate uses its device; USE_TORCH_XLA=0 in the environment leaves it out.
"""

from collections.abc import Sequence

import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
from tiny import Bytes, TinyLM, report, settings
from torch.utils.data import DataLoader

import collage_neuron

FORMS = ("object", "class", "model")


def build(form: str, strategy: str) -> tuple[torch.nn.Module, torch.optim.Optimizer]:
    """A model and its optimizer, not yet prepared; the model is bf16."""
    model = TinyLM()
    if form == "class":
        model.to(torch.bfloat16)
        return model, collage_neuron.compile(torch.optim.AdamW, strategy=strategy)(model.parameters(), lr=3e-3)
    if form == "model":
        collage_neuron.compile(model, strategy=strategy)
        return model, torch.optim.AdamW(model.parameters(), lr=3e-3)
    return collage_neuron.compile(model, torch.optim.AdamW(model.parameters(), lr=3e-3), strategy=strategy)


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains and reports; returns the loss of every step."""
    chosen = settings(__doc__ or "", FORMS, argv)
    set_seed(0)
    model, optimizer = build(chosen.form, chosen.strategy)
    accelerator = Accelerator()
    loader = DataLoader(Bytes(), batch_size=16, shuffle=True)
    model, prepared, loader = accelerator.prepare(model, optimizer, loader)
    losses: list[float] = []
    for _, batch in zip(range(chosen.steps), loader, strict=False):
        prepared.zero_grad()
        loss = model(**batch)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        prepared.step()
        losses.append(loss.item())
    report(f"accelerate, {chosen.form}", losses, optimizer)
    return losses


if __name__ == "__main__":
    main()
