"""Hugging Face's Trainer, three ways in.

Run it like this::

    python examples/trainers/hf_trainer.py --form optimizers                # an optimizer object
    python examples/trainers/hf_trainer.py --form optimizer_cls_and_kwargs  # a class
    python examples/trainers/hf_trainer.py --form model                     # the Trainer's own optimizer

Where torch_xla is installed the Trainer uses its device; USE_TORCH_XLA=0 in the environment leaves it out.
"""

from collections.abc import Sequence
from typing import Any

import torch
from tiny import BLOCK, VOCABULARY, WIDTH, Bytes, Settings, report, settings
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

import collage_neuron

FORMS = ("optimizers", "optimizer_cls_and_kwargs", "model")


def tiny_llama() -> torch.nn.Module:
    """A randomly initialised Llama of one layer, fp32."""
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=BLOCK,
    )
    return LlamaForCausalLM(config)  # type: ignore[no-any-return]  # transformers has no types here


def with_collage(model: torch.nn.Module, form: str, strategy: str) -> dict[str, Any]:
    """What the Trainer is given beside the model; the model is bf16 afterwards."""
    if form == "optimizers":
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy)
        return {"optimizers": (optimizer, None)}
    if form == "optimizer_cls_and_kwargs":
        model.to(torch.bfloat16)
        return {
            "optimizer_cls_and_kwargs": (collage_neuron.compile(torch.optim.AdamW, strategy=strategy), {"lr": 3e-3})
        }
    collage_neuron.compile(model, strategy=strategy)
    return {}


def make_trainer(chosen: Settings) -> Trainer:
    """A Trainer as in any script: `bf16=True` (autocast over fp32 weights) is what it does not need."""
    set_seed(0)
    arguments = TrainingArguments(
        output_dir=str(chosen.out),
        max_steps=chosen.steps,
        per_device_train_batch_size=16,
        learning_rate=3e-3,
        logging_steps=1,
        save_steps=max(1, chosen.steps // 2),
        report_to=[],
        disable_tqdm=True,
    )
    model = tiny_llama().to(arguments.device)  # before there is an optimizer: on XLA a move makes new parameters
    return Trainer(model, arguments, train_dataset=Bytes(), **with_collage(model, chosen.form, chosen.strategy))


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains and reports; returns the loss of every step."""
    chosen = settings(__doc__ or "", FORMS, argv)
    trainer = make_trainer(chosen)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(f"Trainer, {chosen.form}", losses, trainer.optimizer.optimizer)  # accelerate's wrapper is around it
    return losses


if __name__ == "__main__":
    main()
