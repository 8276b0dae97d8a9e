"""Matmuls in 8 bits: infers the scale of every operand from the joint forward and backward graph, and rewrites."""
