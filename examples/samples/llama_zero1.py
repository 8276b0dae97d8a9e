"""NxD's Llama sample with ZeRO-1 and the edits of docs/neuron_libraries.md, on a CPU, with a tiny Llama.

Run it in one process, or in several over gloo::

    python examples/samples/llama_zero1.py
    torchrun --nproc-per-node 2 examples/samples/llama_zero1.py

What is kept of `tp_zero1_llama_hf_pretrain.py` (neuronx-distributed at fbac349): the bf16 model, the class that is
handed to a sharding wrapper, and its loop. torch's own ZeRO-1 and DDP are in the place of NxD's, which need a Neuron
device; tensor parallelism, the data set and checkpoints are left out. Nothing is downloaded.
"""

import argparse
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.nn.functional import cross_entropy
from torch.nn.parallel import DistributedDataParallel
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

import collage_neuron

VOCABULARY, LENGTH, BATCH = 64, 32, 8


def get_model() -> torch.nn.Module:
    """A randomly initialised Llama of one layer; line 156 of the sample returns it in bf16."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=LENGTH,
    )
    return LlamaForCausalLM(config).to(torch.bfloat16)  # type: ignore[no-any-return]  # transformers has no types here


def join() -> None:
    """Joins torchrun's processes, or is a group of one."""
    if "RANK" in os.environ:
        dist.init_process_group("gloo")
    else:
        file = Path(tempfile.mkdtemp(), "group")  # where a group meets; torch removes the file
        dist.init_process_group("gloo", init_method=f"file://{file}", rank=0, world_size=1)


def train(steps: int, strategy: str) -> list[float]:
    """Trains in a group of processes, each on its own part of the data; returns the losses of this one."""
    torch.manual_seed(0)  # equal weights everywhere
    model = DistributedDataParallel(get_model())
    optimizer_cls = collage_neuron.compile(torch.optim.AdamW, strategy=strategy)  # lines 223-226
    optimizer = ZeroRedundancyOptimizer(model.parameters(), optimizer_class=optimizer_cls, lr=3e-3, weight_decay=0.01)
    scheduler = get_linear_schedule_with_warmup(optimizer, steps // 10, steps)
    drawn, losses = torch.Generator().manual_seed(dist.get_rank()), []
    for _ in range(steps):
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=drawn)
        tokens = (start + torch.arange(LENGTH)) % VOCABULARY
        logits = model(input_ids=tokens).logits.float()  # fp32: a bf16 loss near 4 is a multiple of 1/32
        loss = cross_entropy(logits[:, :-1].flatten(0, 1), tokens[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        losses.append(loss.item())
    if dist.get_rank() == 0:
        size = collage_neuron.bytes_per_parameter(optimizer.optim)
        group = f"states over {dist.get_world_size()} ranks"
        print(f"Llama: {strategy}, {size:g} bytes/parameter, {group}, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Joins the processes, trains and reports; returns the loss of every step."""
    made = argparse.ArgumentParser(description="NxD's Llama loop with ZeRO-1, tiny, on CPUs")
    made.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    made.add_argument(
        "--strategy", choices=collage_neuron.STRATEGIES, default="split433", help="(default: %(default)s)"
    )
    chosen = made.parse_args(argv)
    join()
    try:
        return train(chosen.steps, chosen.strategy)
    finally:
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
