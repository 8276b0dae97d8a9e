"""From the recorded operations on one parameter, which write in place, to a functional graph."""
