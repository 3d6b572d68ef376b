"""Long runs that look for what short tests can't see: growth, rare orders, rare damage.

Each module does one thing so many times as it is asked, and returns figures. `test_soak.py` asks
for little, in `make test`; `python -m tests.soak` for much, and writes
`benchmarks/results/soak.json`.
"""
