"""The lint finds what the front ends of NKI reject, and says where: one table, of text and message."""

from __future__ import annotations

import re
from typing import NamedTuple

import nki_lint as lint
import pytest
from nki_standin import beta1_instructions, instructions
from nki_standin.dtypes import DTYPES
from nki_standin.operators import OPERATORS

GOOD = '''"""A kernel."""

import nki
import nki.isa as nisa
import nki.language as nl

COLUMNS = 2 * 32
SHAPE = (128, -1)


def helper(a, i, scale=1.0):
    x = nl.ndarray((128, COLUMNS), dtype=a.dtype, buffer=nl.sbuf)
    nisa.dma_copy(dst=x, src=a.ap(pattern=[[COLUMNS, 128], [1, COLUMNS]], offset=i * COLUMNS))
    if scale != 1.0 and i >= 0:
        nisa.tensor_scalar(dst=x[:, 0:1], data=x[:, 0:1], op0=nl.add, operand0=1.0, engine=nisa.engine.vector)
    return x


@nki.jit
def kernel(a, b):
    n = a.shape[0]
    size = min(n, 5) if n > 3 else max(n, 1)
    out = nl.ndarray((n,), dtype=nl.bfloat16, buffer=nl.shared_hbm)
    for i in range(0, n, size):
        x = helper(a, i)
        nisa.dma_copy(dst=out.ap(pattern=[[COLUMNS, 128], [1, COLUMNS]], offset=i), src=x)
    return out, b
'''


class Case(NamedTuple):
    """What is replaced in the good kernel, by what, and the message that follows its line."""

    old: str
    new: str
    message: str


CASES: dict[str, Case] = {
    "is": Case("scale != 1.0", "scale is 1.0", "Is is not in the subset"),
    "in": Case("scale != 1.0", "scale in (1.0, 2.0)", "In is not in the subset"),
    "matmul": Case("n = a.shape[0]", "n = a @ b", "MatMult is not in the subset"),
    "augmented": Case("n = a.shape[0]", "n += 1", "AugAssign is not in the subset"),
    "while": Case("if scale != 1.0 and i >= 0:", "while scale < 1:", "While is not in the subset"),
    "lambda": Case("n = a.shape[0]", "n = lambda x: x", "Lambda is not in the subset"),
    "class": Case("@nki.jit", "class C:\n    pass\n\n\n@nki.jit", "ClassDef is not in the subset"),
    "f-string": Case("n = a.shape[0]", "n = f'{a}'", "JoinedStr is not in the subset"),
    "comprehension": Case("n = a.shape[0]", "n = [k for k in a]", "ListComp is not in the subset"),
    "with": Case("    n = a.shape[0]", "    with a:\n        pass", "With is not in the subset"),
    "yield": Case("n = a.shape[0]", "yield a", "Yield is not in the subset"),
    "code outside": Case(
        "COLUMNS = 2 * 32", "COLUMNS = len('ab')", "a kernel file has imports, constants and functions"
    ),
    "docstring": Case('"""A kernel."""', "", "a kernel file starts with a docstring"),
    "no kernel": Case("@nki.jit\n", "", "one function decorated with nki.jit, not 0"),
    "two kernels": Case("def helper", "@nki.jit\ndef helper", "one function decorated with nki.jit, not 2"),
    "import": Case("import nki\n", "import nki\nimport numpy as np\n", "`import numpy as np`: a kernel file imports"),
    "future": Case("import nki\n", "from __future__ import annotations\nimport nki\n", "a kernel file imports"),
    "old import": Case(
        "import nki.isa as nisa", "import neuronxcc.nki.isa as nisa", "a kernel file imports import nki;"
    ),
    "keyword-only": Case("i, scale=1.0", "i, *, scale=1.0", r"helper: `\*`, `/`, \*args and \*\*kwargs"),
    "args": Case("a, i, scale=1.0", "a, *i", r"helper: `\*`"),
    "list default": Case("scale=1.0", "scale=[1.0]", "helper: a default must be a number"),
    "function inside": Case("    n = a.shape[0]", "    def f(x):\n        return x", "a function inside a function"),
    "loop body returns": Case(
        "    n = a.shape[0]",
        "    def body(i):\n        return i\n    nl.fori_loop(0, 1, body)\n    n = a.shape[0]",
        "kernel: the body of a compiled loop returns nothing",
    ),
    "decorator": Case("@nki.jit", "@nki.jit(platform_target='trn1')", "one decorator, @nki.jit without arguments"),
    "return": Case("    return out, b\n", "", "kernel: a kernel ends with `return`"),
    "removed name": Case("n = a.shape[0]", "n = nl.mgrid", "nl.mgrid is not in the subset, or not in this dialect"),
    "load": Case("x = helper(a, i)", "x = nl.load(a)", "nl.load is not in the subset, or not in this dialect"),
    "instruction": Case("nisa.tensor_scalar", "nisa.divide", "nisa.divide is not in the subset"),
    "nki name": Case("n = a.shape[0]", "n = nki.simulate", "nki.simulate is not in the subset"),
    "builtin": Case("n = a.shape[0]", "print(a)", r"print\(...\) is neither a function of this file nor one of"),
    "kernel called": Case("n = a.shape[0]", "n = kernel(a, b)", "kernel is a kernel: only the top function"),
    "operator called": Case("x = helper(a, i)", "x = nl.add(a, b)", r"nl.add\(...\) on tiles is several instructions"),
    "method": Case("n = a.shape[0]", "n = a.item()", r"a.item\(...\) is not a tensor method"),
    "mask": Case("operand0=1.0,", "operand0=1.0, mask=a,", "nisa.tensor_scalar has no argument mask"),
    "dtype": Case("operand0=1.0,", "operand0=1.0, dtype=nl.float32,", "nisa.tensor_scalar has no argument dtype"),
    "by position": Case("dst=x[:, 0:1], ", "x[:, 0:1], ", "nisa.tensor_scalar: arguments are given by name"),
    "engine": Case("engine=nisa.engine.vector", "engine=5", "engine must be a member of nisa.engine, got 5"),
    "implicit type": Case(", dtype=a.dtype,", ",", "the dtype of a tile is its rounding; give it by name"),
    "implicit buffer": Case(", buffer=nl.sbuf)", ")", "nl.ndarray: give buffer=, one of nl.sbuf"),
    "buffer by name": Case("buffer=nl.sbuf", "buffer='sbuf'", "nl.ndarray: give buffer=, one of nl.sbuf"),
    "loop": Case("range(0, n, size)", "a", "a loop goes over range, not over a"),
    "old loop": Case("range(0, n, size)", "nl.affine_range(n)", "a loop goes over range, not over nl.affine_range"),
    "loop else": Case("    return out, b", "    else:\n        pass\n    return out, b", "`else` of a loop is not"),
    "assignment": Case("n = a.shape[0]", "a[0] = 1", "a tensor is written by instructions of nki.isa only"),
}


def changed(case: Case) -> str:
    assert case.old in GOOD
    return GOOD.replace(case.old, case.new, 1)


def test_a_kernel_in_the_subset_has_no_finding() -> None:
    assert lint.lint(GOOD, "kernel.py") == []


def test_a_compiled_loop_takes_its_body_as_a_function_in_the_newer_dialect_alone() -> None:
    loop = "    def body(i):\n        helper(a, i)\n\n    nl.fori_loop(0, 1, body)\n    n = a.shape[0]"
    text = GOOD.replace("    n = a.shape[0]", loop)
    assert lint.lint(text, "kernel.py") == []
    old = [f.message for f in lint.lint(text, "kernel.py", "beta1")]
    assert any("function inside a function" in m for m in old)
    assert any("nl.fori_loop is not in the subset" in m for m in old)


def test_the_older_dialect_has_its_own_imports_loops_and_names() -> None:
    text = GOOD.replace("import nki", "import neuronxcc.nki").replace("nki\n", "nki as nki\n", 1)
    text = text.replace("range(0", "nl.affine_range(0").replace("dst=x[:, 0:1], ", "dtype=nl.float32, ")
    text = text.replace("dst=x, src=a.ap(pattern=[[COLUMNS, 128], [1, COLUMNS]], offset=i * COLUMNS)", "dst=x, src=a")
    text = text.replace("out.ap(pattern=[[COLUMNS, 128], [1, COLUMNS]], offset=i)", "out")
    text = text.replace("nisa.engine.vector", "nisa.vector_engine")
    assert lint.lint(text, "kernel.py", "beta1") == []
    assert lint.lint(text, "kernel.py") != []
    assert lint.lint(GOOD, "kernel.py", "beta1") != []


@pytest.mark.parametrize("name", CASES)
def test_finding(name: str) -> None:
    messages = "\n".join(map(str, lint.lint(changed(CASES[name]), "kernel.py")))
    assert re.search(CASES[name].message, messages), messages


def test_a_finding_names_file_and_line() -> None:
    case = CASES["removed name"]
    line = next(i for i, text in enumerate(GOOD.splitlines(), 1) if case.old in text)
    assert [str(f).partition(": ")[0] for f in lint.lint(changed(case), "some/kernel.py")] == [f"some/kernel.py:{line}"]


def test_not_python() -> None:
    with pytest.raises(SyntaxError):
        lint.lint("def", "kernel.py")


@pytest.mark.parametrize("rule", lint.RULES, ids=lambda rule: str(rule.__name__))
def test_every_rule_finds_something_that_no_other_rule_finds(rule: lint.Rule, monkeypatch: pytest.MonkeyPatch) -> None:
    with_rule = {name: lint.lint(changed(case), "kernel.py") for name, case in CASES.items()}
    monkeypatch.setattr(lint, "RULES", tuple(r for r in lint.RULES if r is not rule))
    assert any(lint.lint(changed(CASES[name]), "kernel.py") != found for name, found in with_rule.items())


def test_the_subset_is_what_the_stand_in_has() -> None:
    assert frozenset(instructions.DOCUMENTED) == lint.INSTRUCTIONS
    assert frozenset(beta1_instructions.DOCUMENTED) == lint.INSTRUCTIONS - {"rng", "set_rng_seed"}
    assert OPERATORS.keys() == lint.OPERATORS
    assert DTYPES.keys() < lint.TOKENS
