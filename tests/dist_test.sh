#!/bin/sh
# The wheel, installed in a virtual environment of its own, passes the tests. Asks only for python3;
# PYTHON names another. Slow tests are left out: they have run against the same source already.
set -eu
cd "$(dirname "$0")/.."
PYTHON="${PYTHON:-python3}"
VENV=.venv-dist
BIN="$VENV/bin"

rm -rf "$VENV" dist
"$PYTHON" -m venv "$VENV"
install() {
    "$BIN/python" -m pip --disable-pip-version-check install --quiet -c constraints.txt "$@"
}
install build
"$BIN/python" -m build --quiet --wheel --outdir dist
wheel=$(echo dist/tenure-*.whl)
install "$wheel[test]"
echo "Wrote $wheel"

# The tests import each other as `tests.…`, so they stand in a folder where no `tenure/` does.
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
cp -R tests examples docs pyproject.toml "$stage"
python="$PWD/$BIN/python"
venv="$PWD/$VENV"
cd "$stage"
export PYTHONSAFEPATH=1
unset PYTHONPATH

"$python" - "$venv" <<'CHECK'
import sys
from pathlib import Path

import tenure

home = Path(tenure.__file__).resolve()
assert home.is_relative_to(Path(sys.argv[1]).resolve()), f"tenure was imported from {home}"
CHECK
export OMP_NUM_THREADS=1 # a worker for each core
"$python" -m pytest -n auto --dist loadfile -o pythonpath=. -m "not simdevice and not slow" tests
"$python" -m pytest -n auto --dist loadfile -o pythonpath=. -m "simdevice and not slow" tests --ignore=tests/scopes/test_opinfo.py
