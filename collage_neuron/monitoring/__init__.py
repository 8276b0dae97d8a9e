"""What precision costs a run, while it runs: measured steps, records, logs."""
