"""The public names of the package, which `collage_neuron/__init__.py` imports when the first of them is read."""

from collage_neuron import checkpoint
from collage_neuron.accumulation import accumulate_in_fp32
from collage_neuron.api import compile
from collage_neuron.averaging import AveragedModel
from collage_neuron.conversion.buffers import RoundedBuffers
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
)
from collage_neuron.exact import exact_value, set_exact_value
from collage_neuron.explanation import bytes_per_parameter, explain
from collage_neuron.monitoring.metrics import Effect, Measures, Record
from collage_neuron.monitoring.monitor import Monitor, monitor
from collage_neuron.monitoring.writers import JsonLog, Live, MLflow, TensorBoard, WandB, Writer
from collage_neuron.numerics.formats import FORMATS, Format
from collage_neuron.numerics.strategies import STRATEGIES, Strategy
from collage_neuron.optimizer.compiled import Compiled
from collage_neuron.runtime.nonfinite import skipped_steps
from collage_neuron.states.strategy_checks import ImpreciseState, SmallSteps

__all__ = [
    "FORMATS", "STRATEGIES", "AveragedModel", "ClampedDivisor", "Compiled", "ComputedOnHost", "Effect", "Format",
    "Fp32Products", "ImpreciseState", "JsonLog", "Live", "MLflow", "Measures", "Monitor", "Record",
    "RoundedAverage", "RoundedBuffers", "RoundedWeights", "RunsAsWritten", "SmallSteps",
    "StepInterrupted", "Strategy", "StrategyChanged", "TensorBoard", "TranslationError", "UnsafeEnvironment",
    "UnsupportedModel", "UnsupportedUpdate", "WandB", "Writer", "accumulate_in_fp32", "bytes_per_parameter",
    "checkpoint", "compile", "exact_value", "explain", "monitor", "set_exact_value", "skipped_steps",
]  # fmt: skip
