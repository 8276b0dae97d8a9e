"""The examples in examples/trainers run, and what surrounds the optimizer there changes no bit of its update."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from models import differences, example, run_script, snapshot
from torch.optim import AdamW, Optimizer
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

import collage_neuron
from collage_neuron import Compiled

# Other people's packages warn of one another.
pytestmark = pytest.mark.filterwarnings("default")

STEPS = 6
EXAMPLES_FOLDER = Path(__file__).parents[2] / "examples" / "trainers"


# --- given the gradients that it saw, the optimizer took the steps it would have taken alone -------------------------


def copy_of(optimizer: Optimizer) -> Optimizer:
    """An optimizer of the same class over copies of parameters and states, which nothing surrounds."""
    make: Any = type(optimizer)
    groups = [
        g | {"params": [torch.nn.Parameter(p.detach().clone()) for p in g["params"]]} for g in optimizer.param_groups
    ]
    alone: Optimizer = make(groups)
    for group, own in zip(optimizer.param_groups, alone.param_groups, strict=True):
        for p, q in zip(group["params"], own["params"], strict=True):
            if state := optimizer.state.get(p):
                alone.state[q].update({k: v.clone() for k, v in state.items()})
    return alone


@contextmanager
def followed() -> Iterator[list[Optimizer]]:
    """The one compiled optimizer that steps, and after each step its copy, which takes the same steps alone."""
    collage_neuron.compile(torch.nn.Linear(1, 1))  # the hook that compiles at the first step comes before those here
    found: list[Optimizer] = []

    def before(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if isinstance(optimizer, Compiled) and not found:
            found[:] = optimizer, copy_of(optimizer)
        assert optimizer in found or not isinstance(optimizer, Compiled)

    def after(optimizer: Optimizer, args: Any, kwargs: Any) -> None:
        if not found or optimizer is not found[0]:
            return
        for group, own in zip(optimizer.param_groups, found[1].param_groups, strict=True):
            own.update({k: v for k, v in group.items() if k != "params"})
            for p, q in zip(group["params"], own["params"], strict=True):  # only now: a closure makes them in the step
                q.grad = None if p.grad is None else p.grad.clone()
        found[1].step()
        found.append(found[1])

    handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def without_gradients(found: dict[str, Any]) -> dict[str, Any]:
    """And without the record of formats that a checkpoint leaves in its group: the whole run may have loaded none."""
    return {k: v for k, v in found.items() if not k.endswith((" grad", ", collage_formats"))}


EXAMPLES = [
    ("hf_trainer", "transformers", "optimizers"),
    ("hf_trainer", "transformers", "optimizer_cls_and_kwargs"),
    ("hf_trainer", "transformers", "model"),
    ("accelerate_loop", "accelerate", "object"),
    ("accelerate_loop", "accelerate", "class"),
    ("accelerate_loop", "accelerate", "model"),
    ("lightning_module", "lightning", "model and optimizer"),
    ("lightning_module", "lightning", "class"),
]


@pytest.mark.sampled(of=2)  # each form is in one of the tests of this file, and each example here
@pytest.mark.parametrize(("name", "needs", "form"), EXAMPLES)
def test_an_example_trains_and_takes_the_steps_of_the_optimizer_alone(
    name: str, needs: str, form: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    module = example(name, needs)
    with followed() as steps:
        losses = module.main(["--form", form, "--steps", str(STEPS), "--strategy", "full", "--out", str(tmp_path)])
    assert len(steps[2:]) == len(losses) == STEPS
    assert losses[-1] < losses[0]
    assert f"{form}: full, 14 bytes/parameter" in capsys.readouterr().out
    found = snapshot(steps[0])
    assert any(bits.any() for key, value in found.items() if key.endswith("param_lo") for bits in value[1:])
    lr = {k: v for k, v in found.items() if k.startswith("group")}  # a scheduler stepped once more after the last step
    assert differences(without_gradients(found), without_gradients(snapshot(steps[1])) | lr) == []


def test_every_form_of_an_example_is_tried() -> None:
    for name, needs in {e[:2] for e in EXAMPLES}:
        assert set(example(name, needs).FORMS) == {form for n, _, form in EXAMPLES if n == name}


# --- an interrupted run goes on bit for bit ---------------------------------------------------------------------------


@pytest.mark.sampled(of=3)
@pytest.mark.parametrize("form", ["object", "class", "model"])
def test_accelerate_goes_on_from_its_saved_state_bit_for_bit(form: str, tmp_path: Path) -> None:
    loop = example("accelerate_loop", "accelerate")
    batches = [{k: v[None] for k, v in loop.Bytes()[i].items()} for i in range(STEPS)]

    def run(steps: range, accelerator: Any, model: Any, optimizer: Any) -> None:
        for i in steps:
            optimizer.zero_grad()
            accelerator.backward(model(**batches[i]))
            optimizer.step()
            if i == STEPS // 2 - 1:
                accelerator.save_state(str(tmp_path / "state"))

    def prepared() -> Any:
        accelerator = loop.Accelerator()
        return accelerator, *accelerator.prepare(*loop.build(form, "split433"))

    whole = prepared()
    run(range(STEPS), *whole)
    resumed = prepared()
    resumed[0].load_state(str(tmp_path / "state"))
    run(range(STEPS // 2, STEPS), *resumed)
    found, expected = (without_gradients(snapshot(t[2].optimizer)) for t in (resumed, whole))
    assert any(key.endswith("exp_avg_lo") for key in found)
    assert differences(found, expected) == []


# --- on torch_xla's device --------------------------------------------------------------------------------------------

ON_XLA = """
import os, sys, warnings
warnings.simplefilter("default")  # accelerate calls what torch_xla calls by another name now
os.environ["USE_TORCH_XLA"] = "1"
sys.path.insert(0, sys.argv[1])
import torch
import torch_xla
import accelerate_loop as loop
import collage_neuron

accelerator = loop.Accelerator()
assert accelerator.device.type == "xla"
torch.manual_seed(0)
originals = [p.detach().clone() for p in loop.TinyLM().parameters()]
torch.manual_seed(0)
model, optimizer = loop.build("object", "full")
before = list(model.parameters())
model, prepared = accelerator.prepare(model, optimizer)
assert not any(p is q for p, q in zip(model.parameters(), before))
saved = prepared.state_dict()["state"]
optimizer.param_groups[0]["lr"] = 0.0
batch = {k: v[None].to(accelerator.device) for k, v in loop.Bytes()[0].items()}
accelerator.backward(model(**batch))
prepared.step()
assert set(saved) == set(range(len(before))) == set(prepared.state_dict()["state"])
values = [collage_neuron.exact_value(optimizer, p) for p in model.parameters()]
torch_xla.sync()  # one program for all: each alone would be compiled
for value, x in zip(values, originals, strict=True):
    assert ((value.cpu() - x).abs() <= 2**-17 * x.abs()).all()
"""


@pytest.mark.slow
def test_low_words_follow_a_model_that_accelerate_moves_to_xla(tmp_path: Path) -> None:
    """There a move makes new parameters, and accelerate puts them into the groups."""
    pytest.importorskip("torch_xla")
    pytest.importorskip("accelerate")
    run_script(tmp_path, ON_XLA, EXAMPLES_FOLDER)


# --- torch.compile ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(of=2)
@pytest.mark.parametrize("form", ["before torch.compile", "after torch.compile"])
def test_a_model_under_torch_compile_trains(form: str) -> None:
    """With the backend that compiles nothing: what Inductor makes of the model is not ours to test."""
    module = example("compiled_model", "torch")
    argv = ["--form", form, "--steps", str(STEPS), "--strategy", "full"]
    with followed() as steps:
        losses = module.main(argv, engine="aot_eager")
    assert losses[-1] < losses[0]
    assert differences(*(without_gradients(snapshot(o)) for o in steps[:2])) == []


@pytest.mark.parametrize("form", ["(model, optimizer)", "(model)"])
def test_torch_compile_around_the_step_leaves_the_update_alone(form: str) -> None:
    """Inductor would keep the fp32 value that a rounding is to shorten, and every low word would be zero."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, inputs: object) -> Any:
        graphs.append(graph)
        return graph.forward

    def run(compiled: bool) -> dict[str, Any]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = torch.nn.Linear(8, 8)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        if form == "(model)":
            collage_neuron.compile(model)
        else:
            collage_neuron.compile(model, optimizer)
        step: Any = torch.compile(optimizer.step, backend=backend) if compiled else optimizer.step
        for i in range(3):
            for p in model.parameters():
                p.grad = torch.full_like(p, 1 + i)
            step()
        return snapshot(optimizer)

    assert differences(run(compiled=True), run(compiled=False)) == []
    # In the form (model) torch compiles AdamW's own step, which is left an optimizer without parameters.
    assert form == "(model)" or not [n for graph in graphs for n in graph.graph.nodes if n.op.startswith("call")]
