import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import tenure

_SCRIPT = Path(__file__).parent.parent / "release.sh"
# a Python whose `-m build` makes two files, for the real one asks for the network
_PYTHON = """#!/bin/sh
if [ "$1 $2" = "-m build" ]; then
    mkdir -p "$4"
    touch "$4/tenure-1.2.3.tar.gz" "$4/tenure-1.2.3-py3-none-any.whl"
    cp CHANGELOG.md "$4/CHANGELOG.md"
    exit
fi
exec {executable} "$@"
"""
_FILES = {
    "pyproject.toml": 'version = "1.2.3"\n',
    "tenure/__init__.py": '__version__ = "1.2.3"\n',
    "tenure/__main__.py": 'print("tenure 1.2.3")\n',
    "tenure/py.typed": "",
    "CHANGELOG.md": "# Changelog\n\n## Unreleased\n\n### Added\n\n- A thing.\n",
    "LICENSE": "",
    "README.md": "",
    "CITATION.cff": "version: 1.2.3\n",
    "SECURITY.md": "",
    ".gitignore": "dist/\n__pycache__/\n",
}


class Repository:
    def __init__(self, folder):
        self.folder = folder / "repository"
        for name, text in _FILES.items():
            self.write(name, text)
        shutil.copy(_SCRIPT, self.folder)
        self.python = folder / "python"
        self.python.write_text(_PYTHON.format(executable=sys.executable))
        self.python.chmod(0o755)
        self.git("init", "-q", "-b", "main")
        self.commit()

    def write(self, name, text):
        (self.folder / name).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / name).write_text(text)

    def git(self, *arguments):
        done = self.run("git", "-c", "commit.gpgsign=false", *arguments)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-q", "-m", "A commit")

    def release(self, *arguments):
        return self.run("sh", "release.sh", *arguments)

    def run(self, *command):
        environment = {
            **{name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
            **{f"GIT_{who}_NAME": "a" for who in ("AUTHOR", "COMMITTER")},
            **{f"GIT_{who}_EMAIL": "a@example.org" for who in ("AUTHOR", "COMMITTER")},
            "PYTHON": str(self.python),
        }
        return subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, check=False
        )


@pytest.fixture
def repository(tmp_path):
    if shutil.which("git") is None or shutil.which("sh") is None:
        pytest.skip("releases are made with git and sh")
    return Repository(tmp_path)


def test_a_release_names_its_changes_tags_and_builds_and_a_dry_run_changes_nothing(repository):
    done = repository.release("--dry-run", "1.2.3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "tenure-1.2.3.tar.gz" in done.stdout
    assert 'would write "## 1.2.3 - ' in done.stdout
    assert repository.git("status", "--porcelain") == repository.git("tag") == ""
    assert not (repository.folder / "dist").exists()
    done = repository.release("1.2.3")
    assert done.returncode == 0, done.stdout + done.stderr
    assert repository.git("tag") == "v1.2.3\n"
    assert repository.git("log", "-1", "--format=%s") == "Release 1.2.3\n"
    assert repository.git("status", "--porcelain") == ""
    head, _, changes = (repository.folder / "CHANGELOG.md").read_text().partition("\n## 1.2.3 - ")
    assert head == "# Changelog\n\n## Unreleased\n"
    assert changes.endswith("\n\n### Added\n\n- A thing.\n")
    # what is in the archives is what the tag has
    assert (repository.folder / "dist" / "CHANGELOG.md").read_text().count("## 1.2.3") == 1
    again = repository.release("1.2.3")
    assert again.returncode == 1
    assert "the tag v1.2.3 is there already" in again.stdout
    assert "CHANGELOG.md has a section 1.2.3 already" in again.stdout


def test_what_does_not_fit_is_named_and_nothing_is_made(repository):
    wrong = {
        "pyproject.toml": ('version = "1.2.4"\n', "pyproject.toml has another version"),
        "tenure/__init__.py": ("", "tenure/__init__.py has another version"),
        "CITATION.cff": ("version: 1.2.4\n", "CITATION.cff has another version"),
        "tenure/__main__.py": ('print("tenure 9")\n', "tenure --version says: tenure 9"),
        "CHANGELOG.md": ("## Unreleased\n\n## 1.0.0\n\n- Old.\n", "says nothing under Unreleased"),
    }
    for name, (text, _) in wrong.items():
        repository.write(name, text)
    done = repository.release("1.2.3")
    assert (done.returncode, repository.git("tag")) == (1, "")
    assert all(told in done.stdout for _, told in wrong.values())
    assert "the tree has changes that are not committed" in done.stdout
    done = repository.release("next")
    assert done.returncode == 2
    assert done.stdout.startswith("usage: sh release.sh")


def test_the_package_has_the_version_of_its_metadata():
    (told,) = re.findall(
        r'^version = "(.*)"$', (_SCRIPT.parent / "pyproject.toml").read_text(), re.MULTILINE
    )
    assert tenure.__version__ == told
