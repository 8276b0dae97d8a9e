"""Generated kernels for trn2, dialect nki: see `benchmarks/kernel_files.py`."""
