"""Each attempt of a pod finds the same: what the attempt before has left goes."""

import ctypes
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from zipfile import ZipFile

import pytest

from ddpjob.agent import place

# Ends by SIGTERM, as a rank that has lost its peer, so the pod waits for the next attempt.
WRITES = """
import os, pathlib, tempfile
folder = pathlib.Path(tempfile.gettempdir())
print("found", folder, sorted(path.name for path in folder.rglob("*")))
last = folder.with_name("work.last")
print("last", sorted(path.name for path in last.rglob("*")))
print("caches", os.environ["TORCHINDUCTOR_CACHE_DIR"], os.environ["TRITON_CACHE_DIR"])
attempt = os.environ["DDP_ATTEMPT"]
(folder / f"out-{attempt}").mkdir()
(folder / f"out-{attempt}" / f"file-{attempt}").touch()
os.kill(os.getpid(), 15)
"""


@pytest.fixture
def folder() -> Iterator[Path]:
    """Return a folder with a short path, as in a pod. Programs make sockets in it."""
    with tempfile.TemporaryDirectory(dir="/tmp", prefix="d") as path:
        yield Path(path)


def options(work: Path, *, own: bool = False) -> SimpleNamespace:
    return SimpleNamespace(
        work=str(work),
        code=None,
        clear=None,
        setup=None,
        own_files=own,
        own_ipc=own,
    )


def test_the_folder_for_temporary_files_is_empty_when_an_attempt_begins(pod, folder):
    found = pod(WRITES, work=str(folder), own_files=True)
    found.assign(0)
    found.start()
    work = folder / "work"
    found.wait_for(f"found {work} []")
    found.wait_for("last []")
    found.wait_for(f"caches {folder}/cache/inductor {folder}/cache/triton")
    for attempt in (1, 2):
        found.wait_for("waiting for the next attempt", attempt)
        found.assign(attempt)
        found.wait_for(f"found {work} []", attempt + 1)
        # Only what the attempt before has left, and not those before it.
        found.wait_for(f"last ['file-{attempt - 1}', 'out-{attempt - 1}']")


def test_each_attempt_has_a_copy_of_sent_code_as_its_working_directory(pod, folder, tmp_path):
    code = tmp_path / "code"
    # As a kubelet mounts a ConfigMap.
    (code / "..data" / "parts").mkdir(parents=True)
    (code / "..data" / "config.json").write_text("as sent")
    (code / "..data" / "parts" / "words").write_text("as sent")
    (code / "config.json").symlink_to("..data/config.json")
    (code / "parts").symlink_to("..data/parts")
    script = """
import os
from pathlib import Path
print("folder", sorted(str(path) for path in Path().rglob("*")), os.getcwd())
for path in (Path("config.json"), Path("parts/words")):
    print(path.read_text())
    path.write_text("changed")
Path("out").touch()
os.kill(os.getpid(), 15)
"""
    found = pod(script, work=str(folder), code=str(code))
    found.assign(0)
    found.start()
    files = f"folder ['config.json', 'parts', 'parts/words'] {folder}/work"
    found.wait_for(files)
    found.wait_for("waiting for the next attempt")
    found.assign(1)
    found.wait_for(files, 2)
    found.wait_for("as sent", 4)
    assert (code / "config.json").read_text() == "as sent"


@pytest.mark.parametrize("is_isolated", [True, False])
def test_each_attempt_has_its_archive_unpacked_in_its_working_directory(
    pod, folder, tmp_path, is_isolated
):
    code = tmp_path / "code"
    code.mkdir()
    with ZipFile(code / "code.zip", "w") as archive:
        archive.writestr("parts/words", "as sent")
    script = """
import os
from pathlib import Path
print("folder", sorted(map(str, Path().rglob("*"))), os.getcwd(), Path("parts/words").read_text())
Path("parts/words").write_text("changed")
Path("out").touch()
os.kill(os.getpid(), 15)
"""
    place = folder / "work"
    found = pod(script, work=str(folder), own_files=is_isolated, code=str(code))
    found.assign(0)
    found.start()
    seen = f"folder ['parts', 'parts/words'] {place} as sent"
    found.wait_for(seen)
    found.wait_for("waiting for the next attempt")
    found.assign(1)
    found.wait_for(seen, 2)


def test_a_hostile_archive_ends_the_pod_with_a_sentence(pod, folder, tmp_path):
    with ZipFile(tmp_path / "code.zip", "w") as archive:
        archive.writestr("../escaped", "x")
    found = pod("", work=str(folder), code=str(tmp_path))
    found.assign(0)
    assert found.start().end() == 1
    assert "code.zip has the path '../escaped', outside of its folder" in found.report["exception"]


def test_variables_of_the_pod_stay(pod, folder):
    own = {"TMPDIR": "/tmp", "TORCHINDUCTOR_CACHE_DIR": "/a", "TRITON_CACHE_DIR": "/b"}
    script = "import os\nprint([os.environ[name] for name in " + repr(list(own)) + "])"
    found = pod(script, work=str(folder), own_files=True, env=own)
    found.assign(0)
    found.start()
    found.wait_for("['/tmp', '/a', '/b']")


def test_processes_of_one_machine_have_its_folders():
    assert place.variables(options(Path()), {"A": "b"}) == {"A": "b"}


def test_what_is_left_moves_aside_in_place_of_what_was_there(folder):
    for name in ("work.last/old/deep", "work/new", "work/locked"):
        (folder / name).mkdir(parents=True)
    (folder / "work/new/file").touch()
    (folder / "work/link").symlink_to(folder / "work/new")
    (folder / "work/locked").chmod(0)
    place.keep_last(folder)
    assert list((folder / "work").iterdir()) == []
    assert {path.name for path in (folder / "work.last").iterdir()} == {"new", "locked", "link"}
    assert (folder / "work.last/new/file").exists()
    place.keep_last(folder)
    assert list((folder / "work.last").iterdir()) == []


def test_the_first_attempt_finds_what_an_init_container_has_prepared(folder):
    (folder / "work").mkdir()
    (folder / "work" / "prepared").touch()
    place.prepare(options(folder, own=True), {}, is_first=True)
    assert (folder / "work" / "prepared").exists()


@pytest.fixture
def table(tmp_path, monkeypatch):
    """Return a function for setting the mounts by their points and sources; "/" is always there."""

    def write(*mounts):
        lines = ["20 1 0:30 / / rw,relatime - overlay overlay rw"]
        lines += [f"21 20 0:31 {source} {point} rw - ext4 /dev/x rw" for point, source in mounts]
        path = tmp_path / "mountinfo"
        path.write_text("\n".join([*lines, "22 20"]))
        monkeypatch.setattr(place, "MOUNTS", str(path))

    write()
    return write


KUBELET = "/var/lib/kubelet/pods/uid/volumes"
OWN = f"{KUBELET}/kubernetes.io~empty-dir/cache"
SHARED = f"{KUBELET}/kubernetes.io~csi/pvc-1/mount"


def lock_in(folder):
    path = folder / "op/lock"
    path.parent.mkdir(parents=True)
    path.touch()
    return path


@pytest.mark.parametrize(
    ("sources", "is_removed"),
    [
        ([], True),
        ([OWN], True),
        ([f"{OWN}/sub"], True),
        ([SHARED], False),
        # A volume of the whole file system, as of NFS; a folder of the node; a volume over another.
        (["/"], False),
        (["/data/home"], False),
        ([OWN, SHARED], False),
        ([SHARED, OWN], True),
    ],
)
def test_locks_on_a_volume_that_other_pods_may_have_stay(tmp_path, table, sources, is_removed):
    given, cache = tmp_path / "given", tmp_path / "a cache"
    locks = [lock_in(given), lock_in(cache / "torch_extensions/py311_cpu")]
    points = [given, str(cache).replace(" ", "\\040")]
    table(*[(point, source) for source in sources for point in points])
    place.remove_locks({"TORCH_EXTENSIONS_DIR": str(given), "XDG_CACHE_HOME": str(cache)})
    assert [path.exists() for path in locks] == [not is_removed] * 2


def test_the_locks_behind_a_link_to_a_volume_stay(tmp_path, table):
    lock = lock_in(tmp_path / "claim")
    (tmp_path / "home").symlink_to(tmp_path / "claim")
    table((tmp_path / "claim", SHARED), (f"{tmp_path}/hom", OWN))
    place.remove_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "home")})
    assert lock.exists()


def test_without_a_table_of_mounts_locks_stay(tmp_path, monkeypatch):
    monkeypatch.setattr(place, "MOUNTS", str(tmp_path / "missing"))
    lock = lock_in(tmp_path / "given")
    place.remove_locks({"TORCH_EXTENSIONS_DIR": str(tmp_path / "given")})
    assert lock.exists()


def test_the_table_of_this_machine_is_understood():
    # A point that is not understood would let a volume pass as the container's own file system.
    assert not place.is_own(Path("/proc/self"))
    assert not place.is_own(Path("/dev/shm"))


def test_locks_of_extensions_are_removed(tmp_path, table):
    given, cache = tmp_path / "given", tmp_path / "cache"
    locks = [given / "op/lock", cache / "torch_extensions/py311_cpu/op/lock"]
    others = [given / "op/op.so", cache / "torch_extensions/py311_cpu/op/deeper/lock"]
    for path in (*locks, *others):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    place.remove_locks({"TORCH_EXTENSIONS_DIR": str(given), "XDG_CACHE_HOME": str(cache)})
    assert [path.exists() for path in (*locks, *others)] == [False, False, True, True]


def test_the_locks_are_where_torch_makes_them(tmp_path, monkeypatch, table):
    extension = pytest.importorskip("torch.utils.cpp_extension")
    for variables in ({"XDG_CACHE_HOME": str(tmp_path)}, {"TORCH_EXTENSIONS_DIR": str(tmp_path)}):
        for name, value in variables.items():
            monkeypatch.setenv(name, value)
        lock = Path(extension._get_build_directory("op", verbose=False), "lock")
        baton = extension.FileBaton(str(lock))
        assert baton.try_acquire()
        place.remove_locks(variables)
        assert not lock.exists()


# System V IPC

SYSV = """
import ctypes, os, sys, time
libc = ctypes.CDLL(None)
key = int(sys.argv[1])
create = 0o1600
segment, group, queue = libc.shmget(key, 64, create), libc.semget(key, 2, create), -1
libc.semctl(group, 1, 16, 5)  # SETVAL
print(segment, group, flush=True)
sys.stdin.read()
"""


@pytest.fixture
def sysv(monkeypatch: pytest.MonkeyPatch) -> Iterator[subprocess.Popen]:
    """Return a process with a segment and semaphores. Those of other programs are hidden."""
    if not Path("/proc/sysvipc/shm").exists():
        pytest.skip("this needs System V IPC in Linux")
    key = os.getpid() + 7_000_000
    words = [sys.executable, "-c", SYSV, str(key)]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as found:
        assert found.stdout
        found.numbers = [int(word) for word in found.stdout.readline().split()]
        own = [(place.SHM, "shmid"), (place.SEM, "semid")]
        kept = {kind: (name, n) for (kind, name), n in zip(own, found.numbers, strict=True)}
        all_rows = place.rows_of

        def own_rows(kind: str) -> list[dict[str, int]]:
            name, number = kept.get(kind, ("", -1))
            return [row for row in all_rows(kind) if row.get(name) == number]

        monkeypatch.setattr(place, "rows_of", own_rows)
        yield found
    libc = ctypes.CDLL(None)
    libc.shmctl(found.numbers[0], place.IPC_RMID, None)
    libc.semctl(found.numbers[1], 0, place.IPC_RMID)


def exist() -> list[bool]:
    return [bool(list(place.rows_of(kind))) for kind in (place.SHM, place.SEM)]


def test_segments_and_semaphores_of_processes_that_have_ended_are_removed(sysv):
    place.remove_segments()
    assert exist() == [True, True]
    sysv.kill()
    sysv.wait()
    place.remove_segments()
    assert exist() == [False, False]


def test_segments_stay_where_the_pod_shares_them(sysv, folder):
    sysv.kill()
    sysv.wait()
    place.prepare(options(folder), {}, is_first=False)
    assert exist() == [True, True]
