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
of {seeds} seeds; the tensor of one seed is {shape}. `bytes` counts weight, gradient and states of AdamW per parameter,
from the tensors that the optimizer really keeps (with the scales of blocks).

## Errors

Names in code style are strategies of this package, run through `collage_neuron.compile(optimizer, strategy=...)`.
torch fp32 is `torch.optim.AdamW` with parameter, gradient and states in fp32, torch bf16 the same in bf16. The others
are other packages.

{table}

{conditions}

Gradients have a fixed scale per element, lognormal with sigma 1, and a fixed mean of a tenth of the noise; weights
start from N(0, 0.02), in bf16. Conditions differ from `recipe` only as stated. Formats were tuned with other seeds, and
without `mixture` (`benchmarks/accuracy/conditions.py`).

![error over bytes](accuracy/error_over_bytes.svg)

## Fine-tuning

Small steps on trained weights. `2e-6@.07` is a learning rate of 2e-6, reached after 40 steps of warm-up and followed by
cosine decay to 0, with weights from N(0, .07); `@1` are gains of a normalization, N(1, .02). There are 400 steps,
betas are .9 and .95, and no weight decays. `decay` is the opposite: gradients are zero, as in the unused rows of an
embedding or in idle experts, and 1500 steps at learning rate 1e-4 and weight decay .01 take .15 % off each weight.

{fine_tuning}

An error of 1.0 means that the weights stayed where they were. Weights start in fp32: the low words of a trained weight
are not zero, as those of a bf16 checkpoint are at first, and a low word that is large has no bits for small steps.
Each contender is compared with a float64 run from what it stored of these weights before its first step, so its
first rounding does not count. torch bf16 and other packages take bf16 weights, and start from those. That favours
optimi, whose compensation is a bf16 number that starts at zero.

* **For fine-tuning take a strategy whose first digit is a 4**, the bytes of a parameter. The default `split433` is as
  accurate as torch's fp32, as are `split444` and `fp32`. `split423` and `split422`, with fewer bytes for the moments,
  are so too but for the smallest errors, to which they add a ten-thousandth of the way. `split412` keeps a first moment
  in one byte, whose noise is 4 % of the way at any learning rate.
* `plus`, `light` and `full` keep a pair of bf16 numbers, whose low word rounds a weight to about 2^-17 of it. More
  bytes for the moments (`full`) do not help.
* A parameter of three bytes, `split323`, `split322`, `split312` and `split311`, rounds to 2^-15: these are for learning
  rates of 1e-4, not for fine-tuning.
* Stochastic rounding is right on average, but moves each weight by whole roundings, up to dozens of times as far as it
  should go; without low words weights do not move at all.
* Where a step cannot arrive, a warning says so (`collage_neuron.SmallSteps`).

## Goals

What the strategy of each byte count must reach, on every seed:

{goals}

`tests/numerics/test_accuracy.py` asserts these goals in shorter runs. The last is the default's: what is as accurate as
fp32 in pre-training has to be so in fine-tuning. What bounds `split311` is the noise of drawing
second moments in a byte: 255 codes have to cover 2^44, 6 % apart at the largest and 25 % apart at the smallest. For
codes a fraction h apart, any independent unbiased draw leaves a relative standard deviation of about sqrt(h / 2) in a
second moment, whatever beta2 is. `benchmarks/accuracy/goals.py` derives this, and lists what was tried on other
seeds.

Gradients without noise are harder for `split423`, `split422`, `split323` and `split322`: their averages round to
nearest, and stop short of a steady gradient by up to half a gap between codes over 1 - beta1
([formats](development/formats.md), `tests/numerics/test_averages.py`).

## At equal bytes

Each peer beside the most accurate strategy that takes no more bytes; the last column lists the conditions under which
that strategy, or any other with as few bytes, is less accurate than the peer, to two digits.

{peers}
{missing}
## The order of `bytes=N`

`compile(..., bytes=N)` does not know at which learning rates you train: it takes the first of these that fits. They are
ordered by their largest error in both tables, where 1 stands for all above it too, since the steps are lost then; those
that are as good to one digit, by their largest error in the first table, and then by bytes:

{order}

So `bytes=10` takes `split422` and not `split323`, which is twice as accurate where weights of .02 learn at
1e-4, and twice as fast on a CPU, but loses up to all of the way in fine-tuning. For the same reason `bytes=9` takes
`split412` and not `split322`. Name the other if you know that all steps are large.

## A language model

The validation loss, in nats per byte, of a byte-level GPT of some 40 000 parameters after {language_steps} steps on
real text, Python's standard library (`benchmarks/accuracy/language.py`): mean and standard deviation over
{language_seeds} seeds, then of the differences from torch's fp32 AdamW at the same seed. The last column compares the
mean difference with twice its standard error. Such a short run of a small model shows gross losses only; the first
table is the finer instrument.

{language}
"""
