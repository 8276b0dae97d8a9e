"""What passes work on: captured updates, updates in explicit-rounding form, their numbers, and what must hold."""
