"""Fine-tuning a Hugging Face model at 1e-5 in a loop of one's own, on the CPU or on torch_xla's device.

Run it like this, without a network: the model is made on the spot and saved first, as a hub's would lie on disk::

    python examples/trainers/hf_finetune_loop.py                 # on the CPU
    python examples/trainers/hf_finetune_loop.py --device xla    # trn1; elsewhere XLA's CPU, with PJRT_DEVICE=CPU

The learning rate warms up and falls, gradients are clipped, and what is saved is what the optimizer has, in fp32.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

os.environ.setdefault("USE_TORCH_XLA", "0")  # transformers reads it when imported: this loop moves its tensors itself

import torch
from hf_finetune import pretrained
from tiny import Bytes, report
from torch.optim.lr_scheduler import LambdaLR
from transformers import AutoModelForCausalLM

import collage_neuron
from collage_neuron import checkpoint

BATCH = 4


def made(folder: Path, device: str, strategy: str, steps: int) -> tuple[Any, Any, LambdaLR]:
    """Loads in fp32, moves, builds the optimizer, then the line; and a schedule over the compiled optimizer."""
    end_of_step(device)
    model = AutoModelForCausalLM.from_pretrained(pretrained(folder), dtype=torch.float32).to(device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy)  # the one line
    warm = max(1, steps // 10)
    return model, optimizer, LambdaLR(optimizer, lambda n: min((n + 1) / warm, (steps - n) / max(1, steps - warm)))


def batch(step: int, device: str) -> dict[str, torch.Tensor]:
    """The rows of a step on the device."""
    rows = [Bytes()[BATCH * step + i] for i in range(BATCH)]
    return {name: torch.stack([row[name] for row in rows]).to(device) for name in rows[0]}


def end_of_step(device: str) -> Callable[[], object]:
    """What runs the graph of a step on XLA, `xm.mark_step` of older scripts; nothing elsewhere."""
    if device != "xla":
        return lambda: None
    import torch_xla  # also what makes `.to("xla")` known to torch

    return torch_xla.sync


def train(model: Any, optimizer: Any, schedule: LambdaLR, steps: int, device: str) -> list[float]:
    """An ordinary loop. No number is read before its end: each reading would wait for the device."""
    losses, sync = [], end_of_step(device)
    for step in range(steps):
        optimizer.zero_grad()
        loss = model(**batch(step, device)).loss  # transformers computes it in fp32
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.detach())
        sync()
    return [float(loss) for loss in losses]


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, saves, loads and reports; returns the loss of every step."""
    made_of = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    made_of.add_argument("--device", choices=("cpu", "xla"), default="cpu", help="default: %(default)s")
    made_of.add_argument("--steps", type=int, default=40, help="training steps (default: %(default)s)")
    made_of.add_argument("--strategy", choices=collage_neuron.STRATEGIES, default="split433")
    made_of.add_argument("--out", type=Path, default=Path("out"), help="where fp32 weights go (default: %(default)s)")
    chosen = made_of.parse_args(argv)
    model, optimizer, schedule = made(chosen.out / "pretrained", chosen.device, chosen.strategy, chosen.steps)
    losses = train(model, optimizer, schedule, chosen.steps, chosen.device)
    report(f"fine-tuned on {chosen.device}", losses, optimizer)
    checkpoint.save_pretrained_fp32(model, optimizer, chosen.out / "fp32")
    print("fp32 on disk is read as", AutoModelForCausalLM.from_pretrained(chosen.out / "fp32").dtype)
    return losses


if __name__ == "__main__":
    main()
