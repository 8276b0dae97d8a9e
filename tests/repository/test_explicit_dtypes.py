"""No tensor is made with torch's default dtype or device, which belong to the user, and which a cache would keep."""

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

MAKERS = (
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "zeros",
)  # fmt: skip

ASKS = "collage_neuron/runtime/step_call.py"
"""Finds out what the default device is."""


def implicit(source: str, where: str) -> Iterator[str]:
    """Calls that leave the dtype or the device to torch; `as_tensor` leaves a tensor where it is."""
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in MAKERS):
            continue
        if isinstance(node.func.value, ast.Name) and node.func.value.id == "torch":
            needed = {"dtype"} if node.func.attr == "as_tensor" else {"dtype", "device"}
            missing = needed - {keyword.arg for keyword in node.keywords}
            yield from (f"{where}:{node.lineno} has no {name}" for name in sorted(missing))


def test_every_tensor_has_an_explicit_dtype_and_device() -> None:
    files = [f for part in ("collage_neuron", "passes", "kernels_nki") for f in (ROOT / part).rglob("*.py")]
    places = {str(f.relative_to(ROOT)): f.read_text() for f in files}
    assert [x for where, source in places.items() if where != ASKS for x in implicit(source, where)] == []
