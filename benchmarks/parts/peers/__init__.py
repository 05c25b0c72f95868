"""Parts of the comparison with what people use today: `benchmarks/peers.py`."""
