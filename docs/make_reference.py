"""Writes the table of public names in docs/reference.md, from the docstrings: `python docs/make_reference.py`.

The rest of the page are directives that `make docs` fills in; a plain listing shows the table.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import collage_neuron
from collage_neuron import checkpoint, trainers
from collage_neuron.monitoring import trainers as monitor_trainers

PAGE = Path(__file__).parent / "reference.md"
BEGIN, END = "<!-- names, by python docs/make_reference.py -->\n", "<!-- end -->\n"
PLACES = {"": collage_neuron, "checkpoint": checkpoint, "trainers": trainers, "monitoring.trainers": monitor_trainers}
"""Where the names of the page are found, by what stands before the last dot."""
TABLES = {
    "FORMATS": "How a value lies in memory, by name.",
    "STRATEGIES": "Which format each kind of state has, by name.",
}
"""Of dictionaries, which have no docstring of their own."""


def names(text: str) -> Iterator[str]:
    """The names that the directives of the page show, in order, without `collage_neuron.`."""
    for name, members in re.findall(r"^::: collage_neuron\.([\w.]+)\n(?: +options: \{members: \[(.*?)\])?", text, re.M):
        yield from [f"{name}.{member}" for member in members.split(", ")] if members else [name]


def row(name: str) -> str:
    """A name with its arguments, and the first sentence of its docstring."""
    place, _, last = name.rpartition(".")
    found = getattr(PLACES[place], last)
    said = TABLES.get(name) or (inspect.getdoc(found) or "").split("\n\n")[0].replace("\n", " ")
    sentence = re.split(r"(?<=\.)\s+(?=[A-Z`])", said.replace("``", "`"))[0]
    return f"| `{name}{arguments(found)}` | {sentence} |"


def arguments(found: object) -> str:
    """The names of a function's parameters, with three dots for those that may be left out."""
    if not inspect.isfunction(found):
        return ""
    given = inspect.signature(found).parameters.values()
    needed = [p.name for p in given if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    # Python writes a star before those that are given by name alone.
    if by_name := [p.name for p in given if p.name in needed and p.kind is p.KEYWORD_ONLY]:
        needed.insert(needed.index(by_name[0]), "*")
    return f"({', '.join([*needed, '...'] if len(needed) < len(given) else needed)})"


def page(text: str) -> str:
    """The page with its table as the docstrings have it now."""
    before, rest = text.split(BEGIN)
    table = ["| in `collage_neuron` | what it is |", "|---|---|", *map(row, names(rest))]
    return before + BEGIN + "\n" + "\n".join(table) + "\n\n" + END + rest.split(END)[1]


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text()))
