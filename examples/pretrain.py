"""Train one byte-level GPT under several precision strategies, and compare what they cost and reach.

Every strategy starts from the same weights and sees the same bytes in the same order; one line differs::

    python examples/pretrain.py                     # about six minutes on two CPU cores
    python examples/pretrain.py --data my_texts/ --strategies bf16 plus --out results
    python examples/pretrain.py --checkpoint saved --resume     # goes on where it was killed, bit for bit
    python examples/pretrain.py --log runs && python -m collage_neuron report runs    # what arrives of the updates

It prints a table and leaves ``pretrain.png`` and ``pretrain.json`` in the folder ``--out``.
"""

import argparse
import importlib
import importlib.util
import math
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from tempfile import TemporaryFile
from time import perf_counter
from typing import Any

# torch_xla picks its device when it is first imported, and asks for this line where there is no accelerator.
if importlib.util.find_spec("libneuronxla") is None:
    os.environ.setdefault("PJRT_DEVICE", "CPU")

import torch
from checkpoint_file import Checkpoint, CheckpointError
from comparison import Result, save, table
from gpt import GPT, Shape
from text_data import Corpus, TextError, batches, load
from torch import Tensor
from torch.nn import functional as F
from torch.optim.lr_scheduler import CosineAnnealingLR, LRScheduler
from tqdm import tqdm

import collage_neuron

DEFAULT = ["bf16", "light", "plus", "split433", "fp32"]  # the paper's, and what `compile` takes unasked
STRETCHES = 48  # a run is cut into so many stretches of steps; the host waits for the device once in each


class Settings(argparse.Namespace):
    """The command line."""

    strategies: list[str]
    data: Path | None
    steps: int
    lr: float
    beta2: float
    seed: int
    device: str
    out: Path
    checkpoint: Path | None
    resume: bool
    log: Path | None
    quick: bool

    @property
    def shape(self) -> Shape:
        return Shape(batch=4, block=32, width=32, heads=2, layers=1) if self.quick else Shape()

    @property
    def title(self) -> str:
        return f"Byte-level GPT, AdamW: {self.steps} steps, lr {self.lr:g}, beta2 {self.beta2:g}"

    @property
    def run(self) -> dict[str, Any]:
        """What a run depends on beside its strategy and its text: a checkpoint goes on under the same only."""
        return {k: getattr(self, k) for k in ("steps", "lr", "beta2", "seed", "quick", "device")}


def open_device(name: str) -> torch.device:
    """The device called ``name``; torch_xla aborts if it is opened after a first backward pass."""
    if name == "neuron":
        importlib.import_module("torch_neuronx")  # registers it
    if name != "xla":
        return torch.device(name)
    import torch_xla

    return torch_xla.device()


def end_step(device: torch.device) -> None:
    """Send what torch_xla has recorded since the last call to the device; elsewhere nothing waits."""
    if device.type == "xla":
        import torch_xla

        torch_xla.sync()


@dataclass(frozen=True)
class Run:
    """A training run as anyone would write it: nothing in here depends on the strategy it runs under."""

    model: torch.nn.Module
    optimizer: torch.optim.Optimizer
    scheduler: LRScheduler
    batches: Iterator[Tensor]
    device: torch.device
    monitor: collage_neuron.Monitor | None = None

    @property
    def parts(self) -> dict[str, Any]:
        """What a checkpoint holds of a run; the optimizer first, which refuses what it cannot go on from."""
        return {"optimizer": self.optimizer, "model": self.model, "scheduler": self.scheduler}

    def loss(self, batch: Tensor) -> Tensor:
        batch = batch.to(self.device)
        logits = self.model(batch[:, :-1])
        return F.cross_entropy(logits.flatten(0, 1), batch[:, 1:].flatten())

    def step(self) -> Tensor:
        self.optimizer.zero_grad()
        loss = self.loss(next(self.batches))
        loss.backward()
        self.optimizer.step()
        if self.monitor is not None:
            self.monitor.log(loss=loss)
        self.scheduler.step()
        end_step(self.device)
        return loss.detach()

    @torch.no_grad()
    def validate(self, held_out: list[Tensor]) -> float:
        losses = []
        for batch in held_out:
            losses.append(self.loss(batch))
            end_step(self.device)
        return sum(loss.item() for loss in losses) / len(losses)


def new_run(strategy: str, settings: Settings, text: Tensor, device: torch.device) -> Run:
    """A fresh model with its optimizer, compiled for ``strategy``."""
    torch.manual_seed(settings.seed)
    model: torch.nn.Module = GPT(settings.shape).to(device)
    betas = (0.9, settings.beta2)
    optimizer: torch.optim.Optimizer = torch.optim.AdamW(
        model.parameters(), lr=settings.lr, betas=betas, weight_decay=0.1
    )
    model, optimizer = collage_neuron.compile(model, optimizer, strategy=strategy)  # the one changed line
    feed = batches(text, settings.shape, settings.seed)
    monitor = watch(strategy, settings, model, optimizer)
    return Run(model, optimizer, CosineAnnealingLR(optimizer, settings.steps), feed, device, monitor)


def watch(
    strategy: str, settings: Settings, model: torch.nn.Module, optimizer: torch.optim.Optimizer
) -> collage_neuron.Monitor | None:
    """Measure a step in each stretch, and log it, where ``--log`` names a folder."""
    if settings.log is None:
        return None
    log = collage_neuron.JsonLog(settings.log / f"{strategy}.jsonl", **settings.run)
    return collage_neuron.monitor(optimizer, model, every=math.ceil(settings.steps / STRETCHES), to=log, unread=1)


def kept_values(run: Run) -> Tensor:
    """What the optimizer keeps for all parameters, as one fp32 vector."""
    return torch.cat([collage_neuron.exact_value(run.optimizer, p).flatten() for p in run.model.parameters()])


def watched_step(run: Run) -> tuple[float, float]:
    """Take a step; return its loss, and the percentage of nonzero gradients that changed nothing at all."""
    before = kept_values(run)
    end_step(run.device)  # so that the step is the graph that every other step is, compiled already
    loss = run.step()
    pushed = torch.cat([p.grad.flatten() for p in run.model.parameters() if p.grad is not None]) != 0
    lost = pushed & (kept_values(run) == before)
    return loss.item(), (100 * lost.sum() / pushed.sum()).item()


def stretch(run: Run, result: Result, steps: int, watch: bool) -> None:
    """Take ``steps`` steps, the first of them watched and not timed where ``watch`` says so."""
    if watch:
        loss, lost = watched_step(run)
        result.train.append(loss)
        result.lost.append(lost)
        steps -= 1
    began = perf_counter()
    losses = [run.step() for _ in range(steps)]
    result.train += [loss.item() for loss in losses]  # waits for the device; no step does
    if steps:
        result.seconds.append((perf_counter() - began) / steps)


def resumed(run: Run, checkpoint: Checkpoint, strategy: str) -> Result:
    """What was reached before the program was killed, with ``run`` brought to where it was then; or nothing yet."""
    saved = checkpoint.restore(run.parts)
    result = Result(**saved["result"]) if saved else Result(strategy)
    next(islice(run.batches, len(result.train), len(result.train)), None)  # the batches that were seen
    return result


def pretrain(strategy: str, settings: Settings, corpus: Corpus, device: torch.device) -> Result:
    """Train under ``strategy``, from the beginning or where a killed run was, and return the curves."""
    run, result, checkpoint = new_run(strategy, settings, corpus.train, device), Result(strategy), None
    if settings.checkpoint is not None:
        checkpoint = Checkpoint(settings.checkpoint / f"{strategy}.pt", settings.run | {"text": corpus.digest})
        result = resumed(run, checkpoint, strategy) if settings.resume else result
    feed = batches(corpus.valid, settings.shape, seed=0)
    held_out = [next(feed) for _ in range(16)]
    size = math.ceil(settings.steps / STRETCHES)
    before = len(result.train)
    with tqdm(total=settings.steps, desc=f"{strategy:>11}", unit="step", initial=before) as bar:
        for done in range(before, settings.steps, size):
            steps, count = min(size, settings.steps - done), done // size + 1
            stretch(run, result, steps, watch=count % 6 == 3)
            if count % 4 == 0 or done + steps == settings.steps:
                result.valid[done + steps] = run.validate(held_out)
            if checkpoint is not None:
                checkpoint.save(run.parts, result=asdict(result))
            bar.set_postfix(loss=f"{result.train[-1]:.3f}", refresh=False)
            bar.update(steps)
    if run.monitor is not None:
        run.monitor.close()
    result.bytes_per_parameter = collage_neuron.bytes_per_parameter(run.optimizer)
    return result


def positive(text: str) -> int:
    """An argparse type: an integer above zero."""
    if (number := int(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is not a number of steps: give 1 or more")
    return number


def rate(text: str) -> float:
    """An argparse type: a number of at least 0 and below 1."""
    if not 0 <= (number := float(text)) < 1:
        raise argparse.ArgumentTypeError(f"{number} is out of range: give 0 or more, below 1")
    return number


def parser(devices: list[str]) -> argparse.ArgumentParser:
    """The command line's parser, on a machine that has ``devices``."""
    made = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    add = made.add_argument
    names = f"any of {', '.join(collage_neuron.STRATEGIES)} (default: {' '.join(DEFAULT)})"
    add("--strategies", nargs="+", choices=list(collage_neuron.STRATEGIES), default=DEFAULT, metavar="NAME", help=names)
    add("--data", type=Path, help="a text file or a folder of them (default: Python's own library)")
    add("--steps", type=positive, help="training steps (default: 1500, or 48 with --quick)")
    add("--lr", type=rate, default=5e-4, help="peak of the cosine schedule (default: %(default)s)")
    add("--beta2", type=rate, default=0.999, help="AdamW's decay of the second moment (default: %(default)s)")
    add("--seed", type=int, default=0, help="of weights and data order (default: %(default)s)")
    add("--device", choices=devices, default=devices[0], help="where to train (default: %(default)s)")
    add("--out", type=Path, default=Path("out"), help="folder for the results (default: %(default)s)")
    add("--checkpoint", type=Path, metavar="FOLDER", help="save each run there, 48 times on its way")
    add("--resume", action="store_true", help="go on from what is in the folder --checkpoint, if there is something")
    add("--log", type=Path, metavar="FOLDER", help="log there what arrives of updates: python -m collage_neuron report")
    add("--quick", action="store_true", help="a smaller model and few steps: does it run at all?")
    return made


def devices() -> list[str]:
    """The devices that can be named here, the fastest one first. With torch_xla, torch_neuronx is a part of that."""
    installed = {"xla": "torch_xla", "neuron": "torch_neuronx"}
    found = [name for name, package in installed.items() if importlib.util.find_spec(package) is not None]
    return [*found[:1], "cpu"]


def main() -> None:
    """Read the command line, train once for each strategy, and report."""
    command = parser(devices())
    settings = command.parse_args(namespace=Settings())
    settings.steps = settings.steps or (48 if settings.quick else 1500)
    if settings.resume and settings.checkpoint is None:
        command.error("--resume goes on from a folder: name it with --checkpoint")
    try:
        corpus = load(settings.data, settings.shape)
        for folder in filter(None, (settings.out, settings.checkpoint, settings.log)):
            folder.mkdir(parents=True, exist_ok=True)
            TemporaryFile(dir=folder).close()  # better to fail now than when all is trained
    except TextError as error:
        command.error(str(error))
    except OSError as error:
        command.error(
            f"{error.filename}: {error.strerror}; name another place with --data, --out, --log or --checkpoint"
        )
    device = open_device(settings.device)
    try:
        results = [pretrain(name, settings, corpus, device) for name in dict.fromkeys(settings.strategies)]
    except CheckpointError as error:
        command.error(str(error))
    save(results, settings.out, settings.title)
    print(f"\n{settings.title}\n\n{table(results)}\n\ncurves: {settings.out / 'pretrain.png'}")


if __name__ == "__main__":
    main()
