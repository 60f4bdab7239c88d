"""The documentation runs: its notebook from top to bottom, and its commands word for word."""

from __future__ import annotations

import csv
import json
import os
import re
import signal
import subprocess
import sys
import sysconfig
import time
from functools import partial
from pathlib import Path

import onnxruntime
import pytest
import torch
from cli_folders import COLOURS, hf_folder, timm_folder, write_images  # noqa: F401
from hub_server import HubServer
from PIL import Image
from transformers import AutoImageProcessor, AutoModelForImageClassification

pytestmark = [pytest.mark.runs, pytest.mark.slow]

# Fixtures.
# ruff: noqa: F811

ROOT = Path(__file__).parents[1]

# What GPUs, hours or the Hub would do, by two processes on the CPU, a listing and a Hub of the test.
HERE = {
    "--config_file scripts/launch/ddp.yaml": "--config_file scripts/launch/cpu.yaml",
    "scripts/finetune.py": "scripts/finetune.py --use_cpu True",
    "accelerate launch --multi_gpu --num_processes 16 scripts/reproduce.py": "python scripts/reproduce.py",
    "me/": "ada/",
}


def blocks(file: str, language: str = "bash") -> list[str]:
    """List the fenced blocks of a document."""
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / file).read_text(encoding="utf-8"), re.DOTALL | re.MULTILINE
    )


class Shell:
    """Run what a reader types, in the folder that the last `cd` led to and in the environment that is active."""

    def __init__(self, folder: Path, environment: dict[str, str]) -> None:
        self.folder, self.environment = folder, environment

    def start(self, command: str) -> subprocess.Popen[str]:
        command = f"{command.strip()}\ncode=$?; pwd > $STATE; env -0 > $STATE.env; exit $code"
        where = {"cwd": self.folder, "env": self.environment, "start_new_session": True}
        # A test that runs in the background would hand on that it ignores Ctrl-C.
        where["preexec_fn"] = partial(signal.signal, signal.SIGINT, signal.SIG_DFL)
        return subprocess.Popen(["bash", "-c", command], stdout=-1, stderr=-1, text=True, **where)

    def run(self, command: str) -> str:
        out, error = (process := self.start(command)).communicate()
        assert process.returncode == 0, f"{command}\n{out[-2000:]}\n{error[-3000:]}"
        state = Path(self.environment["STATE"])
        self.folder = Path(state.read_text().strip())
        self.environment = dict(
            line.split("=", 1) for line in state.with_name("state.env").read_text().split("\0") if "=" in line
        )
        return out

    def kill(self, command: str, number: signal.Signals, sign: str) -> str:
        """Start a command, and end it once a file is there."""
        process = self.start(command)
        while process.poll() is None and not any(path.stat().st_size for path in self.folder.glob(sign)):
            time.sleep(0.1)
        assert process.poll() is None, process.communicate()[1][-3000:]
        os.killpg(process.pid, number)
        return process.communicate()[1]


@pytest.fixture
def shell(tmp_path, timm_folder, hf_folder):
    """A shell in an empty folder, beside a Hub that has the models of the documentation, small."""
    with HubServer() as hub:
        hub.add("models", "timm/resnet50.a1_in1k", timm_folder)
        hub.add("models", "google/vit-base-patch16-224-in21k", hf_folder)
        environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
        path = f"{Path(sys.executable).parent}:{environment['PATH']}"
        environment |= {"PATH": path, "XDG_CACHE_HOME": str(tmp_path / "cache"), "STATE": str(tmp_path / "state")}
        folder = tmp_path / "stranger"
        folder.mkdir()
        yield Shell(folder, environment | hub.environment(tmp_path / "hub"))


@pytest.fixture
def installed(shell):
    """The shell after what the README says to install with."""
    install, *_ = blocks("README.md")
    clone, environment, package = install.replace("REPOSITORY", str(ROOT)).splitlines()
    shell.run(clone)
    shell.run(environment)
    # What the tests run with, in place of a download of 6 GB.
    site = next(shell.folder.glob(".venv/lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    accelerate = shell.folder / ".venv" / "bin" / "accelerate"
    code = "from accelerate.commands.accelerate_cli import main\n\nmain()\n"
    accelerate.write_text(f"#!{accelerate.with_name('python')}\n{code}")
    accelerate.chmod(0o755)
    shell.run(package)
    return shell


def test_a_stranger_gets_from_an_empty_folder_to_an_onnx_file(installed):
    shell = installed
    _, make, use = blocks("README.md")
    resume, onnx, *_ = blocks("docs/checkpoints-and-hub.md")
    demo, _ = make.splitlines()
    printed = shell.run(demo)
    assert printed.count("%") > 20
    assert "entame finetune --model_name_or_path timm/resnet50.a1_in1k --data_dir PHOTOS" in printed

    write_images(shell.folder / "photos", COLOURS, count=400)
    write_images(shell.folder / "new_photos", COLOURS, count=5)
    finetune, predict, resume_readme = (line.split("  #")[0] for line in use.replace("\\\n", "").splitlines())
    assert resume.strip() == resume_readme
    said = shell.kill(finetune, signal.SIGINT, "out/checkpoint-*/checkpoint_files.json")
    assert f"interrupted. Resume with:\n  {resume_readme}" in said
    shell.kill(resume_readme, signal.SIGKILL, "out/checkpoint-[4-9]?/checkpoint_files.json")
    assert "Done in" in shell.run(resume_readme)
    state = json.loads((shell.folder / "out" / "trainer_state.json").read_text())
    assert state["global_step"] == state["max_steps"]

    assert "15 images predicted, 0 not read" in shell.run(predict)
    with (shell.folder / "predictions.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert sum(Path(row["file"]).parent.name == row["label"] for row in rows) >= 13

    shell.run(onnx)
    session = onnxruntime.InferenceSession(shell.folder / "out" / "model.onnx")
    model = AutoModelForImageClassification.from_pretrained(shell.folder / "out")
    images = [Image.open(row["file"]) for row in rows]
    pixels = AutoImageProcessor.from_pretrained(shell.folder / "out")(images, return_tensors="pt")["pixel_values"]
    (logits,) = session.run(["logits"], {"pixel_values": pixels.numpy()})
    with torch.no_grad():
        torch.testing.assert_close(torch.tensor(logits), model(pixels).logits, rtol=1e-4, atol=1e-4)
    assert [model.config.id2label[int(index)] for index in logits.argmax(1)] == [row["label"] for row in rows]


def test_the_commands_of_the_docs_run(installed):
    shell = installed
    write_images(shell.folder / "photos", COLOURS, count=20)
    _, _, push = blocks("docs/checkpoints-and-hub.md")
    commands = push + "".join("".join(blocks(f"docs/{file}.md")) for file in ("method", "distributed", "reproduce"))
    for here in HERE.items():
        commands = commands.replace(*here)
    for line in commands.replace("\\\n", " ").splitlines():
        command = line.split("  #")[0]
        of_rows = re.search(r"--results (\S+)", command)
        if command.startswith(("#", "pip install")) or (of_rows and not (ROOT / of_rows[1]).exists()):
            continue
        is_long = "reproduce.py run" in command and "--dry_run" not in command
        shell.run(f"{command} --dry_run" if is_long else command)
    results = [
        json.loads((shell.folder / f"two_{kind}" / "all_results.json").read_text()) for kind in ("gpus", "processes")
    ]
    assert results[0]["eval_loss"] == results[1]["eval_loss"]
    (code,) = blocks("docs/checkpoints-and-hub.md", "python")
    (shell.folder / "load.py").write_text(code.replace("me/", "ada/"))
    shell.run("python load.py")


def test_the_python_of_the_readme_runs(shell):
    write_images(shell.folder / "photos", COLOURS, count=40)
    (code,) = blocks("README.md", "python")
    (shell.folder / "run.py").write_text(code + "print(trainer.state.log_history)\n")
    shell.environment["PYTHONPATH"] = str(ROOT)
    assert "'eval_accuracy':" in shell.run("python run.py")
    assert AutoModelForImageClassification.from_pretrained(shell.folder / "out").config.id2label[0] == "blue"


def test_the_notebook_runs_from_top_to_bottom(tmp_path):
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    notebook = nbformat.read(ROOT / "docs" / "first_run.ipynb", as_version=4)
    assert not any(cell.get("outputs") for cell in notebook.cells)
    nbclient.NotebookClient(notebook, timeout=600, resources={"metadata": {"path": str(tmp_path)}}).execute()
    *_, found = [cell.outputs for cell in notebook.cells if cell.cell_type == "code"]
    (digit,) = [output.data["text/plain"] for output in found if output.output_type == "execute_result"]
    assert "'label': '0'" in digit
