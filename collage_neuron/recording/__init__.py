"""Recordings of a step: which parameters share one, whether parameters are independent, and host side effects."""
