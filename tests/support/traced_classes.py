"""Optimizers whose traced steps are compared with recorded ones, or with plain fp32 if nothing else records them."""

from __future__ import annotations

from functools import partial
from typing import Any

import foreign
import rowed
import staged
import torch

OF_TORCH: dict[str, Any] = {
    "adamw": torch.optim.AdamW,
    "rmsprop": partial(torch.optim.RMSprop, centered=True, momentum=0.9),
    "foreach_nadam": partial(torch.optim.NAdam, foreach=True),
    "fused_adamw": partial(torch.optim.AdamW, fused=True),
    "fused_amsgrad": partial(torch.optim.Adam, fused=True, amsgrad=True, weight_decay=0.1, maximize=True),
    "fused_nesterov": partial(torch.optim.SGD, lr=0.01, fused=True, momentum=0.9, nesterov=True, weight_decay=0.1),
    "fused_adagrad": partial(torch.optim.Adagrad, fused=True, lr_decay=0.1, weight_decay=0.1),
}
"""torch's own, whose steps are recorded without a switch."""

FOREIGN: dict[str, Any] = {
    "transformers_adamw": foreign.TransformersAdamW,
    "lion": foreign.Lion,
    "lamb_without_trust": partial(foreign.Lamb, trust=False),
    "schedule_free": foreign.ScheduleFreeAdamW,
}

SUMMING: dict[str, Any] = {
    "lamb": staged.Lamb,
    "novograd": staged.Novograd,
    "clipping": staged.Clipping,
    "factored": rowed.Factored,
    "came": rowed.Came,
    "by_neuron": rowed.ByNeuron,
    "outer": rowed.Outer,
}
"""Those that add up elements."""
