"""The machine of the simulated device: its clock on the host, and memory that torch doesn't see."""

# private: a program has no way to the pool that a library would take its workspaces from, and
# none to the host's clock while work is under way
from tenure.testing._device._machine import machine as machine


def library_pool():
    return machine.devices[0].pool
