"""How to install what parts of tenure need beside it: one text, for a checkout as well."""

from __future__ import annotations

import re
from importlib.metadata import PackageNotFoundError, version

# those of the extras in pyproject.toml; by name, because tenure is on no index from which pip
# could take an extra
EXTRAS = {
    "paging": ("safetensors>=0.5", "numpy"),
    "transformers": ("transformers>=4.50", "accelerate>=1.0"),
    "lightning": ("lightning>=2.4",),
    "accelerate": ("accelerate>=0.34",),
}


def install_command(extra: str) -> str:
    """Return the command that installs the libraries of an extra.

    Example:
        >>> print(install_command("paging"))
        pip install "safetensors>=0.5" numpy
    """
    # double quotes, which the shells of Windows know as well
    quoted = (each if each.isalnum() else f'"{each}"' for each in EXTRAS[extra])
    return f"pip install {' '.join(quoted)}"


def require_new_enough(extra: str, *others: str) -> None:
    """Raise an error if a library of an integration is installed in a release that is too old.

    A library that is not installed is no error here, because its import raises one.

    Args:
        extra: the extra, named like its module in `tenure.integrations`.
        *others: packages that the integration can use instead of the library.

    Raises:
        ImportError: all that are installed are too old.
    """
    for requirement in EXTRAS[extra]:
        name, _, oldest = requirement.partition(">=")
        found = {each: release for each in (name, *others) if (release := _installed(each))}
        if found and all(numbers(release) < numbers(oldest) for release in found.values()):
            installed = " and ".join(f"{each} {release}" for each, release in found.items())
            raise ImportError(
                f"tenure.integrations.{extra} needs {requirement}, and {installed} is installed. "
                f"Nothing was changed. Install a newer release with: {install_command(extra)}.",
                name=name,
            )


def _installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def numbers(release: str) -> list[int]:
    """Return the first numbers of a release, which compare as it does."""
    return [int(each) for each in re.findall(r"\d+", release)[:3]]
