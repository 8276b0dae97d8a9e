"""The loops of the samples in docs/neuron_libraries.md that run on a CPU, with the edits that the page names."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

os.environ["USE_TORCH_XLA"] = "0"  # read when transformers is imported: these tests are on the CPU
os.environ["HF_HUB_OFFLINE"] = "1"

import pytest

# Other people's packages warn of one another.
pytestmark = pytest.mark.filterwarnings("default")

SAMPLES = Path(__file__).parents[2] / "examples" / "samples"


def sample(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """The script as a module; skipped where transformers is not installed."""
    pytest.importorskip("transformers")
    monkeypatch.syspath_prepend(str(SAMPLES))
    monkeypatch.delitem(sys.modules, name, raising=False)
    return __import__(name)


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("bert_pretraining", "BERT: split433, 12 bytes/parameter"),
        ("llama_zero1", "Llama: split433, 12 bytes/parameter, states over 1 ranks"),
    ],
)
def test_an_edited_sample_trains_on_a_cpu(
    name: str, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delenv("RANK", raising=False)
    losses = sample(name, monkeypatch).main(["--steps", "20"])
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0]
    assert said in capsys.readouterr().out
