"""`compile`, the one line that a user changes, and the other public names.

`collage_neuron/__init__.py` imports this file when the first of them is read.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar, overload

import torch
from torch.optim import Optimizer

from collage_neuron import checkpoint
from collage_neuron.accumulation import accumulate_in_fp32
from collage_neuron.averaging import AveragedModel
from collage_neuron.conversion.budget import check_budget, overridden
from collage_neuron.conversion.buffers import Choice, RoundedBuffers, check_buffers, check_choice, chosen, kept
from collage_neuron.conversion.convert import compile_optimizer
from collage_neuron.conversion.loaded_weights import watch_models_of
from collage_neuron.conversion.model_casting import cast_beside, check_model, check_together, compile_model
from collage_neuron.errors import (
    ClampedDivisor,
    ComputedOnHost,
    Fp32Products,
    RoundedAverage,
    RoundedWeights,
    RunsAsWritten,
    StepInterrupted,
    StrategyChanged,
    TranslationError,
    UnsafeEnvironment,
    UnsupportedModel,
    UnsupportedUpdate,
    warn_user,
)
from collage_neuron.exact import exact_value, set_exact_value
from collage_neuron.explanation import bytes_per_parameter, explain
from collage_neuron.matmuls.install import RESCALE, check_matmul, install
from collage_neuron.monitoring.metrics import Effect, Measures, Record
from collage_neuron.monitoring.monitor import Monitor, monitor
from collage_neuron.monitoring.writers import JsonLog, Live, MLflow, TensorBoard, WandB, Writer
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.numerics.strategies import STRATEGIES, Strategy, StrategyLike, default_strategy
from collage_neuron.optimizer.compiled import Compiled, compiled_class
from collage_neuron.runtime import wrappers
from collage_neuron.runtime.nonfinite import skipped_steps
from collage_neuron.runtime.step_call import check_environment
from collage_neuron.settings import Settings
from collage_neuron.states.bookkeeping import params_of
from collage_neuron.states.inner_optimizers import base_of
from collage_neuron.states.shared_memory import check_unshared
from collage_neuron.states.strategy_checks import ImpreciseState, SmallSteps

__all__ = [
    "FORMATS", "STRATEGIES", "AveragedModel", "ClampedDivisor", "Compiled", "ComputedOnHost", "Effect", "Format",
    "Fp32Products", "ImpreciseState", "JsonLog", "Live", "MLflow", "Measures", "Monitor", "Record",
    "RoundedAverage", "RoundedBuffers", "RoundedWeights", "RunsAsWritten", "SmallSteps",
    "StepInterrupted", "Strategy", "StrategyChanged", "TensorBoard", "TranslationError", "UnsafeEnvironment",
    "UnsupportedModel", "UnsupportedUpdate", "WandB", "Writer", "accumulate_in_fp32", "bytes_per_parameter",
    "checkpoint", "compile", "exact_value", "explain", "monitor", "set_exact_value", "skipped_steps",
]  # fmt: skip


Model = TypeVar("Model", bound=torch.nn.Module)
Opt = TypeVar("Opt", bound=Optimizer)


if TYPE_CHECKING:
    from typing_extensions import TypedDict, Unpack  # Python 3.10 has no Unpack

    class _OfClass(TypedDict, total=False):  # the keywords of `compile(OptimizerClass)`
        strategy: StrategyLike | None
        arithmetic: str
        backend: str
        nonfinite: str
        seed: int
        validate: str
        unsupported: str | None
        verbose: bool

    class _OfOptimizer(_OfClass, total=False):  # those of `compile(optimizer)`
        bytes: int | None

    class _OfModel(_OfOptimizer, total=False):  # those of `compile(model)` and `compile(model, optimizer)`
        buffers: str
        keep_fp32: Choice | Iterable[Choice] | None
        matmul: str | None
        keep: Iterable[str] | None
        rescale: int


@overload
def compile(target: Model, optimizer: Opt, /, **settings: Unpack[_OfModel]) -> tuple[Model, Opt]: ...
@overload
def compile(target: Model, /, **settings: Unpack[_OfModel]) -> Model: ...
@overload
def compile(target: Opt, /, **settings: Unpack[_OfOptimizer]) -> Opt: ...
@overload
def compile(target: type[Opt], /, **settings: Unpack[_OfClass]) -> type[Opt]: ...


def compile(
    target: Any,
    optimizer: Any = None,
    /,
    *,
    strategy: StrategyLike | None = None,
    bytes: int | None = None,
    arithmetic: str = "fp32",
    backend: str = "auto",
    nonfinite: str = "pass",
    seed: int = 0,
    buffers: str = "auto",
    keep_fp32: Choice | Iterable[Choice] | None = None,
    validate: str = "on",
    unsupported: str | None = None,
    verbose: bool = True,
    matmul: str | None = None,
    keep: Iterable[str] | None = None,
    rescale: int = RESCALE,
) -> Any:
    """Makes an optimizer keep its parameters and states in multi-component bf16, by rewriting its own update.

    ``compile(model, optimizer)`` returns both; ``compile(optimizer)`` returns the optimizer;
    ``compile(OptimizerClass)`` returns a class, for ZeRO-1 and trainers that take one. ``compile(model)`` returns the
    model; build its optimizer afterwards as usual, and it is compiled when it first steps, saves or loads. Objects are
    changed in place and keep their type: the optimizer is still an instance of its class. Its settings are in
    ``param_groups`` (``collage_strategy``, ...), so groups may differ.

    fp32 parameters become bf16, as with ``model.to(torch.bfloat16)``, but nothing is lost: what the cast drops is kept
    as a low word (or an fp32 master) in the optimizer's state.

    Args:
        target: a model, an optimizer, or an optimizer class.
        optimizer: the optimizer of the model.
        strategy: the default is ``split433``, or ``plus`` with ``arithmetic="bf16"``; both take 12 bytes per parameter
            with Adam and a bf16 gradient. The paper's are ``bf16``, ``light``, ``plus``, ``full`` and ``fp32``: 8, 10,
            12, 14, 16 bytes. ``split444`` to ``split311`` are named by the bytes of weight, first and second moment.
            ``fp32_states`` takes 12; ``stochastic`` (bf16 parameters, rounded stochastically) and
            ``stochastic_states`` (states too) take 8. docs/strategies.md compares them. Or a mapping from state name
            to storage format. The environment variable ``COLLAGE_STRATEGY`` overrides it, and `bytes`; the log
            ``collage_neuron`` says so (level WARNING).
        bytes: instead of `strategy`: the memory per parameter, its states and its gradient included. Of the
            strategies that need no more with this optimizer it is the one whose largest error is the smallest, from
            pre-training down to the learning rates of fine-tuning: where all steps are large, another may be more
            accurate. ``explain`` says which, and so does a line in the log ``collage_neuron`` (level INFO). Blocks of
            128 elements that share a word (.03 bytes) are not counted for it; `accumulate_in_fp32` needs 2 bytes
            more. Does not apply to ``compile(OptimizerClass)``.
        arithmetic: ``fp32`` (values stay fp32 between load and store) or ``bf16`` (the paper's: every operation
            rounds, Yu et al., ICML 2024).
        backend: ``auto`` (by the device of the parameters; on a CPU ``native`` if llvmlite is installed, else
            ``reference``), ``reference``, ``native``, ``xla`` or ``nki``.
        nonfinite: the effect of a NaN or Inf in a gradient. ``pass`` propagates it, as torch does; ``skip`` makes the
            step change no parameter and no state tensor, and counts it (`skipped_steps`).
        seed: the seed of stochastic rounding, 32 bits. The random bits depend on the seed, the step number, the index
            of the parameter in the optimizer and the index of the element, and on nothing else: they are the same on
            ``reference``, ``native`` and ``xla`` (``nki`` draws others) and in a resumed run. Replicas need equal
            seeds; shards of a parameter, and several optimizers of a model, should have different ones.
        buffers: the treatment of the fp32 buffers of a model. ``auto`` keeps rotary frequencies and modules with
            running statistics (batch norm, with its weights) in fp32 and casts the rest, as ``model.to`` does; a
            `RoundedBuffers` warning names those that bf16 cannot hold. ``keep`` changes no buffer, ``cast`` makes
            everything bf16. Does not apply to ``compile(optimizer)`` and ``compile(OptimizerClass)``.
        keep_fp32: parameters that stay fp32 in the model and are updated in plain fp32 (norms, a router), with the
            buffers of their modules: a list of patterns of names (``norm``, ``layers.0``, ``*_norm``: whole parts of
            the dotted name, ``*`` is any text), modules, classes of modules (``torch.nn.LayerNorm``), or functions
            ``(name, parameter) -> bool``. A module of such parameters is given fp32 activations and gives bf16 ones, so
            that the model runs as before. Needs the model; see docs/usage.md.
        validate: ``on`` checks the rewritten update before steps 1, 2, 4, 8, ... and whenever the update changes. The
            optimizer's own ``step`` updates a few hundred elements in fp32; if rounding does not explain a difference,
            TranslationError is raised before anything is changed. ``off`` skips this (docs/development/validation.md).
        unsupported: deprecated, without effect. An update that cannot be compiled (matrix products, tensors in lists)
            runs its ``step()`` as it is written, on fp32 values that exist for the duration of a step, and one warning
            (`RunsAsWritten`) says so. See docs/as_written.md.
        verbose: after its first step the optimizer says in one line what was compiled, for how many parameters, under
            which strategy, with how many bytes, by which backend. It is a record of level INFO in the log
            ``collage_neuron``, or a line on stderr if the program has not configured logging; of several processes
            only that of rank 0 writes it. Another such line says if all parameters were bf16 before, so that training
            starts from rounded weights if they ever were fp32. ``False`` silences both.
        matmul: ``fp8`` runs the matmuls of the model's linear layers in 8 bits, forward and backward, by scales that
            are inferred from its graph: see docs/fp8.md. The default leaves the model as it is.
        keep: names of modules or parameters whose matmuls stay as they are; the default is the model's heads, the
            linear layers that no other one follows.
        rescale: the number of forward calls after which the sizes of fp8 operands are measured again; 0 for never.

    Raises:
        TypeError: a trained parameter that is neither bfloat16 nor float32; a target of another kind.
        ValueError: unknown settings; `buffers` or `keep_fp32` without a model; an entry of `keep_fp32` that matches no
            parameter; `bytes` beside `strategy`, or fewer than any strategy needs; ``differentiable=True``; mixed
            devices; a learning rate that is not finite; an optimizer that holds no parameter of the model; fp32
            parameters held by a wrapper that keeps copies of them; `matmul` without a model, or of a model whose
            forward cannot be captured.
        UnsupportedUpdate: the optimizer's update cannot be compiled, and cannot run as written either, or a filter of
            ``warnings`` makes `RunsAsWritten` an error.
        UnsafeEnvironment: settings of the process or the device would lose the low words.
    """
    if unsupported is not None:
        warn_user(
            "compile(unsupported=...) has no effect any more and will be removed: what cannot be compiled runs as "
            "written in fp32, and is warned of once (collage_neuron.RunsAsWritten). In place of unsupported='error' "
            "use warnings.simplefilter('error', collage_neuron.RunsAsWritten)",
            DeprecationWarning,
        )
    strategy, budget = overridden(strategy, bytes)
    chosen_or_default = default_strategy(arithmetic) if strategy is None else strategy
    settings = Settings(chosen_or_default, arithmetic, backend, nonfinite, seed, validate, verbose)
    check_choice(buffers, target)
    if budget is not None:
        check_budget(budget, strategy, needs_optimizer=isinstance(target, type))
    kept_layers = check_matmul(target, matmul, keep, rescale)  # all checks of arguments before anything changes
    within_budget = partial(compile_optimizer, budget=budget)
    check_environment()
    named = chosen(target, keep_fp32)
    if isinstance(target, type) and issubclass(target, Optimizer) and optimizer is None:
        wrappers.check_stepper(base_of(target) if issubclass(target, Compiled) else target)
        return compiled_class(target, settings)
    if isinstance(target, Optimizer) and optimizer is None:
        with wrappers.followed(optimizer=target):
            check_unshared(params_of(target))
            within_budget(target, settings)
        watch_models_of(target)
        return target
    if isinstance(target, torch.nn.Module) and optimizer is None:
        check_buffers(target, buffers, named)
        compile_model(target, settings, buffers, within_budget, named)
        if matmul is not None:
            install(target, kept_layers, rescale)
        return target
    if isinstance(target, torch.nn.Module) and isinstance(optimizer, Optimizer):
        check_model(target)
        check_together(target, optimizer)
        check_buffers(target, buffers, named)
        stay = kept(target, buffers, named)
        with wrappers.followed(target, optimizer):
            check_unshared(params_of(optimizer), target.parameters())
            # The optimizer first: it takes the fp32 values of its parameters, which the cast of the rest would round.
            within_budget(optimizer, settings, {p: p in stay for p in target.parameters()})
            cast_beside(target, optimizer, stay, named)
        if matmul is not None:
            install(target, kept_layers, rescale)
        return target, optimizer
    given = [target] if optimizer is None else [target, optimizer]
    kinds = " and ".join("None" if x is None else type(x).__name__ for x in given)
    several = isinstance(optimizer, (list, tuple))
    raise TypeError(
        f"cannot compile {kinds}; pass a model and its optimizer, an optimizer, an optimizer class, or a model"
        + ". Several optimizers: compile(optimizer) for each, and compile(model, optimizer) for the last" * several
    )
