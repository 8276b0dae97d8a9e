"""Hugging Face's Llama with random weights in fp8: which matmuls, no reduction, gradients, and its dots on XLA."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import fp8_models
import pytest
import torch
from fp8_models import by_layer, compiled, dots, graph, hlo, largest_difference, reference, tokens
from sampling import WHOLE
from torch import nn

import collage_neuron

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
"""torch.compile makes an instance of a function like `Layer` when it captures it."""

LINEAR = 7
"""q, k, v, o, gate, up and down."""


def llama() -> nn.Module:
    """One layer; two heads that share keys and values, in bf16."""
    transformers = pytest.importorskip("transformers")
    torch.manual_seed(0)
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1}
    config = transformers.LlamaConfig(**sizes, **heads, max_position_embeddings=32, use_cache=False)
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.bfloat16()


def loss_of(model: Any, batch: torch.Tensor) -> torch.Tensor:
    """The model's own loss."""
    loss: torch.Tensor = model(input_ids=batch, labels=batch).loss
    return loss


def trained(model: nn.Module, batch: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    return fp8_models.trained(model, batch, loss_of)  # type: ignore[no-any-return]


def test_every_linear_layer_but_the_head_and_gradients_are_those_of_a_plain_implementation() -> None:
    plain = llama()
    model = compiled(copy.deepcopy(plain))
    trained(model, tokens())  # the exponents of gradients are those of the first backward
    made = graph(model).plan
    assert (made.kept, len(made.products), made.reductions) == (["lm_head.weight"], 3 * LINEAR, {})
    other = reference(plain, by_layer(model))
    vars(other)["forward"] = torch.compile(other.forward, backend="aot_eager", fullgraph=True)
    (loss, found), (wanted_loss, wanted) = trained(model, tokens(1)), trained(other, tokens(1))
    assert torch.equal(loss, wanted_loss)
    assert found.keys() == wanted.keys()
    assert [n for n in wanted if not torch.equal(found[n], wanted[n])] == []


@pytest.mark.skipif(not WHOLE, reason="XLA compiles for half a minute; test_xla.py has both claims of smaller models")
def test_dots_of_8_bits_on_xla_and_gradients_near_eager(xla: torch.device, golden: Callable[[str, str], None]) -> None:
    """Where XLA's sums round to the other neighbour in bf16 (2**-8), an operand may round to the next code.

    That happens to a part 2**-8 / step of the elements, and moves these by a step: sqrt(2**-8 * step) of the operand in
    norm, 2**-5.5 in e4m3 and 2**-5 in e5m2. The longest way leads through four inputs and four gradients, whose errors
    add up as squares do.
    """
    plain = llama()
    on_cpu, on_xla = compiled(copy.deepcopy(plain)), compiled(plain.to(xla))
    _, wanted = trained(on_cpu, tokens())
    _, found = trained(on_xla, tokens().to(xla))  # waits for the size of the gradient
    bound = (4 * (2.0**-11 + 2.0**-10)) ** 0.5
    assert largest_difference({n: g.cpu() for n, g in found.items()}, wanted) < bound
    _, found = trained(on_xla, tokens().to(xla))
    text = dots(hlo(list(found.values())))
    assert sum("f8" in line for line in text.splitlines()) == len(graph(on_xla).plan.products) == 3 * LINEAR
    assert not graph(on_xla).plan.reductions
    golden("fp8_llama_xla.txt", text)


def test_it_trains_with_states_of_few_bytes() -> None:
    model = llama()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model, optimizer = collage_neuron.compile(model, optimizer, strategy="split422", matmul="fp8", verbose=False)
    losses = []
    for _ in range(12):
        loss, _ = trained(model, tokens())
        optimizer.step()
        losses.append(float(loss))
    assert losses[-1] < losses[0] / 1.5
