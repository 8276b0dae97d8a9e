"""The commands of `python -m collage_neuron`."""
