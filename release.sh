#!/bin/sh
# Checks what a release needs, writes its heading into the changelog, tags it and builds both
# archives: sh release.sh [--dry-run] VERSION. Asks only for git, and for python3 with `build`; PYTHON
# names another. With --dry-run it checks and builds in a copy, and changes nothing here.
# It pushes nothing: that is said at its end.
set -eu
cd "$(dirname "$0")"
PYTHON="${PYTHON:-.venv/bin/python}"
dry=no
if [ "${1:-}" = "--dry-run" ]; then
    dry=yes
    shift
fi
version="${1:-}"
tag="v$version"
problems=0
say() { printf '%s\n' "$*"; }
wrong() {
    say "not ready: $*"
    problems=$((problems + 1))
}

case "$version" in
    [0-9]*.[0-9]*.[0-9]*) ;;
    *)
        say "usage: sh release.sh [--dry-run] VERSION, as in: sh release.sh --dry-run 0.1.0"
        exit 2
        ;;
esac
[ -z "$(git status --porcelain)" ] || wrong "the tree has changes that are not committed"
git rev-parse -q --verify "refs/tags/$tag" > /dev/null && wrong "the tag $tag is there already"
grep -q "^version = \"$version\"\$" pyproject.toml || wrong "pyproject.toml has another version"
grep -q "^__version__ = \"$version\"\$" tenure/__init__.py || wrong "tenure/__init__.py has another version"
grep -q "^version: $version\$" CITATION.cff || wrong "CITATION.cff has another version"
told=$("$PYTHON" -m tenure --version) || told="an error"
[ "$told" = "tenure $version" ] || wrong "tenure --version says: $told"
grep -q "^## \[*$version\]*\( \|\$\)" CHANGELOG.md && wrong "CHANGELOG.md has a section $version already"
# something between this heading and the next
awk '/^## Unreleased/ { on = 1; next } /^## / { on = 0 } on && /^- / { n++ } END { exit !n }' CHANGELOG.md ||
    wrong "CHANGELOG.md says nothing under Unreleased"
for file in LICENSE README.md SECURITY.md tenure/py.typed; do
    [ -e "$file" ] || wrong "$file is missing"
done
[ "$problems" = 0 ] || exit 1
say "checked: clean tree, version $version everywhere, a changelog for it, no tag $tag yet"

heading="## $version - $(date -u +%Y-%m-%d)"
write_heading() {
    awk -v heading="$heading" '{ print } /^## Unreleased/ { print ""; print heading }' CHANGELOG.md > CHANGELOG.new
    mv CHANGELOG.new CHANGELOG.md
}
if [ "$dry" = yes ]; then
    copy=$(mktemp -d)
    trap 'rm -rf "$copy"' EXIT
    git archive HEAD | tar -x -C "$copy"
    python=$(command -v "$PYTHON")
    case "$python" in /*) ;; *) python="$PWD/$python" ;; esac
    cd "$copy"
    write_heading
    "$python" -m build --outdir dist . > build.log 2>&1 || { cat build.log; exit 1; }
    (cd dist && ls -l -- *)
    say "would write \"$heading\" into CHANGELOG.md, commit it, and tag that $tag"
    exit 0
fi
write_heading
git commit -q -m "Release $version" CHANGELOG.md
git tag -a "$tag" -m "tenure $version"
rm -rf dist
"$PYTHON" -m build --outdir dist .
say "tagged $tag and built dist/. Test it with make dist-test, then push the branch and the tag, and upload dist/."
