"""The switch of traced steps."""

from __future__ import annotations

import os

TRACE = "COLLAGE_NEURON_TRACE"
"""The environment variable with which steps are traced instead of recorded, if it is "on" (docs/development)."""


def is_on() -> bool:
    """Returns True if steps are traced."""
    return os.environ.get(TRACE) == "on"
