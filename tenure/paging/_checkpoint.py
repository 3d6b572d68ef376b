"""Which files hold a model's weights, what is in them, and where; a model is given them unread.

The library of the model says which tensors of a file become which, and nothing is read for asking.

Invariant: the files are the user's. They are read, and neither written nor copied. Which of a
folder's are taken is never a guess: a name that libraries give to whole models, or the only file.
What a file holds as the model has it is used where it is; the rest is written once, a tensor at a
time, to a nameless file of our own. All tensors fit or none is assigned; what was can be taken
back. A parameter stays the object that it was, unless it is on ``meta`` and torch, which keeps weak
references to it, forbids.
"""

from __future__ import annotations

import copy
import ctypes
import errno
import importlib
import json
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import torch
from torch import Tensor, nn

from tenure._errors import PagingError
from tenure._extras import install_command
from tenure._report_files import is_no_file
from tenure._show import progress
from tenure._text import describe_elements, format_bytes, listed
from tenure._torch.modules import unsaved_names
from tenure._torch.quiet import aside

from ._files import MappedFile, checked_folder, nameless, writing
from ._tensors import is_plain

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
            for shard, expected in shards.items():
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
        f"{str(folder)!r} is a folder with neither {_STEMS[0]}{_INDEX} nor {_STEMS[0]}{_FILE} in "
        f"it, nor another safetensors file.{_elsewhere(folder)} Name a safetensors file, or the "
        "index of several."
    )


def _shards(path: Path) -> dict[Path, set[str] | None]:
    """Return the files, each with the names that the index says it holds; None without an index."""
    if path.suffix != ".json":
        return {path: None}
    _check_kind(path)
    text = path.read_bytes()
    try:
        by_file: dict[Path, Any] = {}
        for name, file_name in dict(json.loads(text)["weight_map"]).items():
            by_file.setdefault(path.parent / file_name, set()).add(name)
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise PagingError(
            f"{path.name} is no index of safetensors files: a JSON object with a 'weight_map' from "
            "names to files. Name a safetensors file, or such an index."
        ) from error
    return by_file


def _add(checkpoint: Checkpoint, path: Path, expected: set[str] | None) -> None:
    """Take up one file."""
    try:
        _check_kind(path)
        with path.open("rb") as opened:
            _validate(path)
            file = MappedFile(opened, path.name)
    except (OSError, ValueError) as error:
        _refuse(path, error)
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


def _elsewhere(folder: Path) -> str:
    """Return the folders inside that have such files, as a pipeline of several models does."""
    inside = [each for each in sorted(folder.iterdir()) if each.is_dir()]
    holding = [each for each in inside if any(each.glob(f"*{_FILE}"))]
    return f" There are such files in its folders {_named(holding)}." if holding else ""


def _named(paths: list[Path]) -> str:
    return listed([repr(path.name) for path in paths], _N_NAMED)


_N_TROUBLES = 5
_COMPARED_BYTES = 64 * 2**20


@dataclass(slots=True)
class _Wanted:
    """A tensor of the model.

    Attributes:
        tensor: the object.
        names: all that it is registered under.
        sites: the modules that register it, each with its own name for it.
        is_saved: whether a state_dict has it.
    """

    tensor: Tensor
    names: list[str] = field(default_factory=list)
    sites: list[tuple[nn.Module, str]] = field(default_factory=list)
    is_saved: bool = False


@contextmanager
def assigned(model: nn.Module, checkpoint: Checkpoint) -> Iterator[None]:
    """Return a block at whose begin a model gets its tensors; if it raises, they are taken back.

    Raises:
        PagingError: names, shapes or dtypes differ; the model is as before.
    """
    pairs = _matched(model, checkpoint)
    with ExitStack() as undoing:
        with aside():
            for each, stored in pairs:
                undoing.callback(_assign(each, stored.view()))
        yield
        undoing.pop_all()


def _matched(model: nn.Module, checkpoint: Checkpoint) -> list[tuple[_Wanted, StoredTensor]]:
    wanted = _wanted(model)
    pairs: list[tuple[_Wanted, StoredTensor]] = []
    troubles: list[str] = []
    known = {name for each in wanted if each.is_saved for name in each.names}
    missing: list[str] = []
    without_values: list[_Wanted] = []
    for each in wanted:
        found = [name for name in each.names if each.is_saved and name in checkpoint.tensors]
        if found:
            stored = checkpoint.tensors[found[0]]
            pairs.append((each, stored))
            troubles += _differences(each.tensor, found, checkpoint)
        elif each.is_saved:
            missing.append(each.names[0])
        elif each.tensor.device.type == "meta":
            without_values.append(each)
    if missing:
        troubles.insert(0, f"the file lacks {_quoted(missing)}")
    unexpected = [name for name in checkpoint.tensors if name not in known]
    if unexpected:
        troubles.insert(0, f"the model has no {_quoted(unexpected)}")
    advice = ""
    if troubles:
        advice = " Build the model as it was when its state_dict was saved, or save this one's."
    if without_values:
        advice += f" {_advice_for(without_values[0])}"
        names = _quoted([each.names[0] for each in without_values])
        troubles.append(f"no file holds {names} (buffers on meta, persistent=False)")
    if troubles:
        raise PagingError(
            f"{checkpoint.name} does not fit {type(model).__name__}: "
            f"{listed(troubles, _N_TROUBLES, '; ')}. Nothing was loaded.{advice}"
        )
    return pairs


def _advice_for(buffer: _Wanted) -> str:
    owner, _, name = buffer.names[0].rpartition(".")
    module = type(buffer.sites[0][0]).__name__
    line = f"{owner} = {module}(...)" if owner else f"{name} = ..."
    line = re.sub(r"\.(\d+)", r"[\1]", f"model.{line}")
    return f'Give such a buffer its values outside of torch.device("meta") first, as by `{line}`.'


def _wanted(model: nn.Module) -> list[_Wanted]:
    by_tensor: dict[int, _Wanted] = {}
    for prefix, module in model.named_modules(remove_duplicate=False):
        # Rotary tables and the like are computed when the model is built, and in no file.
        unsaved = unsaved_names(module)
        for name, tensor in (*module._parameters.items(), *module._buffers.items()):
            if tensor is not None:
                each = by_tensor.setdefault(id(tensor), _Wanted(tensor))
                each.names.append(f"{prefix}.{name}" if prefix else name)
                each.sites.append((module, name))
                each.is_saved |= name not in unsaved
    return list(by_tensor.values())


def _differences(tensor: Tensor, names: list[str], checkpoint: Checkpoint) -> Iterator[str]:
    first = checkpoint.tensors[names[0]]
    for name in names:
        stored = checkpoint.tensors[name]
        if (stored.dtype, stored.shape) != (tensor.dtype, tuple(tensor.shape)):
            yield (
                f"{name!r} is {describe_elements(stored.dtype, stored.shape)} in the file, and "
                f"{describe_elements(tensor.dtype, tensor.shape)} in the model"
            )
        elif tensor.numel() and not is_plain(tensor):
            yield f"{name!r} is a {type(tensor).__name__} in the model, whose bytes no file holds"
        elif stored is not first and not _are_equal(stored, first):
            yield f"{names[0]!r} and {name!r} are one tensor in the model, and differ in the file"


def _are_equal(one: StoredTensor, other: StoredTensor) -> bool:
    """Compare bytes, a part at a time; where shapes differ that is said elsewhere."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return True
    n_bytes = one.view().nbytes
    for low in range(0, n_bytes, _COMPARED_BYTES):
        size = min(_COMPARED_BYTES, n_bytes - low)
        parts = (each.file.bytes_at(each.offset + low, size) for each in (one, other))
        if not torch.equal(*parts):
            return False
    return True


def _assign(wanted: _Wanted, view: Tensor) -> Callable[[], None]:
    """Let a tensor have other data; what takes it back."""
    tensor = wanted.tensor
    # One that was made in inference mode counts no writes, and raises when asked for them.
    if tensor.device.type != "meta" and not tensor.is_inference():
        before, tensor.data = tensor.data, view
        return lambda: setattr(tensor, "data", before)
    twin = _twin(tensor, view)
    try:
        # The object stays the same, where it can: whoever holds a parameter has the loaded one.
        torch.utils.swap_tensors(tensor, twin)
    except RuntimeError:
        # Something refers to it weakly, as recurrent layers do.
        def put(other: Tensor) -> None:
            for module, name in wanted.sites:
                setattr(module, name, other)

        put(twin)
        return lambda: put(tensor)
    return lambda: torch.utils.swap_tensors(tensor, twin)


def _twin(tensor: Tensor, view: Tensor) -> Tensor:
    twin: Tensor = view
    if isinstance(tensor, nn.Parameter):
        twin = nn.Parameter(view, requires_grad=tensor.requires_grad)
    elif isinstance(tensor, nn.Buffer):
        twin = nn.Buffer(view, persistent=tensor.persistent)
    vars(twin).update(vars(tensor))
    return twin


def _quoted(names: list[str]) -> str:
    return listed([*map(repr, names)], _N_TROUBLES)


# As safetensors' own files; torch needs that of the element.
_ALIGNMENT_BYTES = 64


def convert_names(checkpoint: Checkpoint, model: nn.Module, host: Path | None) -> None:
    """Name a checkpoint's tensors as a model does, where the model knows how.

    Args:
        checkpoint: the checkpoint, which is changed; a file of ours joins its files.
        model: the model.
        host: the folder for that file.

    Raises:
        PagingError: tensors have another form, and there is no folder for them, or no room in it.
    """
    # Names that all fit are the model's own, whatever its library would make of them.
    if checkpoint.tensors.keys() <= model.state_dict().keys():
        return
    asked = _key_map(model, checkpoint.tensors)
    if asked is None:
        return
    renamed, conversions = asked
    if conversions:
        if host is None:
            raise _without_folder(checkpoint, model, conversions)
        with writing(checked_folder(host), type(model).__name__, _n_bytes(checkpoint, conversions)):
            renamed |= _convert(checkpoint, conversions, model, host)
    checkpoint.tensors.clear()
    checkpoint.tensors.update(renamed)


def _convert(
    checkpoint: Checkpoint, conversions: list[_Conversion], model: nn.Module, host: Path
) -> dict[str, StoredTensor]:
    made: dict[str, tuple[int, Tensor]] = {}
    n_bytes = _n_bytes(checkpoint, conversions)
    with nameless(host) as file, progress("converting weights", n_bytes, in_bytes=True) as done:
        for conversion in conversions:
            for name, tensor in _tensors_of(conversion, checkpoint, model):
                # On meta: the shape is needed, and the values would be all of the model in memory.
                made[name] = _append(file, tensor), tensor.to("meta")
            done(_n_bytes(checkpoint, [conversion]))
        file.truncate(max(1, file.tell()))
        file.flush()
        mapped = MappedFile(file, f"The converted weights in {str(host)!r}", is_ours=True)
    checkpoint.files.append(mapped)
    return {
        name: StoredTensor(mapped, offset, like.dtype, tuple(like.shape))
        for name, (offset, like) in made.items()
    }


def _tensors_of(
    conversion: _Conversion, checkpoint: Checkpoint, model: Any
) -> Iterator[tuple[str, Tensor]]:
    target, converter = conversion.target, conversion.converter
    try:
        for name, made in converter.convert(target, model=model, config=model.config).items():
            # What no operation has joined comes as it was collected, in a list of one.
            yield name, made[0] if isinstance(made, list) else made
    except (RuntimeError, ValueError, TypeError, IndexError, AssertionError, KeyError) as error:
        raise PagingError(
            f"{checkpoint.name} holds {_told(conversion)}, and they could not be converted: "
            f"{error}. Nothing was loaded. The file may be of another configuration of the model."
        ) from error


def _append(file: BinaryIO, tensor: Tensor) -> int:
    """Write a tensor at the end; where it begins."""
    whole = tensor.detach().contiguous()
    begin = -(-file.tell() // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    file.seek(begin)
    if whole.nbytes:
        file.write((ctypes.c_ubyte * whole.nbytes).from_address(whole.data_ptr()))
    return begin


def _without_folder(
    checkpoint: Checkpoint, model: nn.Module, conversions: list[_Conversion]
) -> PagingError:
    n_bytes = _n_bytes(checkpoint, conversions)
    return PagingError(
        f"{checkpoint.name} holds {len(conversions)} of the tensors of {type(model).__name__} in "
        f"another form, such as {_told(conversions[0])}: {format_bytes(n_bytes)} have to be "
        "written once in the model's own form. Nothing was loaded. Name a folder on a disk for "
        "them, host=Path(...); their file has no name there, and goes with the model."
    )


def _n_bytes(checkpoint: Checkpoint, conversions: list[_Conversion]) -> int:
    names = [name for each in conversions for name in each.sources]
    return sum(checkpoint.tensors[name].n_bytes for name in names)


def _told(conversion: _Conversion) -> str:
    return f"{conversion.target!r} as {listed([*map(repr, conversion.sources)], 1)}"


@dataclass(slots=True)
class _Conversion:
    """Tensors of a file that a model has in another form: joined, split, or laid out differently.

    Attributes:
        target: the name in the model of the first tensor that is made of them.
        converter: of transformers; makes the tensors when it is asked, and reads the file then.
        sources: their names in the file.
    """

    target: str
    converter: Any
    sources: list[str] = field(default_factory=list)


_KeyMap = tuple[dict[str, StoredTensor], list[_Conversion]]
"""The tensors that are the same, by their names in the model; and how the others are made."""


def _key_map(model: nn.Module, tensors: dict[str, StoredTensor]) -> _KeyMap | None:
    """Return the map that a model offers; None where it offers none."""
    patterns = getattr(model, "_checkpoint_conversion_mapping", None)
    if isinstance(patterns, dict) and patterns:
        # Transformers before 5.
        return {_substituted(name, patterns): each for name, each in tensors.items()}, []
    library = _loading_of(model)
    return None if library is None else _asked(model, tensors, *library)


def _substituted(name: str, patterns: dict[str, str]) -> str:
    for pattern, other in patterns.items():
        name, n_changes = re.subn(pattern, other, name)
        if n_changes:
            break
    return name


def _loading_of(model: nn.Module) -> tuple[Any, Any] | None:
    """Return transformers' modules that convert checkpoints, if the model is of its own."""
    if not any(each.__module__.partition(".")[0] == "transformers" for each in type(model).__mro__):
        return None
    try:
        mapping = importlib.import_module("transformers.conversion_mapping")
        return mapping, importlib.import_module("transformers.core_model_loading")
    except ImportError:
        return None


def _asked(model: Any, tensors: dict[str, StoredTensor], mapping: Any, loading: Any) -> _KeyMap:
    """Ask transformers, in the steps of its ``convert_and_load_state_dict_in_model``.

    Args:
        model: a model of transformers.
        tensors: what the file holds.
        mapping: its module ``conversion_mapping``.
        loading: its module ``core_model_loading``.
    """
    state, renamed = model.state_dict(), dict[str, StoredTensor]()
    transforms = mapping.get_model_conversion_mapping(model)
    renamings = [each for each in transforms if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in transforms if isinstance(each, loading.WeightConverter)]
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    prefix, collected = model.base_model_prefix, dict[str, _Conversion]()
    # As transformers does: experts are joined in the order in which they come, and the 10th comes
    # after the 9th.
    for name in sorted(tensors, key=loading.dot_natural_key):
        target, pattern = loading.rename_source_key(name, renamings, converters, prefix, state)
        # A renaming meant for other checkpoints of the architecture may hit a name that was right.
        if target not in state and name in state:
            target, pattern = loading.rename_source_key(name, [], [], prefix, state)
        if pattern is None or target not in state:
            renamed[target if target in state else name] = tensors[name]
            continue
        # A converter collects the tensors of one target; a pattern stands for many, a layer each.
        if target not in collected:
            collected[target] = _Conversion(target, copy.deepcopy(by_pattern[pattern]))
        # It is called when it is needed.
        collected[target].converter.add_tensor(target, name, pattern, tensors[name].view)
        collected[target].sources.append(name)
    return renamed, list(collected.values())
