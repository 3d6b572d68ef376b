#!/bin/sh
# The wheel that the sdist gives, installed in a virtual environment of its own, holds every file,
# imports with what its metadata asks for alone, and passes the tests that the sdist has, of what
# packaging can break: the surface, the command, and a file of each room. The others have run
# against the same source already. Packages that .venv has are linked, not installed again.
set -eu
cd "$(dirname "$0")/.."
VENV=.venv-dist
BIN="$VENV/bin"

rm -rf "$VENV" dist
.venv/bin/python -m venv "$VENV"
install() {
    "$BIN/python" -m pip --disable-pip-version-check install --quiet --no-compile -c constraints.txt "$@"
}
install build
# without being told, it makes the wheel from the sdist
"$BIN/python" -m build --quiet --outdir dist
sdist=$(echo dist/tenure-*.tar.gz)
wheel=$(echo dist/tenure-*.whl)
install --no-deps "$wheel"
echo "Wrote $sdist and $wheel"
site=$("$BIN/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
packages=$(.venv/bin/python -c 'import sysconfig; print(sysconfig.get_path("purelib"))')

.venv/bin/python - "$site" <<'LINK'
import sys
from importlib.metadata import Distribution, distribution
from pathlib import Path

from packaging.requirements import Requirement

site = Path(sys.argv[1])
(metadata,) = site.glob("tenure-*.dist-info")
waiting, linked = Distribution.at(metadata).requires, set()
while waiting:
    asked = Requirement(waiting.pop())
    if asked.name in linked or (asked.marker and not asked.marker.evaluate({"extra": ""})):
        continue
    linked.add(asked.name)
    found = distribution(asked.name)
    assert asked.specifier.contains(found.version, prereleases=True), f"{asked}: {found.version}"
    for name in {file.parts[0] for file in found.files} - {"..", "__pycache__"}:
        if not (site / name).exists():
            (site / name).symlink_to(found.locate_file(name))
    waiting += found.requires or []
LINK

# The tests import each other as `tests.…`, so they stand in a folder where no `tenure/` does.
stage=$(mktemp -d)
trap 'rm -rf "$stage"' EXIT
tar -xzf "$sdist" --strip-components=1 -C "$stage"
for file in LICENSE README.md CHANGELOG.md SECURITY.md tenure/py.typed benchmarks/results; do
    [ -e "$stage/$file" ] || { echo "the sdist lacks $file" >&2; exit 1; }
done
rm -r "$stage/tenure"
python="$PWD/$BIN/python"
venv="$PWD/$VENV"
source="$PWD/tenure"
cd "$stage"
export PYTHONSAFEPATH=1
unset PYTHONPATH

"$python" - "$venv" "$source" <<'CHECK'
import importlib
import pkgutil
import sys
from pathlib import Path

import tenure

home, source = Path(tenure.__file__).resolve().parent, Path(sys.argv[2])
assert home.is_relative_to(Path(sys.argv[1]).resolve()), f"tenure was imported from {home}"
files = {path.relative_to(source) for path in source.rglob("*") if "__pycache__" not in path.parts}
missing = sorted(str(path) for path in files if not (home / path).exists())
assert not missing, f"the wheel lacks {missing}"
modules = [m.name for m in pkgutil.walk_packages(tenure.__path__, "tenure.")]
of_extras = {"IPython", "safetensors", "numpy", "transformers", "lightning", "accelerate", "pytest"}
for name in modules:
    try:
        if not name.endswith("__main__"):
            importlib.import_module(name)
    except ImportError as error:
        # an integration says which extra it needs, because of the library that is not there
        names = {error.name, getattr(error.__cause__, "name", None)}
        if not names & of_extras:
            raise
print(f"{len(files)} files and {len(modules)} modules of the wheel are in place")
CHECK
# behind all that is there: the tests ask for more than tenure does
echo "$packages" > "$site/tests.pth"
export OMP_NUM_THREADS=1 # a worker for each core
"$python" -m pytest -n auto --dist loadfile -o pythonpath=. \
    -m "not simdevice and not slow and not exhaustive" \
    tests/test_*.py tests/cli/test_cli.py tests/cli/test_demo.py tests/scopes/test_scope.py tests/adaptive/test_toma.py \
    tests/profiler/lines/test_line_profiler.py tests/profiler/lines/test_mlrun.py \
    tests/paging/checkpoint/test_files.py
"$python" -m pytest -n auto --dist loadfile -o pythonpath=. \
    -m "simdevice and not slow and not exhaustive" \
    tests/testing/test_simulated_accelerator.py tests/testing/test_fault_sweep.py
