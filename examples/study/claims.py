"""The claims that the study puts to the test, each with what decides it, and what the results say."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from statistics import fmean

from study.jobs import Results
from study.readings import (
    TOLERANCE,
    above,
    best,
    decays,
    diverged,
    final,
    over_run,
    result,
    spread,
    usable,
)
from study.variants import RELEASED

Finding = tuple[bool, str]
"""Whether the claim holds here, and the numbers that say so."""

PAPER = "Collage"
FP8 = "To FP8 and Back Again"
OURS = "this project"


@dataclass(frozen=True)
class Claim:
    """A sentence, who says it, and the test; the test raises LookupError where what it needs was not run."""

    text: str
    source: str
    test: Callable[[Results], Finding]


CLAIMS: list[Claim] = []


def claim(text: str, source: str) -> Callable[[Callable[[Results], Finding]], Callable[[Results], Finding]]:
    """Adds a claim that the decorated function decides."""

    def add(test: Callable[[Results], Finding]) -> Callable[[Results], Finding]:
        CLAIMS.append(Claim(text, source, test))
        return test

    return add


def percent(x: float) -> str:
    return f"{100 * x:.3g} %"


@claim("At beta2 = 0.999 a second moment in bf16 can never decrease; that of `plus` always can", PAPER)
def _stall(r: Results) -> Finding:
    bf16, plus = (result(r["second_moment"][name])["cannot decrease"]["0.999"] for name in ("bf16", "plus"))
    holds = min(bf16.values()) == 1 and max(plus.values()) == 0
    return holds, f"`bf16` {percent(min(bf16.values()))} of the states stalled, `plus` {percent(max(plus.values()))}"


def largest_bias(r: Results, names: Sequence[str]) -> dict[str, float]:
    """The largest mean relative error of v, over decays and streams."""
    found = {name: result(r["second_moment"][name])["relative error"].values() for name in names}
    return {name: max(abs(x) for row in rows for x in row.values()) for name, rows in found.items()}


@claim("The second moment of `plus` is that of fp32, in the paper's arithmetic too", PAPER)
def _second_moment(r: Results) -> Finding:
    worst = largest_bias(r, ("plus", "plus bf16-arithmetic", "bf16"))
    holds = worst["plus"] < 1e-4 and worst["plus bf16-arithmetic"] < 3e-3
    return holds, "largest bias " + ", ".join(f"`{name}` {error:.1e}" for name, error in worst.items())


@claim("The second moment of `split433`, in three bytes, can always decrease too", OURS)
def _stall_split433(r: Results) -> Finding:
    stalled = max(result(r["second_moment"]["split433"])["cannot decrease"]["0.999"].values())
    return stalled == 0, f"{percent(stalled)} of the states stalled at 0.999"


@claim("The second moment of `split433` is that of fp32", OURS)
def _second_moment_split433(r: Results) -> Finding:
    rows = result(r["second_moment"]["split433"])["relative error"].values()
    worst = {stream: max(abs(row[stream]) for row in rows) for stream in next(iter(rows))}
    numbers = ", ".join(f"{stream} {error:.1e}" for stream, error in worst.items())
    return max(worst.values()) < 1e-4, f"largest bias under gradients that are {numbers}"


@claim("Weights in bf16 lose most of their updates, and a layer norm's gain all of them; `plus` keeps them", PAPER)
def _weights(r: Results) -> Finding:
    bf16, plus = (result(r["weights"][name]) for name in ("bf16", "plus"))
    lost, kept = (of["normal"]["error"]["drift"] for of in (bf16, plus))
    gain = bf16["one"]["unmoved"]["drift"]
    numbers = f"error `bf16` {percent(lost)}, `plus` {percent(kept)} of the way; gains that never moved {percent(gain)}"
    return lost > 0.5 and kept < 1e-3 and gain == 1, numbers


@claim("In the bytes of `plus`, `split433` has weights closer to float64, from each start and under each stream", OURS)
def _weights_split433(r: Results) -> Finding:
    plus, split433 = (result(r["weights"][name]) for name in ("plus", "split433"))
    ratios = [plus[start]["error"][s] / split433[start]["error"][s] for start in plus for s in moving(plus[start])]
    return min(ratios) > 1, f"errors of `plus` are {min(ratios):.3g} to {max(ratios):.3g} times those of `split433`"


def moving(found: dict[str, dict[str, float]]) -> list[str]:
    """The streams that have gradients."""
    return [stream for stream in found["error"] if stream != "no gradient"]


def excess(r: Results, name: str, beta2: str) -> float:
    return fmean(result(r["quadratic"][name])["kept"][beta2])


@claim("On a quadratic, plain bf16 is as bad with fp32 moments as without, and far above `light`", PAPER)
def _quadratic_bf16(r: Results) -> Finding:
    a, d, light = (excess(r, name, "0.999") for name in ("bf16", "fp32_states", "light"))
    return min(a, d) > 10 * light and abs(
        a / d - 1
    ) < 0.2, f"`bf16` {a:.2e}, `fp32_states` {d:.2e}, `light` {light:.2e}"


def quadratic_like_fp32(name: str, r: Results) -> Finding:
    """Whether the mean excess loss is within 1 % of fp32's at every decay."""
    ratios = [excess(r, name, beta2) / excess(r, "fp32", beta2) - 1 for beta2 in ("0.95", "0.99", "0.999")]
    return max(map(abs, ratios)) < 0.01, "above fp32: " + ", ".join(map(percent, ratios))


for name, source in (("plus", PAPER), ("split433", OURS)):
    claim(f"On a quadratic, `{name}` ends where fp32 does, at every beta2", source)(partial(quadratic_like_fp32, name))


@claim("On a quadratic, `light` is worse than `plus` at beta2 = 0.999 only", PAPER)
def _quadratic_light(r: Results) -> Finding:
    above_plus = [excess(r, "light", beta2) / excess(r, "plus", beta2) - 1 for beta2 in ("0.95", "0.99", "0.999")]
    holds = max(map(abs, above_plus[:2])) < 0.01 < above_plus[2]
    return holds, "above `plus` at 0.95, 0.99, 0.999: " + ", ".join(map(percent, above_plus))


def differences(r: Results, name: str) -> dict[str, list[float]]:
    """The last validation loss of each seed above that of fp32, by decay."""
    return {b: above(r["language"][f"{name} {b}"], r["language"][f"fp32 {b}"]) for b in decays(r)}


def nats(found: dict[str, list[float]]) -> str:
    return ", ".join(f"{b}: {fmean(d):+.4f}" for b, d in found.items())


def between_seeds(r: Results) -> dict[str, float]:
    """The standard deviation of fp32's last losses, by decay: a mean difference below that is none."""
    return {b: spread(final(r["language"][f"fp32 {b}"])) for b in decays(r)}


def beside_noise(found: dict[str, list[float]], noise: dict[str, float]) -> str:
    deviations = ", ".join(f"{x:.4f}" for x in noise.values())
    return f"nats above fp32 at {nats(found)}; fp32's seeds deviate by {deviations}"


def language_like_fp32(name: str, r: Results) -> Finding:
    """Whether the mean difference from fp32 is below what fp32's seeds deviate by, at every decay."""
    found, noise = differences(r, name), between_seeds(r)
    return all(abs(fmean(d)) < noise[b] for b, d in found.items()), beside_noise(found, noise)


for name, source in (("plus", PAPER), ("split433", OURS)):
    claim(f"A language model under `{name}` ends where fp32 does", source)(partial(language_like_fp32, name))


@claim("Plain bf16 ends far above fp32, and fp32 moments alone do not help it", PAPER)
def _language_bf16(r: Results) -> Finding:
    a, d, light = (differences(r, name) for name in ("bf16", "fp32_states", "light"))
    holds = all(min(fmean(a[b]), fmean(d[b])) > 3 * abs(fmean(light[b])) for b in a)
    return holds, f"`bf16` {nats(a)}; `fp32_states` {nats(d)}"


@claim("`light` is enough at beta2 = 0.95 and falls behind `plus` at 0.999", PAPER)
def _language_light(r: Results) -> Finding:
    light, plus = differences(r, "light"), differences(r, "plus")
    behind = {b: [x - y for x, y in zip(light[b], plus[b], strict=True)] for b in light}
    small = max(abs(x) for x in behind["0.95"])
    return min(behind["0.999"]) > 2 * small, f"nats above `plus` at {nats(behind)}"


@claim("Collage ends below fp32 with master weights (option D)", PAPER)
def _better_than_fp32(r: Results) -> Finding:
    found, noise = differences(r, "plus"), between_seeds(r)
    return all(fmean(d) < -noise[b] for b, d in found.items()), beside_noise(found, noise)


@claim("With the released code's second moment Collage ends below fp32 at the same nominal learning rate", "its code")
def _released(r: Results) -> Finding:
    found = differences(r, RELEASED)
    return all(max(d) < 0 for d in found.values()), f"nats above fp32 at {nats(found)}"


@claim("That is due to longer steps: fp32 at the learning rate that matches them is as good or better", OURS)
def _released_is_learning_rate(r: Results) -> Finding:
    found = {b: above(r["language"][f"{RELEASED} {b}"], r["controls"][f"fp32 like {RELEASED} {b}"]) for b in decays(r)}
    noise = between_seeds(r)
    return all(fmean(d) > -noise[b] for b, d in found.items()), f"nats above the matched fp32 at {nats(found)}"


ORDER = ("bf16", "fp32_states", "stochastic", "light", "plus", "fp32")


@claim("EDQ: bf16 < fp32_states < stochastic < light ~ plus ~ fp32", PAPER)
def _edq(r: Results) -> Finding:
    found = {b: [over_run(r["language"][f"{name} {b}"], "edq") for name in ORDER] for b in decays(r)}
    if any(x is None for row in found.values() for x in row):
        raise LookupError("EDQ was not measured")
    rows = {b: [x or 0.0 for x in row] for b, row in found.items()}
    holds = all(row[0] < row[1] < row[2] < min(row[3:]) and max(row[3:]) - min(row[3:]) < 1e-3 for row in rows.values())
    return holds, "; ".join(f"{b}: " + ", ".join(f"{x:.4f}" for x in row) for b, row in rows.items())


@claim("EDQ does not see the noise of stochastic rounding; the length of the effective update does", OURS)
def _noise(r: Results) -> Finding:
    keys = ("edq", "length")
    found = {b: [over_run(r["language"][f"stochastic {b}"], key) for key in keys] for b in decays(r)}
    rows = {b: [x or 0.0 for x in row] for b, row in found.items()}
    holds = all(abs(edq - 1) < 0.02 and length > 1.2 for edq, length in rows.values())
    return holds, "EDQ, effective / raw at " + "; ".join(f"{b}: {e:.3f}, {n:.2f}" for b, (e, n) in rows.items())


@claim("Fewer updates are lost under `split433` than under `plus`, at every beta2", OURS)
def _lost_split433(r: Results) -> Finding:
    names = ("plus", "split433")
    found = {b: [over_run(r["language"][f"{name} {b}"], "lost") or 0.0 for name in names] for b in decays(r)}
    numbers = (f"{b}: {plus:.2g} %, {split433:.2g} %" for b, (plus, split433) in found.items())
    return all(split433 < plus for plus, split433 in found.values()), "`plus`, `split433` at " + "; ".join(numbers)


def widths(r: Results, names: tuple[str, ...]) -> dict[str, int]:
    limit = (1 + TOLERANCE) * best(r["grid"])
    return {name: len(usable(r["grid"][name], limit)) for name in names}


def listed(found: dict[str, int]) -> str:
    return ", ".join(f"{name} {n}" for name, n in found.items())


@claim("`plus` can be trained at the learning rates that fp32 can; plain bf16 at fewer", PAPER)
def _region(r: Results) -> Finding:
    found = widths(r, ("bf16", "stochastic", "light", "plus", "fp32_states", "fp32"))
    return found["plus"] == found["fp32"] > found["bf16"], f"usable learning rates: {listed(found)}"


@claim("`split433` can be trained at the learning rates that fp32 can", OURS)
def _region_split433(r: Results) -> Finding:
    found = widths(r, ("split433", "fp32"))
    return found["split433"] == found["fp32"], f"usable learning rates: {listed(found)}"


@claim("Fewer mantissa bits leave fewer usable learning rates and seeds", FP8)
def _mantissa(r: Results) -> Finding:
    names = ("E8M7 nearest", *(f"E8M{m} truncation" for m in (6, 5, 4, 3)))
    found = widths(r, names)
    counts = list(found.values())
    runs = {name: diverged(r["grid"][name]) for name in names}
    holds = counts == sorted(counts, reverse=True) and counts[-1] < counts[0]
    return holds, f"usable learning rates: {listed(found)}; diverged runs: {listed(runs)}"


@claim("That is partly the mask's bias toward zero: rounding to nearest leaves more", "reviews of " + FP8)
def _bias(r: Results) -> Finding:
    names = ("E8M3 truncation", "E8M3 nearest", "E8M3 stochastic")
    found = widths(r, names)
    losses = (f"{min(map(fmean, result(r['grid'][name])['validation'])):.4f}" for name in names)
    holds = found["E8M3 nearest"] > found["E8M3 truncation"]
    return holds, f"usable learning rates: {listed(found)}; best loss {', '.join(losses)}"


def sharpness_at_end(r: Results, name: str, lr: int = 0) -> float:
    return fmean(result(r["grid"][name])["sharpness"][-1][lr])


@claim("The fewer mantissa bits, the sharper the logits", FP8)
def _sharper(r: Results) -> Finding:
    lrs = r["grid"]["fp32"]["settings"]["lrs"]
    limit = (1 + TOLERANCE) * best(r["grid"])
    at = lrs.index(usable(r["grid"]["fp32"], limit)[0])
    found = [sharpness_at_end(r, name, at) for name in ("E8M7 nearest", *(f"E8M{m} truncation" for m in (6, 5, 4, 3)))]
    numbers = f"at learning rate {lrs[at]:g}, M7 to M3: " + ", ".join(f"{x:.4f}" for x in found)
    return found == sorted(found), numbers
