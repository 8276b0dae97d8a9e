"""The names that a piece of code uses, read from its bytecode."""

from __future__ import annotations

import dis
from functools import lru_cache
from types import CodeType


@lru_cache(4096)
def names_of(code: CodeType) -> frozenset[str]:
    """The names of globals and attributes that code uses, also in nested functions."""
    inner = (names_of(c) for c in code.co_consts if isinstance(c, CodeType))
    return frozenset(code.co_names).union(*inner)


@lru_cache(4096)
def words_of(code: CodeType) -> frozenset[str]:
    """The names that code uses, and its string constants that could be names (`getattr(torch, "rand")`)."""
    consts = [y for x in code.co_consts for y in (x if isinstance(x, tuple) else (x,))]
    inner = (words_of(c) for c in consts if isinstance(c, CodeType))
    texts = (x for x in consts if isinstance(x, str) and x.isidentifier())
    return frozenset(code.co_names).union(texts, *inner)


@lru_cache(4096)
def globals_of(code: CodeType) -> frozenset[str]:
    """The names of globals only."""
    inner = (globals_of(c) for c in code.co_consts if isinstance(c, CodeType))
    own = (i.argval for i in dis.get_instructions(code) if i.opname.endswith(("_GLOBAL", "_NAME")))
    return frozenset(own).union(*inner)
