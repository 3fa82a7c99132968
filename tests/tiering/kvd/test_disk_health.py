"""When a disk is given up, and when it is tried again."""

from __future__ import annotations

import errno

from tiering.kvd.disk_health import DiskHealth, DiskLimits

ERROR = OSError(errno.EIO, "sick disk")


def new_health() -> DiskHealth:
    return DiskHealth(DiskLimits(retry_s=10, slow_io_s=0.5))


def test_a_disk_that_stays_broken_is_tried_ever_less_often() -> None:
    health = new_health()
    tried_at_s = []
    for second in range(1000):
        if health.retry(second) or not second:
            tried_at_s.append(second)
            health.refuse_writes("write", ERROR, second)
    assert tried_at_s == [0, 10, 30, 70, 150, 310, 470, 630, 790, 950]
    assert health.num_errors == 10


def test_a_disk_that_works_again_gets_its_short_pause_back() -> None:
    health = new_health()
    health.refuse_writes("write", ERROR, 0)
    assert health.retry(10)
    health.note_write(0.01, 10)
    health.refuse_writes("write", ERROR, 20)
    assert not health.retry(29)
    assert health.retry(30)


def test_only_writes_that_are_slow_in_a_row_make_the_disk_read_only() -> None:
    health = new_health()
    for took_s in (0.6, 0.6, 0.6, 0.1, 0.6, 0.6, 0.6):
        health.note_write(took_s, 0)
    assert health.level == "on"
    health.note_write(0.6, 0)
    assert health.level == "read_only"


def test_reads_that_are_slow_in_a_row_turn_the_disk_off() -> None:
    health = new_health()
    for _ in range(3):
        health.note_read(0.6, 0)
    health.note_read(0.1, 0)
    for _ in range(3):
        health.note_read(0.6, 0)
    assert health.level == "on"
    health.note_read(0.6, 0)
    assert health.level == "off"


def test_a_read_only_disk_can_still_turn_off_but_not_back() -> None:
    health = new_health()
    health.refuse_writes("write", ERROR, 0)
    health.turn_off("wait", ERROR, 1)
    health.refuse_writes("write", ERROR, 2)
    assert health.level == "off"
    assert not health.retry(20)
    assert health.retry(21)


def test_a_disk_that_never_was_is_never_tried() -> None:
    health = new_health()
    health.give_up()
    assert not health.retry(1e12)
