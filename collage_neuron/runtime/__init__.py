"""The parts of a step: its preconditions, its plan, and agreement between processes."""
