"""`explain`: describes a compiled optimizer as text: formats and bytes as a table, and its graphs on request."""

from __future__ import annotations

import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from textwrap import fill
from typing import Any

import torch
from torch.optim import Optimizer

from collage_neuron._version import __version__
from collage_neuron.conversion.budget import NEGLECTED
from collage_neuron.eager import memory_estimate
from collage_neuron.errors import UnknownUpdate, UnsupportedUpdate
from collage_neuron.matmuls.scale_metrics import describe
from collage_neuron.numerics.reductions import NUMBER
from collage_neuron.optimizer import first_step_report
from collage_neuron.optimizer.first_step_report import line_of
from collage_neuron.optimizer.pending_models import require_compiled
from collage_neuron.passes.analysis.state_roles import structure
from collage_neuron.passes.backends.registry import choose
from collage_neuron.passes.ir import printer
from collage_neuron.passes.ir.update import Captured, Recording
from collage_neuron.passes.pipeline import Pass, passes_of, run_passes
from collage_neuron.runtime import step_plan
from collage_neuron.runtime.fallback_warning import reason_of, why
from collage_neuron.runtime.preconditions import is_left_alone
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import bookkeeping
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.states.strategy_checks import imprecise_states
from collage_neuron.trace import dry_run, replayed_steps


def _jobs(optimizer: Optimizer) -> Iterator[tuple[int, step_plan.Job]]:
    """One plan for the parameters of each dtype in a group, recorded with the first, as if it had a gradient."""
    require_compiled(optimizer)
    base = base_of(type(optimizer))
    records = replayed_steps.records(base, optimizer, dry_run.known(base, optimizer))
    for i, group in enumerate(optimizer.param_groups):
        moved = [p for p in group["params"] if not is_left_alone(p)]
        for dtype in dict.fromkeys(p.dtype for p in moved):  # states of fp32 parameters have other formats
            params = [p for p in moved if p.dtype == dtype]
            first = step_plan.plan_update(base, optimizer, group, params, records)
            if not first.recording.by_shape:
                yield i, first
                continue
            # Where the step looks at shapes, one for each update that it has for them.
            yield from ((i, job) for job in _by_shape(optimizer, group, params, records))


def _by_shape(
    optimizer: Optimizer, group: dict[str, Any], params: list[Any], records: step_plan.Records
) -> Iterator[step_plan.Job]:
    found: dict[str, step_plan.Job] = {}
    for shape in dict.fromkeys(p.shape for p in params):
        own = [p for p in params if p.shape == shape]
        if not records(group, own[0]).captured.may_be_of(shape):  # what is frozen has the update of another parameter
            continue
        job = step_plan.plan_update(base_of(type(optimizer)), optimizer, group, own, records)
        text = job.recording.captured.text
        found[text] = replace(found[text], params=[*found[text].params, *own]) if text in found else job
    yield from found.values()


def bytes_per_parameter(optimizer: Optimizer) -> float:
    """Bytes per parameter that training with `optimizer` needs: parameter, gradient and states, averaged over all.

    Existing tensors count with their size, later ones with the size that their format has. Step counts are ignored.
    It is 0.0 without parameters. Where steps run as written (docs/as_written.md), states count from the first step on,
    and tensors in attributes and settings of groups with them, also in lists, dictionaries, sets and deques; not those
    in other objects, in closures or in globals, nor the fp32 values, which exist for the duration of a step.
    """
    found, reason = _planned(optimizer)
    if reason:
        groups = optimizer.param_groups
        elements: int = sum(p.numel() for group in groups for p in group["params"])
        each = (sum(memory_estimate.bytes_by_name(optimizer, group).values()) for group in groups)
        return (sum(each) + memory_estimate.bytes_elsewhere(optimizer)) / max(1, elements)
    jobs = [job for _, job in found]
    total = sum(sum(first_step_report.sizes_of(optimizer, job).values()) for job in jobs)
    return total / max(1, first_step_report.elements_of(jobs))


def _planned(optimizer: Optimizer) -> tuple[list[tuple[int, step_plan.Job]], str]:
    """The plans of all groups; none, and why, where steps run as written, as far as is known."""
    require_compiled(optimizer)
    if bookkeeping(optimizer).as_written:
        return [], why(optimizer)
    try:
        return list(_jobs(optimizer)), ""
    except UnsupportedUpdate as error:
        may_run_as_written = all(Settings.of(group).arithmetic == "fp32" for group in optimizer.param_groups)
        if may_run_as_written or isinstance(error, UnknownUpdate):
            return [], reason_of(str(error))
        raise


def about(optimizer: Optimizer) -> dict[str, Any]:
    """The description of a run for a log: the optimizer, its settings, and the versions of the packages it runs on."""
    groups = [(group, Settings.of(group)) for group in optimizer.param_groups if group["params"]]
    versions = {name: getattr(sys.modules.get(name), "__version__", None) for name in ("torch", "torch_xla")}
    return {
        "optimizer": base_of(type(optimizer)).__name__,
        "strategy": _each(settings.strategy for _, settings in groups),
        "arithmetic": _each(settings.arithmetic for _, settings in groups),
        "backend": _each(choose(settings.backend, group["params"][0].device).name for group, settings in groups),
        "lr": _each(f"{float(r):g}" for g, _ in groups if (r := g.get("initial_lr", g.get("lr"))) is not None),
        "bytes_per_parameter": bytes_per_parameter(optimizer),
        "parameters": sum(p.numel() for group, _ in groups for p in group["params"]),
        "parameters_in_fp32": sum(p.numel() for g, _ in groups for p in g["params"] if p.dtype == torch.float32),
        "versions": {
            "collage_neuron": __version__, "python": platform.python_version(),
            **{name: str(version) for name, version in versions.items() if version is not None},
        },
    }  # fmt: skip


def _each(values: Iterable[Any]) -> str:
    """The value that all groups share, or the list of their values."""
    return ", ".join(dict.fromkeys(map(str, values)))


def explain(optimizer: Optimizer | torch.nn.Module, *, graphs: bool = False, passes: bool = False) -> str:
    """Describes each group as a table: its settings, the storage formats of its tensors, and their memory.

    The line under all tables has the totals, beside what fp32 master weights and states would need; it is also what
    the first step writes into the log.

    Args:
        optimizer: a compiled optimizer, or a model that was compiled with ``matmul="fp8"``: of that it shows the
            layers, operands and scales, and waits for the device.
        graphs: shows the captured and the rewritten update under each table.
        passes: shows instead the update as it was captured, and what each pass of the compiler changes in it; with
            `graphs` the whole update after each.
    """
    if isinstance(optimizer, torch.nn.Module):
        return describe(optimizer)
    jobs, reason = _planned(optimizer)
    if reason:
        groups = enumerate(optimizer.param_groups)
        return "\n".join(_explain_as_written(optimizer, i, group, reason) for i, group in groups)
    if passes:
        return "\n".join(_explain_passes(optimizer, i, job, graphs) for i, job in jobs)
    last = [line_of(base_of(type(optimizer)), optimizer, [job for _, job in jobs])] if jobs else []
    return "\n".join([*(_explain_group(optimizer, i, job, graphs) for i, job in jobs), *last])


def _explain_passes(optimizer: Optimizer, index: int, job: step_plan.Job, whole: bool) -> str:
    """Describes what each pass makes of an update."""
    name, arithmetic = base_of(type(optimizer)).__name__, job.settings.arithmetic
    stored = ", ".join(f"{key} as {fmt.name} ({fmt.bytes} bytes)" for key, fmt in job.update.formats.items())
    head = f"param_groups[{index}] of {name}: {_strategy(job)}, arithmetic {arithmetic}\nstored: {stored}"
    pipeline = passes_of(job.update.formats, arithmetic, frozenset(), job.update.far)
    text = "\n\n".join([head, *_paragraphs(job.recording, pipeline, whole)])
    return "".join(f"{fill(line, 118, subsequent_indent='      ')}\n" for line in text.splitlines())


def _paragraphs(recording: Recording, pipeline: Sequence[Pass], whole: bool) -> Iterator[str]:
    """The captured update, then for each pass its name, the first line of its docstring, and what it changed."""
    text = printer.format_graph(recording.captured.graph)
    numbers = f"  # numbers of the next step:\n  {_slots(recording)}"
    yield f"captured: The step of one parameter as its optimizer writes it.\n{numbers}\n{text}"
    for each, update in run_passes(recording.captured, pipeline):
        before, text = text, printer.format_update(update, parts=True)
        text = text if whole else printer.fold_draws(text)  # what draws random bits, in one line
        sentence = (type(each).__doc__ or "").partition("\n")[0]
        idle = f"  (nothing to do: {getattr(each, 'idle', 'it is as it was')})"
        shown = text if whole else printer.format_changes(before, text)
        stages = "".join(f"{line}\n" for line in printer.format_stage_list(update))
        yield f"{each.name}: {sentence}\n{idle if text == before else f'{stages}{shown}'}"


def _slots(recording: Recording) -> str:
    return ", ".join(f"s{i} = {v:.9g}" for i, v in enumerate(recording.slots))


def _explain_group(optimizer: Optimizer, index: int, job: step_plan.Job, graphs: bool) -> str:
    settings = Settings.of(job.group)
    elements, sizes = first_step_report.elements_of([job]), first_step_report.sizes_of(optimizer, job)
    formats = {name: fmt.name for name, fmt in job.update.formats.items()}
    formats |= _small(job.recording.captured)
    formats |= {name: "as made" for name in sizes if name not in (*formats, "grad")} | {"grad": "as given"}
    each = sum(sizes.values()) / elements
    head = (
        f"param_groups[{index}]: {_strategy(job)}, arithmetic {settings.arithmetic}, "
        f"backend {job.backend.name}, {each:.3g} bytes a parameter"
    )
    rows = _rows({name: (fmt, sizes[name]) for name, fmt in formats.items()}, sum(sizes.values()), elements)
    more = [*_explain_roles(job, settings), *(_explain_graphs(job) if graphs else ())]
    return "\n".join([head, *_explain_budget(optimizer, job, each), *rows, *more])


def _rows(states: Mapping[str, tuple[str, int]], total: int, elements: int) -> Iterator[str]:
    """The table: the format of each state, its bytes per parameter, and those of all parameters."""
    for name, (fmt, size) in (*states.items(), ("total", ("", total))):  # a state may be called so
        each = f"{size / elements:.3g} bytes"
        yield f"  {name:<18} {fmt:<10} {each:<12} {size / 1e6:10,.3f} MB"


def _explain_graphs(job: step_plan.Job) -> Iterator[str]:
    yield "captured update (every number a slot):"
    yield printer.format_graph(job.recording.captured.graph)
    yield f"slots of this step: {_slots(job.recording)}"
    yield "scalar vector (doubles on the host, rounded once):"
    yield from (f"  {line}" for line in str(job.update.scalars).splitlines())
    yield "rewritten update (fp32 values, every rounding a round_to):"
    yield printer.format_stages(job.update)


def _explain_as_written(optimizer: Optimizer, index: int, group: Mapping[str, Any], reason: str) -> str:
    """Describes a group whose steps run as written."""
    found, elements = memory_estimate.bytes_by_name(optimizer, dict(group)), sum(p.numel() for p in group["params"])
    formats = {**memory_estimate.formats_by_name(optimizer, dict(group)), "grad": "as given"}
    elsewhere, total, elements = memory_estimate.bytes_elsewhere(optimizer), sum(found.values()), max(1, elements)
    head = (
        f"param_groups[{index}]: strategy {Settings.of(group).strategy}, step() as written on fp32 values, "
        f"{total / elements:.3g} bytes a parameter"
    )
    rows = _rows({name: (fmt, found.get(name, 0)) for name, fmt in formats.items()}, total, elements)
    more = [f"in attributes and settings: {elsewhere / 1e6:.3g} MB of all groups"] if elsewhere else []
    more += [f"during a step: {memory_estimate.bytes_of_values(optimizer) / 1e6:.3g} MB of fp32 values of all groups"]
    return "\n".join([head, *rows, *more, f"why it is not captured: {reason}"])


def _small(captured: Captured) -> dict[str, str]:
    """How the states without a value for each element are kept."""
    extents = {name: captured.extent_of(name) for name in captured.small}
    return {name: "one fp32" if extent == NUMBER else f"fp32 by {extent}" for name, extent in extents.items()}


def _explain_budget(optimizer: Optimizer, job: step_plan.Job, size: float) -> Iterator[str]:
    """Says that the strategy was chosen by bytes, if that of the group was, and whether these suffice now."""
    # The words that blocks share, and states of one number, are not counted when the strategy is chosen.
    values = len(job.update.formats) + len(job.recording.captured.small)
    ours, shared = bookkeeping(optimizer), NEGLECTED * values
    if ours.budget is None or job.params[0].dtype == torch.float32:
        return
    if job.settings.strategy != ours.budgeted:
        yield f"  not chosen by bytes={ours.budget}, which gives {ours.budgeted} to groups that name no strategy"
    elif size <= ours.budget + shared:
        yield f"  chosen by bytes={ours.budget}: of those that fit, the smallest worst error, fine-tuning included"
    else:
        yield (
            f"  chosen by bytes={ours.budget} for the states and gradients that there were when it was compiled; there "
            f"are more now, {size:.3g} bytes: compile again, with collage_neuron.compile(optimizer, bytes=...)"
        )


def _strategy(job: step_plan.Job) -> str:
    if job.params[0].dtype == torch.float32:
        return f"{len(job.params)} parameters that stay fp32"
    return f"strategy {Settings.of(job.group).strategy}"


def _explain_roles(job: step_plan.Job, settings: Settings) -> Iterator[str]:
    """Lists states that accumulate slowly, those that the update divides by, and which of these may lose updates."""
    if (seen := job.recording.captured.seen_as) is not None:
        yield f"seen in the shape {list(seen)}, whose rows and columns are meant"
    graph, dtype = job.recording.captured.graph, job.params[0].dtype
    lacking = imprecise_states(graph, settings, dtype).difference(job.recording.captured.small)
    lines = {
        "accumulate slowly": structure(graph).slow,
        "under a root or a division": structure(graph).denominators,
        "of these not recognised, and imprecise in one word": lacking,
    }
    yield from (f"{what}: {', '.join(sorted(names))}" for what, names in lines.items() if names)
