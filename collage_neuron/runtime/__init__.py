"""One step: what must hold before it, its plan, and how it is taken."""
