"""The compiler: capture -> expand -> verify -> lower. Each file is one pass, or a data type or analysis of a pass.

`capture` records an optimizer's update as a graph, `expand` rewrites it into explicit-rounding form,
`verify` checks that form, and `lower_*` turn it into something that runs. Nothing in here knows the name of
an optimizer.
"""
