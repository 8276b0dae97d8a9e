"""What goes wrong in a training run: NaN and Inf, numbers too large and too small, tensors too small and too large."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from models import MODES, bits, differences, parameters, set_gradients, snapshot
from planned import plan_update
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.optim import SGD, Adagrad, AdamW, Optimizer

import collage_neuron
from collage_neuron import STRATEGIES, exact_value, skipped_steps
from collage_neuron.numerics.formats import format_named
from collage_neuron.passes.backends import reference
from collage_neuron.passes.backends.native.backend import BACKEND
from collage_neuron.passes.backends.reference import ReferenceUpdate
from collage_neuron.runtime import nonfinite, step_plan
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.states.store import record_of

INF, NAN = float("inf"), float("nan")

MAKE: dict[str, Callable[[Any], Optimizer]] = {
    "adamw": lambda ps: AdamW(ps, lr=1e-2, weight_decay=0.1),
    "momentum": lambda ps: SGD(ps, lr=1e-2, momentum=0.9),
    "adagrad": lambda ps: Adagrad(ps, lr=1e-2),
}

UNDRAWN = [s.name for s in STRATEGIES.values() if not any(format_named(f).draw for f in (s.param, s.state, s.slow))]


# --- NaN and Inf in gradients, let through ----------------------------------------------------------------------------


BAD = (0, 2, 4)
"""Elements of the first parameter whose second gradient is NaN, Inf, -Inf."""


def run_of(params: list[nn.Parameter], optimizer: Optimizer, poisoned: bool = False) -> None:
    for i in range(3):
        set_gradients(params, i)
        if poisoned and i == 1:
            poison(params[0])
        optimizer.step()


def poison(p: nn.Parameter) -> None:
    assert p.grad is not None
    p.grad.view(-1)[list(BAD)] = torch.tensor([NAN, INF, -INF]).to(p.dtype)


@pytest.mark.sampled(of=8)
@pytest.mark.parametrize(("strategy", "arithmetic"), MODES)
@pytest.mark.parametrize("name", MAKE)
def test_by_default_nan_and_inf_go_where_torch_lets_them_go(name: str, strategy: str, arithmetic: str) -> None:
    """To their own elements, and to no other: those are the run without them, bit for bit."""
    params, others, plain = (parameters() for _ in range(3))
    settings: dict[str, Any] = {"strategy": strategy, "arithmetic": arithmetic}
    optimizer, other = (collage_neuron.compile(MAKE[name](ps), **settings) for ps in (params, others))
    run_of(params, optimizer, poisoned=True)
    run_of(others, other)
    run_of(plain, MAKE[name](plain), poisoned=True)
    bad = torch.zeros(params[0].numel(), dtype=torch.bool).index_fill(0, torch.tensor(BAD), True).view(params[0].shape)
    assert torch.equal(~plain[0].isfinite(), bad)
    if any(format_named(fmt).is_coded for fmt in record_of(optimizer, params[0]).values()):
        # The rest of the block shares a word with it, and is seen to be lost too.
        bad = bad.any(-1, keepdim=True).expand_as(bad)
    assert torch.equal(~params[0].isfinite(), bad)
    assert torch.equal(~exact_value(optimizer, params[0]).isfinite(), bad)
    assert torch.equal(bits(params[0])[~bad], bits(others[0])[~bad])
    for key, state in other.state[others[0]].items():
        mine = optimizer.state[params[0]][key]
        if key.endswith("_scale"):  # one word for a block
            assert torch.equal(bits(mine)[~bad.any(-1)], bits(state)[~bad.any(-1)])
            continue
        assert torch.equal(bits(mine)[~bad], bits(state)[~bad]) if state.dim() else torch.equal(mine, state)
    for p, q in zip(params[1:], others[1:], strict=True):
        assert torch.equal(bits(p), bits(q))


# --- skipped ----------------------------------------------------------------------------------------------------------


CPU_BACKENDS = [
    "reference",
    pytest.param("native", marks=pytest.mark.skipif(bool(BACKEND.missing()), reason="no code")),
]


def skipping(
    name: str, strategy: str = "plus", arithmetic: str = "fp32", device: Any = "cpu", backend: str = "auto"
) -> tuple[Any, Optimizer]:
    params = [nn.Parameter(p.detach().to(device)) for p in parameters()]
    settings: dict[str, Any] = {"strategy": strategy, "arithmetic": arithmetic, "nonfinite": "skip", "backend": backend}
    settings |= {"validate": "off"} if device != "cpu" else {}  # XLA would compile programs for it
    return params, collage_neuron.compile(MAKE[name](params), **settings)


def step(params: list[nn.Parameter], optimizer: Optimizer, seed: int, bad: float | None = None) -> None:
    set_gradients(params, seed)
    if bad is not None:
        assert params[1].grad is not None
        params[1].grad[3] = bad
    optimizer.step()
    if params[0].device.type == "xla":
        import torch_xla

        torch_xla.sync()


def tensors(params: list[nn.Parameter], optimizer: Optimizer) -> dict[str, Any]:
    """What a skipped step leaves alone: all bits of the parameters and of the states that are not numbers."""
    kept = {k: v for k, v in snapshot(optimizer).items() if not k.endswith((" grad", " step"))}
    return {k: v for k, v in kept.items() if not k.startswith("group")}


@pytest.mark.parametrize("bad", [NAN, INF, -INF])
def test_each_gradient_is_looked_at(bad: float) -> None:
    params = [nn.Parameter(torch.zeros(2)) for _ in range(3)]
    for place in params:
        for p in params:
            p.grad = torch.tensor([1.0, bad if p is place else 2.0])
        assert not nonfinite.all_finite(params)


def test_a_step_of_rows_of_one_whole_block_is_skipped() -> None:
    """Validation compares words of blocks, of which each element of a sample has its own copy."""
    params = [nn.Parameter(torch.ones(4, 128).bfloat16()), nn.Parameter(torch.ones(5).bfloat16())]
    optimizer = collage_neuron.compile(AdamW(params), strategy="split422", nonfinite="skip")
    params[0].grad, params[1].grad = torch.ones_like(params[0]), torch.full_like(params[1], INF)
    optimizer.step()
    assert skipped_steps(optimizer) == 1
    assert (params[0] == 1).all()


@pytest.mark.sampled(of=32)
@pytest.mark.parametrize("bad", [NAN, INF, -INF])
@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(("strategy", "arithmetic"), MODES)
@pytest.mark.parametrize("name", MAKE)
def test_a_skipped_step_is_one_that_is_not_taken(
    name: str, strategy: str, arithmetic: str, backend: str, bad: float
) -> None:
    """Whole, and counted; then bit for bit the run without it, the step count and random bits included."""
    found = []
    for is_skipped in (True, False):
        params, optimizer = skipping(name, strategy, arithmetic, backend=backend)
        step(params, optimizer, 0)
        assert skipped_steps(optimizer) == 0
        if is_skipped:
            before = tensors(params, optimizer)
            step(params, optimizer, 1, bad)
            assert differences(tensors(params, optimizer), before) == []
        step(params, optimizer, 2)
        assert skipped_steps(optimizer) == is_skipped
        optimizer.param_groups[0].pop("collage_skipped")
        found.append(snapshot(optimizer))
    assert differences(found[0], found[1]) == []


class CountedOnHost(Optimizer):
    """Its rate falls with a number in the group, an attribute and an object, which a captured step changes too."""

    def __init__(self, params: Any, on_copies: bool = False) -> None:
        super().__init__(params, {"lr": 1e-2, "rate": 1.0, "on_copies": on_copies})
        self.steps, self.schedule = 0, iter(range(1, 100))

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.steps += 1
        later = next(self.schedule)
        for group in self.param_groups:
            group["rate"] *= 0.5
            for p in group["params"]:
                if group["on_copies"] and p.grad.sum().item() > 1e9:
                    continue
                p.sub_(p.grad, alpha=group["lr"] * group["rate"] / (self.steps + later))


@pytest.mark.parametrize("backend", CPU_BACKENDS)
@pytest.mark.parametrize(
    "make", [lambda params: AdamW(params, lr=1e-2), CountedOnHost, lambda params: CountedOnHost(params, on_copies=True)]
)
def test_skipped_steps_agree_with_plain_torch_that_does_not_step(make: Any, backend: str) -> None:
    """Captured and on copies: after three skipped steps of six, among them the first and two in a row."""
    params = [nn.Parameter(p.detach().float()) for p in parameters()]
    plain = [nn.Parameter(p.detach().clone()) for p in params]
    oracle = make(plain)
    optimizer = collage_neuron.compile(make(params), strategy="split444", nonfinite="skip", backend=backend)
    for i, bad in enumerate((NAN, None, INF, NAN, None, None)):
        step(params, optimizer, i, bad)
        if bad is None:
            for p, q in zip(params, plain, strict=True):
                q.grad = None if p.grad is None else p.grad.float()
            oracle.step()
    assert skipped_steps(optimizer) == 3
    for p, q in zip(params, plain, strict=True):
        torch.testing.assert_close(exact_value(optimizer, p), q.detach(), rtol=2.0**-20, atol=2.0**-24)


def test_groups_that_let_them_through_step_beside_groups_that_skip() -> None:
    params = parameters()
    groups: list[dict[str, Any]] = [
        {"params": params[:1], "collage_nonfinite": "pass"},
        {"params": params[1:], "collage_nonfinite": "skip"},
    ]
    optimizer = collage_neuron.compile(AdamW(groups, lr=1e-2))
    before = [bits(p) for p in params]
    step(params, optimizer, 0, INF)
    assert [torch.equal(bits(p), b) for p, b in zip(params, before, strict=True)] == [False, True, True]
    set_gradients(params, 1)
    poison(params[0])
    optimizer.step()
    assert skipped_steps(optimizer) == 1  # the gradients of the group that skips were finite


def test_the_choice_is_checked() -> None:
    with pytest.raises(ValueError, match="unknown nonfinite 'ignore'; choose one of pass, skip"):
        collage_neuron.compile(AdamW(parameters()), nonfinite="ignore")


@pytest.mark.sampled(of=2, each=False)
@pytest.mark.parametrize("strategy", ["plus", "fp32"])
def test_on_xla_a_step_is_skipped_without_the_host(xla: torch.device, strategy: str) -> None:
    """No tensor is fetched, and good and bad steps are one program."""
    met = pytest.importorskip("torch_xla.debug.metrics")
    params, optimizer = skipping("adamw", strategy, device=xla)
    for i in range(4):
        step(params, optimizer, i)
    before = tensors(params, optimizer)
    met.clear_all()
    for i, bad in enumerate((NAN, -INF, INF)):
        step(params, optimizer, i, bad)
    assert met.metric_data("TransferFromDeviceTime") is None
    assert (
        met.metric_data("CompileTime") is None or met.metric_data("CompileTime")[0] <= 1
    )  # the gradient is written by index
    assert not [name for name in met.counter_names() if name.startswith("aten::")]
    assert differences(tensors(params, optimizer), before) == []
    assert skipped_steps(optimizer) == 3
    assert met.metric_data("TransferFromDeviceTime") is not None  # now the host has asked
    step(params, optimizer, 9)
    assert skipped_steps(optimizer) == 3
    assert differences(tensors(params, optimizer), before) != []


# --- numbers at the ends ------------------------------------------------------------------------------------------

LARGEST = 2.0**127 * (2 - 2**-7)
"""Of bf16."""


def one_step(values: Tensor, gradients: Tensor, strategy: str, steps: int = 2) -> tuple[Tensor, Tensor, Optimizer]:
    """(kept, in float64) after steps of SGD, lr 1; and the optimizer."""
    p, q = nn.Parameter(values.clone()), nn.Parameter(values.double())
    optimizer, reference = collage_neuron.compile(SGD([p], lr=1.0), strategy=strategy), SGD([q], lr=1.0)
    for _ in range(steps):
        p.grad, q.grad = gradients.to(p.dtype), gradients.bfloat16().double()
        optimizer.step()
        reference.step()
    return exact_value(optimizer, p), q.detach(), optimizer


STORE = {"bf16": 2**-8, "light": 2**-17, "plus": 2**-17, "full": 2**-17, "fp32": 2**-24, "fp32_states": 2**-8}
"""Half an ulp of a parameter, relative."""
ABSOLUTE = {"bf16": 2.0**-134, "fp32_states": 2.0**-134, "fp32": 2.0**-150}
"""Half the smallest number of the format; a pair's is that of bf16."""


@pytest.mark.parametrize("strategy", STORE)
def test_huge_parameters_are_right_or_not_finite_and_never_wrong(strategy: str) -> None:
    """Where the high word overflows, the low word is infinite too, and their sum is NaN: loud, not wrong."""
    g = torch.Generator().manual_seed(0)
    x = LARGEST * (1 - 2.0 ** -torch.randint(1, 24, (4096,), generator=g))
    x[:4] = torch.tensor([LARGEST, torch.finfo(torch.float32).max, -LARGEST, LARGEST * (1 - 2**-8)])
    grad = -x * 2.0 ** -torch.randint(1, 20, (4096,), generator=g)
    kept, exact, _ = one_step(x, grad, strategy)
    finite = kept.isfinite()
    error = (kept.double() - exact).abs()
    assert (error <= 3 * (STORE[strategy] + 2 * 2**-24) * exact.abs())[finite].all()
    assert finite[exact.abs() < LARGEST].all()
    assert not finite[exact.abs() > torch.finfo(torch.float32).max * (1 + 2**-8)].any()
    assert finite.any()
    assert not finite.all()


@pytest.mark.parametrize("strategy", STORE)
def test_tiny_parameters_keep_what_their_format_has_down_there(strategy: str) -> None:
    """Half an ulp, which below 2**-126 is no smaller than half the format's smallest number."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(4096, generator=g) * 2.0 ** -torch.randint(100, 150, (4096,), generator=g).double()
    x[:5] = torch.tensor([0.0, 2.0**-149, -(2.0**-149), 2.0**-133, 2.0**-126])
    x = x.float()
    grad = (torch.randn(4096, generator=g) * 2.0**-130).bfloat16().float()
    kept, exact, _ = one_step(x, grad, strategy)
    floor = ABSOLUTE.get(strategy, 2.0**-134)
    magnitude = torch.maximum(exact.abs(), x.double().abs()) + 2 * grad.double().abs()
    assert ((kept.double() - exact).abs() <= 3 * (STORE[strategy] * magnitude + floor + 2.0**-149)).all()
    assert torch.equal(kept == 0, kept.abs() < 2.0**-149)


def test_on_xla_s_cpu_numbers_without_all_their_digits_are_zero(xla: torch.device) -> None:
    """As documented: below 2**-126 it has none; normal numbers beside them are not disturbed."""
    import torch_xla

    p = nn.Parameter(torch.tensor([2.0**-130, 1.5 * 2.0**-127, 2.0**-126, 1e-30]).to(xla))
    optimizer = collage_neuron.compile(SGD([p], lr=1.0))
    p.grad = torch.zeros_like(p)
    optimizer.step()
    torch_xla.sync()
    kept = exact_value(optimizer, p).cpu()
    assert kept[:3].tolist() == [0.0, 0.0, 2.0**-126]
    assert abs(kept[3].item() / 1e-30 - 1) <= 2**-17


# --- empty tensors ----------------------------------------------------------------------------------------------------


@pytest.mark.sampled(of=16)
@pytest.mark.parametrize("shape", [(0,), (3, 0), (0, 2, 5)])
@pytest.mark.parametrize("strategy", UNDRAWN)  # chances depend on the number of a parameter
@pytest.mark.parametrize("name", MAKE)
def test_empty_parameters_step_beside_others(name: str, strategy: str, shape: tuple[int, ...]) -> None:
    """Experts without columns, a vocabulary without padding: and the others are not disturbed."""
    found = []
    for shapes in ((shape, (4, 3)), ((4, 3),)):
        params = [nn.Parameter(torch.linspace(-1, 1, torch.Size(s).numel()).view(s)) for s in shapes]
        optimizer = collage_neuron.compile(MAKE[name](params), strategy=strategy, nonfinite="skip")
        for i in range(3):
            for p in params:
                p.grad = torch.full_like(p, 0.5 + i)
            optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        collage_neuron.checkpoint.get_fp32_state_dict(nn.ParameterList(params), optimizer)
        found.append((params, optimizer))
    (params, optimizer), (others, _) = found
    assert torch.equal(bits(params[1]), bits(others[0]))
    words = {k: v for k, v in optimizer.state[params[0]].items() if v.dim() > 0}
    assert all(v.numel() == 0 if k.endswith("_scale") else v.shape == shape for k, v in words.items())
    assert skipped_steps(optimizer) == 0


# --- more elements than 32 bits count -------------------------------------------------------------------------------

MANY = 2**31 + 7


def planned(strategy: str) -> step_plan.Job:
    params = parameters(0, ((8,),))
    optimizer = collage_neuron.compile(AdamW(params, lr=1e-3), strategy=strategy)
    return plan_update(base_of(type(optimizer)), optimizer, optimizer.param_groups[0], params)


@pytest.mark.parametrize("strategy", ["plus", "fp32"])
@pytest.mark.parametrize("shape", [(MANY,), (2**16 + 1, 2**15 + 3)])
def test_the_reference_backend_cuts_large_tensors_into_pieces_that_cover_them(
    strategy: str, shape: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On fake tensors, which have a shape, strides and offsets but no memory; in eight pieces instead of 32 768."""
    monkeypatch.setattr(reference, "CHUNK", 2**28)
    job = planned(strategy)
    dtypes = {
        key: torch.float32 if c.storage == "fp32" else torch.bfloat16
        for name, fmt in job.update.formats.items()
        for key, c in zip(fmt.keys(name), fmt.components, strict=True)
    }
    pieces: list[tuple[int, int]] = []
    run = ReferenceUpdate._run

    def noted(self: ReferenceUpdate, piece: reference.Piece, scalars: Tensor) -> Any:
        pieces.append((int(piece.components[0].storage_offset()), piece.components[0].numel()))
        assert piece.first == pieces[-1][0]
        return run(self, piece, scalars)

    monkeypatch.setattr(ReferenceUpdate, "_run", noted)
    with FakeTensorMode():
        components = [torch.empty(shape, dtype=dtypes.get(key, torch.bfloat16)) for key in job.update.inputs]
        results = ReferenceUpdate(job.update)(components, torch.empty(len(job.update.scalars.entries)))
    assert {tuple(r.shape) for r in results} == {shape}
    assert [r.dtype for r in results] == [dtypes[key] for key in job.update.outputs]
    ends = [offset + size for offset, size in pieces]
    assert [offset for offset, _ in pieces] == [0, *ends[:-1]]
    assert ends[-1] == torch.Size(shape).numel() > 2**31
