import re
from pathlib import Path

PAGE = Path(__file__).parents[2] / "docs" / "simulated-device.md"


def test_the_example_of_the_page_runs(sim):
    [source] = re.findall(r"```python\n(.*?)```", PAGE.read_text(encoding="utf-8"), re.DOTALL)
    names = {}
    exec(compile(source, str(PAGE), "exec"), names)
    [example] = [value for name, value in names.items() if name.startswith("test_")]
    example(sim)


def test_the_page_names_every_figure_that_it_lists(sim):
    listed = re.findall(
        r"`(?:sim\.)?(\w+_bytes|\w+_count|elapsed_s|host_waits|faults)`", PAGE.read_text()
    )
    assert {"peak_bytes", "elapsed_s", "faults"} <= set(listed)
    assert all(hasattr(sim, name) for name in listed)
