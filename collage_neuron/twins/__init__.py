"""Steps as written: the user's own `step()` on fp32 copies of parameters and states, where capture cannot follow."""
