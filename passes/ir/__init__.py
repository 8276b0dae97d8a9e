"""The intermediate representation: captured updates, explicit-rounding form, host scalars, and the verifier."""
