"""Capture: an optimizer's own `step()` becomes a functional graph, and leaves no trace."""
