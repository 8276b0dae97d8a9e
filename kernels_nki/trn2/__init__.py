"""Generated kernels for trn2, dialect nki: see `python -m collage_neuron kernels`."""
