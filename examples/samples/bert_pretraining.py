"""The training loop of AWS's BERT sample with the edits of docs/neuron_libraries.md, on a CPU, with a tiny random BERT.

Run it like this::

    python examples/samples/bert_pretraining.py

What is kept of `dp_bert_large_hf_pretrain_hdf5.py` (aws-neuron-samples at 2015d65): the two groups of parameters,
decayed or not, the tied bias of the head, gradients over several microsteps, clipping, warm-up and linear decay, masked
tokens and next sentences. What is left out: the device, the data set, logging and checkpoints. Nothing is downloaded.
"""

import argparse
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import BertConfig, BertForPreTraining, get_linear_schedule_with_warmup

import collage_neuron

VOCABULARY, LENGTH, BATCH, MICROSTEPS, MASK, PERIOD = 64, 32, 8, 2, 3, 8
IGNORED = -100
"""The label of a token that was not masked."""


def tiny_bert() -> torch.nn.Module:
    """A randomly initialised BERT of one layer, fp32; lines 288-289 of the sample, which cast it, are deleted."""
    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=LENGTH,
    )
    return BertForPreTraining(config)  # type: ignore[no-any-return]  # ties the head to the embedding


def groups(model: torch.nn.Module, decay: float) -> list[dict[str, object]]:
    """The sample's groups: no weight decay for biases and normalizations."""
    named = list(model.named_parameters())
    free = [p for name, p in named if "bias" in name or "LayerNorm" in name]
    return [
        {"params": [p for _, p in named if all(p is not q for q in free)], "weight_decay": decay},
        {"params": free, "weight_decay": 0.0},
    ]


def batches(seed: int) -> Iterator[dict[str, Tensor]]:
    """Sequences that count to eight again and again, int64 `[BATCH, LENGTH]`; in half of them the second half jumps."""
    drawn = torch.Generator().manual_seed(seed)
    while True:
        start = torch.randint(VOCABULARY, (BATCH, 1), generator=drawn)
        jump = torch.randint(2, (BATCH, 1), generator=drawn)
        second = torch.arange(LENGTH) >= LENGTH // 2
        tokens = 4 + (start + torch.arange(LENGTH) + jump * second * PERIOD // 2) % PERIOD
        masked = torch.rand(BATCH, LENGTH, generator=drawn) < 0.15
        yield {
            "input_ids": tokens.masked_fill(masked, MASK),
            "token_type_ids": second.long().expand(BATCH, -1),
            "labels": tokens.masked_fill(~masked, IGNORED),
            "next_sentence_label": jump[:, 0],
        }


def loss_of(model: torch.nn.Module, batch: dict[str, Tensor]) -> Tensor:
    """The sample's two losses. In fp32: the model's own loss, of bf16 logits near 4, is a multiple of 1/32."""
    out = model(input_ids=batch["input_ids"], token_type_ids=batch["token_type_ids"])
    tokens = cross_entropy(out.prediction_logits.float().flatten(0, 1), batch["labels"].flatten(), ignore_index=IGNORED)
    return tokens + cross_entropy(out.seq_relationship_logits.float(), batch["next_sentence_label"])


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains and reports; returns the loss of every step."""
    made = argparse.ArgumentParser(description="AWS's BERT loop, tiny, on a CPU")
    made.add_argument("--steps", type=int, default=60, help="training steps (default: %(default)s)")
    made.add_argument(
        "--strategy", choices=collage_neuron.STRATEGIES, default="split433", help="(default: %(default)s)"
    )
    chosen = made.parse_args(argv)
    torch.manual_seed(0)
    model = tiny_bert()
    optimizer = torch.optim.AdamW(groups(model, 0.01), lr=1e-2)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=chosen.strategy)  # after line 312
    scheduler = get_linear_schedule_with_warmup(optimizer, chosen.steps // 10, chosen.steps)
    data, losses = batches(seed=0), []
    for _ in range(chosen.steps):
        parts = []
        for _ in range(MICROSTEPS):
            loss = loss_of(model, next(data)) / MICROSTEPS
            loss.backward()
            parts.append(loss.item())
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(sum(parts))
    size = collage_neuron.bytes_per_parameter(optimizer)
    print(f"BERT: {chosen.strategy}, {size:g} bytes/parameter, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
    return losses


if __name__ == "__main__":
    main()
