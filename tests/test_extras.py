"""What to install is said so that it can be: by names that an index has."""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from tenure._extras import EXTRAS, install_command

_ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_OFFERED = _PROJECT["optional-dependencies"]
_COMMAND = re.compile(r"pip install ([^`\n]+)")
# a checkout, and the index that PyTorch has of its own
_ELSEWHERE = re.compile(r"(^|[ \"'])(\.|/path/to/checkout)(\[|[ \"']|$)|--index-url")


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_command_names_what_the_extra_brings(extra):
    assert list(EXTRAS[extra]) == _OFFERED[extra]
    assert shlex.split(install_command(extra)) == ["pip", "install", *_OFFERED[extra]]


def _commands():
    for folder in ("tenure", "docs"):
        for path in sorted((_ROOT / folder).rglob("*")):
            if path.suffix in (".py", ".md"):
                for line in path.read_text(encoding="utf-8").splitlines():
                    for found in _COMMAND.finditer(line):
                        yield path.name, found[1]


def test_all_that_is_to_be_installed_is_on_an_index_or_in_a_checkout():
    known = {requirement for extra in _OFFERED.values() for requirement in extra}
    commands = list(_commands())
    assert len(commands) > 5
    for path, command in commands:
        # what the helper builds is asked above
        if (path == "_extras.py" and "{" in command) or _ELSEWHERE.search(command):
            continue
        named = shlex.split(command)
        assert named, path
        assert set(named) <= known, (path, command)
