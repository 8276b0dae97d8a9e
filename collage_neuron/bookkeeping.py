"""Where pickles from before there were sub-packages look for `Bookkeeping`; the code is in `states/bookkeeping.py`."""

from collage_neuron.states.bookkeeping import Bookkeeping as Bookkeeping
