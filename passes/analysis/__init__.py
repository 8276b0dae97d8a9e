"""What a captured graph says of its states and of the parameter."""
