import os
from pathlib import Path

import pytest

from opengyre.store.whole_file import whole_file


def test_a_file_appears_when_it_is_whole_and_a_link_to_it_stays(tmp_path: Path) -> None:
    real, link = tmp_path / "real", tmp_path / "link"
    real.write_text("before")
    link.symlink_to(real)
    with whole_file(link) as file:
        file.write(b"after")
        assert real.read_text() == "before"
    assert real.read_text() == "after"
    assert link.is_symlink()
    assert sorted(one.name for one in tmp_path.iterdir()) == ["link", "real"]


def test_what_fails_in_the_middle_leaves_what_was_there(tmp_path: Path) -> None:
    real = tmp_path / "real"
    real.write_text("before")

    def write_half() -> None:
        with whole_file(real) as file:
            file.write(b"half")
            raise RuntimeError

    with pytest.raises(RuntimeError):
        write_half()
    assert [one.read_text() for one in tmp_path.iterdir()] == ["before"]


def test_a_pipe_is_written_to_and_stays_a_pipe(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    try:
        with whole_file(pipe) as file:
            file.write(b"through")
        assert os.read(reader, 100) == b"through"
    finally:
        os.close(reader)
    assert pipe.is_fifo()
