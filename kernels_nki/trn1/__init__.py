"""Generated kernels for trn1, dialect nki: see `python -m collage_neuron kernels`."""
