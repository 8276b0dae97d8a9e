"""Accuracy of strategies, and of other people's optimizers, against float64: what docs/accuracy.md is written from."""
