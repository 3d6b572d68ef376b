"""What to install is said so that it can be: by names that an index has."""

import importlib
import re
import shlex
import tomllib
from pathlib import Path

import pytest
from torch import nn

from tenure.paging import PagingError, load_paged
from tests.programs import run_program

_ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_OFFERED = _PROJECT["optional-dependencies"]


def _told_to_install(message):
    return shlex.split(re.search(r"with: pip install (.*)\.$", message)[1])


def test_paging_names_what_its_extra_brings(tmp_path, monkeypatch):
    (tmp_path / "model.safetensors").write_bytes(bytes(16))

    def absent(name):
        raise ModuleNotFoundError(f"No module named {name!r}")

    monkeypatch.setattr(importlib, "import_module", absent)
    with pytest.raises(
        PagingError,
        match=r"^Reading model\.safetensors takes safetensors and numpy \(No module named 'safet",
    ) as caught:
        load_paged(nn.Linear(1, 1, device="meta"), tmp_path, "cpu")
    assert _told_to_install(str(caught.value)) == _OFFERED["paging"]


# as if the library were not there, so that it isn't imported where it is new enough
_PROGRAM = """
import importlib, sys
sys.modules["transformers"] = None
sys.path.insert(0, {folder!r})
try:
    importlib.import_module("tenure.integrations.{extra}")
except ImportError as error:
    print(error)
"""


def _imported(extra, folder, **releases):
    """What an integration says where pip seems to have installed packages."""
    for name, release in releases.items():
        metadata = folder / f"{name}-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")
    done = run_program(_PROGRAM.format(folder=str(folder), extra=extra))
    assert (done.stderr, done.returncode) == ("", 0)
    return done.stdout.strip()


@pytest.mark.parametrize(
    ("extra", "installed"),
    [
        ("transformers", {"transformers": "4.9.2", "accelerate": "1.15.0"}),
        ("transformers", {"transformers": "5.1.0", "accelerate": "0.9.0"}),
        ("accelerate", {"accelerate": "0.9.0"}),
        ("lightning", {"lightning": "1.9.5", "pytorch_lightning": "1.9.5"}),
    ],
)
def test_a_library_that_is_too_old_is_refused_before_it_is_imported(extra, installed, tmp_path):
    message = _imported(extra, tmp_path, **installed)
    begin = rf"tenure\.integrations\.{extra} needs \w+>=[\d.]+, and .*\d is installed\. Nothing was"
    assert re.match(begin, message)
    assert " Install a newer release with: " in message
    assert _told_to_install(message) == _OFFERED[extra]


_LAZY = """
import sys
from importlib import import_module
import tenure.integrations
libraries = ("torch", "transformers", "accelerate", "lightning", "pytorch_lightning")
assert not sys.modules.keys() & {*libraries}
from tenure.integrations import accelerate, lightning
assert not sys.modules.keys() & {*libraries[1:]}
del sys.modules["tenure.integrations.lightning"]
sys.modules |= dict.fromkeys(libraries[1:])
for name in ("lightning", "transformers"):
    try:
        import_module(f"tenure.integrations.{name}")
    except ImportError as error:
        print(error)
"""


@pytest.mark.slow
def test_libraries_are_imported_by_who_uses_them_and_a_missing_one_is_named():
    done = run_program(_LAZY)
    assert done.returncode == 0, done.stderr
    assert 'pip install "lightning>=2.4"' in done.stdout
    assert 'pip install "transformers>=4.50" "accelerate>=1.0"' in done.stdout


def test_one_of_two_packages_of_lightning_is_enough(tmp_path):
    pytest.importorskip("lightning", reason="needs lightning")
    assert _imported("lightning", tmp_path, lightning="1.9.5", pytorch_lightning="2.6.0") == ""


def test_a_release_is_compared_by_its_numbers(tmp_path):
    message = _imported("transformers", tmp_path, transformers="10.0.0rc1+local", accelerate="1.0")
    assert "one of them can't be imported" in message
