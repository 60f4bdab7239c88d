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
from pathlib import Path

import pytest
import torch

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


def start(hosts: list[str], folder: Path, **options) -> list[subprocess.Popen]:
    """Launch one process on each host, as a user would type it there."""
    running = []
    for rank, host in enumerate(hosts):
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


def alone(folder: Path, **options) -> None:
    command = [sys.executable, str(WORKER), str(folder), json.dumps(options)]
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, "OMP_NUM_THREADS": "1"}, timeout=120)


@pytest.mark.slow
def test_two_machines_train_as_one_and_go_on_after_one_died(tmp_path, hosts):
    options = {"save_strategy": "steps", "save_steps": 2, "max_steps": 6}
    one, two, broken = (tmp_path / name for name in ("one", "two", "broken"))
    for folder in (one, two, broken):
        folder.mkdir()
    alone(one, per_device_train_batch_size=24, **options)
    for process in start(hosts, two, per_device_train_batch_size=12, **options):
        assert process.wait(timeout=180) == 0, (two / "host0.log").read_text()[-3000:]
    expected, got = torch.load(one / "rank0.pt"), torch.load(two / "rank1.pt")
    torch.testing.assert_close(got["model"], expected["model"], rtol=0, atol=1e-5)

    # One host loses power in the middle of a long training, some time after a checkpoint.
    survivor, victim = start(hosts, broken, per_device_train_batch_size=12, **{**options, "max_steps": 100000})
    deadline = time.monotonic() + 120
    while not list(broken.glob("checkpoint-*/trainer_state.json")):
        assert time.monotonic() < deadline, (broken / "host0.log").read_text()[-3000:]
        time.sleep(0.2)
    os.killpg(victim.pid, signal.SIGKILL)
    for pid in subprocess.check_output(["ip", "netns", "pids", hosts[1]], text=True).split():
        os.kill(int(pid), signal.SIGKILL)
    assert survivor.wait(timeout=60) != 0
    log = (broken / "host0.log").read_text()
    assert re.search("Connection (closed|reset)|peer", log), log[-3000:]

    # The last whole checkpoint goes on, on one host.
    last = max(broken.glob("checkpoint-*/trainer_state.json"), key=lambda file: int(file.parent.name[11:])).parent
    step = int(last.name[11:])
    alone(broken, per_device_train_batch_size=24, **{**options, "max_steps": step + 2, "resume": str(last)})
    resumed = torch.load(broken / "rank0.pt")
    assert max(entry["step"] for entry in resumed["log"]) == step + 2
