"""Deterministic tensor lifetimes for PyTorch."""
