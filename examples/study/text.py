"""The text of the page, as a template; page.py inserts the numbers."""

TEXT = """\
# The study

Written by `{command}` (`make study`) from the results in `study/`, each of which has its
settings, seeds, versions and the command that repeats it: {jobs} jobs, {minutes} minutes of processor time on each of
two cores.
{versions}, on {machine}.
{caution}
The study tests the claims of [Collage](https://arxiv.org/abs/2405.03637) (Yu et al., ICML 2024) and of [To FP8 and Back
Again](https://arxiv.org/abs/2405.18710) (Lee et al., 2024) about arithmetic, at a size that a CPU trains in minutes. It
does not repeat their experiments: models of some 40 000 parameters show how roundings act on an optimizer, not what a
model of a billion parameters loses.

## Claims

A test in `examples/study/claims.py` decides whether a claim holds; its numbers are in the last column. Results that
contradict a paper are reported as they are.

{claims}

## How to read it

`plus`, `light` and the others are strategies of this package, computed in fp32 between load and store. `bf16` and
names with `bf16-arithmetic` round every operation, as in the paper. `split433` is the default of this package, and not
from the paper. It has the bytes of `plus`: weights have an integer of 16 bits as their low word, and both moments one
of 8 bits, where `plus` keeps the first moment in bf16 and the second in two words of bf16.

`released` is `plus` with the second moment as the code published with the paper computes it: its multiplication of two
expansions overwrites an operand, so v is 43 to 81 % too low (first table) and steps are up to twice as long. A longer
step acts like a higher learning rate, and looks like a better algorithm wherever the learning rate is below the best
one. Therefore there are controls: fp32 at the learning rate that corresponds to each wrong second moment
(`fp32 like ...`), and fp32 at one and a half times the learning rate.

"Does not hold" means that the test did not confirm the claim here. These runs are too small to decide three kinds of
claims. Claims about usable regions: no run of any format diverged, and at high learning rates seeds differ more than
variants do, so one seed decides whether a region is one learning rate wider. Claims about differences between
`light`, `stochastic`, `plus`, `split433` and fp32: these are no larger than the differences between seeds. And the
order of sharpness, which hardly differs between 7 and 4 mantissa bits. The run with version 0.1.0 of this package,
whose last bits differ, had the opposite answer to two of these: `plus` at the learning rates of fp32, and sharpness.

## Second moment

Mean relative error of v against float64 after {oracle_steps} steps at four decays, for constant, random and decaying
bf16 gradients (the last shrink 100-fold), and the share of elements of v that do not decrease under a zero gradient.

{second_moment}

`split433` differs from fp32 where gradients are constant: v approaches its limit by ever smaller steps, and stops where
they are less than half of its last place ([formats](formats.md)). `plus` has a byte more of v, and comes closer.
Half of the relative error of v arrives in the length of a step.

![v while gradients shrink](study/second_moment.svg)

## Weights

||theta - theta64|| / ||theta64 - theta0|| after {oracle_steps} steps of AdamW at learning rate 1e-4, beta2 = 0.999 and
weight decay 0.1. theta ~ N(0, 0.02), with gradients that are a mean, noise, or both (drift: the mean is half the noise;
weak drift: a tenth). The last columns have theta = 1, as in the gain of a layer norm, the share of these elements that
never moved, and the share of the weight decay that arrives.

{weights}

`plus` is off by up to 2 % where gradients are pure drift or pure noise. The cause is its bf16 first moment, which
`full` keeps as a pair (`tests/numerics/test_weights.py`). `stochastic` has the moments of `light`, and adds noise to
the error of `light`; relative to the distance travelled this noise decreases as the distance grows. `split433` takes
the byte that its first moment has more than that of `plus` from the second, and is off by less than a hundredth of one
per cent under every stream of the table.

## A noisy quadratic

f(theta) = mean(h (theta - target)^2) / 2 with 4096 curvatures h from 1 to 1/100, gradient noise 0.1,
{quadratic_steps} steps of Adam at learning rate 3e-3 with cosine decay, three seeds. The table has the excess loss of
the stored weights (hi + lo, or the master) by beta2, mean and standard deviation; in brackets, the learning rates of
controls.

{quadratic}

![excess loss](study/quadratic.svg)

Where `released` ends below fp32, compare `fp32 like released`: it shows how much of that is due to the learning rate.

## A language model

A byte-level GPT (`examples/gpt.py`, two layers of width 32) on Python's standard library, {language_run}, warm-up and
cosine, weight decay 0.1, {language_seeds} seeds with the same weights and the same batches under every variant.
Weights and gradients are bf16 in each; matrices are multiplied in fp32. The table has the final validation loss in
nats per byte, mean and standard deviation over seeds; in brackets, the mean difference from fp32 at the same seed.

{language}

![loss above fp32](study/language_models.svg)

### How much of each update arrives

Means over the runs, measured by `collage_neuron.monitor` in the update itself:

* EDQ: <effective, raw> / ||raw||^2 of the stored value, and of its high word alone;
* effective / raw: ||effective|| / ||raw|| of the stored value;
* lost: elements whose update is not zero and changes nothing;
* v stalled: second moments that should decrease and do not;
* length of a step: that with the stored second moment over that with an exact second moment of the same gradients,
  which is kept in float64.

EDQ is a projection and does not contain zero-mean noise, which is what stochastic rounding adds; the length of the
effective update contains it. An EDQ near 1 says that the intended update arrives, not that nothing else does.

{descent}

![EDQ and lost updates](study/descent_quality.svg)

### Controls: the learning rate

{controls}

![loss over the length of steps](study/learning_rates.svg)

## Seeds x learning rates

Lee et al. ask for more than one loss: for the region in which training works. A GPT of one layer, {grid_run}, beta2 =
0.95. A learning rate is usable if every seed ends within {tolerance} % of the best mean loss of fp32; a run has
diverged if it ends as NaN, or worse than a model that only knows the frequency of each byte.

`E8Mk` are runs under `fp32` in which every matrix multiplication of a linear layer, forward and backward, reads
numbers with k mantissa bits: truncated as in the paper (a mask, which is biased toward zero), rounded to nearest
even, or stochastically. Sharpness is defined as in their paper (after Keskar et al., 2017): by how many per cent the
loss can rise when the logits of the last token move by at most 5e-4 (|z| + 1). The paper searches for the worst
corner; for the cross-entropy it is known in closed form (`examples/study/sharpness.py`), and
`tests/repository/test_study_formats.py` compares it with all corners.

{grid}

![usable regions](study/regions.svg)

![sharpness](study/sharpness.svg)
"""
