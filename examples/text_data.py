"""Real text for the examples: files in, batches of bytes out."""

import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import torch
from gpt import Shape
from torch import Tensor

# Folders beside Python's library that are not its ordinary source: tests, tables, other people's packages.
SKIPPED = {"site-packages", "dist-packages", "test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data"}


class TextError(ValueError):
    """The text asked for cannot be used; the message says what, where and what to do."""


@dataclass(frozen=True)
class Corpus:
    """The bytes to train on and the bytes to validate on, two 1-D ``uint8`` tensors on the host."""

    train: Tensor
    valid: Tensor

    @property
    def digest(self) -> str:
        """The same for the same bytes to train on."""
        return sha256(self.train.numpy().tobytes()).hexdigest()


def load(source: Path | None, shape: Shape, limit: int = 4_000_000) -> Corpus:
    """Read up to ``limit`` bytes of ``source``, a file or a folder; None stands for Python's own library.

    Nine tenths train and the last tenth validates. Raises TextError when there is too little to read.
    """
    place = source or Path(sysconfig.get_paths()["stdlib"])
    text = _read(_files(place) if source else _library(place), limit)
    if not text:
        raise TextError(f"there is no text in {place}: name a text file, or a folder of them, with --data")
    if len(text) < (least := 10 * (shape.block + 1)):  # a tenth of it has to hold a block and what follows it
        raise TextError(
            f"{place} holds {len(text)} bytes of text and blocks of {shape.block} bytes need {least}: "
            "name a longer text with --data"
        )
    whole = torch.frombuffer(text, dtype=torch.uint8)
    cut = len(text) * 9 // 10
    return Corpus(whole[:cut], whole[cut:])


def batches(text: Tensor, shape: Shape, seed: int) -> Iterator[Tensor]:
    """Endless int64 ``[batch, block + 1]`` random windows of ``text``; the same seed gives the same ones."""
    windows = text.unfold(0, shape.block + 1, 1)
    generator = torch.Generator().manual_seed(seed)
    while True:
        yield windows[torch.randint(len(windows), (shape.batch,), generator=generator)].long()


def _library(root: Path) -> list[Path]:
    files = sorted(root.rglob("*.py"))
    return [path for path in files if SKIPPED.isdisjoint(path.relative_to(root).parts)]


def _files(source: Path) -> list[Path]:
    if not source.exists():
        raise TextError(f"{source} does not exist: name a text file, or a folder of them, with --data")
    if not source.is_dir():
        return [source]
    files = sorted(path for path in source.rglob("*") if path.is_file())
    return [path for path in files if "/." not in f"/{path.relative_to(source).as_posix()}"]  # none is hidden


def _read_file(path: Path, limit: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(limit)
    except OSError as error:
        raise TextError(f"{path} cannot be read ({error.strerror}): name another text") from error


def _read(files: list[Path], limit: int) -> bytearray:
    text = bytearray()
    for path in files:
        if len(text) >= limit:
            break
        piece = _read_file(path, limit - len(text))
        if b"\0" not in piece:  # a NUL byte means a picture, an archive or a program
            text += piece
    return text
