"""The compiler: capture -> expand -> store -> lower, with verification after each pass.

`capture` records an optimizer's update as a graph; the passes of `pipeline` (in `rewrite`) bring it into
explicit-rounding form; a backend runs that form. Nothing in here knows the name of an optimizer.
"""
