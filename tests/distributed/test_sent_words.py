"""Words of states that user code sends itself: 16-bit integers are rejected by gloo, 8-bit ones arrive unnoticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from sharded_runs import different, fsdp, model_of, refusal, train, whole
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
from torch.optim import AdamW, Optimizer
from worlds import in_turn, run_world

import collage_neuron

TORCH_SAYS = "Invalid scalar type"
WORDS = ("param_lo", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")
CODES = tuple(name for name in WORDS if not name.endswith("_scale"))

# --- what each process runs -------------------------------------------------------------------------------------------


def stepped(strategy: str, gradient: float, steps: int = 2) -> tuple[nn.Parameter, Optimizer]:
    """A parameter of two rows and its optimizer, after steps with equal gradients."""
    p = nn.Parameter(torch.ones(2, 130))
    optimizer = collage_neuron.compile(AdamW([p], lr=1e-2), strategy=strategy)
    for _ in range(steps):
        p.grad = torch.full_like(p, gradient)
        optimizer.step()
    return p, optimizer


COLLECTIVES: dict[str, Callable[[torch.Tensor], object]] = {
    "broadcast": lambda t: dist.broadcast(t, 0),
    "all_gather": lambda t: dist.all_gather([torch.empty_like(t) for _ in range(2)], t),
    "all_gather_into_tensor": lambda t: dist.all_gather_into_tensor(t.new_empty(2 * t.shape[0], *t.shape[1:]), t),
    "all_reduce": lambda t: dist.all_reduce(t),
    "gather": lambda t: dist.gather(t, [torch.empty_like(t) for _ in range(2)] if dist.get_rank() == 0 else None),
}


def sent_int16() -> dict[str, str]:
    """What each collective says of 16-bit codes, which stay as they were."""
    p, optimizer = stepped("split422", 1.0 + dist.get_rank())
    codes = optimizer.state[p]["exp_avg"]
    before, found = codes.clone(), {}
    assert codes.dtype == torch.int16
    for name, send in COLLECTIVES.items():
        found[name] = refusal(partial(send, codes), RuntimeError, "")
        assert torch.equal(codes, before)
    return found


def gathered(strategy: str) -> tuple[str, dict[str, Any]]:
    """What gathering a sharded state says, and the state where it says nothing."""
    model, optimizer = fsdp(model_of(0, bias=False), strategy)
    train((model, optimizer), range(2))
    found: dict[str, Any] = {}
    options = StateDictOptions(full_state_dict=True)
    gather = lambda: found.update(get_optimizer_state_dict(model, optimizer, options=options))  # noqa: E731
    message = refusal(gather, RuntimeError, "")
    return message, dict(found.get("state", {}))


def broadcast_states(names: Sequence[str]) -> list[str]:
    """What differs from the first process after it sent the weights and these words, and both took a step more."""
    p, optimizer = stepped("split311", 1.0 + 1e3 * dist.get_rank())
    dist.broadcast(p.data, 0)
    for name in names:
        dist.broadcast(optimizer.state[p][name], 0)
    p.grad = torch.ones_like(p)
    optimizer.step()
    found = whole(optimizer)
    sent = [found if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(sent)
    assert sent[0] is not None
    return different(found, sent[0])


# --- tests ------------------------------------------------------------------------------------------------------------

CALLS: dict[Any, tuple[Any, ...]] = {
    "int16": (sent_int16,),
    **{strategy: (gathered, strategy) for strategy in ("split422", "split322", "split311")},
    WORDS: (broadcast_states, WORDS),
    CODES: (broadcast_states, CODES),
}


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[dict[Any, Any]]:
    """What each of two processes found: one world for all tests."""
    return run_world(2, tmp_path_factory.mktemp("world"), in_turn, CALLS)


def test_gloo_sends_no_16_bit_codes_and_says_so(found: list[dict[Any, Any]]) -> None:
    for own in found:
        assert {name: text for name, text in own["int16"].items() if TORCH_SAYS not in text} == {}
        assert own["int16"].keys() == COLLECTIVES.keys()


def test_a_sharded_state_is_gathered_or_rejected(found: list[dict[Any, Any]]) -> None:
    """Codes are gathered as the values that they stand for; a parameter's low words of 16 bits are rejected."""
    for own in found:
        message, _ = own["split422"]
        assert TORCH_SAYS in message
        for strategy in ("split322", "split311"):
            message, state = own[strategy]
            assert message == ""
            dtypes = {name: (s["exp_avg"].dtype, s["param_lo"].dtype) for name, s in state.items()}
            assert dtypes == dict.fromkeys(("0.weight", "2.weight"), (torch.float32, torch.int8))


def test_all_words_sent_make_replicas_and_codes_alone_do_not(found: list[dict[Any, Any]]) -> None:
    """A collective moves no version counter, so that codes without their powers of two are not noticed: documented."""
    assert [own[WORDS] for own in found] == [[], []]
    first, second = (own[CODES] for own in found)
    assert first == []
    assert {"0 exp_avg", "0 exp_avg_sq"} <= set(second)
