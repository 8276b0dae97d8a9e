"""The eager form: the user's own `step()` runs once, as written, while parameters and states present fp32 values."""
