"""Where pickles of version 0.3.0 look for `Arrived`, which nobody reads any more."""

from collage_neuron.numerics.underflow import Pace

Arrived = Pace
