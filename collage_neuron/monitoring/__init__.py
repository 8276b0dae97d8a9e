"""Measures how much of each update arrives while training runs: records, logs, writers."""
