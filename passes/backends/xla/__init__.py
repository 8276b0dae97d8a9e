"""The XLA backend, which runs an update as one user computation, with roundings as reduce-precision."""
