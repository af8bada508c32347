"""Archives sent by a pod: whole ones, and hostile ones. Nothing of these leaves the folder."""

import io
import os
import tarfile

import pytest

from ddpjob.cli import archive as module
from ddpjob.cli.archive import ArchiveError, Ended, Unpacker, stays_inside


def member(name, content=b"", kind=tarfile.REGTYPE, **fields):
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, len(content)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, content


def folder(name="."):
    return member(name, kind=tarfile.DIRTYPE)


def link(name, target, kind=tarfile.SYMTYPE):
    return member(name, kind=kind, linkname=target)


def archive_of(*members):
    """Return an archive as tar sends it."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w") as archive:
        for info, content in members:
            archive.addfile(info, io.BytesIO(content))
    return file.getvalue()


def unpack(place, data):
    unpacker = Unpacker(place)
    unpacker.unpack(io.BytesIO(data))
    return unpacker


def tree(place):
    """Return what is below a folder, by its path: a text, a link's target, or None."""
    found = {}
    for path in sorted(place.rglob("*")):
        content = None if path.is_dir() else path.read_text()
        found[str(path.relative_to(place))] = os.readlink(path) if path.is_symlink() else content
    return found


@pytest.fixture
def place(tmp_path):
    """Return the place of a copy. Beside it is a file that no archive may change."""
    (tmp_path / "outside").write_text("mine")
    return tmp_path / "inside" / "copy"


@pytest.fixture(autouse=True)
def the_outside_is_unchanged(tmp_path, place):
    place.parent.mkdir()
    yield
    assert {path.name for path in tmp_path.iterdir()} == {"outside", "inside"}
    assert (tmp_path / "outside").read_text() == "mine"
    assert {path.name for path in place.parent.iterdir()} <= {"copy"}


def test_a_folder_is_unpacked_with_its_files_and_links(place):
    data = archive_of(
        folder("./"),
        folder("./a"),
        member("./a/model.pt", b"weights"),
        link("./last.pt", "a/model.pt"),
        link("./a/up", "../last.pt"),
        link("./a/best.pt", "./a/model.pt", tarfile.LNKTYPE),
        member("./deep/er/empty"),
    )
    copied = unpack(place, data)
    assert tree(place) == {
        "a": None,
        "a/best.pt": "weights",
        "a/model.pt": "weights",
        "a/up": "../last.pt",
        "deep": None,
        "deep/er": None,
        "deep/er/empty": "",
        "last.pt": "a/model.pt",
    }
    assert (copied.count, copied.size) == (5, 7)


def test_one_file_is_unpacked_to_the_place_itself(place):
    copied = unpack(place, archive_of(member("./model.pt", b"weights", mode=0o4777)))
    assert (place.read_text(), copied.count, copied.size) == ("weights", 1, 7)
    # Programs stay programs. Others get no right to write, and nobody gets another identity.
    assert place.stat().st_mode & 0o7022 == 0
    assert os.access(place, os.X_OK)


HOSTILE = {
    "an absolute name": ([member("/tmp/x", b"x")], "the path '/tmp/x', outside"),
    "a parent": ([member("../outside", b"x")], "the path '../outside', outside"),
    "a parent in the middle": ([member("a/../../outside", b"x")], "outside of its folder"),
    "an absolute folder": ([folder("/tmp/x")], "the path '/tmp/x', outside"),
    "a null": ([member("a", pax_headers={"path": "a\0b"})], "outside of its folder"),
    "an absolute link": ([link("a", "/etc/passwd")], "a link to '/etc/passwd', which is outside"),
    "a link to a parent": ([link("a", "..")], "a link to '..', which is outside"),
    "a link above": ([link("a/b", "../../outside")], "outside of the folder"),
    "a link through a link": (
        [link("here", "."), link("out", "here/../../outside")],
        "a link to 'here/../../outside', which is",
    ),
    "an empty link": ([link("a", "")], "outside of the folder"),
    "a hard link to a parent": ([link("a", "../outside", tarfile.LNKTYPE)], "outside of its"),
    "a hard link to an absolute name": ([link("a", "/etc/passwd", tarfile.LNKTYPE)], "outside of"),
    "a hard link to nothing": ([link("a", "b", tarfile.LNKTYPE)], "which the archive has not"),
    "a hard link to a link": (
        [link("b", "c"), link("a", "b", tarfile.LNKTYPE)],
        "which the archive has not",
    ),
    "a character device": ([member("a", kind=tarfile.CHRTYPE)], "is a device or a pipe"),
    "a block device": ([member("a", kind=tarfile.BLKTYPE)], "is a device or a pipe"),
    "a pipe": ([member("a", kind=tarfile.FIFOTYPE)], "is a device or a pipe"),
    "a file twice": ([member("a", b"x"), member("./a", b"y")], "the archive has 'a' twice"),
    "a file in a file": ([member("a", b"x"), member("a/b", b"y")], "twice"),
    "a planted link, then a file through it": (
        [link("a", "."), member("a", b"x")],
        "the archive has 'a' twice",
    ),
    "a planted link, then a file below it": (
        [link("a", "b"), member("a/b", b"x")],
        "the archive has 'a' twice",
    ),
    "a planted link, then a link below it": (
        [folder("d/e"), link("a", "d"), link("a/b", "../d")],
        "the archive has 'a' twice",
    ),
    "a link twice": ([link("a", "b"), link("a", "c")], "the archive has 'a' twice"),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_what_would_leave_the_folder_is_refused(place, case):
    members, message = HOSTILE[case]
    with pytest.raises(ArchiveError) as refused:
        unpack(place, archive_of(folder(), *members))
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("members", "message"),
    [
        ([link("a", "/etc/passwd")], "which is neither a file nor a folder"),
        ([member("a", kind=tarfile.CHRTYPE)], "which is neither a file nor a folder"),
        ([member("../a", b"x")], "outside of its folder"),
        ([member("a", b"x"), member("b", b"y")], "'b', which is beside the only file"),
    ],
)
def test_an_archive_that_is_not_one_file_is_refused(place, members, message):
    with pytest.raises(ArchiveError, match=message):
        unpack(place, archive_of(*members))


@pytest.mark.parametrize(
    ("link", "target", "inside"),
    [
        ("a", "b", True),
        ("a/b/c", "../../d", True),
        ("a/b/c", "./x//y", True),
        ("a/b/c", "../../../d", False),
        ("a", "b/..", False),
        ("a", "../copy/b", False),
    ],
)
def test_a_link_may_ascend_only_at_its_beginning_and_within_the_folder(link, target, inside):
    assert stays_inside(tuple(link.split("/")), target) is inside


LONG_CHAIN = 16


def test_a_chain_of_links_that_is_longer_than_a_path_may_be_does_not_lead_out(place, tmp_path):
    # The filter "data" of Python 3.11.12 and older does not resolve what is behind such a chain.
    name, step, members = "d" * 247, "", [folder()]
    for letter in "abcdefghijklmnop":
        members += [folder(f"{step}{name}"), link(f"{step}{letter}", name)]
        step += f"{name}/"
    chain = "/".join("abcdefghijklmnop")
    members += [
        link(f"{chain}/{'l' * 254}", "../" * LONG_CHAIN),
        link("escape", f"{chain}/{'l' * 254}/../../outside"),
        member("escape", b"theirs"),
    ]
    with pytest.raises(ArchiveError):
        unpack(place, archive_of(*members))


def sparse_archive(size):
    """Return an archive with a file of so many zeros, according to its header."""
    headers = {"GNU.sparse.major": "1", "GNU.sparse.minor": "0", "GNU.sparse.realsize": str(size)}
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=tarfile.PAX_FORMAT) as archive:
        info, _ = member("a", b"0\n".ljust(512, b"\0"), pax_headers=headers)
        archive.addfile(info, io.BytesIO(b"0\n".ljust(512, b"\0")))
    return file.getvalue()


def test_a_sparse_file_that_would_fill_the_disk_is_refused(place):
    with pytest.raises(ArchiveError, match="is a sparse file"):
        unpack(place, sparse_archive(2**60))


def test_a_header_that_would_fill_the_memory_is_refused(place, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HEADER", 3 * module.CHUNK)
    long = member("a", pax_headers={"comment": "x" * 4 * module.CHUNK})
    with pytest.raises(ArchiveError, match="a header in the archive is too long"):
        unpack(place, archive_of(long))


def test_files_of_any_size_are_no_headers(place, monkeypatch):
    monkeypatch.setattr(module, "LONGEST_HEADER", 3 * module.CHUNK)
    data = bytes(8 * module.CHUNK)
    assert unpack(place, archive_of(folder(), member("a", data), member("b", data))).count == 2


@pytest.mark.parametrize("size", [0, 100, 512, 1024, 1536, 2000, 2048, 2560])
def test_a_part_of_an_archive_is_no_archive(place, size):
    whole = archive_of(folder(), member("a", b"x" * 1000), member("b", b"y"))
    assert len(whole) > 4096
    with pytest.raises(Ended):
        unpack(place, whole[:size])


@pytest.mark.parametrize("text", [b"Welcome!\n", b"x" * 10_000, b"\0" * 300])
def test_what_is_no_archive_is_no_archive(place, text):
    with pytest.raises(Ended):
        unpack(place, text)


def test_chained_headers_without_an_end_are_no_archive(place):
    info = tarfile.TarInfo("a")
    info.pax_headers = {"comment": "x"}
    header = info.tobuf(tarfile.PAX_FORMAT)[:1024]
    with pytest.raises(Ended):
        unpack(place, header * 5000)


def test_the_size_of_each_piece_is_reported(place):
    seen = []
    unpacker = Unpacker(place, lambda *what: seen.append(what), seen.append)
    unpacker.unpack(io.BytesIO(archive_of(member("a", b"x" * (module.CHUNK + 5)))))
    assert seen == [("a", module.CHUNK + 5), module.CHUNK, 5]
