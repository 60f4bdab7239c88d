"""How scripts end."""

from __future__ import annotations

import pytest
import torch.distributed as dist

from entame_hf import InputError, RunError
from entame_hf.cli.launch import run_command, say_once


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (InputError("No data.\n Give some."), 2, "tool.py: error: No data. Give some.\n"),
        (RunError("No space.\nMake room."), 1, "tool.py: error: No space.\nMake room.\n"),
        (KeyboardInterrupt(), 130, "tool.py: interrupted.\n"),
    ],
    ids=["input", "run", "interrupted"],
)
def test_what_may_end_a_script_is_a_message_and_a_code(capsys, error, code, message):
    def main(argv):
        assert argv == ["--option"]
        raise error

    with pytest.raises(SystemExit) as end:
        run_command(main, ["--option"], "tool.py")
    assert end.value.code == code
    assert capsys.readouterr().err.startswith(message)


def test_a_script_that_ends_well_ends_its_process_group(tmp_path):
    where = {"init_method": f"file://{tmp_path}/store", "rank": 0, "world_size": 1}
    run_command(lambda _: dist.init_process_group("gloo", **where), [], "tool.py")
    assert not dist.is_initialized()


@pytest.fixture
def launcher(monkeypatch):
    """The store of a launcher, as its processes find it."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True)
    for name, value in {
        "TORCHELASTIC_USE_AGENT_STORE": "True",
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(store.port),
        "GROUP_RANK": "0",
    }.items():
        monkeypatch.setenv(name, value)
    return store


def test_a_message_is_said_once_a_host(launcher, monkeypatch, capsys):
    for message in ("No data.", "No data.", "No model.", "No data."):
        say_once(message)
    monkeypatch.setenv("GROUP_RANK", "1")
    say_once("No data.")
    assert capsys.readouterr().err.splitlines() == ["No data.", "No model.", "No data."]


def test_a_message_is_said_where_the_launcher_is_gone(monkeypatch, capsys, launcher):
    def refuse(*_, **__):
        raise dist.DistNetworkError("connection refused")

    monkeypatch.setattr(dist, "TCPStore", refuse)
    say_once("No data.")
    assert capsys.readouterr().err == "No data.\n"
