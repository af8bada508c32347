"""Archives of code: what is unpacked, and what is refused."""

import os
import stat
from zipfile import ZIP_DEFLATED, ZipFile, ZipInfo

import pytest

from ddpjob.agent import code


def archive_of(folder, entries, **settings):
    """Write an archive with the content of entries, each a name or a ZipInfo."""
    with ZipFile(folder / code.ARCHIVE, "w", **settings) as archive:
        for entry, content in entries:
            archive.writestr(entry, content)
    return folder


def an_entry(name, mode):
    entry = ZipInfo(name)
    entry.external_attr = mode << 16
    return entry


@pytest.fixture
def target(tmp_path):
    (tmp_path / "a" / "target").mkdir(parents=True)
    return tmp_path / "a" / "target"


def test_files_have_their_content_and_programs_can_be_run(tmp_path, target):
    program = an_entry("bin/run.sh", 0o100755)
    source = archive_of(
        tmp_path,
        [("lib/x.bin", b"\xff\0"), (program, "#!/bin/sh"), (an_entry("empty/", 0o40777), "")],
    )
    code.unpack(source, target)
    assert (target / "lib/x.bin").read_bytes() == b"\xff\0"
    assert os.access(target / "bin/run.sh", os.X_OK)
    # A folder has the rights that any new one has.
    assert (target / "empty").stat().st_mode == (tmp_path / "a").stat().st_mode


HOSTILE = {
    "a path above": ("../escaped", "outside of its folder"),
    "a path above, in the middle": ("lib/../../escaped", "outside of its folder"),
    "an absolute path": ("/tmp/escaped", "outside of its folder"),
    "no path": (".", "outside of its folder"),
    "a link": (an_entry("link", stat.S_IFLNK | 0o777), "neither a file nor a folder"),
    "a device": (an_entry("null", stat.S_IFCHR | 0o666), "neither a file nor a folder"),
    "a pipe": (an_entry("pipe", stat.S_IFIFO | 0o666), "neither a file nor a folder"),
}


@pytest.mark.parametrize(("entry", "sentence"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_entry_is_refused_before_anything_is_written(tmp_path, target, entry, sentence):
    source = archive_of(tmp_path, [("fine.py", "x"), (entry, "/etc/passwd")])
    with pytest.raises(ValueError, match=sentence):
        code.unpack(source, target)
    assert list(target.iterdir()) == []


def test_an_enormous_archive_is_refused_before_anything_is_written(tmp_path, target, monkeypatch):
    monkeypatch.setattr(code, "MAX_BYTES", 100_000)
    # In an archive, a megabyte of zeros takes only a kilobyte.
    source = archive_of(tmp_path, [("bomb", bytes(2**20))], compression=ZIP_DEFLATED)
    with pytest.raises(ValueError, match="more than 100000 bytes when it is unpacked"):
        code.unpack(source, target)
    assert list(target.iterdir()) == []


def test_an_entry_is_not_larger_than_it_says(tmp_path, target, monkeypatch):
    monkeypatch.setattr(code, "MAX_BYTES", 100_000)
    source = archive_of(tmp_path, [("bomb", bytes(2**20))], compression=ZIP_DEFLATED)
    path = source / code.ARCHIVE
    # Its size is in its header and in the table at the end.
    said, wrong = ((size).to_bytes(4, "little") for size in (2**20, 1000))
    content = path.read_bytes()
    assert content.count(said) == 2
    path.write_bytes(content.replace(said, wrong))
    with pytest.raises(ValueError, match="cannot be read"):
        code.unpack(source, target)
    assert (target / "bomb").stat().st_size <= 1000


def test_too_many_entries_are_refused(tmp_path, target, monkeypatch):
    monkeypatch.setattr(code, "MAX_ENTRIES", 3)
    source = archive_of(tmp_path, [(f"f{number}", "") for number in range(4)])
    with pytest.raises(ValueError, match="4 entries; the limit is 3"):
        code.unpack(source, target)


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\3\4 damaged"])
def test_a_damaged_archive_is_refused(tmp_path, target, content):
    (tmp_path / code.ARCHIVE).write_bytes(content)
    with pytest.raises(ValueError, match="cannot be read"):
        code.unpack(tmp_path, target)


def test_damaged_content_is_refused(tmp_path, target):
    source = archive_of(tmp_path, [("train.py", os.urandom(1000))], compression=ZIP_DEFLATED)
    path = source / code.ARCHIVE
    content = bytearray(path.read_bytes())
    # The data of the first entry follow its header of 30 bytes and its name.
    begin = 30 + len("train.py")
    for broken in (begin, begin + 500):
        changed = bytearray(content)
        changed[broken] ^= 0xFF
        path.write_bytes(changed)
        with pytest.raises(ValueError, match=r"code\.zip cannot be read"):
            code.unpack(source, target)
