"""Compiling: models and optimizers are converted, or rejected before anything is changed."""
