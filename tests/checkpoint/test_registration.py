"""Formats and strategies that are registered from outside: checked, kept under their names, and never guessed."""

from __future__ import annotations

import copy
import json
import re
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from agreement import gradients, initial
from integer_words import BF16_INT8
from torch import nn
from torch.optim import AdamW, Optimizer

import collage_neuron
import collage_neuron.optimizer
from collage_neuron.checkpoint.fp32 import get_fp32_state_dict
from collage_neuron.numerics.eft import Value, narrow, round_to, widen
from collage_neuron.numerics.formats import BUILT_IN, FORMATS, FORMATS_KEPT, Component, Format
from collage_neuron.numerics.strategies import STRATEGIES, Strategy
from collage_neuron.numerics.underflow import digits

WORD = Component("", "bf16")
ONE = torch.tensor(1.0, dtype=torch.float32, device="cpu")


def pair(name: str = "pair", scale: float = 1.0, suffix: str = "_lo", storage: str = "bf16") -> Format:
    """Two words of which the second is `scale` times the rounding error of the first."""

    def encode(x: Value) -> Sequence[Value]:
        hi = round_to(x, "bf16")
        return [narrow(hi, "bf16"), narrow(round_to((x - hi) * scale, storage), storage)]

    def decode(words: Sequence[Value]) -> Value:
        return widen(words[0]) + widen(words[1]) * (1 / scale)

    return Format(name, (WORD, Component(suffix, storage)), encode, decode)


@pytest.fixture(autouse=True)
def _as_before() -> Any:
    formats, strategies = dict(FORMATS), dict(STRATEGIES)
    yield
    for table, before in ((FORMATS, formats), (STRATEGIES, strategies)):
        for name in table.keys() - before.keys():
            del table[name]


def start(strategy: Any) -> tuple[nn.ParameterList, Optimizer]:
    model = nn.ParameterList([nn.Parameter(initial().bfloat16())])
    return collage_neuron.compile(model, AdamW(model.parameters(), lr=1e-2), strategy=strategy)


def stepped(model: nn.ParameterList, optimizer: Optimizer, steps: int = 3) -> None:
    for gradient in gradients(steps):
        model[0].grad = gradient.to(model[0].dtype)
        optimizer.step()


# --- the record -----------------------------------------------------------------------------------------------------


def test_a_checkpoint_is_read_as_it_was_written_where_other_formats_are_known() -> None:
    FORMATS["pair"] = pair()
    model, optimizer = start({"*": "pair"})
    stepped(model, optimizer)
    want, saved = collage_neuron.exact_value(optimizer, model[0]), copy.deepcopy(optimizer.state_dict())
    assert json.loads(saved["param_groups"][0][FORMATS_KEPT])["param"] == "pair"
    del FORMATS["pair"]
    FORMATS["other"], FORMATS["pair"] = pair("other", 2.0), pair()  # with the same keys, and it comes first
    weights = model[0].detach().clone()
    model, optimizer = start({"*": "pair"})
    model[0].data.copy_(weights)
    optimizer.load_state_dict(saved)
    assert torch.equal(collage_neuron.exact_value(optimizer, model[0]), want)


USES: dict[str, Callable[[nn.ParameterList, Optimizer], Any]] = {
    "exact_value": lambda m, o: collage_neuron.exact_value(o, m[0]),
    "set_exact_value": lambda m, o: collage_neuron.set_exact_value(o, m[0], 1.0),
    "export": get_fp32_state_dict,
    "average": lambda m, o: collage_neuron.AveragedModel(m, o, decay=0.5).update_parameters(m),
    "step": stepped,
    "bytes": lambda _, o: collage_neuron.bytes_per_parameter(o),
    "another strategy": lambda _, o: collage_neuron.compile(o, strategy="plus"),
    "load": lambda _, o: o.load_state_dict(o.state_dict()),
}


@pytest.mark.filterwarnings("ignore:.* keeps parameters as b, :collage_neuron.SmallSteps")  # it has 8 bits, measured
@pytest.mark.parametrize("use", USES)
@pytest.mark.parametrize("fmt", [pair(suffix="_lo"), pair("b", 128.0, "_frac", "int8")], ids=["bf16", "int8"])
def test_a_format_that_is_gone_is_asked_for_by_name(fmt: Format, use: str) -> None:
    FORMATS[fmt.name] = fmt
    model, optimizer = start({"param": fmt.name, "exp_avg_sq": fmt.name, "exp_avg": "bf16"})
    stepped(model, optimizer)
    del FORMATS[fmt.name]
    with pytest.raises(ValueError, match=rf"'{fmt.name}'.* known .*Register a format of your own"):
        USES[use](model, optimizer)


def test_a_checkpoint_that_is_saved_without_its_format_has_the_record() -> None:
    FORMATS["pair"] = pair(scale=2.0)
    model, optimizer = start({"*": "pair"})
    stepped(model, optimizer)
    del FORMATS["pair"]
    kept = json.loads(optimizer.state_dict()["param_groups"][0][FORMATS_KEPT])
    assert kept == dict.fromkeys(("param", "exp_avg", "exp_avg_sq"), "pair")


@pytest.mark.parametrize("record", ["{", "[]", "", None, 3, '{"param": 3}', '{"param": ["bf16", "bf16"]}'])
def test_a_damaged_record_is_named(record: Any) -> None:
    _, optimizer = start("plus")
    saved = optimizer.state_dict()
    saved["param_groups"][0][FORMATS_KEPT] = record
    with pytest.raises(ValueError, match=r"param_groups\[0\]\['collage_formats'\] is .* it is damaged"):
        optimizer.load_state_dict(saved)


# --- names keep their meaning ---------------------------------------------------------------------------------------


def test_a_name_does_not_get_another_meaning() -> None:
    first = FORMATS["pair"] = pair()
    FORMATS["pair"] = first
    for enter in (FORMATS.__setitem__, lambda name, it: FORMATS.update({name: it})):
        with pytest.raises(ValueError, match=r"'pair' is registered already.* choose another name"):
            enter("pair", pair())
    with pytest.raises(ValueError, match="registered already"):
        FORMATS["bf16x2"] = replace(BUILT_IN["bf16x2"], encode=first.encode)
    assert FORMATS["pair"] is first


@pytest.mark.filterwarnings("ignore:.* keeps parameters as pair, :collage_neuron.SmallSteps")  # the second has 8 bits
def test_what_is_known_of_a_format_is_not_that_of_another_of_its_name() -> None:
    FORMATS["pair"] = pair()
    fine = digits(FORMATS["pair"])
    model, optimizer = start({"*": "pair"})
    stepped(model, optimizer)
    del FORMATS["pair"]
    FORMATS["pair"] = replace(pair(), decode=lambda words: widen(words[0]) + widen(words[1]) * 0.0)
    assert digits(FORMATS["pair"]) < fine
    model, optimizer = start({"*": "pair"})
    stepped(model, optimizer)  # validated: the update is that of this one
    assert torch.equal(collage_neuron.exact_value(optimizer, model[0]), model[0].float())


def test_a_strategy_of_another_meaning_is_followed_and_a_missing_one_named() -> None:
    STRATEGIES["mine"] = Strategy("mine", "bf16x2", "bf16", "bf16x2")
    stepped(*start("mine"))
    STRATEGIES["mine"] = Strategy("mine", "bf16x2", "fp32", "fp32")
    model, optimizer = start("mine")
    stepped(model, optimizer)
    assert optimizer.state[model[0]]["exp_avg"].dtype == torch.float32
    del STRATEGIES["mine"]
    with pytest.raises(ValueError, match="unknown strategy 'mine'"):
        optimizer.step()


# --- what a format must be ------------------------------------------------------------------------------------------

BAD = pair("bad")


def one_word(encode: Any, *draw: Any) -> Format:
    return Format("bad", (WORD,), encode, lambda words: widen(words[0]), *draw)


def to_bf16(x: Value) -> Value:
    return narrow(round_to(x, "bf16"), "bf16")


UNUSABLE = {
    "no components": replace(BAD, components=()),
    "two components have the suffix ''": replace(BAD, components=(WORD, WORD)),
    "two components have the suffix '_a'": replace(BAD, components=(WORD, *[Component("_a", "bf16")] * 2)),
    "its first component is Component(suffix='_hi'": replace(BAD, components=(Component("_hi", "bf16"), WORD)),
    "'int4' is not a storage type": replace(BAD, components=(WORD, Component("_f", "int4"))),
    "and here it is int8": pair("bad", 128.0, "_master", "int8"),
    "and here it has another value": pair("bad", suffix="_master", storage="fp32"),
    "returns words of [torch.bfloat16, torch.bfloat16], and": replace(BAD, components=(WORD,)),
    "its encode returns words of": replace(BAD, components=(WORD, Component("_lo", "int8"))),
    "its first component is Component(suffix='', storage='int8'": replace(
        BF16_INT8, name="bad", components=(Component("", "int8"),)
    ),
    "raises for fp32 numbers: ZeroDivisionError": replace(BAD, decode=lambda _: 1 / 0),
    "its decode does not return": replace(BAD, decode=lambda words: words[0]),
    "calls the method bfloat16()": one_word(lambda x: [x.bfloat16()]),
    "cannot be written as a graph": one_word(lambda x: [to_bf16(x if bool((x >= 0).any()) else -x)]),
    "calls rand_like(), which may round unseen": one_word(lambda x: [to_bf16(x + 0 * torch.rand_like(x))]),
    "its encode stores a bf16 that was not rounded": replace(
        BAD, encode=lambda x: [narrow(x, "bf16"), to_bf16(x - round_to(x, "bf16"))]
    ),
    "its draw stores a bf16 that was not rounded: write narrow(round_to(x, 'bf16'), 'bf16')": one_word(
        BUILT_IN["bf16"].encode, lambda x, _: [narrow(x, "bf16")]
    ),
    "has a tensor of its own": one_word(lambda x: [to_bf16(x * ONE)]),
    "its decode_param reads other values": replace(BAD, decode_param=lambda words: widen(words[0])),
    "0 comes back as 1": replace(BAD, decode=lambda w: torch.where(w[0] == 0, widen(w[0]) + 1, pair().decode(w))),
    "calls the method float()": replace(BAD, decode_param=lambda words: words[0].float() + widen(words[1])),
    "comes back as nan": replace(BAD, decode=lambda words: widen(words[0]) * float("nan")),
    "comes back as": replace(BAD, decode=lambda words: widen(words[0]) + 2 * widen(words[1]) + 1),
    "when it is stored again": one_word(lambda x: [to_bf16(x * (1 + 2.0**-8))]),
    "called 'good': register it under its own name": pair("good"),
}


@pytest.mark.parametrize("reason", UNUSABLE)
def test_an_unusable_format_is_rejected_when_it_is_registered(reason: str) -> None:
    with pytest.raises(ValueError, match=re.escape(reason)):
        FORMATS["bad"] = UNUSABLE[reason]
    assert "bad" not in FORMATS
    with pytest.raises(TypeError, match=r"register a collage_neuron\.Format"):
        FORMATS["bad"] = "bf16"  # type: ignore[assignment]


def test_conversions_need_no_hash() -> None:
    class Encode:
        __hash__ = None  # type: ignore[assignment]

        def __call__(self, x: Value) -> Sequence[Value]:
            return pair().encode(x)

    FORMATS["pair"] = replace(pair(), encode=Encode())
    stepped(*start("plus"))
    stepped(*start({"*": "pair"}))


def test_the_base_class_of_torch_has_no_compiled_form_and_no_parameters_need_no_bytes() -> None:
    assert not hasattr(collage_neuron.optimizer, "CollageOptimizer")
    _, optimizer = start("plus")
    optimizer.param_groups[0]["params"] = []
    assert collage_neuron.bytes_per_parameter(optimizer) == 0.0


def test_the_word_that_the_model_reads_is_the_value() -> None:
    def encode(x: Value) -> Sequence[Value]:
        return [narrow(round_to(x * 1.5, "bf16"), "bf16"), narrow(x, "fp32")]

    FORMATS["aside"] = Format("aside", (WORD, Component("_f", "fp32")), encode, lambda words: widen(words[1]))
    with pytest.raises(ValueError, match="whose first word is not the value rounded to bf16"):
        start({"*": "aside"})
    model, optimizer = start({"param": "bf16x2", "*": "aside"})  # states may be kept so
    stepped(model, optimizer)
