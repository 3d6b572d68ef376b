"""The memory of the host, with the limits of containers, on made-up systems, and a reserve of it.

Private names are asked: what follows from them depends on the machine that runs the tests.
"""

import mmap
import sys
from types import SimpleNamespace

import psutil
import pytest

from tenure import _host_memory as host_memory
from tenure._host_memory import GroupMemory, free_host_bytes
from tenure._reserve import Reserve
from tenure.adaptive._memory import meter_for
from tenure.paging._checks import _free_bytes
from tests.programs import run_python

MACHINE = 1000
MIB = 1 << 20


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=MACHINE))


@pytest.fixture
def system(tmp_path):
    """Writes the files of a system; returns where they lie."""

    def write(groups, **files):
        process = tmp_path / "proc/self"
        process.mkdir(parents=True)
        (process / "cgroup").write_text(groups)
        for name, text in files.items():
            file = tmp_path / "sys/fs/cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{text}\n")
        return tmp_path

    return write


def v2(folder, limit, used, cache=0):
    stat = f"anon 5\nfile 900\ninactive_file {cache}\nactive_file 7"
    return {
        f"{folder}memory.max": limit,
        f"{folder}memory.current": used,
        f"{folder}memory.stat": stat,
    }


def v1(folder, limit, used, cache=0):
    stat = f"inactive_file 3\ntotal_inactive_file {cache}"
    return {
        f"memory/{folder}memory.limit_in_bytes": limit,
        f"memory/{folder}memory.usage_in_bytes": used,
        f"memory/{folder}memory.stat": stat,
    }


def test_without_groups_it_is_what_the_machine_has(tmp_path):
    assert free_host_bytes(tmp_path) == MACHINE


@pytest.mark.parametrize(
    ("groups", "files", "free_bytes"),
    [
        ("0::/\n", v2("", 500, 200), 300),
        # above what the machine has
        ("0::/\n", v2("", 10**12, 200), MACHINE),
        # files that were read and are not in use make room
        ("0::/\n", v2("", 500, 450, cache=400), 450),
        # past its limit
        ("0::/\n", v2("", 500, 600), 0),
        # the strictest of nested groups
        (
            "0::/pod/box/job\n",
            v2("pod/", 400, 350) | v2("pod/box/", "max", 100) | v2("pod/box/job/", 300, 10),
            50,
        ),
        # a group beside the own one
        ("0::/own\n", v2("own/", 500, 100) | v2("other/", 10, 10), 400),
        # the first version
        (
            "4:memory:/docker/a\n1:cpu:/docker/a\n0::/\n",
            v1("docker/a/", 600, 500, cache=100) | v1("", 2**63 - 4096, 700),
            200,
        ),
        # a container that sees only its own group
        ("4:memory:/docker/a\n", v1("", 600, 500), 100),
        ("4:memory:/../../else\n", v1("", 600, 500), 100),
        # both versions at once
        ("5:memory,pids:/a\n0::/b\n", v1("a/", 500, 100) | v2("b/", 200, 150), 50),
        # another form
        ("nonsense", {}, MACHINE),
        ("0::\n4:memory\n", {}, MACHINE),
    ],
)
def test_limits_of_containers_count(system, groups, files, free_bytes):
    assert free_host_bytes(system(groups, **files)) == free_bytes


def test_files_that_are_missing_limit_nothing(system):
    files = v2("", 500, 200)
    root = system("0::/\n", **files)
    (root / "sys/fs/cgroup/memory.stat").unlink()
    assert free_host_bytes(root) == 300
    (root / "sys/fs/cgroup/memory.current").unlink()
    assert free_host_bytes(root) == MACHINE


def test_the_limit_of_the_process_counts(tmp_path, monkeypatch):
    monkeypatch.setattr("tenure._host_memory.address_space_limits", lambda: [900, 2000])
    monkeypatch.setattr("tenure._host_memory.address_space_bytes", lambda: 860)
    assert free_host_bytes(tmp_path) == 40
    monkeypatch.setattr("tenure._host_memory.address_space_bytes", lambda: 901)
    assert free_host_bytes(tmp_path) == 0


def test_retries_and_budgets_of_paging_ask_for_it(monkeypatch):
    monkeypatch.setattr("tenure._host_memory._groups", lambda root: [GroupMemory(100, 70)])
    assert meter_for("cpu").available_bytes() == 70
    assert _free_bytes(SimpleNamespace(type="cpu")) == 70


def test_the_memory_of_this_process_is_what_psutil_says():
    resident = host_memory.resident_bytes()
    assert abs(resident - psutil.Process().memory_info().rss) < 64 << 20
    assert host_memory.peak_resident_bytes() >= host_memory.resident_bytes() - (8 << 20)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the figure of who starts it counts")
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    code = "from tenure import _host_memory as own; print(own.peak_resident_bytes())"
    assert 2 * int(run_python("-c", code).stdout) < host_memory.resident_bytes()


# --- a reserve that is kept for a report of an error of memory


@pytest.fixture
def room(monkeypatch):
    """Room for so many bytes at once; what is there more is refused, as by a limit."""
    kept = {"at most": 0}
    mapped = mmap.mmap

    def limited(number, n_bytes, **flags):
        if n_bytes > kept["at most"]:
            raise OSError("Cannot allocate memory")
        return mapped(number, n_bytes, **flags)

    monkeypatch.setattr(mmap, "mmap", limited)
    return kept


def test_the_largest_that_there_is_room_for_is_kept_until_it_is_freed(room):
    reserve = Reserve(64 * MIB, 16 * MIB, 4 * MIB)
    kept = [(0, 0), (20, 16), (64, 16)]
    # the last time there is more room, and nothing more is taken
    for at_most, n_mib in kept:
        room["at most"] = at_most * MIB
        reserve.take()
        assert reserve.n_bytes == n_mib * MIB
    reserve.free()
    reserve.free()
    assert reserve.n_bytes == 0
    reserve.take()
    assert reserve.n_bytes == 64 * MIB
