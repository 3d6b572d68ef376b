import subprocess
import sys
from importlib import resources

import pytest

import tenure


def _run(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)


def test_importing_tenure_imports_neither_torch_nor_rich_and_prints_nothing():
    done = _run("import sys, tenure; assert not {'torch', 'rich', 'psutil'} & set(sys.modules)")
    assert (done.stdout, done.stderr) == ("", "")


@pytest.mark.slow
def test_the_first_name_brings_torch_and_the_rooms_no_compiler():
    rooms = "tenure.adaptive, tenure.paging, tenure.profiler, tenure.scopes, tenure.testing"
    _run(
        f"import sys, tenure; tenure.scoped; assert 'torch' in sys.modules; import {rooms}; "
        "assert not {'torch._dynamo', 'sympy'} & set(sys.modules)"
    )


def test_every_public_name_resolves_is_listed_once_and_is_of_tenure():
    for name in tenure.__all__:
        value = getattr(tenure, name)
        assert value is not None, name
        if isinstance(value, type) and issubclass(value, Exception):
            assert value.__module__ == "tenure"
    assert set(tenure.__all__) <= set(dir(tenure))
    assert len(set(tenure.__all__)) == len(tenure.__all__)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match=r"^module 'tenure' has no attribute 'dispoze'$"):
        tenure.dispoze  # noqa: B018  # reading it is the test


def test_the_package_tells_type_checkers_that_it_is_typed():
    assert resources.files("tenure").joinpath("py.typed").is_file()
