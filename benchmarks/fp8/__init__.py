"""Training a byte-level GPT with matmuls in fp8: every way to find scales against bf16 (docs/development/fp8.md)."""
