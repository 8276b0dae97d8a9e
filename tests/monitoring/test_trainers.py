"""The callbacks that log the monitor, inside Hugging Face's Trainer and Lightning."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

os.environ["USE_TORCH_XLA"] = "0"  # read when transformers is imported: these tests are on the CPU
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest
from torch.utils.data import DataLoader

from collage_neuron import JsonLog
from collage_neuron.monitoring.run_log import read_log
from collage_neuron.monitoring.trainers import hugging_face_monitor, lightning_monitor

pytestmark = pytest.mark.filterwarnings("default")  # other people's packages warn of one another

EXAMPLES_FOLDER = Path(__file__).parents[2] / "examples" / "trainers"
STEPS = 4


@pytest.fixture(autouse=True)
def _trainers_on_the_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(EXAMPLES_FOLDER))


def example(name: str, needs: str) -> Any:
    pytest.importorskip(needs)
    return __import__(name)


@pytest.mark.parametrize("form", ["optimizers", "optimizer_cls_and_kwargs", "model"])
def test_the_trainer_logs_the_monitor(form: str, tmp_path: Path) -> None:
    hf_trainer = example("hf_trainer", "transformers")
    trainer = hf_trainer.make_trainer(hf_trainer.Settings(form=form, steps=STEPS, strategy="bf16", out=tmp_path))
    trainer.add_callback(hugging_face_monitor(every=2, to=JsonLog(tmp_path / "run.jsonl")))
    trainer.train()
    entries = [entry for entry in trainer.state.log_history if "loss" in entry]
    assert [entry["step"] for entry in entries] == [1, 2, 3, 4]
    assert "collage/edq" not in entries[0]
    assert entries[1]["collage/edq"] == entries[2]["collage/edq"] != entries[3]["collage/edq"]
    written = read_log(tmp_path / "run.jsonl", "run")
    assert list(written.steps) == [2, 4]
    assert 0 < entries[3]["collage/lost"] < 100


@pytest.mark.parametrize("form", ["model and optimizer", "class"])
def test_lightning_logs_the_monitor(form: str, tmp_path: Path) -> None:
    module = example("lightning_module", "lightning")
    import lightning

    task = module.Task(form, "bf16")
    trainer = lightning.Trainer(
        accelerator="cpu", max_steps=STEPS, default_root_dir=tmp_path, logger=False, enable_checkpointing=False,
        enable_progress_bar=False, enable_model_summary=False,
        callbacks=[lightning_monitor(every=2, to=JsonLog(tmp_path / "run.jsonl"), modules=True)],
    )  # fmt: skip
    trainer.fit(task, DataLoader(module.Bytes(), batch_size=8))
    found = {name: float(x) for name, x in trainer.callback_metrics.items()}
    assert 0 < found["collage/edq"] < 2
    assert any(name.startswith("collage_modules/model.head") for name in found)
    assert list(read_log(tmp_path / "run.jsonl", "run").steps) == [2, 4]
