"""The text of docs/accuracy.md, with places for what was measured."""

TEXT = """\
# Accuracy

Written by `python benchmarks/accuracy` (`make accuracy`) from the records in
[accuracy/records.json](accuracy/records.json): {jobs} jobs, {minutes} minutes on two cores.
{versions}, on {machine}. Everything ran on the CPU; nothing here was measured on a Trainium device.
{note}
The table has the error of each strategy after training with AdamW on the same stream of bf16 gradients as a run in
float64: ||theta - theta64|| / ||theta64 - theta0||, where theta is the weight exactly as stored (all of its words).
An error of 1e-3 means that the weights are off by a thousandth of the distance they travelled. Each number is the mean
of {seeds} seeds; the tensor of one seed is {shape}. `bytes` counts weights and states of AdamW per parameter, from the
tensors that the optimizer really keeps (with the scales of blocks, without the gradient).

## Errors

Names in code style are strategies of this package, run through `collage_neuron.compile(optimizer, strategy=...)`.
torch fp32 is `torch.optim.AdamW` with parameter, gradient and states in fp32. The others are other packages.

{table}

{conditions}

Gradients have a fixed scale per element, lognormal with sigma 1, and a fixed mean of a tenth of the noise; weights
start from N(0, 0.02). Conditions differ from `recipe` only as stated. Formats were tuned with other seeds, and without
`mixture` (`benchmarks/accuracy/conditions.py`).

![error over bytes](accuracy/error_over_bytes.svg)

## Goals

What the strategy of each byte count must reach, on every seed:

{goals}

`tests/numerics/test_accuracy.py` asserts these goals in shorter runs. What bounds `split311` is the noise of drawing
second moments in a byte: 255 codes have to cover 2^44, 6 % apart at the largest and 25 % apart at the smallest. For
codes a fraction h apart, any independent unbiased draw leaves a relative standard deviation of about sqrt(h / 2) in a
second moment, whatever beta2 is. `benchmarks/accuracy/goals.py` derives this, and lists what was tried on other
seeds.

Gradients without noise are harder for `split423`, `split422`, `split323` and `split322`: their averages round to
nearest, and stop short of a steady gradient by up to half a gap between codes over 1 - beta1 ([formats](formats.md),
`tests/numerics/test_averages.py`).

## At equal bytes

Each peer beside the most accurate strategy that takes no more bytes; the last column lists the conditions under which
that strategy, or any other with as few bytes, is less accurate than the peer.

{peers}
{missing}
## A language model

The validation loss, in nats per byte, of a byte-level GPT of some 40 000 parameters after {language_steps} steps on
real text, Python's standard library (`benchmarks/accuracy/language.py`): mean and standard deviation over
{language_seeds} seeds, then of the differences from torch's fp32 AdamW at the same seed. The last column compares the
mean difference with twice its standard error. Such a short run of a small model shows gross losses only; the first
table is the finer instrument.

{language}
"""
