"""Rewriting, which turns a captured update into explicit-rounding form, in the storage formats of its states."""
