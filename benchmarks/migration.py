"""The tables of docs/migration.md: what people come from, beside the strategies that they would take here."""

from __future__ import annotations

from runs import accuracy, blocks, bytes_kept, markdown, stored, times

from collage_neuron.numerics.strategies import STRATEGIES

SECTIONS = {
    "from fp32": ("torch fp32", "split433", "plus", "split422", "split323"),
    "from stochastic rounding": ("stochastic", "split312", "split412", "split422"),
    "from FlashOptim": ("FlashAdamW bf16", "split322", "split412", "FlashAdamW 8-bit", "split311"),
    "from torchao": ("torchao SR", "stochastic", "split312", "torchao 8-bit SR", "torchao fp8 SR", "split311"),
}
"""By marker: the contenders of docs/accuracy.md that a section compares."""

NOT_TIMED = {"FlashAdamW bf16", "FlashAdamW 8-bit"}
"""Of these only the arithmetic is here, in plain PyTorch (accuracy/flash_adamw.py): its time says nothing."""

HEAD = ("", "bytes", "error, condition `recipe`", "error, condition `1e-6`", "step time")


def table(section: str) -> str:
    """Bytes with the gradient, errors, and step times over torch's fused fp32 AdamW."""
    found, kept = blocks(stored("step_time")), bytes_kept()
    recipe, small = accuracy("recipe"), accuracy("1e-6")

    def line(name: str) -> list[str]:
        time = "-" if name in NOT_TIMED else times(found, _name_of_run(name)) or "-"
        return [_shown(name), str(kept[name]), recipe[name], small[name], time]

    return markdown(HEAD, list(map(line, SECTIONS[section])))


def _shown(name: str) -> str:
    return f"`{name}`" if name in STRATEGIES else name.replace("torch fp32", "torch AdamW fp32, fused")


def _name_of_run(name: str) -> str:
    """What step_time.py calls a contender of docs/accuracy.md."""
    return f"{name}, native" if name in STRATEGIES else _shown(name)
