"""Kernels for Trainium: generated from updates by `passes/lower_nki.py`, kept as files to be read and reviewed.

A folder for each target, and one for the older dialect: `trn1`, `trn1_beta1`, `trn2`, `trn3`. `python -m collage_neuron
kernels` writes them, `--check` says whether they are up to date, `--report` what they cost. Other optimizers' kernels
are generated when they first run. Importing a file needs NKI; importing this package does not.
"""
