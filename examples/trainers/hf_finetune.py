"""Fine-tuning with Hugging Face's Trainer at 1e-5: its usual options, the best model at the end, bf16 and fp32 on disk.

Run it like this, without a network: the model is made on the spot and saved first, as a hub's would lie on disk::

    python examples/trainers/hf_finetune.py --form full
    python examples/trainers/hf_finetune.py --form lora    # needs peft

The second half loads what was saved, and says how far its weights are from those that the optimizer has.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hf_trainer import tiny_llama
from tiny import Bytes, Settings, report, settings
from torch.utils.data import Subset
from transformers import AutoModelForCausalLM, PrinterCallback, Trainer, TrainingArguments, set_seed

import collage_neuron
from collage_neuron import checkpoint

FORMS = ("full", "lora")


def pretrained(folder: Path) -> Path:
    """A bf16 checkpoint of a language model, in the place of one that is downloaded."""
    set_seed(0)
    model: Any = tiny_llama().to(torch.bfloat16)
    model.save_pretrained(folder)
    return folder


def make_trainer(chosen: Settings) -> Trainer:
    """Loads in fp32, adds an adapter or not, then the line; the Trainer builds the optimizer that it is told to."""
    model = AutoModelForCausalLM.from_pretrained(pretrained(chosen.out / "pretrained"), dtype=torch.float32)
    if chosen.form == "lora":
        import peft

        adapter = peft.LoraConfig(task_type="CAUSAL_LM", r=4, target_modules=["q_proj", "v_proj"])
        model = peft.get_peft_model(model, adapter)
    model = collage_neuron.compile(model, strategy=chosen.strategy)  # the one line
    half = max(1, chosen.steps // 2)
    arguments = TrainingArguments(
        output_dir=str(chosen.out / "checkpoints"),
        max_steps=chosen.steps,
        learning_rate=1e-4 if chosen.form == "lora" else 1e-5,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        gradient_checkpointing=chosen.form == "full",
        eval_strategy="steps",
        eval_steps=half,
        save_steps=half,
        load_best_model_at_end=True,
        logging_steps=1,
        use_cpu=True,
        report_to=[],
        disable_tqdm=True,
    )
    return Trainer(
        model, arguments, train_dataset=Subset(Bytes(), range(64)), eval_dataset=Subset(Bytes(), range(64, 80))
    )


def save(trainer: Trainer, folder: Path) -> None:
    """In bf16, as the model computes; and in fp32, exactly what the optimizer has."""
    trainer.save_model(str(folder / "bf16"))
    checkpoint.save_pretrained_fp32(trainer.model, trainer.optimizer, folder / "fp32")


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains, saves, loads and reports; returns the loss of every step."""
    chosen = settings(__doc__ or "", FORMS, argv)
    trainer = make_trainer(chosen)
    trainer.remove_callback(PrinterCallback)
    trainer.train()
    save(trainer, chosen.out)
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    report(f"fine-tuned, {chosen.form}", losses, trainer.optimizer.optimizer)
    if chosen.form == "full":
        for kind in ("bf16", "fp32"):
            print(kind, "on disk is read as", AutoModelForCausalLM.from_pretrained(chosen.out / kind).dtype)
    return losses


if __name__ == "__main__":
    main()
