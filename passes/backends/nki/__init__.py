"""From explicit-rounding form to an NKI kernel: `legalize` -> `select` -> `schedule` -> `tiling` -> `emit`.

`legalize` writes the graph in what Trainium's engines can do, `select` lists the instructions that can compute each
value, `schedule` picks among them so that the busiest engine is least busy, `emit` writes the kernel as Python.
`hardware` holds what is documented about the hardware, as data.
"""
