"""Paging a model from its user's own safetensors files, never with all weights in memory."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from torch import nn

from ._checkpoint import assigned, convert_names, open_checkpoint
from ._forward import checked_methods
from ._handle import PagedModel, carry_out, file_link
from ._host import FileStore
from ._planning import (
    DISK,
    Elsewhere,
    check_folder,
    checked_device,
    checked_model,
    checked_prefetch,
    make_plan,
)


def load_paged(
    model: nn.Module,
    weights: str | Path,
    device: str | torch.device = "cuda",
    max_layer_size: int | str = -1,
    *,
    budget: int | str | None = None,
    host: Path | None = None,
    keep: Iterable[str] = (),
    prefetch: str | int = "auto",
    methods: Iterable[str] = (),
) -> PagedModel:
    """Run a model whose weights stay in safetensors files and pass through memory as they are used.

    The files are neither changed nor copied, and must not be changed while the model is paged. The
    model's parameters become tensors over them: they read the files when they are read, and what is
    written to them stays in memory.

    Args:
        model: a model on ``meta`` (built under ``torch.device("meta")``) or in host memory, whose
            values there are given up. Shapes and dtypes must be those of the files.
        weights: a safetensors file, the index of several (``model.safetensors.index.json``), or a
            folder that holds either, as transformers, diffusers and timm save it. Where a model of
            transformers saves its tensors under other names than its own, these are used.
        device: the accelerator, or ``"cpu"``.
        max_layer_size: as of ``page``.
        budget: the bytes that weights may take where the model computes; as of ``page``.
        host: a folder for what the files hold in another form than the model, such as the experts
            of a mixture one by one: that is written there once, to a file that has no name and
            goes with the model. Made if it is missing; not used where nothing has to be converted.
        keep: as of ``page``.
        prefetch: as of ``page``.
        methods: as of ``page``.

    Returns:
        The handle, as of ``page``. After ``unpage()`` the parameters still lie over the files.

    Raises:
        PagingError: a file can't be read, or does not fit the model, or the budget is too small;
            the model is as before.
        ByteSizeError: the budget is no number of bytes.
        torch.OutOfMemoryError: the device has less free than the plan needs; it is as before.

    Example:
        >>> import tempfile
        >>> from safetensors.torch import save_file
        >>> from tenure.paging import load_paged
        >>> folder = tempfile.TemporaryDirectory()
        >>> save_file(torch.nn.Linear(2, 3).state_dict(), f"{folder.name}/model.safetensors")
        >>> model = torch.nn.Linear(2, 3, device="meta")
        >>> with load_paged(model, folder.name, "cpu"), torch.no_grad():
        ...     print(model(torch.ones(1, 2)).shape)
        torch.Size([1, 3])
        >>> folder.cleanup()
    """
    check_folder(host)
    max_ahead = checked_prefetch(prefetch)
    chosen = checked_device(device, Elsewhere.CPU)
    checked_model(model, has_values=False)
    entries = checked_methods(model, methods)
    checkpoint = open_checkpoint(weights)
    try:
        # Before the model is given anything: what can't be named or converted is refused with the
        # model as it was.
        convert_names(checkpoint, model, host)
        with assigned(model, checkpoint):
            planned = make_plan(model, chosen, max_layer_size, budget, keep, DISK)
            store = FileStore(checkpoint.files)
            link = file_link(planned, chosen, store)
            return carry_out(model, planned, link, store, max_ahead, entries)
    except BaseException:
        # An interruption, too: until there is a handle, nobody else closes the files.
        checkpoint.close()
        raise
