"""The words of docs/development/coverage.md, with the places that docs/make_coverage.py fills."""

TEXT = """\
# What is covered

Written by `docs/make_coverage.py` from the table of rules and from measurements; `tests/repository/test_tables.py`
checks it.

What this means for your optimizer: [Optimizers](../optimizers.md).

## Stages

An update with sums, means or norms of whole tensors (LAMB, LARS, StableAdamW) is compiled in stages: reductions, then
arithmetic with their results, one fp32 number for each parameter, then the elementwise stage, which reads these numbers
and stores the new values. Nothing of a parameter's size is kept between stages: what a reduction needs of each element
is computed twice. Parameters never share a sum.

* The order of additions is defined, in fp64 (`collage_neuron/numerics/reductions.py`), so that the bits of a step do
  not depend on the backend, the width of vectors, the number of threads or the layout in memory, as
  `tests/optimizers/test_reductions.py::test_backends_give_the_same_bits` and its neighbours show. torch's own sums
  differ from these by their rounding.
* The backends `reference` and `native` run them, on CPUs, and `xla` on torch_xla's CPU device: a parameter's update is
  one program, which never waits for the host, and has the bits of the reference but in exp, log and power,
  and in results below 2^-126, which XLA makes 0 (`tests/optimizers/test_stages_on_xla.py`); SPMD may shard the
  parameter (`tests/distributed/test_spmd.py`). On XLA devices without fp64 or NKI such steps run as written.
* On XLA's CPU device a compiled step of LAMB under `full` takes 2.1 times as long as its own step in plain fp32, and
  one of AdamW, which has no sums, 1.3 times as long as that (`benchmarks/stages_on_xla.py`, 2^22 elements, on a busy
  machine). It needs 16 bytes per element during the step.
* `nki` has kernels for sums, means and norms of whole tensors, rows and columns, without fp64: within 2^-36 of the
  exact ones before they are rounded to fp32, so that a result may be the neighbour of the reference's, 1 ulp off
  ([Kernels](../kernels.md#sums-over-a-parameter); evidence: stand-in and independent interpreter).
* Over parameters in shards (FSDP2's `fully_shard`, HSDP, DTensor), on CPUs, each process adds up its own part, and what
  DTensor adds up between processes is gathered, one message for all parameters that share an update, and added in fp64
  in the order of the processes. The bits depend on how parameters are sharded, and are the same in all processes and
  runs. Before a step they compare which sums they need; if these differ, the step runs [as written](../as_written.md).
  So do steps that keep a number as a state, read one in Python (`.item()`), or gather elements, as newer torch does
  for the mean of parts of different sizes. Rejected, since the sum would be that
  of a part: shards that are no DTensors (FSDP1, `p.tensor_model_parallel`, torch_xla's ZeRO-1).
* A state of one number that is computed from tensors (NovoGrad's second moment, 0-d) is kept in fp32, 4 bytes for a
  parameter, which `explain` lists and `bytes_per_parameter` counts. It must be fp32, and not of a 0-d parameter;
  `tests/optimizers/test_rows.py` has what is promised and what is rejected.
* Sums, means and norms over the last dimension (rows) or the last but one (columns) of parameters with two or more
  dimensions have an order of their own (`collage_neuron/numerics/reductions.py`). Their results are fp32 vectors,
  which may be kept as states, `[n]` or `[n, 1]` and `[m]` or `[1, m]` of a matrix (CAME's second moments): 4 bytes for
  each of their elements, listed as `fp32 by row` or `fp32 by column`. Which dimension of a state runs along which of
  the parameter is found out from how the step combines them, so that square matrices are no special case. `native` runs
  them where rows have at least 32 elements and lie in memory one after another; else the reference does, with the same
  bits. `nki` runs them with [kernels around the sums](../kernels.md#sums-of-rows-and-columns). Strategies that keep
  words for blocks of elements of such a parameter are rejected.
  `tests/optimizers/test_rows.py` has what is promised and what is rejected.
* What `.item()` gives, and what `if norm > 1:` asks, is computed at once, by the operations that it depends on, in
  fp32, on copies; Python computes with it as usual, and the rest of the step goes on waiting
  (`tests/optimizers/test_items.py`). A branch that goes the other way is another update. Sums over several parameters
  (a norm of all gradients) are such numbers too.
* A step may see the parameter in one other shape of as many elements (`grad.view(heads, -1)`, `flatten()`):
  Adam-mini, whose moments are by head. Views have their elements in one order, so the update is one of a parameter of
  that shape, whose rows are the heads; they may begin and end within the parameter's own rows. Its states are kept in
  the shapes that the optimizer gives them, in the formats of the strategy where they have a value for each element,
  and checkpoints have them so. It needs contiguous parameters that a process has as a whole and SPMD has not split,
  formats without words of blocks, and the backends `reference`, `native`, `xla` (which reshapes in its program:
  `tests/optimizers/test_stages_on_xla.py`, XLA on the CPU) or `nki` (stand-in): else it runs as written.
  So does what depends on two shapes (means by head beside means by row), takes a part of a view, or turns it.
  `explain` says in which shape a parameter is seen. `tests/optimizers/test_heads.py` has what is promised and what is
  rejected.
* Not in stages: sums over other dimensions than the last two, and norms of other orders than 1
  and 2 (of rows: than 2). Such a `step()` runs as written.

## Optimizers that language models are trained with

{right} of these {of} are right. Each is used as its package has it, on an embedding, two matrices and a vector, for
{language_steps} steps with gradients as [below](#errors-of-the-parameters). An optimizer counts as right if `full`,
`split433` or `split444` is within {near:g} times the error of its own fp32, and, if it runs
[as written](../as_written.md), if it is bit for bit plain fp32 where everything is stored in fp32. In brackets: bytes
per parameter, gradient included. `python docs/measure_optimizers.py` measures and prints this, and keeps it in
`docs/coverage/optimizers.json`; `tests/optimizers/test_language_optimizers.py` checks how each runs.

{language}

The error is ||theta - theta64|| / ||theta64 - theta0||; theta64 is the same code with float64 parameters. \\* SOAP's
own code rounds to fp32, and its eigenvectors amplify any rounding: the reference is its own fp32, and the error of
`own fp32` that of a run in which half of the gradients' elements are one ulp of fp32 larger. `bf16` is the same code
with bf16 parameters. Sophia is the published SophiaG, whose `update_hessian` is called every tenth step; the SophiaH
of pytorch_optimizer is rejected, because it differentiates again inside `step()`. Muon orthogonalizes in bf16, in
whatever it computes: its fp32 is limited by that.

Matrix products and `linalg` are not compiled yet. Compiling them would save
time and memory for a moment, not accuracy: they run as written, in the precision that the optimizer asks for.

## torch.optim

Every class that torch exports is in one of three lists. These are rewritten:

{cases}

These are rewritten too. Their errors are not measured, because the option only selects another implementation of the
same update, or combines options of rows above: {tested}.

Compiled in [stages](#stages): {staged}.

`differentiable=True` is rejected for every class. These classes are not compiled:

{refused}

## Published packages

Each optimizer is used as installed, unmodified, built from a list of parameters and its own defaults: {rewritten} are
compiled, {written} run [as written](../as_written.md), and {rejected} are rejected. For each compiled one a
test runs the same optimizer in float64 beside it (`tests/optimizers/test_packages.py`). Each that runs as written
gives, under the strategy `fp32`, bit for bit what it gives in plain fp32 (`tests/eager/test_packages.py`).

{packages}

{meaning}

[pytorch_optimizer's own tests](public_suites.md), with each optimizer compiled, are run now and then.

Two more packages are tried without being installed by the tests:
`python docs/measure_packages.py heavyball timm.optim` (stored in `docs/coverage/packages.json`). Under the strategy
`fp32` those that run as written equal plain fp32 bit for bit after {package_steps} steps, and compiled ones differ by
at most {package_off} of the largest weight. heavyball keeps its moments in dictionaries within the state, which stay
fp32: its parameters alone are stored in the strategy's format.

{further}

## Errors of the parameters

||theta - theta64|| / ||theta64 - theta0|| after {steps} steps, for {elements} parameters that start at N(0, 0.02), with
bf16 gradients (a mean of random sign under noise twice as large); theta64 is the same optimizer of torch run in float64
on the same gradients. `bf16` and `fp32` are torch's own optimizer on parameters of that dtype. In brackets: bytes per
parameter, gradient included. Compiled optimizers use `arithmetic="fp32"`.

{errors}

The last two columns show the cost of the formats. Storing a value as a pair of bf16 numbers has a relative error of at
most 2**-17, storing it as fp32 one of 2**-24: a ratio of {ratio}, and of 2**7 * sqrt(4 / 7) = 97 in the root mean
square over random values. The column of `full` is close to that where the stores are the only source of error. It is
smaller where fp32 has other errors as well: torch multiplies the parameter by 1 - lr * weight_decay, which fp32 rounds
and the rewritten update does not. It is larger for `Rprop`, whose step sizes come to rest at their minimum: the same
increment is then added again and again, and its rounding errors add up instead of averaging out. `split433` stores
averages as bf16 and an int8 (2**-16), and the parameter and sums without decay (Adagrad's), which forget no rounding
error, as bf16 and an int16 (fp32's precision): it has no more bytes than `full` and is nearer to fp32. It stays within
20 times fp32's error wherever `full` is about 100 times off, except for one case of `Adadelta`. There `acc_delta` feeds
on itself: its new value is the old one times rho + (1 - rho) * g**2 / square_avg, which is 1 on average, so it forgets
no rounding error either, its own or that of `square_avg`. Both would need four bytes, which is `split444`.

## Errors of the states

||s - s64|| / ||s64|| after the same {steps} steps. One rounding to bf16 has a relative error of at most 2**-8
(3.9e-03). A state with a much larger error should have moved by less than half an ulp of bf16 per step, and stood
still instead.

{states}

## Operations

{rules} rules for {overloads} operations. Capturing the update turns in-place forms, `out=` forms and `torch._foreach_*`
into these operations and removes views that show the whole tensor. An operation without a rule raises an error that
names it and the node that uses it. With `arithmetic="bf16"` the result of a rule is rounded to bf16; the result for a
state kept as `hi + lo` is a pair.

* Functions that are made of others are within a few units of the last place of the exact result: `ULPS` in
  `collage_neuron/numerics/functions.py`. `tests/numerics/test_functions.py` measures it on `reference`, `native` and
  XLA's CPU device. On other XLA devices their errors are up to the device's compiler, and not known.
* NKI rejects some of them by name: [what is exact](../kernels.md#what-is-exact-and-what-is-not).
* Without a rule is what no optimizer of torch and of the packages above computes an update with: whole numbers
  (`round`, `floor`), remainders, `copysign` and `signbit`, trigonometric and hyperbolic functions but `atan2`,
  logarithms but `log`, `expm1`, `erf` and other special functions, `logical_xor`, activations of networks (`silu`,
  `gelu`, ...), `nextafter`, `frexp`, operations on integers, and `x[mask] = y` of a tensor (that of a number is a
  `masked_fill`). A step that uses one runs
  [as written](../as_written.md)
  (`tests/eager/test_as_written.py::test_functions_without_a_rule_are_those_of_torch_in_fp32`).

{operations}
"""
