"""What the examples of this folder share: text that is on every machine, a tiny model, a command line, a report."""

import argparse
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset

import collage_neuron

BLOCK, WIDTH, VOCABULARY = 32, 32, 256


class Bytes(Dataset[dict[str, Tensor]]):
    """Windows of torch's own source; int64 ``[BLOCK]`` under the names that language models take."""

    def __init__(self) -> None:
        text = bytearray(Path(torch.__file__).read_bytes())
        self.windows = torch.frombuffer(text, dtype=torch.uint8).unfold(0, BLOCK, BLOCK)

    def __len__(self) -> int:
        return len(self.windows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        window = self.windows[index].long()
        return {"input_ids": window, "labels": window}


class TinyLM(nn.Module):
    """A byte-level language model of one layer; returns the mean loss of the bytes that follow."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 4 * WIDTH, dropout=0.0, batch_first=True, norm_first=True)
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, input_ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embed(input_ids)
        mask = nn.Transformer.generate_square_subsequent_mask(x.shape[1], device=x.device, dtype=x.dtype)
        # fp32: a bf16 loss near 3 is a multiple of 1/64, and its softmax is as coarse.
        logits = self.head(self.layer(x, src_mask=mask, is_causal=True)).float()
        return F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


class Settings(argparse.Namespace):
    """The command line."""

    form: str
    steps: int
    strategy: str
    out: Path


def settings(description: str, forms: Sequence[str], argv: Sequence[str] | None) -> Settings:
    """Reads the command line; the first of ``forms`` is the default."""
    made = argparse.ArgumentParser(description=description.partition("\n")[0])
    made.add_argument("--form", choices=forms, default=forms[0], help="how it is switched on (default: %(default)s)")
    made.add_argument("--steps", type=int, default=40, help="training steps (default: %(default)s)")
    known = collage_neuron.STRATEGIES
    made.add_argument("--strategy", choices=known, default="split433", help="precision strategy (default: %(default)s)")
    made.add_argument("--out", type=Path, default=Path("out"), help="folder for checkpoints (default: %(default)s)")
    return made.parse_args(argv, namespace=Settings())


def report(name: str, losses: Sequence[float], optimizer: torch.optim.Optimizer) -> None:
    """Prints one line: what a run reached, and that its optimizer was a compiled one."""
    size = collage_neuron.bytes_per_parameter(optimizer)
    strategy = optimizer.param_groups[0]["collage_strategy"]
    print(f"{name}: {strategy}, {size:g} bytes/parameter, loss {losses[0]:.3f} -> {losses[-1]:.3f}")
