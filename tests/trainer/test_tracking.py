"""Trackers that need no account: what they are given, and what they show."""

import os
import re
import shutil
import subprocess
import sys
from contextlib import contextmanager

import pytest
from cli_folders import SCRIPT, arguments, photos, timm_folder  # noqa: F401
from conftest import RandomImages

from entame_hf import EntameTrainer, EntameTrainingArguments

NAMES = ("noise_share", "entropy", "features", "feature_var", "grad_norm_backbone", "head_weights")
# Ends the process that reaches for anything but this machine.
OFFLINE = """
import os, runpy, sys
def guard(event, args):
    if event == "socket.getaddrinfo" and args[0] not in (None, "localhost", "127.0.0.1", "::1"):
        print("reaches for", args[0], file=sys.stderr, flush=True)
        os._exit(99)
sys.addaudithook(guard)
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""
SHOW = """
import time, trackio
_, url, _, _ = trackio.show(project="huggingface", open_browser=False, block_thread=False, share=False)
print("serving", url, flush=True)
time.sleep(300)
"""


def test_tensorboard_holds_the_energies(tmp_path, tiny_vit):
    event_accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    args = EntameTrainingArguments(
        str(tmp_path),
        max_steps=3,
        per_device_train_batch_size=16,
        report_to="tensorboard",
        save_strategy="no",
        use_cpu=True,
        disable_tqdm=True,
    )
    trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(48))
    trainer.train()
    (folder,) = (tmp_path / "runs").iterdir()
    events = event_accumulator.EventAccumulator(str(folder))
    events.Reload()
    for name in NAMES:
        scalars = events.Scalars(f"train/energy/{name}")
        assert [scalar.step for scalar in scalars] == [1, 2, 3]
        logged = [entry[f"energy/{name}"] for entry in trainer.state.log_history if f"energy/{name}" in entry]
        assert [scalar.value for scalar in scalars] == pytest.approx(logged, rel=1e-6)


@contextmanager
def dashboard(environment):
    """Serve trackio's page on a free port of this machine."""
    process = subprocess.Popen([sys.executable, "-c", SHOW], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        yield next(line.split()[1] for line in process.stdout if line.startswith("serving"))
    finally:
        process.kill()
        process.wait()


@pytest.mark.slow
def test_trackios_page_shows_the_energies(tmp_path, photos, timm_folder):  # noqa: F811
    """One run with its training and its last evaluation, without a word to any other machine."""
    pytest.importorskip("trackio")
    sync_api = pytest.importorskip("playwright.sync_api")
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if chromium is None:
        pytest.skip("needs Chromium")
    environment = {**os.environ, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    environment = {name: value for name, value in environment.items() if not name.startswith("TRACKIO_")}
    options = arguments(timm_folder, photos, tmp_path / "out", report_to="trackio", logging_steps=4)
    command = [sys.executable, "-c", OFFLINE, str(SCRIPT), *options]
    result = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert result.returncode == 0, result.stderr[-3000:]
    with dashboard(environment) as url, sync_api.sync_playwright() as playwright:
        context = playwright.chromium.launch_persistent_context(
            str(tmp_path / "profile"),
            executable_path=chromium,
            args=["--no-sandbox", "--disable-gpu", "--disable-background-networking", "--no-first-run"],
            viewport={"width": 1400, "height": 3600},
        )
        page = context.pages[0]
        page.goto(f"{url}?project=huggingface")
        page.get_by_text(re.compile(r"^energy \(\d+\)$")).wait_for()
        page.wait_for_timeout(2000)
        text = page.inner_text("body")
        page.screenshot(path=str(tmp_path / "trackio.png"))
        context.close()
    assert "Runs (1)" in text
    assert re.search(r"\bout-\d{8}-\d{6}\b", text)
    for name in NAMES:
        assert re.search(rf"^{name}$", text, re.MULTILINE), name


@pytest.mark.parametrize("disable_tqdm", [False, True], ids=["bar", "prints"])
def test_the_console_shows_losses_without_energies(tiny_vit, tmp_path, capsys, disable_tqdm):
    args = EntameTrainingArguments(
        str(tmp_path), max_steps=2, logging_steps=1, use_cpu=True, report_to="none", disable_tqdm=disable_tqdm
    )
    trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(16))
    trainer.train()
    shown = "".join(capsys.readouterr())
    assert shown.count("'grad_norm'") == 2
    assert "energy/" not in shown
    assert sum("energy/total" in entry for entry in trainer.state.log_history) == 2
