"""Generated kernels for trn1, dialect beta1: see `python -m collage_neuron kernels`."""
