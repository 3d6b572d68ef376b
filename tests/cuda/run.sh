#!/bin/sh
# Checks tenure on the CUDA device of this machine: a line for each check, and OUT/cuda.json.
#   sh tests/cuda/run.sh [OUT] [--dry] [--only NAME] [--list]
# Nothing has to be installed. PYTHON names the interpreter that has torch.
set -eu
cd "$(dirname "$0")/../.."
if [ -z "${PYTHON:-}" ]; then
    PYTHON=python3
    [ ! -x .venv/bin/python ] || PYTHON=.venv/bin/python
fi
PYTHONPATH=$PWD${PYTHONPATH:+:$PYTHONPATH}
OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
export PYTHONPATH OMP_NUM_THREADS PYTHONUNBUFFERED=1
"$PYTHON" -c 'import importlib.util as u, sys; sys.exit(not u.find_spec("torch"))' || {
    echo "$PYTHON has no torch. Set PYTHON to an interpreter that has it." >&2
    exit 2
}
exec "$PYTHON" -m tests.cuda "$@"
