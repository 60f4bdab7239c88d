"""`--help`: what it says, how fast, and that it follows the options."""

from __future__ import annotations

import subprocess
import sys
import time

import pytest

from entame_hf.cli import COMMANDS, main
from entame_hf.cli.help import FOLDER, help_texts

# Modules that take seconds to import.
SLOW = "{'torch', 'transformers', 'timm', 'datasets', 'matplotlib', 'numpy'}"


def test_the_texts_follow_the_options():
    for command, text in help_texts().items():
        written = (FOLDER / f"{command}.txt").read_text(encoding="utf-8")
        assert written == text, "run: python -m entame_hf.cli.help"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_imports_nothing_slow(command):
    code = f"from entame_hf.cli import main; main([{command!r}, '--help']); import sys; "
    code += f"assert not {SLOW} & sys.modules.keys()"
    start = time.monotonic()
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.startswith(f"Usage: entame {command} ")
    assert max(map(len, result.stdout.splitlines())) <= 80
    assert time.monotonic() - start < 10


@pytest.mark.parametrize("argv", [[], ["-h"], ["--help"]])
def test_the_overview_names_every_command(argv, capsys):
    main(argv)
    out = capsys.readouterr().out
    assert all(f"  {command}" in out for command in COMMANDS)


def test_help_shows_the_defaults_of_the_run_that_is_asked_for(capsys):
    main(["finetune", "--help"])
    finetune = " ".join(capsys.readouterr().out.split())
    main(["demo", "--help"])
    demo = " ".join(capsys.readouterr().out.split())
    assert "Images per step and device. [64]" in finetune
    assert "Images per step and device. [128]" in demo
    assert "[out/demo]" in demo
    assert "[out/demo]" not in finetune


def test_an_unknown_command_is_answered_with_a_known_one(capsys):
    with pytest.raises(SystemExit) as end:
        main(["finetun"])
    assert end.value.code == 2
    assert "Did you mean finetune?" in capsys.readouterr().err


def test_all_options_are_listed_on_request(capsys):
    from entame_hf.cli.loading import training_parser

    with pytest.raises(SystemExit):
        training_parser("").given(["--help_all"])
    out = capsys.readouterr().out
    assert "--adam_beta1" in out
    assert "--data_dir" in out
    assert "--do_train" not in out
