"""How torch meets the simulated device: its module, what torch asks in C++."""
