"""Ask paged models for memory, as work does that has run out of it."""

# private: a retry asks for what its error names, and a test wants to choose the bytes
from tenure._registries import ask_to_shrink as ask_to_shrink
