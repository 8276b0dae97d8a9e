"""Analyses of a captured graph: values as sums of products, the roles of states, the parameter's path."""
