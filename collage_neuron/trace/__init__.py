"""Traced steps: the user's own `step()` runs once, on tensors whose values wait, and what it did is launched."""
