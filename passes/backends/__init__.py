"""Backends, which turn an update in explicit-rounding form into something that runs."""
