"""Two machines, as two hosts in network namespaces of the test's own."""

from __future__ import annotations

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest
import torch

from entame_hf.trainer.resume import last_intact_checkpoint

WORKER = Path(__file__).parent / "train.py"
ADDRESSES = ["10.213.7.1", "10.213.7.2"]


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True)


@pytest.fixture
def hosts() -> Iterator[list[str]]:
    """Two hosts that see each other and nothing else."""
    if shutil.which("ip") is None or os.geteuid() != 0:
        pytest.skip("needs root and iproute2 to make hosts")
    names = [f"entame{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            try:
                ip("netns", "add", name)
            except subprocess.CalledProcessError as error:
                pytest.skip(f"no network namespaces here: {error.stderr.decode().strip()}")
        ip("link", "add", "eth0", "netns", names[0], "type", "veth", "peer", "name", "eth0", "netns", names[1])
        for name, address in zip(names, ADDRESSES, strict=True):
            for change in (
                ["addr", "add", f"{address}/24", "dev", "eth0"],
                ["link", "set", "eth0", "up"],
                ["link", "set", "lo", "up"],
            ):
                ip("-n", name, *change)
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], capture_output=True)


def start(hosts: list[str], *folders: Path, **options) -> list[subprocess.Popen]:
    """Launch one process on each host, as a user would type it there, with one folder for all or one each."""
    running = []
    for rank, host in enumerate(hosts):
        folder = folders[rank % len(folders)]
        command = [
            *("ip", "netns", "exec", host, sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu"),
            *("--num_machines", str(len(hosts)), "--num_processes", str(len(hosts)), "--machine_rank", str(rank)),
            *("--main_process_ip", ADDRESSES[0], "--main_process_port", "29533", "--mixed_precision", "no"),
            *(str(WORKER), str(folder), json.dumps(options)),
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "eth0"}
        with (folder / f"host{rank}.log").open("w") as log:
            process = subprocess.Popen(
                command, stdout=log, stderr=subprocess.STDOUT, env=environment, start_new_session=True
            )
        running.append(process)
    return running


def wait_for_a_checkpoint(folder: Path) -> None:
    deadline = time.monotonic() + 120
    while last_intact_checkpoint(folder) is None:
        assert time.monotonic() < deadline, (folder / "host0.log").read_text()[-3000:]
        time.sleep(0.2)


def last_checkpoint(folder: Path) -> tuple[Path, int]:
    found = last_intact_checkpoint(folder)
    assert found is not None
    return Path(found), int(found.rpartition("-")[2])


def kill(*running: subprocess.Popen) -> None:
    for process in running:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)


def alone(folder: Path, **options) -> None:
    command = [sys.executable, str(WORKER), str(folder), json.dumps(options)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)


@pytest.mark.slow
def test_two_machines_train_as_one_and_one_resumes_after_the_other_died(tmp_path, hosts):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6, "double": True}
    one, two, broken = (tmp_path / name for name in ("one", "two", "broken"))
    for folder in (one, two, broken):
        folder.mkdir()
    alone(one, per_device_train_batch_size=24, **options)
    for process in start(hosts, two, per_device_train_batch_size=12, **options):
        assert process.wait(timeout=180) == 0, (two / "host0.log").read_text()[-3000:]
    expected, got = torch.load(one / "rank0.pt"), torch.load(two / "rank1.pt")
    torch.testing.assert_close(got["model"], expected["model"], rtol=1e-9, atol=1e-10)

    # The processes of one host are killed in the middle of a long training, some time after a checkpoint.
    survivor, victim = start(hosts, broken, per_device_train_batch_size=12, **{**options, "max_steps": 100000})
    wait_for_a_checkpoint(broken)
    os.killpg(victim.pid, signal.SIGKILL)
    for pid in subprocess.check_output(["ip", "netns", "pids", hosts[1]], text=True).split():
        os.kill(int(pid), signal.SIGKILL)
    assert survivor.wait(timeout=60) != 0
    log = (broken / "host0.log").read_text()
    assert re.search("Connection (closed|reset)|peer", log), log[-3000:]

    # One host resumes from the last intact checkpoint.
    last, step = last_checkpoint(broken)
    alone(broken, per_device_train_batch_size=24, **{**options, "max_steps": step + 2, "resume": str(last)})
    resumed = torch.load(broken / "rank0.pt")
    assert max(entry["step"] for entry in resumed["log"]) == step + 2


@pytest.mark.slow
def test_hosts_that_share_no_folder(tmp_path, hosts):
    """The first one keeps the checkpoints: that is said before the training, and on resuming until they are copied."""
    options = {"save_strategy": "steps", "save_steps": 2, "per_device_train_batch_size": 12}
    folders = [tmp_path / "a", tmp_path / "b"]
    for folder in folders:
        folder.mkdir()

    def run(succeeds: bool, **changes) -> list[str]:
        running = start(hosts, *folders, **options, **changes)
        try:
            for process in running:
                assert (process.wait(timeout=120) == 0) == succeeds
        finally:
            kill(*running)
        return [(folder / f"host{rank}.log").read_text() for rank, folder in enumerate(folders)]

    assert "this one alone keeps checkpoints" in run(True, max_steps=4)[0]
    for log in run(False, max_steps=6, resume=True):
        assert "Rank 0 would resume from checkpoint-4, and rank 1 from nothing" in log, log[-3000:]
    shutil.copytree(folders[0] / "checkpoint-4", folders[1] / "checkpoint-4", dirs_exist_ok=True)
    run(True, max_steps=6, resume=True)
    first, second = (torch.load(folder / f"rank{rank}.pt") for rank, folder in enumerate(folders))
    assert max(entry["step"] for entry in second["log"]) == 6
    torch.testing.assert_close(first["model"], second["model"], rtol=0, atol=0)
