"""The verifier: checks that an update is in explicit-rounding form, and that no rounding is lost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch.fx as fx

from collage_neuron.errors import VerificationError
from collage_neuron.numerics.eft import ON_BITS, OPERATIONS, block_max, is_rounded, narrow, storage_named
from collage_neuron.numerics.reductions import ENDINGS, OF_TENSOR, REDUCTIONS, across, count, total
from collage_neuron.passes.ir.stage import BETWEEN, JOINED, KINDS, NUMBERS, REDUCTION, Stage
from collage_neuron.passes.ir.update import Update


def verify(update: Update) -> None:
    """Raises VerificationError if `update` is not in explicit-rounding form, or a stored component is missing."""
    # Entries of these forms are numbers of bf16 already: to store them loses no rounding.
    words = frozenset(f"c{i}" for i, (form, _) in enumerate(update.scalars.entries) if form in ("hi", "lo"))
    for stage in update.stages:
        _verify_operations(stage, words)
    if update.stored:
        _verify_components(update)
        _verify_blocks(update)
    if len(set(update.outputs)) != len(update.outputs):
        raise VerificationError(f"a component is stored twice: {update.outputs}")
    _verify_stages(update)


def _verify_components(update: Update) -> None:
    """Every component of every format is stored."""
    for name, fmt in update.formats.items():
        missing = [key for key in fmt.keys(name) if key not in update.outputs]
        if missing:
            raise VerificationError(f"the update stores no {missing[0]}, a component of {name} ({fmt.name})")


def _verify_blocks(update: Update) -> None:
    """What is stored as a word of a block is the same for all of its elements."""
    blocks = update.blocks
    for stage in update.stages:
        uniform: dict[int, set[fx.Node]] = {}
        results = stage.results
        # Outputs come first among the results.
        for key, result in zip(stage.outputs, results, strict=False):
            if key not in blocks:
                continue
            if blocks[key] not in uniform:
                uniform[blocks[key]] = _uniform(stage, blocks[key], blocks)
            if result not in uniform[blocks[key]]:
                raise VerificationError(
                    f"{result} is stored as {key}, one word for {blocks[key]} elements, and may differ among them: it "
                    f"may depend on block_max(., {blocks[key]}), on words of such blocks, and on numbers of the step"
                )


def _uniform(stage: Stage, block: int, blocks: Mapping[str, int]) -> set[fx.Node]:
    """The nodes of a stage that are the same for all elements of a block."""
    # In the order of the graph, so that operands are known before what is computed from them.
    uniform = set[fx.Node]()
    elements = {*stage.inputs, "index"}
    for node in stage.body.nodes:
        if node.op == "placeholder":
            # Words of blocks of another size may differ within a block of this one.
            alike = node.target not in elements or blocks.get(str(node.target)) == block
        elif node.target is block_max:
            alike = node.args[1] == block or node.args[0] in uniform
        else:
            alike = node.op == "call_function" and uniform.issuperset(node.all_input_nodes)
        if alike:
            uniform.add(node)
    return uniform


def _verify_operations(stage: Stage, words: frozenset[str]) -> None:
    """Each operation is one of the form; what is stored was rounded."""
    for node in stage.body.nodes:
        if node.target is narrow:
            _verify_store(node, words)
        if (
            node.op == "call_function"
            and node.target not in OPERATIONS | ON_BITS | REDUCTIONS | _reductions_in(stage)
            and not (stage.kind == NUMBERS and node.target in ENDINGS)
        ):
            raise VerificationError(f"{node.name}: {node.target} is not an operation of explicit-rounding form")
        # Sums for a monitor are results only. Those of the update itself may be computed with in a joined stage, until
        # `cut` has made stages of it, between which they are numbers.
        alone = REDUCTIONS if stage.kind == JOINED else REDUCTIONS | _reductions_in(stage)
        if node.target in alone and any(user.op != "output" for user in node.users):
            raise VerificationError(f"{node.name} is a number of the whole update, and an operation computes with it")


def _reductions_in(stage: Stage) -> frozenset[Any]:
    """The reductions over a tensor that a stage may have."""
    found = frozenset(OF_TENSOR) | frozenset(ENDINGS) if stage.kind in (JOINED, REDUCTION) else frozenset()
    return found | {across} if stage.kind in (JOINED, BETWEEN) else found


def _verify_stages(update: Update) -> None:
    """Each stage reads what is there by then, returns what it says, and together they return every output."""
    if not update.stages:
        raise VerificationError("the update has no stage")
    known, returned = {*update.inputs, *update.reads_small}, set[str]()
    for number, stage in enumerate(update.stages):
        if stage.kind not in KINDS:
            raise VerificationError(f"stage {number} is of the kind {stage.kind!r}; there are {', '.join(KINDS)}")
        unknown = [name for name in (*stage.inputs, *stage.numbers) if name not in known]
        if unknown:
            raise VerificationError(f"stage {number} reads {unknown[0]}, which no stage before it gives")
        again = returned.intersection(stage.gives)
        if again:
            raise VerificationError(f"stage {number} gives {min(again)}, and so does a stage before it")
        _verify_results(update, stage, last=number == len(update.stages) - 1)
        returned.update(stage.gives)
        # The key of a component always means its value before the step, whichever stage has stored it since.
        known.update(name for name in stage.gives if name not in update.outputs)
    missing = [key for key in update.outputs if key not in returned]
    missing += [number for number in update.small.values() if number not in known]
    if missing:
        raise VerificationError(f"no stage gives {missing[0]}, which the update stores")


def _verify_results(update: Update, stage: Stage, last: bool) -> None:
    """Checks the order of results: those of the stage; then, in the last stage, wanted values, sums and counts."""
    results: Sequence[object] = stage.results  # of a wrong update, numbers may be among them
    targets: list[object] = [n.target if isinstance(n, fx.Node) and n.target in REDUCTIONS else None for n in results]
    small = slice(len(stage.outputs), len(stage.gives))  # may be of any operation
    kinds: list[object] = [None] * len(stage.outputs) + targets[small]
    kinds += [None] * (len(stage.gives) - len(kinds))
    if last:
        kinds += [None] * len(update.wanted) + [total] * len(update.sums) + [count] * len(update.counts)
    if targets != kinds:
        raise VerificationError(
            f"the update returns {len(results)} values, not its {len(kinds)} outputs, sums and counts in order"
        )


def _verify_store(node: fx.Node, words: frozenset[str]) -> None:
    """Checks that a stored value is a number of its format already: rounded to it, or a word of an expansion."""
    value, fmt = node.args
    if not is_rounded(value, storage_named(fmt), words):
        raise VerificationError(f"{node.name} stores {value} as {fmt} without a round_to: a rounding was lost")
