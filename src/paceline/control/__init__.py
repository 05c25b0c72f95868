"""The control plane: who is alive, who has which samples, which round. It is on nobody's hot path."""
