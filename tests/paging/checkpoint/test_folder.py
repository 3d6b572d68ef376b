"""Which file of a folder is taken: by the names that libraries give, or the only one."""

import pytest

from tenure.paging import PagingError
from tenure.paging._checkpoint._files import weights_in

ADVICE = "Name one file, or an index of several."


@pytest.mark.parametrize(
    ("names", "expected"),
    [
        (["model.safetensors"], 0),
        (["diffusion_pytorch_model.safetensors"], 0),
        (["model.safetensors", "model.safetensors.index.json"], 1),
        (["diffusion_pytorch_model.safetensors.index.json", "a.safetensors", "b.safetensors"], 0),
        (["diffusion_pytorch_model.safetensors", "diffusion_pytorch_model.fp16.safetensors"], 0),
        (["diffusion_pytorch_model.fp16.safetensors", "config.json"], 0),
        (["model.fp16.safetensors.index.json", "model.fp16-1-of-2.safetensors"], 0),
        (["open_clip_model.safetensors", "pytorch_model.bin"], 0),
    ],
)
def test_the_usual_name_or_the_only_file_is_taken(tmp_path, names, expected):
    for name in names:
        (tmp_path / name).touch()
    assert weights_in(tmp_path) == tmp_path / names[expected]


def test_several_files_of_other_names_are_named_and_none_is_taken(tmp_path):
    for name in ("b.safetensors", "a.safetensors"):
        (tmp_path / name).touch()
    with pytest.raises(PagingError) as caught:
        weights_in(tmp_path)
    assert str(caught.value) == (
        f"{str(tmp_path)!r} is a folder with 'a.safetensors', 'b.safetensors' in it, and which of "
        f"them is meant can't be told. {ADVICE}"
    )


def test_two_indices_are_named_and_many_files_are_cut_short(tmp_path):
    for number in range(8):
        (tmp_path / f"{number}.safetensors").touch()
    with pytest.raises(PagingError, match=r"'5.safetensors' and 2 more in it, and which"):
        weights_in(tmp_path)
    for name in "ab":
        (tmp_path / f"{name}.safetensors.index.json").touch()
    with pytest.raises(
        PagingError, match=r"'a.safetensors.index.json', 'b.safetensors.index.json'"
    ):
        weights_in(tmp_path)


def test_a_pipeline_of_several_models_names_their_folders(tmp_path):
    for name in ("unet", "vae", "scheduler"):
        (tmp_path / name).mkdir()
    (tmp_path / "unet" / "diffusion_pytorch_model.safetensors").touch()
    (tmp_path / "vae" / "diffusion_pytorch_model.safetensors").touch()
    with pytest.raises(PagingError, match=r"There are such files in its folders 'unet', 'vae'\."):
        weights_in(tmp_path)
