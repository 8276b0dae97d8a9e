"""Rewriting: a captured update becomes explicit-rounding form, in the storage formats of its states."""
