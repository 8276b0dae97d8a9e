"""Translation validation: the rewritten update against the optimizer's own `step()`, on a few elements."""
