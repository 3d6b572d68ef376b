"""The machine that is simulated: memory, time, streams, random numbers; no operator of torch."""
