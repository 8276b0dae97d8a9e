"""From explicit-rounding form to an NKI kernel: `values` -> `select` -> `assign` -> `tiling` -> `emit`.

`values` writes the graph in what Trainium's engines can do, `select` lists the instructions that can compute each
value, `assign` picks among them so that the busiest engine is least busy, `emit` writes the kernel as Python.
`engines` holds what is documented about the hardware, as data.
"""
