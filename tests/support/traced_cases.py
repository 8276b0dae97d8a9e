"""The one table of updates that were written to make steps wrong (`collage_neuron/trace`), and what runs them."""

from __future__ import annotations

import cases_of_states  # noqa: F401  # the modules of cases add to the tables
import cases_of_values  # noqa: F401
from cases_of_rates import RATED
from traced_updates import COMPUTED, LAUNCHED, Stepping, error, initial, left, set_gradients

__all__ = ["COMPUTED", "LAUNCHED", "RATED", "Stepping", "error", "initial", "left", "set_gradients"]
