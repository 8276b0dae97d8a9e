"""What lasts between two steps: words of parameters and states, and what is remembered of them."""

from collage_neuron.states.store import States

__all__ = ["States"]  # pickles of earlier versions name it here
