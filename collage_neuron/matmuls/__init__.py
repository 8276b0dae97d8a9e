"""`compile(model, matmul="fp8")`: runs the matmuls of a model's linear layers in 8 bits."""
