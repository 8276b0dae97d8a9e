"""The loops of the samples in docs/neuron_libraries.md that run on a CPU, with the edits that the page names."""

from __future__ import annotations

import pytest
from models import example

# Other people's packages warn of one another.
pytestmark = pytest.mark.filterwarnings("default")


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
    losses = example(name, "transformers").main(["--steps", "20"])
    assert len(losses) == 20
    assert losses[-1] < 0.9 * losses[0]
    assert said in capsys.readouterr().out
