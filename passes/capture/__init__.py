"""Capture, which records an optimizer's own `step()` as a functional graph, without side effects."""
