"""The words of the page; the numbers are put in by page.py."""

TEXT = """\
# The study

Written by `{command}` (`make study`) from its results, which lie beside it in `study/`, each with its
settings, seeds, versions and the command that repeats it: {jobs} jobs, {minutes} minutes on two cores.
{versions}, on {machine}.
{caution}
What it is: the claims of [Collage](https://arxiv.org/abs/2405.03637) (Yu et al., ICML 2024) and of [To FP8 and Back
Again](https://arxiv.org/abs/2405.18710) (Lee et al., 2024) about arithmetic, put to the test at a size that a CPU
trains in minutes. What it is not: their experiments. Models of some 40 000 parameters say how roundings act on an
optimizer; they do not say what a model of a billion parameters loses.

## Claims

A claim holds here if the test in `examples/study/claims.py` says so; its numbers are in the last column. Results that
contradict a paper stand as they are.

{claims}

## How to read it

`plus`, `light` and the others are strategies of this package, computed in fp32 between load and store. `bf16` and names
with `bf16-arithmetic` round every operation, as in the paper. `released` is `plus` with the second moment as the code
published with the paper computes it: its multiplication of two expansions overwrites an operand, so that v comes out 43
to 81 % low (the first table), which makes steps up to twice as long. A longer step is a higher learning rate, and
where the learning rate is below the best one that looks like a better algorithm. Hence the controls: fp32 at the
learning rate that each wrong second moment amounts to (`fp32 like ...`), and at one and a half times the learning rate.

"Does not hold" means that the test did not see it here. Of two kinds of claims these runs are too small to say more:
those about usable regions, for no run of any format diverged, and at high learning rates seeds differ more than
variants do, so that one seed decides whether a region is one learning rate wider; and those about differences between
`light`, `stochastic`, `plus` and fp32, which are those between seeds.

## Second moment

Mean relative error of v against float64 after {oracle_steps} steps at four decays, for constant, random and decaying
bf16 gradients (the last shrink 100-fold), and the share of elements that a zero gradient does not make smaller.

{second_moment}

![v while gradients shrink](study/second_moment.svg)

## Weights

||theta - theta64|| / ||theta64 - theta0|| after {oracle_steps} steps of AdamW at learning rate 1e-4, beta2 = 0.999 and
weight decay 0.1: theta ~ N(0, 0.02), gradients with a mean, noise, or both (drift: mean half the noise; weak drift: a
tenth); then theta = 1, as in the gain of a layer norm, and how much of the weight decay arrives.

{weights}

`plus` is off by up to 2 % where gradients are drift alone or noise alone: that is its bf16 first moment, which `full`
keeps wider (`tests/numerics/test_weights.py`). `stochastic` has the moments of `light`, and adds noise to what that is
off by: a smaller fraction of the way the longer the way is.

## A noisy quadratic

f(theta) = mean(h (theta - target)^2) / 2 with 4096 curvatures h from 1 to 1/100, gradient noise 0.1,
{quadratic_steps} steps of Adam at learning rate 3e-3 falling along a cosine, three seeds. The excess loss of the kept
weights (hi + lo, or the master), mean and standard deviation, by beta2; in brackets the learning rates of controls.

{quadratic}

![excess loss](study/quadratic.svg)

Where `released` ends below fp32, `fp32 like released` says how much of that is the learning rate.

## A language model

A byte-level GPT (`examples/gpt.py`, two layers of width 32) on Python's standard library, {language_run}, warm-up and
cosine, weight decay 0.1, {language_seeds} seeds with the same weights and the same batches under every variant. Weights
and gradients are bf16 in each, matrices are multiplied in fp32. The last validation loss in nats a byte, mean and
standard deviation over seeds; in brackets the mean difference from fp32 at the same seed.

{language}

![loss above fp32](study/language_models.svg)

### What arrives of the updates

Means over the runs, measured by `collage_neuron.monitor` in the update itself. EDQ is <effective, raw> / ||raw||^2 of
the value that is kept, and of its high word alone; effective / raw: ||effective|| / ||raw|| of the value that is kept;
lost: elements whose update is not zero and changes nothing; v stalled: second moments that should become smaller and do
not. The length of a step is that with the kept second moment over that with the exact one of the same gradients, kept
in float64 beside it.

EDQ is a projection: noise that points nowhere, which is what rounding stochastically adds, is not in it. It is in the
length of the effective update. An EDQ near 1 says that what was wanted arrives, not that nothing else does.

{descent}

![EDQ and lost updates](study/descent_quality.svg)

### Controls: the learning rate

{controls}

![loss over the length of steps](study/learning_rates.svg)

## Seeds x learning rates

What Lee et al. ask for: not one loss but the region in which training works. A GPT of one layer, {grid_run}, beta2 =
0.95. A learning rate is usable if every seed ends within {tolerance} % of the best mean loss of fp32; a run has
diverged if it ends worse than a model that only knows how frequent each byte is, or as NaN.

`E8Mk` are runs under `fp32` in which every matrix multiplication of a linear layer, forward and backward, reads numbers
with k mantissa bits: truncated as in the paper (a mask, which is biased toward zero), rounded to nearest even, or
stochastically. Sharpness is theirs too (after Keskar et al., 2017): by how many per cent the loss can rise when the
logits of the last token move by at most 5e-4 (|z| + 1). For the cross-entropy the worst corner is known in closed form
(`examples/study/sharpness.py`), where the paper searches; `tests/repository/test_study_formats.py` compares it with all
corners.

{grid}

![usable regions](study/regions.svg)

![sharpness](study/sharpness.svg)
"""
