"""The memory of the host, with the limits of containers, on made-up systems."""

import subprocess
import sys
from types import SimpleNamespace

import psutil
import pytest

from tenure import _host_memory as host_memory
from tenure._host_memory import GroupMemory, free_host_bytes
from tenure.adaptive._memory import meter_for
from tenure.paging._planning._checks import _free_bytes

MACHINE = 1000
V2 = "30 20 0:25 {top} /sys/fs/cgroup rw,relatime shared:4 - cgroup2 cgroup2 rw,nsdelegate\n"
V1 = "35 31 0:32 {top} /sys/fs/cgroup/memory rw,relatime - cgroup cgroup rw,memory\n"
OTHER_V1 = "32 31 0:29 / /sys/fs/cgroup/cpu rw,relatime - cgroup cgroup rw,cpu\n"


@pytest.fixture(autouse=True)
def machine(monkeypatch):
    monkeypatch.setattr("psutil.virtual_memory", lambda: SimpleNamespace(available=MACHINE))


@pytest.fixture
def system(tmp_path):
    """Writes the files of a system; returns where they lie."""

    def write(groups, mounts, **files):
        process = tmp_path / "proc/self"
        process.mkdir(parents=True)
        (process / "cgroup").write_text(groups)
        (process / "mountinfo").write_text(mounts)
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


def test_the_limit_of_a_container_counts(system):
    root = system("0::/\n", V2.format(top="/"), **v2("", 500, 200))
    assert free_host_bytes(root) == 300


def test_a_limit_above_what_the_machine_has_changes_nothing(system):
    root = system("0::/\n", V2.format(top="/"), **v2("", 10**12, 200))
    assert free_host_bytes(root) == MACHINE


def test_files_that_were_read_and_are_not_in_use_make_room(system):
    root = system("0::/\n", V2.format(top="/"), **v2("", 500, 450, cache=400))
    assert free_host_bytes(root) == 450


def test_the_strictest_of_nested_groups_counts(system):
    files = v2("pod/", 400, 350) | v2("pod/box/", "max", 100) | v2("pod/box/job/", 300, 10)
    root = system("0::/pod/box/job\n", V2.format(top="/"), **files)
    assert free_host_bytes(root) == 50


def test_a_group_beside_the_own_one_does_not_count(system):
    root = system("0::/own\n", V2.format(top="/"), **v2("own/", 500, 100), **v2("other/", 10, 10))
    assert free_host_bytes(root) == 400


def test_groups_of_the_first_version_count(system):
    groups = "4:memory:/docker/a\n1:cpu:/docker/a\n0::/\n"
    files = v1("docker/a/", 600, 500, cache=100) | v1("", 2**63 - 4096, 700)
    assert free_host_bytes(system(groups, OTHER_V1 + V1.format(top="/"), **files)) == 200


def test_in_a_container_that_sees_only_its_own_group_the_mounted_one_counts(system):
    groups = "4:memory:/docker/a/b\n"
    mounts = V1.format(top="/docker/a")
    root = system(groups, mounts, **v1("", 600, 500), **v1("b/", 90, 20))
    assert free_host_bytes(root) == 70


def test_a_group_outside_of_what_is_mounted_is_read_where_it_is_mounted(system):
    root = system("0::/../../else\n", V2.format(top="/own"), **v2("", 500, 200))
    assert free_host_bytes(root) == 300


def test_both_versions_at_once_count(system):
    groups = "5:memory,pids:/a\n0::/b\n"
    mounts = V1.format(top="/").replace("rw,memory", "rw,pids,memory") + V2.format(top="/")
    root = system(groups, mounts, **v1("a/", 500, 100), **v2("b/", 200, 150))
    assert free_host_bytes(root) == 50


def test_a_group_past_its_limit_has_nothing_free(system):
    root = system("0::/\n", V2.format(top="/"), **v2("", 500, 600))
    assert free_host_bytes(root) == 0


@pytest.mark.parametrize("missing", ["memory.max", "memory.current", "memory.stat"])
def test_files_that_are_missing_limit_nothing(system, missing):
    files = v2("", 500, 200)
    del files[missing]
    root = system("0::/\n", V2.format(top="/"), **files)
    assert free_host_bytes(root) == (300 if missing == "memory.stat" else MACHINE)


@pytest.mark.parametrize("text", ["", "nonsense", "1 2 3\n", "0::\n4:memory\n"])
def test_files_of_another_form_limit_nothing(system, text):
    assert free_host_bytes(system(text, text)) == MACHINE


def test_where_groups_are_mounted_is_read_once_and_what_is_used_each_time(system):
    root = system("0::/\n", V2.format(top="/"), **v2("", 500, 200))
    assert free_host_bytes(root) == 300
    (root / "proc/self/mountinfo").unlink()
    (root / "sys/fs/cgroup/memory.current").write_text("250")
    assert free_host_bytes(root) == 250


def test_names_with_spaces_are_found(system):
    mounts = V2.format(top="/").replace("/sys/fs/cgroup", "/sys/fs/cgroup/my\\040groups")
    root = system("0::/\n", mounts, **v2("my groups/", 500, 200))
    assert free_host_bytes(root) == 300


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


def test_the_resident_memory_of_this_process_is_what_psutil_says():
    resident = host_memory.resident_bytes()
    assert abs(resident - psutil.Process().memory_info().rss) < 64 << 20


def test_the_peak_of_this_process_is_at_least_what_it_has_now():
    assert host_memory.peak_resident_bytes() >= host_memory.resident_bytes() - (8 << 20)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere the figure of who starts it counts")
def test_the_peak_of_a_process_is_not_that_of_the_one_that_started_it():
    code = "from tenure import _host_memory as own; print(own.peak_resident_bytes())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert 2 * int(done.stdout) < host_memory.resident_bytes()
