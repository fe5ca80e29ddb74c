"""Members of tar archives are those of Python's ``tarfile``; harmful headers end at once."""

from __future__ import annotations

import io
import tarfile

import pytest

from fastfold.utils.download.tar_members import TarMemberError, read_piecewise, tar_members

FORMATS = {"ustar": tarfile.USTAR_FORMAT, "gnu": tarfile.GNU_FORMAT, "pax": tarfile.PAX_FORMAT}


def archive_of(form: int, *, long_names: bool) -> bytes:
    """An archive with files, a folder and links."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode="w", format=form) as archive:
        for name, content in (("a.txt", b"x" * 700), ("empty", b""), ("é/" + "n" * 60, b"y" * 512)):
            member = tarfile.TarInfo(name + "m" * 200 * long_names)
            member.size = len(content)
            archive.addfile(member, io.BytesIO(content))
        for name, kind in (("folder", tarfile.DIRTYPE), ("link", tarfile.SYMTYPE), ("hard", tarfile.LNKTYPE)):
            member = tarfile.TarInfo(name)
            member.type, member.linkname = kind, "a.txt"
            archive.addfile(member)
        member = tarfile.TarInfo("last")
        member.size = 3
        archive.addfile(member, io.BytesIO(b"end"))
    return file.getvalue()


@pytest.mark.parametrize("form", FORMATS)
@pytest.mark.parametrize("long_names", [False, True])
def test_members_are_those_of_tarfile(form: str, long_names: bool) -> None:
    if long_names and form == "ustar":
        pytest.skip("a header of ustar has no room for long names")
    data = archive_of(FORMATS[form], long_names=long_names)
    source = io.BytesIO(data)
    ours = [
        (*member, b"".join(read_piecewise(source, member))) for member in tar_members(source, size=len(data))
    ]
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        theirs = [
            (
                *(one.name, one.offset_data, one.size, one.isreg(), one.isdir()),
                archive.extractfile(one).read() if one.isreg() else b"",  # type: ignore[union-attr]
            )
            for one in archive
        ]
    assert len(ours) == 7
    assert ours == theirs


def member(kind: bytes = tarfile.REGTYPE, size: int = 0, content: bytes = b"", name: str = "x") -> bytes:
    """Header of a member and its data."""
    info = tarfile.TarInfo(name)
    info.type, info.size = kind, size
    return info.tobuf(tarfile.GNU_FORMAT) + content + bytes(-len(content) % 512)


def pax(**records: str) -> bytes:
    """Header with PAX records."""
    text = b""
    for key, value in records.items():
        body = f" {key.replace('__', '.')}={value}\n".encode()
        length = len(body) + 1
        while len(str(length)) + len(body) != length:
            length += 1
        text += str(length).encode() + body
    return member(tarfile.XHDTYPE, len(text), text)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (pax(size=str(10**17)) + member(), "a member 'x' of 100,000,000,000,000,000 bytes"),
        (pax(size="-512") + member(), "is damaged .the size of its member 'x'"),
        (pax(size="9" * 40) + member(), "is damaged .the size of its member 'x'"),
        (member(size=1 << 40), "a member 'x' of 1,099,511,627,776 bytes"),
        (pax(GNU__sparse__map="0,1", GNU__sparse__size=str(10**15)) + member(), "has a sparse member 'x'"),
        (member(tarfile.GNUTYPE_SPARSE), "has a sparse member 'x'"),
        (member(tarfile.XHDTYPE, 20, b"99999 a=b\n" + b"1" * 10), "is damaged .its PAX record at byte 0"),
        (member(tarfile.XHDTYPE, 6, b"x a=b\n"), "is damaged .its PAX record"),
        (member(tarfile.GNUTYPE_LONGNAME, 1 << 30), "bytes, more than it can hold"),
        (member(tarfile.GNUTYPE_LONGNAME, 600, b"a" * 100), "ends too early"),
        (pax(comment="c") * 9 + member(), "a row of headers without a member"),
        (b"<html>" + bytes(600), "is not a tar archive, or damaged .it starts with b'<html>"),
        (b"", "is not a tar archive"),
        (member() + b"garbage" * 100, "is not a tar archive, or damaged .at byte 512"),
    ],
)
def test_other_archives_are_refused_at_once(data: bytes, message: str) -> None:
    with pytest.raises(TarMemberError, match=message):
        list(tar_members(io.BytesIO(data), size=len(data) + (1 << 20)))


def test_a_member_that_the_archive_cuts_off_is_refused() -> None:
    data = member(size=2000, content=b"x" * 900)
    with pytest.raises(TarMemberError, match="a member 'x' of 2,000 bytes, more than it can hold"):
        list(tar_members(io.BytesIO(data), size=len(data)))
    source = io.BytesIO(data[:1400])
    (only,) = tar_members(source, size=4096)
    with pytest.raises(TarMemberError, match="ends within its member 'x'"):
        list(read_piecewise(source, only))
