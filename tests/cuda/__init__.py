"""Checks that need a GPU, each a plain function; `run.sh` runs them, without pytest."""
