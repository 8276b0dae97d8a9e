"""Analyses of a captured graph: the roles of its states, the parameter's path, value numbering, perturbation."""
