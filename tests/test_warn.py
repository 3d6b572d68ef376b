"""Where warnings point."""

import pytest

from tenure._errors import TenureWarning
from tenure._warn import warn_user

CODE = "def below(): warn_user('here', TenureWarning)"


def place_of_warning(name):
    """The file that a warning names which comes from code of a module of that name."""
    names = {"__name__": name, "warn_user": warn_user, "TenureWarning": TenureWarning}
    exec(compile(CODE, "below.py", "exec"), names)
    with pytest.warns(TenureWarning, match="here") as caught:
        names["below"]()
    return caught[0].filename


@pytest.mark.parametrize("name", ["tenure", "tenure.scopes", "torch", "torch.nn", "contextlib"])
def test_code_of_the_library_and_of_what_calls_it_is_passed_by(name):
    assert place_of_warning(name) == __file__


@pytest.mark.parametrize("name", ["torchmetrics", "tenure._cli", "program"])
def test_other_code_is_the_users(name):
    assert place_of_warning(name) == "below.py"
