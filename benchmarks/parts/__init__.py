"""What the benchmarks are made of."""
