"""The rules, which rewrite aten operations to explicit-rounding form: one rule per operation, in the table `RULES`.

A rule takes the arithmetic and the operation's operands. It reads them as plain values, computes in fp32 and passes the
result to `a.round`, which rounds in bf16 arithmetic and does nothing in fp32 arithmetic; increments of a state go
through `add_to`. A kind of value with a better way takes over the operation (`table`), so that no rule knows any
kind of value.
"""

# Each registers its rules, in the order of the table in docs/development/coverage.md.
from collage_neuron.passes.rewrite.rules import elementwise, masks, tensors
from collage_neuron.passes.rewrite.rules.elementwise import add_to
from collage_neuron.passes.rewrite.rules.table import RULES, rule, rule_for
from collage_neuron.passes.rewrite.rules.tensors import CARRIES

__all__ = ["CARRIES", "RULES", "add_to", "elementwise", "masks", "rule", "rule_for", "tensors"]
