"""Where pickles from before there were sub-packages look for `History`; the code is in `validation/validate.py`."""

from collage_neuron.validation.validate import History as History
