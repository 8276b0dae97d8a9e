"""What a step would do, recorded: for which parameters one recording stands, and what else a step changes."""
