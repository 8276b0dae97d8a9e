"""Weights that other code writes: from compile to the first step, between steps, through `p.data`, and by loads."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from pytorch_optimizer import SAM
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import set_model_state_dict
from torch.nn.utils import parameters_to_vector, vector_to_parameters
from torch.optim import SGD, AdamW, Optimizer

import collage_neuron
from collage_neuron import exact_value

STRATEGIES = ["plus", "light", "full", "split433", "split312", "fp32"]
HALF_AN_ULP = 2.0**-8
"""Of a bf16 number, as a part of it."""

Run = tuple[nn.Module, Optimizer]


def compiled(strategy: str, backend: str = "auto", steps: int = 0, lr: float = 0.0) -> Run:
    """A model whose weights bf16 does not hold, after some steps."""
    torch.manual_seed(1)
    model: nn.Module = nn.Linear(40, 30)
    optimizer: Optimizer = AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy, backend=backend, verbose=False)
    for _ in range(steps):
        step((model, optimizer))
    return model, optimizer


def step(run: Run) -> None:
    for p in run[0].parameters():
        p.grad = torch.ones_like(p)
    run[1].step()


def values(run: Run) -> list[Tensor]:
    return [exact_value(run[1], p) for p in run[0].parameters()]


def params(model: nn.Module) -> list[nn.Parameter]:
    return list(model.parameters())


def copied(model: nn.Module) -> None:
    for p in model.parameters():
        p.copy_(p.clone())


def perturbed_and_restored(model: nn.Module) -> None:
    """Sharpness-aware minimization by hand."""
    saved = [p.clone() for p in model.parameters()]
    for p in model.parameters():
        p.add_(0.25 * torch.randn_like(p))
    for p, value in zip(model.parameters(), saved, strict=True):
        p.copy_(value)


def swapped(model: nn.Module) -> None:
    """An average for an evaluation, and back, by state dicts."""
    own = copy.deepcopy(model.state_dict())
    model.load_state_dict({name: 2 * t for name, t in own.items()})
    model.load_state_dict(own)


def swapped_by_data(model: nn.Module) -> None:
    own = [p.data for p in model.parameters()]
    for p in model.parameters():
        p.data = 2 * p.data
    for p, value in zip(model.parameters(), own, strict=True):
        p.data = value.clone()


def swapped_by_data_and_loaded(model: nn.Module) -> None:
    """An average that `p.data.copy_` brings, of which torch counts no write, and a load takes away."""
    own = copy.deepcopy(model.state_dict())
    for p in model.parameters():
        p.data.copy_(2 * p)
    model.load_state_dict(own)


def swapped_as_vectors(model: nn.Module) -> None:
    own = parameters_to_vector(model.parameters())
    vector_to_parameters(2 * own, model.parameters())
    vector_to_parameters(own, model.parameters())


CAME_AND_WENT = [
    copied, perturbed_and_restored, swapped, swapped_by_data, swapped_by_data_and_loaded, swapped_as_vectors,
]  # fmt: skip


@pytest.mark.sampled(of=8)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("write", CAME_AND_WENT)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", ["native", "reference"])
@torch.no_grad()
def test_a_weight_whose_bits_are_what_they_were_keeps_its_low_word(
    strategy: str, write: Callable[[nn.Module], None], steps: int, backend: str
) -> None:
    run = compiled(strategy, backend, steps)
    before = values(run)
    assert any(not torch.equal(v, p) for v, p in zip(before, run[0].parameters(), strict=True))
    write(run[0])
    assert all(map(torch.equal, values(run), before))
    step(run)
    assert all(map(torch.equal, values(run), before))


@pytest.mark.parametrize("strategy", STRATEGIES)
@torch.no_grad()
def test_weights_that_are_loaded_over_others_begin_anew(strategy: str) -> None:
    """An average was there when another checkpoint is loaded."""
    run = compiled(strategy, steps=2)
    other = {name: 1.01 * t for name, t in run[0].state_dict().items()}
    params(run[0])[0].data[0].mul_(2)
    run[0].load_state_dict(other)
    for _ in range(2):
        assert all(map(torch.equal, values(run), [t.float() for t in other.values()]))
        step(run)


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("strategy", ["split433", "fp32"])
@torch.no_grad()
def test_a_mask_beside_an_average_costs_the_low_words_of_what_it_clears(strategy: str, when: str) -> None:
    run = compiled(strategy, steps=2)
    weight, before = params(run[0])[0], values(run)[0]
    for place in ("before", "after"):
        if place == when:
            weight[:4] *= 0
        if place == "before":
            own = copy.deepcopy(run[0].state_dict())
            weight.data.mul_(1.01)
            run[0].load_state_dict(own)
    step(run)
    assert torch.equal(values(run)[0][4:], before[4:])


@pytest.mark.parametrize("strategy", ["split433", "plus", "fp32"])
@torch.no_grad()
def test_an_average_that_is_read_keeps_low_words(strategy: str) -> None:
    run = compiled(strategy, steps=2)
    before, own = values(run), copy.deepcopy(run[0].state_dict())
    run[0].load_state_dict({name: 2 * t for name, t in own.items()})
    assert not any(map(torch.equal, values(run), before))
    for p, t in zip(run[0].parameters(), own.values(), strict=True):
        p.data.copy_(t)
    step(run)
    assert all(map(torch.equal, values(run), before))


@pytest.mark.parametrize("which", [[1], [0, 1, 2, 3]])
@torch.no_grad()
def test_an_average_by_data_of_weights_in_another_order_of_memory(which: list[int]) -> None:
    """The sample, of the first and the third of four, tells it of all; of others each loses its own low word."""
    model: Any = nn.Sequential(*(nn.Conv2d(8, 8, 3, bias=False) for _ in range(4)))
    model.to(memory_format=torch.channels_last)
    run = collage_neuron.compile(model, AdamW(model.parameters(), lr=0.0), strategy="split433", verbose=False)
    step(run)
    step(run)
    before, own = values(run), copy.deepcopy(run[0].state_dict())
    for i in which:
        params(run[0])[i].data.mul_(2)
    run[0].load_state_dict(own)
    kept = list(map(torch.equal, values(run), before))
    assert kept == [i != 1 or len(which) == 4 for i in range(4)]


@pytest.mark.parametrize("by_data", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@torch.no_grad()
def test_what_is_written_before_the_first_step_is_where_training_begins(strategy: str, by_data: bool) -> None:
    run = compiled(strategy)
    before, weight = values(run)[0], params(run[0])[0]
    new = torch.cat([weight[:10] * 1.25, weight[10:]])  # as large as before: the old low words would fit
    if by_data:
        weight.data = new
    else:
        weight.copy_(new)
    expected = torch.cat([weight[:10].float(), before[10:]])
    assert torch.equal(values(run)[0], expected)
    step(run)
    assert torch.equal(values(run)[0], expected)


LOADS: dict[str, Callable[..., object]] = {
    "load_state_dict": lambda model, state: model.load_state_dict(state),
    "in a wrapper": lambda model, state: nn.ModuleDict({"module": model}).load_state_dict(
        {f"module.{name}": t for name, t in state.items()}
    ),
    "a part": lambda model, state: model.load_state_dict({"weight": state["weight"]}, strict=False),
    "DCP": lambda model, state: set_model_state_dict(model, dict(state)),
}


@pytest.mark.sampled(of=8)
@pytest.mark.filterwarnings("ignore::collage_neuron.RoundedWeights")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("how", LOADS)
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_low_words_of_loaded_weights_start_at_zero(strategy: str, steps: int, how: str, dtype: torch.dtype) -> None:
    """After steps all of them, since most bits of an earlier checkpoint are those of now; before, where bits differ."""
    run = compiled(strategy, steps=steps)
    before, old = values(run), [p.detach().clone() for p in run[0].parameters()]
    state = {name: (1.25 * t.float()).to(dtype) for name, t in run[0].state_dict().items()}
    state["weight"][:10] = old[0][:10]
    LOADS[how](run[0], state)
    step(run)
    for value, p, q, was in zip(values(run), run[0].parameters(), old, before, strict=True):
        same = (p == q).all() if steps else p == q
        assert torch.equal(value, torch.where(same, was, p.float()))


@pytest.mark.parametrize("how", ["load_state_dict", "in place"])
@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("strategy", STRATEGIES)
@torch.no_grad()
def test_weights_that_are_written_and_saved_are_resumed_as_they_go_on(strategy: str, steps: int, how: str) -> None:
    """And are as before if they were there for a moment only."""
    run, other = compiled(strategy, steps=steps), compiled(strategy)
    before, old = values(run), copy.deepcopy(run[0].state_dict())
    for p in run[0].parameters() if how == "in place" else ():
        p.mul_(1 + 2**-7)
    if how != "in place":
        LOADS[how](run[0], {name: t * (1 + 2**-7) for name, t in old.items()})
    saved = copy.deepcopy([each.state_dict() for each in run])
    other[0].load_state_dict(saved[0])
    other[1].load_state_dict(saved[1])
    assert all(map(torch.equal, values(run), values(other)))
    if how == "load_state_dict":
        run[0].load_state_dict(old)
        assert all(map(torch.equal, values(run), before))


@pytest.mark.parametrize("strategy", ["split433", "fp32"])
def test_an_average_may_be_there_while_an_optimizer_with_one_inside_is_saved(strategy: str) -> None:
    model: nn.Module = nn.Linear(40, 30)
    sam = SAM(model.parameters(), AdamW, lr=1e-2)
    model, optimizer = collage_neuron.compile(model, sam, strategy=strategy, verbose=False)
    for p in model.parameters():
        p.grad = torch.ones_like(p)
    optimizer.first_step()
    optimizer.second_step()
    before, old = values((model, optimizer)), copy.deepcopy(model.state_dict())
    model.load_state_dict({name: t * 0.5 for name, t in old.items()})
    optimizer.state_dict()
    model.load_state_dict(old)
    assert all(map(torch.equal, values((model, optimizer)), before))


@pytest.mark.sampled(of=8)
@pytest.mark.parametrize("write", ["clamp", "mask", "copy", "scale", "grow"])
@pytest.mark.parametrize("by_data", [True, False])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("backend", ["native", "reference"])
@torch.no_grad()
def test_a_write_between_steps_is_within_half_an_ulp(strategy: str, write: str, by_data: bool, backend: str) -> None:
    """Through `p.data` too, which nobody notices."""
    run = compiled(strategy, backend, steps=2)
    weight = params(run[0])[0]
    for target in [weight.data if by_data else weight]:
        {
            "clamp": lambda t=target: t.clamp_(-0.001, 0.001),
            "mask": lambda t=target: t.mul_(t > 0),
            "copy": lambda t=target: t.copy_(1e-3 * torch.randn_like(t)),
            "scale": lambda t=target: t.mul_(2.0**-6),
            "grow": lambda t=target: t.mul_(2.0**13),
        }[write]()
    written = weight.float()
    for _ in range(2):
        value = values(run)[0]
        assert ((value - written).abs() <= HALF_AN_ULP * written.abs()).all()
        step(run)
        assert ((weight.float() - written).abs() <= 2 * HALF_AN_ULP * written.abs()).all()


@pytest.mark.parametrize("strategy", ["plus", "split433"])
@torch.no_grad()
def test_a_write_on_xla_is_within_half_an_ulp_and_keeps_what_did_not_change(strategy: str, xla: torch.device) -> None:
    import torch_xla

    p = nn.Parameter(torch.linspace(0.5, 2, 4096).to(xla))
    optimizer = collage_neuron.compile(SGD([p], lr=0.0), strategy=strategy, verbose=False)
    before = exact_value(optimizer, p).cpu()
    p.copy_(p.clone())
    p.grad = torch.ones_like(p)
    optimizer.step()
    torch_xla.sync()
    assert torch.equal(exact_value(optimizer, p).cpu(), before)
    p.data.clamp_(max=2.0**-7)
    optimizer.step()
    torch_xla.sync()
    assert ((exact_value(optimizer, p).cpu() - 2.0**-7).abs() <= HALF_AN_ULP * 2.0**-7).all()


@pytest.mark.parametrize("strategy", ["plus", "fp32", "split433"])
def test_an_exact_value_has_no_low_word_of_another_weight(strategy: str) -> None:
    """A mask, and weights that are there for a moment: nothing is dropped before the next step."""
    p = nn.Parameter(0.3 + torch.rand(64, generator=torch.Generator().manual_seed(0)))
    optimizer = collage_neuron.compile(AdamW([p], lr=1e-3), strategy=strategy, verbose=False)
    p.grad = torch.ones_like(p)
    optimizer.step()
    before, high = exact_value(optimizer, p), p.detach().clone()
    with torch.no_grad():
        p[:32] = 0
    expected = torch.cat([torch.zeros(32), before[32:]])
    error = 2.0**-126 if strategy == "split433" else 0.0  # of an integer, half a last place of the smallest number
    assert (exact_value(optimizer, p) - expected).abs().max() <= error
    with torch.no_grad():
        p.copy_(high)
    assert torch.equal(exact_value(optimizer, p), before)


# --- warnings -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "write", [lambda p: p.mul_(1 - 0.01), lambda p: p.div_(p.float().norm(dim=-1, keepdim=True))], ids=["decay", "norm"]
)
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_the_first_write_that_loses_something_is_told(strategy: str, write: Callable[[Tensor], object]) -> None:
    run = compiled(strategy, lr=1e-2)
    with torch.no_grad():
        write(params(run[0])[0])  # before the first step, where weights may come from anywhere
    step(run)
    with torch.no_grad():
        write(params(run[0])[0])
    with pytest.warns(UserWarning, match=r"written between steps: .*rounded to bf16.*set_exact_value; .*weight_decay"):
        step(run)
    with torch.no_grad():
        write(params(run[0])[0])
    step(run)  # once


@pytest.mark.parametrize(
    "write",
    [
        lambda model: [p.clamp_(-0.05, 0.05) for p in model.parameters()],
        lambda model: [p.mul_(p > 0) for p in model.parameters()],
        lambda model: model.load_state_dict({k: 0.99 * v for k, v in model.state_dict().items()}),
        *CAME_AND_WENT,
    ],
)
def test_masks_clamps_and_loads_are_no_reason_to_warn(write: Callable[[nn.Module], object]) -> None:
    run = compiled("split433", lr=1e-4)
    for _ in range(25):
        step(run)
        with torch.no_grad():
            write(run[0])


# --- what else reads the values -------------------------------------------------------------------------------------


def test_a_plain_checkpoint_leaves_low_words_of_bits_that_are_what_they_were() -> None:
    run, plain = compiled("split433"), compiled("split433")[0].float()
    state = AdamW(plain.parameters()).state_dict()
    before = values(run)
    with torch.no_grad():
        copied(run[0])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        run[1].load_state_dict(state)
    assert all(map(torch.equal, values(run), before))


@torch.no_grad()
def test_a_plain_checkpoint_leaves_no_low_words_to_weights_that_were_written_after_a_step() -> None:
    run, plain = compiled("split433", steps=1), compiled("split433")[0].float()
    for p in params(run[0]):
        p.mul_(3.0)
    run[1].load_state_dict(AdamW(plain.parameters()).state_dict())
    assert all(map(torch.equal, values(run), (p.float() for p in params(run[0]))))


# --- other optimizers, earlier weights (found by a hostile reader) ---------------------------------------------------

STAGES = ["plus", "split433", "split323", "fp32"]


def fine_tuned(strategy: str) -> tuple[nn.Linear, Any]:
    """A model after some small steps, which change few bits of its bf16 weights."""
    torch.manual_seed(0)
    model = nn.Linear(64, 16)
    compiled, optimizer = collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-5), strategy=strategy)
    walk(compiled, optimizer, 5)
    return compiled, optimizer


def walk(model: nn.Module, optimizer: Any, steps: int, rate: float = 1e-5) -> None:
    optimizer.param_groups[0]["lr"] = rate
    for _ in range(steps):
        for p in model.parameters():
            p.grad = torch.randn_like(p)
        optimizer.step()


def exact(model: nn.Module, optimizer: Any) -> list[Tensor]:
    return [exact_value(optimizer, p).clone() for p in model.parameters()]


@pytest.mark.filterwarnings("ignore::collage_neuron.SmallSteps")
@pytest.mark.parametrize("strategy", STAGES)
def test_earlier_weights_begin_anew_though_most_of_their_bits_are_there(strategy: str) -> None:
    model, optimizer = fine_tuned(strategy)
    before = {name: t.clone() for name, t in model.state_dict().items()}
    walk(model, optimizer, 5)
    assert (model.weight == before["weight"]).double().mean() > 0.5
    assert not torch.equal(model.weight, before["weight"])
    model.load_state_dict(before)
    for _ in range(2):  # as it is read, and after a step
        assert all(map(torch.equal, exact(model, optimizer), (t.float() for t in before.values())))
        walk(model, optimizer, 1, rate=0.0)
