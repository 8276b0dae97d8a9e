"""torch_xla's SPMD on four virtual devices of the CPU: sharded and unsharded runs have the same bits.

Everything happens in one process of its own: SPMD cannot be switched off again, and the number of devices is fixed when
torch_xla starts.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from sampling import WHOLE
from worlds import run_script

pytest.importorskip("torch_xla")

SCRIPT = """
import os, sys, warnings
# Without AVX2 there is no fused multiply-add, which XLA on the CPU puts where its fusions happen to end.
flags = f"--xla_dump_to={sys.argv[1]}/hlo --xla_cpu_max_isa=AVX --xla_backend_optimization_level=0"
os.environ |= {"PJRT_DEVICE": "CPU", "CPU_NUM_DEVICES": "4", "XLA_FLAGS": flags}
import copy
import numpy
import torch
import torch_xla
from headed import Mini
from staged import Lamb
import torch_xla.distributed.spmd as xs
import torch_xla.runtime as xr
import collage_neuron

xr.use_spmd()
device = torch_xla.device()
assert xr.global_runtime_device_count() == 4
mesh = xs.Mesh(numpy.arange(4), (4,), ("data",))

SHAPES = ((8, 6), (3,))  # even, and fewer rows than devices
STRATEGIES = {"plus": SHAPES, "full": SHAPES, "fp32": SHAPES, "split422": ((8, 130), (3, 6))}
STRATEGIES = {name: STRATEGIES[name] for name in sys.argv[2:]}
# Sharded along rows of four whole blocks, and within a block
CUT = {"split422": ((2, 512), (2, 300)), "split311": ((2, 300), (300,))}


def shard(t, dim):
    xs.mark_sharding(t, mesh, ("data",) + (None,) * (t.dim() - 1) if dim == 0 else (None,) * (t.dim() - 1) + ("data",))


def start(strategy, sharded, weights=None, shapes=None, dim=0, make=torch.optim.AdamW):
    g = torch.Generator().manual_seed(0)
    weights = weights or [torch.randn(shape, generator=g) for shape in shapes or STRATEGIES[strategy]]
    params = [torch.nn.Parameter(w.to(device)) for w in weights]
    if sharded:
        for p in params:
            shard(p, dim)
    optimizer = make(params, lr=1e-2)
    return collage_neuron.compile(optimizer, strategy=strategy)


def train(optimizer, steps, sharded, dim=0):
    for step in steps:
        g = torch.Generator().manual_seed(100 + step)
        for p in optimizer.param_groups[0]["params"]:
            p.grad = (torch.randn(p.shape, generator=g) ** 5).bfloat16().to(device)
            if sharded:
                shard(p.grad, dim)
        optimizer.step()
        torch_xla.sync()


def tensors(optimizer):
    for i, p in enumerate(optimizer.param_groups[0]["params"]):
        named = {"param": p.data, **optimizer.state[p]}
        yield from ((f"{i} {k}", p, v) for k, v in named.items() if torch.is_tensor(v) and v.dim() > 0)


def spec(t):
    return torch_xla._XLAC._get_xla_sharding_spec(t)


def specs(optimizer):
    return {name: (spec(v), spec(p.data)) for name, p, v in tensors(optimizer)}


def values(optimizer):
    return {name: v.detach().cpu() for name, _, v in tensors(optimizer)}


def saved(optimizer):
    weights = [p.detach().cpu() for p in optimizer.param_groups[0]["params"]]
    state = copy.deepcopy(optimizer.state_dict())
    state["state"] = {i: {k: v.cpu() if torch.is_tensor(v) else v for k, v in s.items()}
                      for i, s in state["state"].items()}
    return weights, state


found = {}
for strategy in STRATEGIES:
    one, four = start(strategy, False), start(strategy, True)
    compiled = specs(four)
    train(one, range(3), False)
    train(four, range(3), True)
    weights, state = saved(four)
    resumed = start(strategy, True, weights)
    resumed.load_state_dict(state)
    loaded = specs(resumed)
    train(resumed, range(3, 5), True)
    train(four, range(3, 5), True)
    train(one, range(3, 5), False)
    found[strategy] = {
        "compiled": compiled, "loaded": loaded, "trained": specs(four),
        "one": values(one), "four": values(four), "resumed": values(resumed),
    }
before = set(os.listdir(sys.argv[1] + "/hlo"))
train(four, range(5, 6), True)
p = four.param_groups[0]["params"][0]
updates = len(os.listdir(sys.argv[1] + "/hlo")) - len(before)
total = p.float().sum()
torch_xla.sync()
control = sorted(set(os.listdir(sys.argv[1] + "/hlo")) - before)
cut = {}
for strategy, shapes in CUT.items():
    one, four = start(strategy, False, None, shapes), start(strategy, True, None, shapes, -1)
    train(one, range(3), False)
    train(four, range(3), True, -1)
    cut[strategy] = {"specs": specs(four), "one": values(one), "four": values(four)}
one, four = (start("plus", sharded, None, ((80, 130),), -1, Lamb) for sharded in (False, True))
train(one, range(3), False)
train(four, range(3), True, -1)
staged = {"specs": specs(four), "one": values(one), "four": values(four)}
heads = {}
for sharded in (False, True):
    p = torch.nn.Parameter(torch.randn(8, 6, generator=torch.Generator().manual_seed(0)).to(device))
    if sharded:
        shard(p, 0)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("error", collage_neuron.RunsAsWritten)
            optimizer = collage_neuron.compile(Mini([p]), strategy="full")
            train(optimizer, range(2), False)
        heads[sharded] = values(optimizer)
    except collage_neuron.UnsupportedUpdate as error:
        heads[sharded] = str(error)
told = {"found": found, "before": sorted(before), "control": control, "updates": updates, "cut": cut}
told |= {"staged": staged, "heads": heads}
torch.save(told, sys.argv[1] + "/found.pt")
"""


@pytest.fixture(scope="module")
def script(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("spmd")
    run_script(folder, SCRIPT, folder, *STRATEGIES)
    found: dict[str, Any] = torch.load(folder / "found.pt")
    return found | {"folder": folder / "hlo"}


STRATEGIES = ("plus", "full", "fp32", "split422") if WHOLE else ("plus",)
"""Each word is sharded as its parameter, whichever it is; words of blocks are in `CUT` too."""


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_four_devices_end_with_the_bits_of_one(script: dict[str, Any], strategy: str) -> None:
    found = script["found"][strategy]
    assert found["one"].keys() == found["four"].keys()
    assert [k for k, v in found["one"].items() if not torch.equal(v, found["four"][k])] == []


@pytest.mark.parametrize("strategy", ["split422", "split311"])
def test_devices_that_cut_rows_and_blocks_end_with_the_bits_of_one(script: dict[str, Any], strategy: str) -> None:
    """One program over the whole tensor: its blocks stay those of the whole."""
    found = script["cut"][strategy]
    assert {name.split()[1] for name in found["one"]} >= {"exp_avg_scale", "exp_avg_sq_scale"}
    assert {name: spec for name, spec in found["specs"].items() if not re.search(r"devices=\[(1,)?4\]", spec[0])} == {}
    assert found["one"].keys() == found["four"].keys()
    assert [k for k, v in found["one"].items() if not torch.equal(v, found["four"][k])] == []


def test_sums_over_what_four_devices_have_parts_of_are_those_over_the_whole(script: dict[str, Any]) -> None:
    found = script["staged"]
    assert all("devices=[1,4]" in spec for spec, _ in found["specs"].values())
    assert len(found["one"]) == 5
    assert [k for k, v in found["one"].items() if not torch.equal(v, found["four"][k])] == []


def test_a_parameter_in_parts_is_not_seen_in_another_shape(script: dict[str, Any]) -> None:
    """One that all devices have as a whole is."""
    found = script["heads"]
    assert "in the shape [4, 12], and mark_sharding (SPMD) has split it over devices" in found[True]
    assert "0 m" in found[False]


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_a_run_goes_on_from_its_state_bit_for_bit(script: dict[str, Any], strategy: str) -> None:
    found = script["found"][strategy]
    assert [k for k, v in found["four"].items() if not torch.equal(v, found["resumed"][k])] == []


@pytest.mark.parametrize("when", ["compiled", "loaded", "trained"])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_every_word_is_sharded_as_its_parameter_was(script: dict[str, Any], strategy: str, when: str) -> None:
    found = script["found"][strategy][when]
    assert {name.split()[1] for name in found} >= {"param", "param_master" if strategy == "fp32" else "param_lo"}
    assert {name: spec for name, spec in found.items() if "devices=[4" not in spec[0] or spec[0] != spec[1]} == {}


COLLECTIVE = re.compile(r"= .*\b(all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter)\(")


def collectives(folder: Path, names: list[str]) -> set[str]:
    """In the programs of torch_xla's steps: what brings a tensor to the host is another."""
    programs = [name for name in names if "SyncTensorsGraph" in name and name.endswith("after_optimizations.txt")]
    texts = [(folder / name).read_text() for name in programs]
    assert texts
    return {found for text in texts for found in COLLECTIVE.findall(text)}


def test_the_update_sends_nothing(script: dict[str, Any]) -> None:
    """No program of the runs has a collective in it; the sum of a sharded tensor, the control, has."""
    assert collectives(script["folder"], script["before"]) == set()
    assert "all-reduce" in collectives(script["folder"], script["control"])


def test_steps_after_the_first_ones_compile_nothing(script: dict[str, Any]) -> None:
    assert script["updates"] == 0
