"""Divisions and roots are computed a step ahead: nothing beyond a tensor is read."""

from __future__ import annotations

from pathlib import Path

import pytest
from worlds import run_script

from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")


GUARDED = """
import ctypes, mmap, torch, collage_neuron

def guarded(x):
    "The numbers of a tensor at the end of a page, with one after it that nobody may read."
    memory = mmap.mmap(-1, 2 * mmap.PAGESIZE)
    first = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    assert ctypes.CDLL(None).mprotect(ctypes.c_void_p(first + mmap.PAGESIZE), mmap.PAGESIZE, 0) == 0
    made = torch.frombuffer(memory, dtype=x.dtype, offset=mmap.PAGESIZE - x.nbytes, count=x.numel())
    return made.copy_(x)

def trained(n, place):
    generator = torch.Generator().manual_seed(n)
    p = torch.nn.Parameter(place(torch.randn(n, generator=generator).bfloat16()))
    optimizer = collage_neuron.compile(torch.optim.AdamW([p]), strategy="plus", backend="native", verbose=False)
    for _ in range(3):
        p.grad = place(torch.randn(n, generator=generator).bfloat16())
        optimizer.step()
        for name, word in optimizer.state[p].items():
            if word.shape == p.shape:
                optimizer.state[p][name] = place(word)
    return p.detach()

for n in (16, 32, 48, 64, 65, 96, 100, 256, 1000):
    assert torch.equal(trained(n, guarded), trained(n, torch.clone)), n
print("nothing beyond was read")
"""


def test_nothing_is_read_beyond_a_tensor(tmp_path: Path) -> None:
    """A step ahead of the last one would be: the process ends with a signal then."""
    assert run_script(tmp_path, GUARDED) == "nothing beyond was read\n"
