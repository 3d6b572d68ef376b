from importlib import resources

import pytest

import tenure
from tests.programs import run_python


def test_importing_tenure_imports_neither_torch_nor_rich_and_prints_nothing():
    code = "import sys, tenure; assert not {'torch', 'rich', 'psutil'} & set(sys.modules)"
    assert run_python("-c", code) == ("", "", 0)


@pytest.mark.slow
def test_the_first_name_brings_torch_and_the_rooms_no_compiler():
    rooms = "tenure.adaptive, tenure.paging, tenure.profiler, tenure.scopes, tenure.testing"
    code = f"import sys, tenure; tenure.scoped; assert 'torch' in sys.modules; import {rooms}; "
    done = run_python("-c", code + "assert not {'torch._dynamo', 'sympy'} & set(sys.modules)")
    assert done.returncode == 0, done.stderr


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
