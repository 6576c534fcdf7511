"""The fast paths: Triton kernels, fp8, bf16 working weights."""
