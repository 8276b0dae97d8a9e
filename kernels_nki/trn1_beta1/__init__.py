"""Generated kernels for trn1, dialect beta1: see `benchmarks/kernel_files.py`."""
