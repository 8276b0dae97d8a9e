"""Words of states that user code sends itself: 16-bit integers are rejected by gloo, 8-bit ones arrive unnoticed."""

from __future__ import annotations

from pathlib import Path

import sent_words as sent
import torch
from worlds import run_world

TORCH_SAYS = "Invalid scalar type"


def test_gloo_sends_no_16_bit_codes_and_says_so(tmp_path: Path) -> None:
    for messages in run_world(2, tmp_path, sent.sent_int16):
        assert {name: text for name, text in messages.items() if TORCH_SAYS not in text} == {}
        assert messages.keys() == sent.COLLECTIVES.keys()


def test_a_sharded_state_is_gathered_or_rejected(tmp_path: Path) -> None:
    """Codes are gathered as the values that they stand for; a parameter's low words of 16 bits are rejected."""
    for found in run_world(2, tmp_path, sent.gathered, ["split422", "split322", "split311"]):
        message, _ = found["split422"]
        assert TORCH_SAYS in message
        for strategy in ("split322", "split311"):
            message, state = found[strategy]
            assert message == ""
            dtypes = {name: (s["exp_avg"].dtype, s["param_lo"].dtype) for name, s in state.items()}
            assert dtypes == dict.fromkeys(("0.weight", "2.weight"), (torch.float32, torch.int8))


WORDS = ("param_lo", "exp_avg", "exp_avg_scale", "exp_avg_sq", "exp_avg_sq_scale")


def test_all_words_sent_make_replicas_and_codes_alone_do_not(tmp_path: Path) -> None:
    """A collective moves no version counter, so that codes without their powers of two are not noticed: documented."""
    codes = [name for name in WORDS if not name.endswith("_scale")]
    first, second = run_world(2, tmp_path, sent.broadcast_states, [WORDS, codes])
    assert (first, second[0]) == ([[], []], [])
    assert {"0 exp_avg", "0 exp_avg_sq"} <= set(second[1])
