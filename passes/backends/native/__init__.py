"""The native backend: an update becomes machine code for this CPU, which works on the tensors in place, in one pass."""
