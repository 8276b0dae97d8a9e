"""What is compared: the strategies, two of them in the paper's arithmetic too, and the second moment as released."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from released_adamw import Words, released_second_moment
from torch import Tensor
from torch.optim import AdamW, Optimizer

import collage_neuron
from collage_neuron.numerics.eft import split


@dataclass(frozen=True)
class Variant:
    """How parameters and states are kept, and in which arithmetic they are updated."""

    strategy: str
    arithmetic: str = "fp32"


VARIANTS = {
    "bf16": Variant("bf16", "bf16"),
    "bf16 fp32-arithmetic": Variant("bf16"),
    "fp32_states": Variant("fp32_states"),
    "stochastic": Variant("stochastic"),
    "light": Variant("light"),
    "light bf16-arithmetic": Variant("light", "bf16"),
    "plus": Variant("plus"),
    "plus bf16-arithmetic": Variant("plus", "bf16"),
    "split433": Variant("split433"),
    "full": Variant("full"),
    "fp32": Variant("fp32"),
}
"""`bf16` is option A of the paper, which rounds every operation; the others compute in fp32 unless they say so."""

RELEASED = "released"
"""`plus`, but for the second moment, which is computed with the defect of the code released with the paper."""

TRAINED = (
    "bf16", "fp32_states", "stochastic", "light", "plus", "plus bf16-arithmetic", "split433", "fp32", RELEASED,
)  # fmt: skip
"""What whole runs are compared under."""


class Released(Optimizer):
    """AdamW as `plus` keeps it (hi + lo parameters, bf16 first moment, fp32 arithmetic), with the released v."""

    def __init__(self, params: Any, lr: float, betas: tuple[float, float], weight_decay: float, eps: float = 1e-8):
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "eps": eps})
        for group in self.param_groups:
            for p in group["params"]:
                hi, lo = split(p.detach().float())
                p.data = hi.bfloat16()
                moments = dict.fromkeys(("exp_avg", "exp_avg_sq", "exp_avg_sq_lo"), torch.zeros_like(p.data))
                self.state[p] = {"step": 0, "param_lo": lo.bfloat16(), **moments}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for p in group["params"]:
                self._update(p, self.state[p], group)

    def _update(self, p: Tensor, s: dict[str, Any], group: dict[str, Any]) -> None:
        beta1, beta2 = group["betas"]
        lr, g = group["lr"], p.grad
        assert g is not None
        s["step"] += 1
        b = torch.tensor(beta2, dtype=torch.float64)
        words = released_second_moment(
            Words(s["exp_avg_sq"], s["exp_avg_sq_lo"]), g, b.bfloat16(), (b - b.bfloat16()).bfloat16(), (1 - b).float()
        )
        s["exp_avg_sq"], s["exp_avg_sq_lo"] = words
        m = s["exp_avg"].float().lerp(g.float(), 1 - beta1)
        s["exp_avg"] = m.bfloat16()
        denominator = words.v.float().sqrt() / (1 - beta2 ** s["step"]) ** 0.5 + group["eps"]
        theta = p.float() + s["param_lo"].float()
        theta = theta - lr * group["weight_decay"] * theta - lr / (1 - beta1 ** s["step"]) * m / denominator
        hi, lo = split(theta)
        p.copy_(hi)
        s["param_lo"] = lo.bfloat16()


def adamw(name: str, groups: Iterable[dict[str, Any]], **options: Any) -> Optimizer:
    """AdamW under the variant called `name`; fp32 parameters become bf16, with low words where it has any."""
    if name == RELEASED:
        return Released(list(groups), **options)
    v = VARIANTS[name]
    return collage_neuron.compile(AdamW(list(groups), **options), strategy=v.strategy, arithmetic=v.arithmetic)
