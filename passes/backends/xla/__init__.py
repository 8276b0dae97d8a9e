"""The XLA backend: an update as one user computation, its roundings as reduce-precision."""
