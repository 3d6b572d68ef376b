"""Operators of torch on the simulated device: each runs on host tensors over the same bytes."""
