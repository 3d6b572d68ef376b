"""Which files hold a model's weights, what is in them, and where.

Invariant: the files are the user's. They are read, and neither written nor copied. Which of a
folder's are taken is never a guess: a name that libraries give to whole models, or the only file.
"""

from __future__ import annotations

import errno
import importlib
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from tenure._errors import PagingError
from tenure._extras import install_command
from tenure._report_files import is_no_file
from tenure._show import progress
from tenure._text import listed

from .._host import MappedFile

_INDEX, _FILE = ".safetensors.index.json", ".safetensors"
_STEMS = ("model", "diffusion_pytorch_model")
"""As transformers and timm call it, and as diffusers does."""
_N_NAMED = 6
_LENGTH_BYTES = 8
# The names of the format, https://github.com/huggingface/safetensors#format
_DTYPES = {
    "BOOL": torch.bool,
    "U8": torch.uint8, "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
    "I8": torch.int8, "I16": torch.int16, "I32": torch.int32, "I64": torch.int64,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2, "F8_E8M0": torch.float8_e8m0fnu,
    "F16": torch.float16, "BF16": torch.bfloat16, "F32": torch.float32, "F64": torch.float64,
    "C64": torch.complex64,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file.

    Attributes:
        file: the file.
        offset: the byte that it begins at.
        dtype: its dtype; the format's own name for one that torch does not have.
        shape: its shape.
    """

    file: MappedFile
    offset: int
    dtype: torch.dtype | str
    shape: tuple[int, ...]

    @property
    def n_bytes(self) -> int:
        """Its bytes; 0 where torch does not have the dtype."""
        if not isinstance(self.dtype, torch.dtype):
            return 0
        return torch.Size(self.shape).numel() * self.dtype.itemsize

    def view(self) -> Tensor:
        """Return a tensor over the file; writing to it does not reach the file."""
        assert isinstance(self.dtype, torch.dtype)
        return self.file.tensor(self.dtype, self.shape, self.offset)


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Safetensors files that belong together.

    Attributes:
        name: of the file that was asked for.
        files: all of them.
        tensors: what they hold, by name.
    """

    name: str
    files: list[MappedFile]
    tensors: dict[str, StoredTensor]

    def close(self) -> None:
        """Close the files."""
        for file in self.files:
            file.close()


def open_checkpoint(path: str | Path) -> Checkpoint:
    """Open a safetensors file, the index of several, or a folder with either of them.

    Raises:
        PagingError: it is no path, or nothing is there, or it is damaged, or safetensors is not
            installed.
    """
    if not isinstance(path, str | Path):
        raise PagingError(f"weights={path!r}: write the path of a safetensors file or of a folder.")
    try:
        chosen = weights_in(Path(path)) if Path(path).is_dir() else Path(path)
        shards = _shards(chosen)
    except (OSError, ValueError) as error:
        _refuse(Path(path), error)
    checkpoint = Checkpoint(chosen.name, [], {})
    try:
        with progress("opening files", len(shards)) as done:
            for shard, expected in shards:
                _add(checkpoint, shard, expected)
                done(1)
    except BaseException:
        checkpoint.close()
        raise
    return checkpoint


def weights_in(folder: Path) -> Path:
    """Return the index, or the only file, of the weights in a folder.

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


def _shards(path: Path) -> list[tuple[Path, set[str] | None]]:
    """Return the files, each with the names that the index says it holds."""
    if path.suffix != ".json":
        return [(path, None)]
    _check_kind(path)
    return list(_by_file(path, path.read_bytes()).items())


def _by_file(path: Path, text: bytes) -> dict[Path, set[str]]:
    try:
        entries = dict(json.loads(text)["weight_map"])
        by_file: dict[Path, set[str]] = {}
        for name, file_name in entries.items():
            by_file.setdefault(path.parent / file_name, set()).add(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PagingError(
            f"{path.name} is no index of safetensors files: a JSON object with a 'weight_map' from "
            "names to files. Name a safetensors file, or such an index."
        ) from error
    return by_file


def _add(checkpoint: Checkpoint, path: Path, expected: set[str] | None) -> None:
    """Take up one file."""
    file = _opened(path)
    checkpoint.files.append(file)
    stored = dict(_stored(file))
    missing = sorted((expected or set()) - stored.keys())
    if missing:
        raise PagingError(
            f"{checkpoint.name} says that {path.name} holds {missing[0]!r}, and it does not: index "
            "and files are not of one save. Fetch or save all of them again."
        )
    checkpoint.tensors.update(
        {name: each for name, each in stored.items() if expected is None or name in expected}
    )


def _opened(path: Path) -> MappedFile:
    try:
        _check_kind(path)
        with path.open("rb") as file:
            _validate(path)
            return MappedFile(file, path.name)
    except (OSError, ValueError) as error:
        _refuse(path, error)


def _check_kind(path: Path) -> None:
    """Refuse pipes, sockets and devices, because opening one may wait for ever.

    Raises:
        OSError: it is one of those.
    """
    if is_no_file(path):
        raise OSError(errno.EINVAL, "it is not a regular file")


def _validate(path: Path) -> None:
    """Have the format's own library check a file: its header, its length, that no bytes are lost.

    Asked as for torch it would reserve memory for the whole file, which Linux refuses where there
    is less; asked as for NumPy it does not.
    """
    try:
        library: Any = importlib.import_module("safetensors")
        importlib.import_module("numpy")
    except ImportError as error:
        raise PagingError(
            f"Reading {path.name} takes safetensors and numpy ({error}). Install both with: "
            f"{install_command('paging')}."
        ) from error
    try:
        with library.safe_open(path, "numpy"):
            pass
    except library.SafetensorError as error:
        raise PagingError(
            f"{path.name} is no whole safetensors file ({error}). It may be cut short or damaged: "
            "fetch or save it again."
        ) from error


def _stored(file: MappedFile) -> Iterator[tuple[str, StoredTensor]]:
    """Yield the entries of a valid file; the library tells shapes, but not where tensors begin."""
    header_bytes = int.from_bytes(file.copy_of(0, _LENGTH_BYTES), "little")
    header = json.loads(file.copy_of(_LENGTH_BYTES, header_bytes))
    for name, entry in header.items():
        if name != "__metadata__":
            offset = _LENGTH_BYTES + header_bytes + entry["data_offsets"][0]
            dtype: torch.dtype | str = _DTYPES.get(entry["dtype"]) or str(entry["dtype"])
            yield name, StoredTensor(file, offset, dtype, tuple(entry["shape"]))


def _refuse(path: Path, error: OSError | ValueError) -> NoReturn:
    """Say that a path can't be read; a ValueError is of one that no system takes for a name."""
    why = getattr(error, "strerror", None) or error
    raise PagingError(
        f"The weights {str(path)!r} can't be read: {why}. Name a safetensors file, or the index of "
        "several, that this process may read."
    ) from error


def _usual_names() -> list[str]:
    return [f"{_STEMS[0]}{suffix}" for suffix in (_INDEX, _FILE)]


def _elsewhere(folder: Path) -> str:
    """Return the folders inside that have such files, as a pipeline of several models does."""
    inside = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    holding = [each for each in inside if any(each.glob(f"*{_FILE}"))]
    return f" There are such files in its folders {_named(holding)}." if holding else ""


def _named(paths: list[Path]) -> str:
    return listed([repr(path.name) for path in paths], _N_NAMED)
