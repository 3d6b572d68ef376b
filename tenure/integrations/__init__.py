"""The loops that people run: a module for each library, which it imports only when it is asked for.

None of them changes the global state of the library, and none is needed by the rest of tenure.
"""
