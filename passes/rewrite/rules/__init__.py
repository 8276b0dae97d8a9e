"""What each aten operation becomes in explicit-rounding form: one rule per operation, in the table `RULES`.

A rule takes the arithmetic and the operation's operands. It reads them as plain values, computes in fp32 and hands the
result to `a.round`, which is one rounding in bf16 arithmetic and none in fp32; what is added to a state goes through
`add_to`. A value that does better than that takes the operation over (`registry`), so that no rule knows any kind of
value.
"""

# Each registers its rules, in the order of the table in docs/coverage.md.
from collage_neuron.passes.rewrite.rules import elementwise, masks, tensors
from collage_neuron.passes.rewrite.rules.elementwise import add_to
from collage_neuron.passes.rewrite.rules.registry import RULES, Rule, operation, rule, rule_for
from collage_neuron.passes.rewrite.rules.tensors import CARRIES

__all__ = ["CARRIES", "RULES", "Rule", "add_to", "elementwise", "masks", "operation", "rule", "rule_for", "tensors"]
