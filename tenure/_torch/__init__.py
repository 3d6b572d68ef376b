"""Every private name of torch; a missing one stops only what needs it, in one clear sentence."""
