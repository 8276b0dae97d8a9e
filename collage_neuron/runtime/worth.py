"""Updates by rows and columns (CAME, Adafactor) on a CPU: captured where that is faster than `step()` as written.

A captured update takes more of the host for each parameter, and less for each element. Nine tenths of the former are
the comparison with a joint step (`recording.independence`): in every step the class's code runs on a stand-in for each
parameter. `benchmarks/stage_cost.py --rows` measures both ways (CAME, `plus`, one thread): captured steps take four
times as long with matrices of 64 x 64, a third to a half longer with 512 x 512, about as long with 1024 x 1024, and a
tenth with 4096 x 4096. Short rows, rows that do not lie one after the other, and random bits are left to the reference,
which takes longer than as written at any size. Steps of Adam-mini by head take 2.7 times as long captured with 64 x 64,
0.67 times with 512 x 512, 0.50 times with 1024 x 1024 and 0.12 times with 4096 x 4096 (`--rows --optimizer Adam-mini`);
pytorch_optimizer's, with a group for each parameter, meet steps as written at 1024 x 1024.

A step that compares values which it reads from tensors is recorded several times for each shape of its parameters, in
every step. One more recording is counted as one more matrix, though it costs up to 10 ms: torch's Adafactor (four
recordings, 16 ns less for each element) meets steps as written at 3 million elements for each shape.
"""

from __future__ import annotations

from torch.optim import Optimizer

from collage_neuron.errors import UnsupportedUpdate
from collage_neuron.passes.ir.update import Update
from collage_neuron.settings import Settings

LEAST = 2**20
"""Elements of a matrix, on average, from which on an update by rows is captured; 0 for all."""

SHORT = 32
"""Elements of a row below which native code leaves it to the reference."""


def slower(optimizer: Optimizer, update: Update, settings: Settings, recordings: int = 1) -> UnsupportedUpdate | None:
    """Why steps should rather run as written; None if they should not, or if the settings ask for something else.

    `recordings` are those that each step of a parameter needs.
    """
    params = [p for group in optimizer.param_groups for p in group["params"]]
    matrices = [p for p in params if p.dim() > 1 and p.numel()]
    chosen = settings.unsupported != "twin" or settings.backend != "auto"
    costs = update.by_rows or recordings > 1
    if chosen or not costs or not matrices or any(p.device.type != "cpu" for p in matrices):
        return None
    elements = sum(p.numel() for p in matrices)
    least = LEAST * (len(matrices) * update.by_rows + (recordings - 1) * len({p.shape for p in params}))
    lie_well = all((update.seen_as or p.shape)[-1] >= SHORT and p.is_contiguous() for p in matrices)
    lie_well = lie_well and not update.draws
    if not LEAST or (elements >= least and (lie_well or not update.by_rows)):
        return None
    again = f" and it is recorded {recordings} times in each step," if recordings > 1 else ""
    what = "means of rows and columns are" if update.by_rows else "numbers read from tensors are"
    return UnsupportedUpdate(
        f"its {what} computed faster as written than captured,{again} with matrices of "
        f"{elements / len(matrices):,.0f} elements on average (captured from {least / len(matrices):,.0f} on, if rows "
        f"have {SHORT} elements or more, lie one after the other, and nothing is drawn; or if backend='native' asks "
        "for it)"
    )
