"""The peak of a training step, told before it runs."""
