"""What two states share, and groups that are no plain dictionaries."""

from typing import Any

import pytest
import torch

import collage_neuron


def _optimizer(**kwargs: Any) -> tuple[list[torch.nn.Parameter], Any]:
    params = [torch.nn.Parameter(torch.ones(8).bfloat16()) for _ in range(3)]
    for p in params:
        p.grad = torch.ones_like(p)
    return params, collage_neuron.compile(torch.optim.AdamW(params, lr=0.1), strategy="plus", **kwargs)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_count_that_two_states_share_is_rejected(backend: str) -> None:
    params, optimizer = _optimizer(backend=backend)
    for _ in range(3):
        optimizer.step()
    optimizer.state[params[2]]["step"] = optimizer.state[params[0]]["step"]
    before = [p.detach().clone() for p in params]
    with pytest.raises(ValueError, match=r"hold one tensor as 'step'.*nothing was updated"):
        optimizer.step()
    assert all(map(torch.equal, before, params))
    assert float(optimizer.state[params[0]]["step"]) == 3
    optimizer.state[params[2]]["step"] = optimizer.state[params[2]]["step"].clone()
    optimizer.step()
    assert [float(optimizer.state[p]["step"]) for p in params] == [4, 4, 4]


def test_a_group_that_computes_its_settings_is_rejected() -> None:
    class Doubling(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            return 2 * super().__getitem__(key) if key == "lr" else super().__getitem__(key)

    params, optimizer = _optimizer()
    optimizer.step()
    optimizer.param_groups[0] = Doubling(optimizer.param_groups[0])
    before = params[0].detach().clone()
    with pytest.raises(TypeError, match=r"param_groups\[0\] is a Doubling that computes"):
        optimizer.step()
    assert torch.equal(params[0], before)
