"""Fine-tuning a Hugging Face model, as docs/fine_tuning.md says it: the Trainer's options, what is saved, adapters."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from models import example

import collage_neuron
from collage_neuron import checkpoint

pytest.importorskip("transformers")
pytestmark = pytest.mark.filterwarnings("default")  # other people's packages warn of one another
STEPS = 4


@pytest.fixture
def module() -> Any:
    return example("hf_finetune", "transformers")


def trained(module: Any, folder: Path, form: str = "full", strategy: str = "split433") -> Any:
    trainer = module.make_trainer(module.Settings(form=form, steps=STEPS, strategy=strategy, out=folder))
    trainer.train()
    return trainer


def exact(trainer: Any) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = checkpoint.get_fp32_state_dict(trainer.model, trainer.optimizer.optimizer)[0]
    return found


def test_what_is_saved_is_read_back_with_every_bit_and_its_dtype(module: Any, tmp_path: Path) -> None:
    trainer = trained(module, tmp_path)
    trainer.model.load_state_dict(trainer.model.state_dict())  # what load_best_model_at_end does; nothing changes
    optimizer = trainer.optimizer.optimizer
    for p in optimizer.param_groups[0]["params"]:
        collage_neuron.set_exact_value(optimizer, p, torch.randn(p.shape))
    module.save(trainer, tmp_path)
    read = {k: module.AutoModelForCausalLM.from_pretrained(tmp_path / k) for k in ("bf16", "fp32")}
    assert {k: model.dtype for k, model in read.items()} == {"bf16": torch.bfloat16, "fp32": torch.float32}
    words = trainer.model.state_dict()
    for name, value in exact(trainer).items():
        assert torch.equal(read["fp32"].state_dict()[name], value), name
        assert torch.equal(read["bf16"].state_dict()[name], words[name]), name
    assert any(not torch.equal(v, v.bfloat16().float()) for v in exact(trainer).values())


def test_dtypes_of_models_within_a_model_are_written_too() -> None:
    from collage_neuron.checkpoint.fp32 import _as_fp32

    given = {"dtype": "bfloat16", "text_config": {"torch_dtype": "bfloat16", "layers": [1]}, "dtype_of_x": "bfloat16"}
    assert _as_fp32(given) == {
        "dtype": "float32",
        "text_config": {"torch_dtype": "float32", "layers": [1]},
        "dtype_of_x": "bfloat16",
    }


def test_a_resumed_run_ends_with_the_bits_of_an_uninterrupted_one(module: Any, tmp_path: Path) -> None:
    """With gradient checkpointing, accumulation and the best model at the end."""
    whole = trained(module, tmp_path / "whole")
    resumed = module.make_trainer(
        module.Settings(form="full", steps=STEPS, strategy="split433", out=tmp_path / "again")
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / "whole" / "checkpoints" / f"checkpoint-{STEPS // 2}"))
    expected, found = exact(whole), exact(resumed)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_an_adapter_is_trained_and_saved_alone(module: Any, tmp_path: Path) -> None:
    pytest.importorskip("peft")
    trainer = trained(module, tmp_path, "lora")
    frozen = {name: p.clone() for name, p in trainer.model.named_parameters() if not p.requires_grad}
    checkpoint.save_pretrained_fp32(trainer.model, trainer.optimizer, tmp_path / "fp32")
    assert not (tmp_path / "fp32" / "config.json").exists()
    assert (tmp_path / "fp32" / "adapter_model.safetensors").exists()
    assert frozen
    assert len(trainer.optimizer.optimizer.param_groups[0]["params"]) == 4
