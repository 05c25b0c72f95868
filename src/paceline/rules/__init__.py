"""Pure rules: numbers and tensors in, numbers and tensors out."""
