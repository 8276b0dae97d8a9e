"""Rewrites the tables of step times and errors in README.md, benchmarks/README.md and docs/ from the stored runs.

A table is what stands between `<!-- NAME -->` and `<!-- end -->`; tests/repository/test_tables.py compares each with
the stored numbers. `make tables` measures everything again first::

    python benchmarks/tables.py
"""

from __future__ import annotations

import re
import sys
import textwrap
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).parents[1] / "examples"))  # errors are kept as the study's records are

import choice
import migration
from host_time import Row as Case
from host_time import Time
from report import Row, Spread, table
from runs import ROOT, Block, blocks, digits, fine_tuning, markdown, stored, times

from collage_neuron.numerics.strategies import BY_ACCURACY, DEFAULT, STRATEGIES, bytes_with_adam

SLACK = 0.1
"""Bytes a parameter that do not count: words that blocks share."""

BUSY = 2.0
"""The load of a core from which on others took part of its time."""
WARNING = (
    "**Other programs kept the machine busy: differences below a factor of two mean nothing here.** Run `make tables` "
    "on an idle machine."
)

WHY_NOT = {
    "torch AdamW bf16, fused": "it keeps no further word and rounds where torch does",
    "torch SGD fp32, fused": "another optimizer",
    "torch Lion fp32, cpu": "another optimizer",
}
"""What is said of a row of others that none of ours is as small and as fast as."""


def machine(content: Any) -> str:
    """One sentence on where and how the numbers were taken."""
    m, s = content["machine"], content["settings"]
    load = ", ".join(f"{x:g}" for x in m["load"])
    processes = f"{s['processes']} process{'es' if int(s['processes']) > 1 else ''} of {s['rounds']} rounds"
    busy = m["load"][0] > BUSY * m["cores"]
    vectors = f"vectors of {m['vectors']}, " if m.get("vectors") else ""
    found = (
        f"{m['processor']}, {vectors}{m['cores']} cores, torch {m['torch']}; load {load} when it ended; {processes}."
    )
    return f"{found} {WARNING}" if busy else found


def wrapped(text: str) -> str:
    return textwrap.fill(text, 118, break_on_hyphens=False)


FIRST = {
    "torch AdamW fp32, fused": "",
    f"{DEFAULT}, native": "**the default**: as accurate as torch's fp32, or within 5e-5 of the way",
    "plus, native": "the paper's Collage-plus",
    "split423, native": "",
    "split422, native": "",
    "split323, native": "twice as fast as `split422`",
    "split412, native": "",
    "split322, native": "",
    "split312, native": "the memory of pure bf16",
    "split311, native": "",
    "bf16, native": "pure bf16: most of each update is lost",
}
"""The rows of README.md, and what it says of them."""
BELOW = (
    "Errors of AdamW's weights, as a fraction of the way that they moved; the largest found: "
    "[at 1e-4](docs/accuracy.md#errors) over nine kinds of gradients, decays and lengths of a run; "
    "[of fine-tuning](docs/accuracy.md#fine-tuning) at 6e-7 to 1e-5 on fp32 weights of size .02 to 1, and of decay "
    "alone. An error of 1.0 means that no update arrived, a larger one that the noise of roundings moved more."
)
"""What the two columns of errors are, in both tables that have them."""


def short() -> str:
    """Bytes, errors and step time over torch's fused fp32 AdamW, for a few optimizers."""
    content = stored("step_time")
    found, large, tuned = blocks(content), choice.largest(choice.LARGE), fine_tuning()
    head = ["bytes", "`strategy=`", "error at 1e-4", "fine-tuning", "step time", ""]
    lines = []
    for name, what in FIRST.items():
        own = name.partition(", ")[0]
        measured = "torch fp32" if own.startswith("torch") else own
        time = times(found, name) or "-"
        lines.append([_bytes(found, name), _code(name), digits(large[measured]), tuned[measured], time, what])
    busy = f"\n\n{WARNING}" if WARNING in machine(content) else ""
    return f"{markdown(head, lines)}\n\n{wrapped(BELOW)}{busy}"


def all_strategies() -> str:
    """Formats, bytes and errors of every strategy, for the page that is in docs/."""
    return f"{choice.all_strategies()}\n\n{wrapped(BELOW.replace('docs/', ''))}"


def strategies() -> str:
    """Bytes and step times of all optimizers that are on every machine."""
    content = stored("step_time")
    found = blocks(content)
    head = ["optimizer", "bytes per parameter", *(b.title for b in found)]
    names = dict.fromkeys(r.name for r in found[0].rows if _is_short(r.name))
    lines = [[_code(n), *_cells(found, n)] for n in names]
    return f"{markdown(head, lines)}\n\n{wrapped(_sizes(found) + ' ' + machine(content))}"


def narrow() -> str:
    """The same without AVX-512; in brackets the kernel alone."""
    content = stored("step_time_avx2")
    found = blocks(content)
    head = ["optimizer", "bytes", *(b.title for b in found)]
    lines = [
        [_code(row.name), f"{row.kept:.0f}", *(_with_kernel(b.row(row.name)) for b in found)] for row in found[0].rows
    ]
    return f"{markdown(head, lines)}\n\n{wrapped(_sizes(found) + ' ' + machine(content))}"


def _with_kernel(row: Row | None) -> str:
    if row is None or row.to_fused is None:
        return ""
    return f"{row.to_fused.median:.2f}" + ("" if row.kernel is None else f" ({row.kernel.median:.2f})")


def _is_short(name: str) -> bool:
    own, _, backend = name.partition(", ")
    return (name.startswith("torch AdamW") and backend != "xla") or (own in STRATEGIES and backend == "native")


def _code(name: str) -> str:
    own, _, backend = name.partition(", ")
    return f"`{own}`" if own in STRATEGIES and backend == "native" else name


def _cells(found: Sequence[Block], name: str) -> list[str]:
    rows = [b.row(name) for b in found]
    kept = next(r.kept for r in rows if r)
    return [f"{kept:.0f}", *("" if r is None or r.to_fused is None else f"{r.to_fused.median:.2f}" for r in rows)]


def _bytes(found: Sequence[Block], name: str) -> str:
    own = name.partition(", ")[0]
    return str(bytes_with_adam(own)) if own in STRATEGIES else _cells(found, name)[0]


def _sizes(found: Sequence[Block]) -> str:
    sizes = dict.fromkeys((b.parameters, b.tensors) for b in found)
    return "Parameters: " + ", ".join(f"{n:,} in {t} tensor{'s' if t > 1 else ''}" for n, t in sizes) + "."


def full() -> str:
    """Every column of every contender."""
    content = stored("step_time")
    parts = [f"{b.workload}; {b.title}:\n\n```\n{table(b.rows)}\n```" for b in blocks(content)]
    return "\n\n".join([wrapped(machine(content)), *parts])


def peers() -> str:
    """Every contender that is not ours, with the most accurate of ours that is neither larger nor slower."""
    head = ["optimizer", "bytes", "x fused fp32", "ours, at most as large and as slow", "bytes", "x fused fp32"]
    parts = []
    for block in blocks(stored("step_time")):
        others = [r for r in block.rows if r.to_fused and not _is_ours(r.name) and r.name != "memory copy"]
        lines = [[r.name, f"{r.kept:.0f}", _median(r), *_ours(block, r)] for r in others]
        parts.append(f"{block.title[0].upper()}{block.title[1:]}:\n\n{markdown(head, lines)}")
    return "\n\n".join(parts)


def _is_ours(name: str) -> bool:
    words = name.removeprefix("SGD ").removeprefix("Lion ").partition(",")[0].removesuffix(" (bf16)")
    return words in STRATEGIES


def _median(r: Row) -> str:
    return f"{r.to_fused.median:.2f}" if r.to_fused else ""


def _ours(block: Block, other: Row) -> list[str]:
    rows = [row for name in BY_ACCURACY if (row := block.row(f"{name}, native")) and row.kept <= other.kept + SLACK]
    assert other.to_fused is not None
    fast = [r for r in rows if r.to_fused and r.to_fused.median <= other.to_fused.median]
    if fast:
        return [_code(fast[0].name), f"{fast[0].kept:.0f}", _median(fast[0])]
    if not rows:
        return ["none is as small", "", ""]
    nearest = min(rows, key=lambda r: r.milliseconds.median)
    reason = WHY_NOT.get(other.name)
    return [
        f"none; nearest is {_code(nearest.name)}{f' ({reason})' if reason else ''}",
        f"{nearest.kept:.0f}",
        _median(nearest),
    ]


def host() -> str:
    """A step over tensors of almost nothing, by their number; and over many groups."""
    content = stored("host_time")
    rows = [Case(r["case"], r["checkout"], r["tensors"], [Time(*t) for t in r["times"]]) for r in content["rows"]]
    counts = list(dict.fromkeys(n for r in rows for n in r.tensors))
    head = ["case", *(f"{n} tensors, ms" for n in counts), "slowest step, ms", "a further tensor, us"]
    lines = []
    for r in rows:
        found = dict(zip(r.tensors, r.times, strict=True))
        cells = [f"{found[n].median:.2f}" if n in found else "" for n in counts]
        lines.append([f"`{r.case}`", *cells, f"{max(t.worst for t in r.times):.0f}", r.slope])
    return f"{markdown(head, lines)}\n\n{wrapped(machine(content))}"


def monitoring() -> str:
    """A step that is measured, over one that is not."""
    content = stored("monitor_cost")
    head = ["what", "ms", "monitored, ms", "ratio (quartiles)"]
    lines = [
        [r["what"], f"{r['plain']:.2f}", f"{r['measured']:.2f}", str(Spread(**r["ratio"]))] for r in content["rows"]
    ]
    return f"{markdown(head, lines)}\n\n{wrapped(machine(content))}"


def stages() -> str:
    """Updates with reductions, over the time that the bytes of their passes take at the rate of AdamW."""
    content = stored("stage_cost")
    head = ["optimizer", "threads", "ms", "bytes per parameter", "ratio (quartiles)"]
    head += ["machine code alone", "in cache", "`step()`"]
    elements = int(content["settings"]["elements"])
    lines = [
        [r["optimizer"], str(r["threads"]), f"{r['ms']:.1f}", f"{r['bytes'] / elements:.0f}", str(Spread(**r["ratio"])),
         str(Spread(**r["kernels"])), f"{r['cached']:.2f}", str(Spread(**r["whole"]))]
        for r in content["stages"]
    ]  # fmt: skip
    return f"{markdown(head, lines)}\n\n{wrapped(machine(content))}"


TABLES: dict[str, tuple[str, Callable[[], str]]] = {
    "choose": ("README.md", choice.table),
    "choose, the same": ("docs/strategies.md", choice.table),
    "strategies, short": ("README.md", short),
    "all strategies": ("docs/strategies.md", all_strategies),
    "step times, strategies": ("docs/strategies.md", strategies),
    "step times, full": ("benchmarks/README.md", full),
    "step times, narrow": ("benchmarks/README.md", narrow),
    "step times, others": ("benchmarks/README.md", peers),
    "host": ("benchmarks/README.md", host),
    "monitoring": ("benchmarks/README.md", monitoring),
    "stages": ("benchmarks/README.md", stages),
    **{name: ("docs/migration.md", partial(migration.table, name)) for name in migration.SECTIONS},
}
"""By marker: the page, and its content."""


def replaced(text: str, name: str, body: str) -> str:
    """`text` with another content of the table `name`."""
    pattern = re.compile(rf"(<!-- {re.escape(name)} -->\n).*?(<!-- end -->)", re.DOTALL)
    if len(pattern.findall(text)) != 1:
        raise ValueError(f"the page has no place, or several, for the table {name!r}: <!-- {name} --> ... <!-- end -->")
    return pattern.sub(lambda m: f"{m[1]}\n{body}\n\n{m[2]}", text)


def pages() -> dict[Path, str]:
    """Every page with all its tables."""
    found = {ROOT / page: (ROOT / page).read_text() for page, _ in TABLES.values()}
    for name, (page, make) in TABLES.items():
        found[ROOT / page] = replaced(found[ROOT / page], name, make())
    return found


def main() -> None:
    for path, text in pages().items():
        path.write_text(text)


if __name__ == "__main__":
    main()
