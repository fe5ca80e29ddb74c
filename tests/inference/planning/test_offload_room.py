"""What may leave the device never takes more room than there is, and fills it exactly."""

from __future__ import annotations

import pytest

from fastfold.inference.planning.memory_model import OffloadRoom, OffloadShare


@pytest.mark.parametrize(("host", "disk"), [(0, 0), (35, 0), (0, 52), (35, 20), (1000, 0)])
def test_shares_fit_into_the_room_and_one_of_them_fills_it(host: int, disk: int) -> None:
    room = OffloadRoom(host, disk)
    choices = list(room.choices(17, 10))
    assert choices[0] == OffloadShare(0, 17, 0)
    assert all(away.nbytes == 10 * away.rows <= room.total for away in choices)
    most = min(17, room.total // 10)
    eighths = {rows for rows in (0, 2, 4, 6, 8, 10, 12, 14, 17) if rows <= most}
    # As much as needs no disk, and as much as there is room for.
    assert [away.rows for away in choices] == sorted(eighths | {min(17, host // 10), most})
    assert [away.rows for away in room.choices(17, 10, used=20)][-1] == min(17, max(0, room.total - 20) // 10)
    for away in choices:
        assert away.kept + away.share == pytest.approx(1.0)
        on_host, on_disk = room.split(away.nbytes)
        assert on_host + on_disk == away.nbytes
        assert on_host <= host
        assert on_disk == 0 or on_host == host


def test_a_piece_that_does_not_fit_into_the_rest_of_the_host_goes_to_the_disk() -> None:
    assert OffloadRoom(100, 1000).split(150, piece=40) == (100, 90)
    assert OffloadRoom(100, 1000).split(90, piece=40) == (90, 0)
