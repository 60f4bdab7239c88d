"""Files are written whole or not at all, and messages say what helps."""

from __future__ import annotations

import errno
import os

import pytest

from entame_hf.errors import RunError
from entame_hf.files import write_file, write_text, written_beside


def test_a_file_is_replaced_whole(tmp_path):
    path = tmp_path / "new" / "card.md"
    write_text(path, "first ü")
    write_text(path, "second")
    assert path.read_text(encoding="utf-8") == "second"
    assert [each.name for each in path.parent.iterdir()] == ["card.md"]


@pytest.mark.parametrize("error", [OSError(errno.ENOSPC, "No space left on device"), OSError(errno.EIO, "I/O error")])
def test_what_was_there_stays_where_writing_fails(tmp_path, error):
    path = tmp_path / "card.md"
    write_text(path, "first")

    def fail(draft):
        draft.write_text("hal")
        raise error

    with pytest.raises(RunError, match=f"card.md could not be written .*{error.strerror}.*Make room"):
        write_file(path, fail)
    assert path.read_text() == "first"
    assert [each.name for each in tmp_path.iterdir()] == ["card.md"]


@pytest.mark.parametrize("name", ["file/predictions.csv", "n" * 300, "folder"])
def test_room_does_not_help_against_a_name(tmp_path, name):
    (tmp_path / "file").write_text("")
    (tmp_path / "folder").mkdir()
    with pytest.raises(RunError, match=r"could not be written .*Give a place that can, and type the command again"):
        write_text(tmp_path / name, "text")
    assert sorted(os.listdir(tmp_path)) == ["file", "folder"]


def test_other_errors_are_no_matter_of_disks(tmp_path):
    with pytest.raises(ZeroDivisionError):
        write_file(tmp_path / "file", lambda draft: 1 / 0)


def test_files_of_a_folder_are_replaced_together(tmp_path):
    (tmp_path / "a").write_text("old")
    (tmp_path / "kept").write_text("kept")

    def fail():
        with written_beside(tmp_path) as draft:
            (draft / "a").write_text("half")
            raise ValueError("odd")

    with pytest.raises(ValueError, match="odd"):
        fail()
    assert {each.name: each.read_text() for each in tmp_path.iterdir()} == {"a": "old", "kept": "kept"}
    with written_beside(tmp_path) as draft:
        (draft / "a").write_text("new")
        (draft / "b").mkdir()
        (draft / "b" / "c").write_text("new")
    assert (tmp_path / "a").read_text() == (tmp_path / "b" / "c").read_text() == "new"
    assert not draft.exists()
