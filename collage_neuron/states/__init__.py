"""State that lasts between steps: the words of parameters and states, and the optimizer's bookkeeping."""

from collage_neuron.states.store import States

__all__ = ["States"]  # pickles of earlier versions name it here
