"""Backends: an update in explicit-rounding form becomes something that runs."""
