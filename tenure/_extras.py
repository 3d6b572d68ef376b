"""How to install what parts of tenure need beside it: one text, for a checkout as well."""

from __future__ import annotations

# those of the extras in pyproject.toml; by name, because tenure is on no index from which pip
# could take an extra
EXTRAS = {
    "paging": ("safetensors>=0.5", "numpy"),
    "transformers": ("transformers>=5", "accelerate>=1.15"),
    "lightning": ("lightning>=2.5",),
    "accelerate": ("accelerate>=1.15",),
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
