"""Divisions and roots a step ahead: what is taken apart, and that nothing beyond a tensor is read."""

from __future__ import annotations

import subprocess
import sys
import textwrap

import pytest

from collage_neuron.passes.backends.native.ahead import ahead_of
from collage_neuron.passes.backends.native.backend import BACKEND as NATIVE

pytestmark = pytest.mark.skipif(NATIVE.missing() is not None, reason=f"no native code here: {NATIVE.missing()}")

LOOP = """\
  %v1 = load <8 x i32>, ptr %p0, align 2
  %v2 = bitcast <8 x i32> %v1 to <8 x float>
  %v3 = fmul <8 x float> %v2, %v0
  %v4 = call <8 x float> @llvm.sqrt.v8f32(<8 x float> %v3)
  %v5 = fdiv <8 x float> %v2, %v4
  %v6 = fadd <8 x float> %v5, %v3
  %v7 = fsub <8 x float> %v6, %v2
  store <8 x float> %v7, ptr %p0, align 4""".splitlines()


def test_the_chain_carries_arithmetic_and_words_are_loaded_again() -> None:
    ahead = ahead_of(LOOP)
    assert [line.split()[0] for line in ahead.chain] == ["%v1", "%v2", "%v3", "%v4", "%v5"]
    assert ahead.carried == {"%v3": "<8 x float>", "%v5": "<8 x float>"}
    assert [line.split()[0] for line in ahead.rest] == ["%v1", "%v2", "%v6", "%v7", "store"]
    assert ahead.lines("%far", "next")[2] == "  %next_v3 = fmul <8 x float> %next_v2, %v0"
    assert next(ahead.phis(("run", "run"), ("loop", "ahead"))) == (
        "  %v3 = phi <8 x float> [ %run_v3, %run ], [ %ahead_v3, %loop ]"
    )


def test_without_divisions_and_roots_nothing_is_ahead() -> None:
    lines = [line for line in LOOP if "fdiv" not in line and "sqrt" not in line]
    assert ahead_of(lines) == ([], lines, {})


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


def test_nothing_is_read_beyond_a_tensor() -> None:
    """A step ahead of the last one would be: the process ends with a signal then."""
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(GUARDED)], capture_output=True, text=True)
    assert done.stdout.strip() == "nothing beyond was read", f"exit status {done.returncode}: {done.stderr[-2000:]}"
