"""How torch meets the simulated device: registration, its module, what torch asks in C++."""
