"""Generated kernels for trn3, dialect nki: see `python -m collage_neuron kernels`."""
