"""What to install is said so that it can be: by names that an index has."""

import importlib
import re
import shlex
import sys
import tomllib
from pathlib import Path

import pytest

from tenure._extras import EXTRAS, install_command, require_new_enough

_ROOT = Path(__file__).parents[1]
_PROJECT = tomllib.loads((_ROOT / "pyproject.toml").read_text())["project"]
_OFFERED = _PROJECT["optional-dependencies"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_a_command_names_what_the_extra_brings(extra):
    assert list(EXTRAS[extra]) == _OFFERED[extra]
    assert shlex.split(install_command(extra)) == ["pip", "install", *_OFFERED[extra]]


def _install(folder, **releases):
    """Make a folder in which pip seems to have installed packages."""
    for name, release in releases.items():
        metadata = folder / f"{name}-{release}.dist-info" / "METADATA"
        metadata.parent.mkdir()
        metadata.write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {release}\n")


@pytest.mark.parametrize(
    ("extra", "installed"),
    [
        ("transformers", {"transformers": "4.9.2", "accelerate": "1.15.0"}),
        ("transformers", {"transformers": "5.1.0", "accelerate": "0.9.0"}),
        ("accelerate", {"accelerate": "0.9.0"}),
        ("lightning", {"lightning": "1.9.5", "pytorch_lightning": "1.9.5"}),
    ],
)
def test_a_library_that_is_too_old_is_refused_before_it_is_imported(
    extra, installed, tmp_path, monkeypatch
):
    _install(tmp_path, **installed)
    monkeypatch.syspath_prepend(tmp_path)
    module = f"tenure.integrations.{extra}"
    monkeypatch.delitem(sys.modules, module, raising=False)
    with pytest.raises(ImportError) as caught:
        importlib.import_module(module)
    message = str(caught.value)
    assert re.match(rf"{module} needs \w+>=[\d.]+, and .*\d is installed\. Nothing was", message)
    assert message.endswith(f"Install a newer release with: {install_command(extra)}.")


def test_one_of_two_packages_of_lightning_is_enough(tmp_path, monkeypatch):
    _install(tmp_path, lightning="1.9.5", pytorch_lightning="2.6.0")
    monkeypatch.syspath_prepend(tmp_path)
    require_new_enough("lightning", "pytorch-lightning")


@pytest.mark.parametrize("release", ["5", "5.0", "5.0.0rc1", "5.1.0.dev0", "10.0.0+local"])
def test_a_release_is_compared_by_its_numbers(release, tmp_path, monkeypatch):
    _install(tmp_path, transformers=release)
    monkeypatch.syspath_prepend(tmp_path)
    require_new_enough("transformers")
