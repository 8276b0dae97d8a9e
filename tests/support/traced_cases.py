"""The one table of updates for steps whose operations wait (`collage_neuron/trace`), and what runs them."""

from __future__ import annotations

import traced_cases_of_a_reader  # noqa: F401  # the modules of cases add to the tables
import traced_computed  # noqa: F401
import traced_launched  # noqa: F401
from traced_updates import COMPUTED, LAUNCHED, Stepping, error, initial, set_gradients

__all__ = ["COMPUTED", "LAUNCHED", "Stepping", "error", "initial", "set_gradients"]
