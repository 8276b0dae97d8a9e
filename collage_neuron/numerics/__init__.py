"""Numbers: error-free transforms, storage formats, strategies, random bits. Knows nothing of optimizers or graphs."""
