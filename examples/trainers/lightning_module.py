"""PyTorch Lightning: compile in `configure_optimizers`.

Run it like this::

    python examples/trainers/lightning_module.py
"""

import logging
from collections.abc import Sequence

import lightning
import torch
from tiny import Bytes, Settings, TinyLM, report, settings
from torch import Tensor
from torch.utils.data import DataLoader

import collage_neuron

FORMS = ("model and optimizer", "class")


class Task(lightning.LightningModule):  # type: ignore[misc]  # Lightning is not read by the type checker
    """A LightningModule as in any script, but for one line."""

    def __init__(self, form: str, strategy: str) -> None:
        super().__init__()
        self.form, self.strategy = form, strategy
        self.model = TinyLM()
        self.losses: list[float] = []

    def configure_optimizers(self) -> torch.optim.Optimizer:
        if self.form == "class":
            self.model.to(torch.bfloat16)
            return collage_neuron.compile(torch.optim.AdamW, strategy=self.strategy)(self.model.parameters(), lr=3e-3)
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=3e-3)
        collage_neuron.compile(self.model, optimizer, strategy=self.strategy)
        return optimizer

    def training_step(self, batch: dict[str, Tensor], index: int) -> Tensor:
        loss: Tensor = self.model(**batch)
        self.losses.append(loss.item())
        return loss


def make_trainer(chosen: Settings) -> lightning.Trainer:
    """A Trainer in its default precision: Lightning's own bf16 modes are what it does not need."""
    return lightning.Trainer(
        accelerator="cpu",
        max_steps=chosen.steps,
        default_root_dir=chosen.out,
        gradient_clip_val=1.0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def main(argv: Sequence[str] | None = None) -> list[float]:
    """Trains and reports; returns the loss of every step."""
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    chosen = settings(__doc__ or "", FORMS, argv)
    lightning.seed_everything(0, verbose=False)
    task, trainer = Task(chosen.form, chosen.strategy), make_trainer(chosen)
    trainer.fit(task, DataLoader(Bytes(), batch_size=16, shuffle=True))
    report(f"Lightning, {chosen.form}", task.losses, trainer.optimizers[0])
    return task.losses


if __name__ == "__main__":
    main()
