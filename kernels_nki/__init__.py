"""What runs on Trainium: the runtime that emitted NKI code calls, and the kernels it was emitted into.

Imported only where the parameters are on a Neuron device; imports nothing of the user's side.
"""
