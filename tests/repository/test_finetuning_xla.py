"""Fine-tuning on torch_xla's device (here XLA's CPU), as docs/fine_tuning.md says for trn1: its loop, what is saved."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from models import example
from sampling import WHOLE, part
from worlds import run_script

import collage_neuron
from collage_neuron import checkpoint
from collage_neuron.checkpoint import get_fp32_state_dict

pytest.importorskip("transformers")
pytest.importorskip("torch_xla")

import torch_xla.debug.metrics as met
from torch_xla.utils.checkpoint import checkpoint as xla_checkpoint

pytestmark = pytest.mark.filterwarnings("default")  # other people's packages warn of one another
ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "examples" / "trainers"
STEPS = 8

Weights = dict[str, torch.Tensor]


class Tuned(NamedTuple):
    """A run of the loop: exact weights before and after it, and how many programs were compiled before each step."""

    losses: list[float]
    model: Any
    optimizer: Any
    before: Weights
    after: Weights
    compiled: list[int]


@pytest.fixture(scope="module")
def module() -> Any:
    return example("hf_finetune_loop", "transformers")


@pytest.fixture(scope="module")
def on_xla(module: Any, tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    return tuned(module, tmp_path_factory.mktemp("xla"), "xla")


def tuned(module: Any, folder: Path, device: str, strategy: str = "split433") -> Tuned:
    model, optimizer, schedule = module.made(folder, device, strategy, STEPS)
    compiled: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: compiled.append(met.counter_value("UncachedCompile") or 0))
    before = {name: p.detach().float().cpu() for name, p in model.named_parameters()}
    losses = module.train(model, optimizer, schedule, STEPS, device)
    after = get_fp32_state_dict(model, optimizer)[0]
    return Tuned(losses, model, optimizer, before, {name: after[name].cpu() for name in before}, compiled)


def apart(found: Weights, expected: Weights, before: Weights) -> float:
    """How far two runs are apart, as a fraction of the way from where they began."""
    norm = torch.linalg.vector_norm
    return max(float(norm(found[n] - expected[n]) / norm(expected[n] - before[n])) for n in before)


def test_the_run_ends_where_that_of_the_cpu_does(module: Any, on_xla: Tuned, tmp_path: Path) -> None:
    """But for its matmuls, which sum in another order in bf16; pure bf16 loses most of the way."""
    *_, before, expected, _ = tuned(module, tmp_path / "cpu", "cpu")
    _, model, optimizer, began, found, _ = on_xla
    assert all(torch.equal(began[name], value) for name, value in before.items())
    assert next(model.parameters()).device.type == "xla"
    assert collage_neuron.bytes_per_parameter(optimizer) == 12
    assert apart(found, expected, before) < 2**-4
    assert apart(tuned(module, tmp_path / "bf16", "cpu", "bf16").after, expected, before) > 2**-1


def test_what_is_saved_has_every_bit_in_fp32(module: Any, on_xla: Tuned, tmp_path: Path) -> None:
    _, model, optimizer, _, expected, _ = on_xla
    checkpoint.save_pretrained_fp32(model, optimizer, tmp_path / "fp32")
    assert json.loads((tmp_path / "fp32" / "config.json").read_text())["dtype"] == "float32"
    read = module.AutoModelForCausalLM.from_pretrained(tmp_path / "fp32").state_dict()
    assert all(torch.equal(read[name], value) for name, value in expected.items())
    assert any(not torch.equal(value, value.bfloat16().float()) for value in expected.values())


def test_no_step_compiles_anew(on_xla: Tuned) -> None:
    """The third step runs what the first two compiled, though the learning rate is another one each time."""
    assert on_xla.compiled[-1] > 0
    assert len(set(on_xla.compiled[3:])) == 1


@pytest.mark.skipif(not WHOLE, reason="a recipe with torch_xla alone, which compiles two more models: WHOLE=1 runs it")
def test_gradient_checkpointing_needs_that_of_torch_xla(module: Any, on_xla: Tuned, tmp_path: Path) -> None:
    model, optimizer, schedule = module.made(tmp_path, "xla", "split433", STEPS)
    model.train()
    model.gradient_checkpointing_enable()
    with pytest.raises(AttributeError, match="no attribute 'xla'"):  # of torch.utils.checkpoint
        module.train(model, optimizer, schedule, 1, "xla")
    model.enable_input_require_grads()
    for layer in model.modules():
        if hasattr(layer, "_gradient_checkpointing_func"):
            layer._gradient_checkpointing_func = partial(xla_checkpoint, use_reentrant=True)
    assert module.train(model, optimizer, schedule, STEPS, "xla") == pytest.approx(on_xla.losses, rel=2**-8)


FORMS = part(("optimizers", "optimizer_cls_and_kwargs", "model"), 3, "on XLA")
"""What differs between them ends before a device is met; test_trainers.py has them all."""


def test_transformers_trainer_trains_there(tmp_path: Path) -> None:
    """In a process of its own, whose transformers may use torch_xla."""
    script = f"import sys, warnings\nwarnings.simplefilter('default')\nsys.path.insert(0, {str(FOLDER)!r})\n"
    script += f"import hf_trainer as h\nout = {str(tmp_path)!r}\n"
    script += f"for form in {FORMS}:\n    h.main(['--form', form, '--steps', '3', '--out', out])\n"
    printed = run_script(tmp_path, script, environ={"USE_TORCH_XLA": "1"})
    assert (tmp_path / "stderr.txt").read_text().count("backend xla") == len(FORMS)
    assert printed.count("split433, 12 bytes/parameter") == len(FORMS)
