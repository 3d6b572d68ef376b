"""Memory that a library takes past torch, on the simulated device."""

# private: a program has no way to the pool that a library would take its workspaces from
from tenure.testing._device._machine import machine


def library_pool():
    return machine.devices[0].pool
