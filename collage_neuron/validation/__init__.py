"""Translation validation: compares the rewritten update with the optimizer's own `step()`, on a few elements."""
