"""Training with matmuls in fp8: every way to find scales against bf16, on a byte-level GPT; tables of docs/fp8.md."""
