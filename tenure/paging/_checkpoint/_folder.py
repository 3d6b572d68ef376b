"""Which file of a folder holds a model's weights.

Invariant: a choice is never a guess: a name that libraries give to whole models, or the only file.
"""

from __future__ import annotations

from pathlib import Path

from tenure._errors import PagingError
from tenure._text import listed

_INDEX, _FILE = ".safetensors.index.json", ".safetensors"
_STEMS = ("model", "diffusion_pytorch_model")
"""As transformers and timm call it, and as diffusers does."""
_N_NAMED = 6


def weights_in(folder: Path) -> Path:
    """The index, or the only file, of the weights in a folder.

    Raises:
        PagingError: there is none, or more than one that could be meant.
    """
    usual = (folder / f"{stem}{suffix}" for stem in _STEMS for suffix in (_INDEX, _FILE))
    found = next(filter(Path.exists, usual), None)
    if found is not None:
        return found
    for suffix in (_INDEX, _FILE):
        files = sorted(folder.glob(f"*{suffix}"))
        if len(files) == 1:
            return files[0]
        if files:
            raise PagingError(
                f"{str(folder)!r} is a folder with {_named(files)} in it, and which of them is "
                "meant can't be told. Name one file, or an index of several."
            )
    raise PagingError(
        f"{str(folder)!r} is a folder with neither {' nor '.join(_usual_names())} in it, nor "
        f"another safetensors file.{_elsewhere(folder)} Name a safetensors file, or the index of "
        "several."
    )


def _usual_names() -> list[str]:
    return [f"{_STEMS[0]}{suffix}" for suffix in (_INDEX, _FILE)]


def _elsewhere(folder: Path) -> str:
    """The folders inside that have such files, as a pipeline of several models does."""
    inside = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    holding = [each for each in inside if any(each.glob(f"*{_FILE}"))]
    return f" There are such files in its folders {_named(holding)}." if holding else ""


def _named(paths: list[Path]) -> str:
    return listed([repr(path.name) for path in paths], _N_NAMED)
