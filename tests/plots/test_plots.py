"""What the pictures say: read from the figures, whose lines and texts are what a reader sees."""

import numpy as np
import pytest
import torch
from matplotlib.figure import Figure
from PIL import Image

from entame_hf import error_energy
from entame_hf.plots import (
    accuracy_curves,
    batch_figure,
    confusion_matrix_figure,
    error_energy_figure,
    feature_variance_curves,
    learning_curves,
    noise_energy,
    save_figures,
    series,
    wrong_images_figure,
)

STEPS = [1, 2, 3, 10, 20, 30]


def lines(axes):
    return {line.get_label(): line.get_xydata().tolist() for line in axes.get_lines()}


def test_what_is_logged_again_at_a_step_is_left_out():
    history = [{"eval_accuracy": 0.5, "step": 4}, {"train_loss": 1.0, "step": 4}, {"eval_accuracy": 0.9, "step": 4}]
    assert series(history, "eval_accuracy") == ([4], [0.5])
    assert series(history, "energy/noise_share") == ([], [])


def test_accuracy_is_the_mean_of_the_seeds_with_their_spread():
    runs = {"entame": [(STEPS, [0.1, 0.2, 0.3, 0.4, 0.5, 0.6]), (STEPS[1:], [0.4, 0.5, 0.6, 0.7, 0.8])]}
    axes = accuracy_curves(runs).axes[0]
    # At the steps that both have.
    expected = [[2, 0.3], [3, 0.4], [10, 0.5], [20, 0.6], [30, 0.7]]
    np.testing.assert_allclose(lines(axes)["entame"], expected)
    band = axes.collections[0].get_paths()[0].vertices
    assert band[:, 1].max() == pytest.approx(0.7 + np.std([0.6, 0.8], ddof=1))


def energies(step, logits, labels):
    """What the trainer logs of the error at a step."""
    energy = error_energy(torch.as_tensor(logits), torch.as_tensor(labels))
    return {"step": step, **{f"energy/{name}": float(value) for name, value in energy._asdict().items()}}


def test_noise_is_what_the_labels_do_not_explain():
    logits, labels = torch.randn(64, 5, generator=torch.Generator().manual_seed(0)), torch.arange(64) % 5
    estimates, targets = logits.softmax(-1), torch.eye(5)[labels]
    alignment = (estimates * targets).sum(-1).mean()
    residual = (estimates - alignment * targets).square().sum(-1).mean()
    steps, values = noise_energy([energies(1, logits, labels)])
    assert steps == [1]
    assert values[0] == pytest.approx(float(residual), rel=1e-5)


def test_noise_vanishes_with_the_error_and_is_never_more():
    labels = torch.arange(40) % 4
    history = [energies(step, torch.eye(4)[labels] * scale, labels) for step, scale in enumerate([0, 1, 5, 50], 1)]
    _, noise = noise_energy(history)
    totals = [entry["energy/total"] for entry in history]
    # A head at maximum entropy: 1/C − 1/C².
    assert noise[0] == pytest.approx(1 / 4 - 1 / 16)
    assert all(0 <= value <= total + 1e-6 for value, total in zip(noise, totals, strict=True))
    assert noise[-1] == pytest.approx(0, abs=1e-6)
    axes = error_energy_figure(history).axes[0]
    assert axes.get_ylim()[0] == 0
    assert axes.get_ylim()[1] < 1
    top = axes.collections[1].get_paths()[0].vertices[:, 1].max()
    assert top == pytest.approx(max(totals))


@pytest.mark.parametrize(("last", "scale"), [(2.0, "linear"), (30.0, "log")])
def test_variance_is_on_a_logarithmic_scale_where_it_grows_tenfold(last, scale):
    assert feature_variance_curves({"base": [([1, 2], [1.0, last])]}).axes[0].get_yscale() == scale


def test_learning_curves_leave_out_what_is_no_share():
    history = [
        {"loss": 2.0, "step": 1},
        {"eval_loss": 1.5, "eval_accuracy": 0.4, "eval_perplexity": 7.0, "eval_runtime": 0.1, "step": 2},
    ]
    loss, metrics = learning_curves(history).axes
    assert lines(loss) == {"training": [[1, 2.0]], "evaluation": [[2, 1.5]]}
    assert lines(metrics) == {"accuracy": [[2, 0.4]]}
    assert len(learning_curves(history[:1]).axes) == 1


def test_what_was_not_logged_has_no_picture(tmp_path):
    nothing = {"base": [series([{"loss": 1.0, "step": 1}], "energy/noise_share")]}
    figures = {
        "accuracy": accuracy_curves(nothing),
        "error_energy": error_energy_figure([{"loss": 1.0, "step": 1}]),
        "batch": batch_figure(np.zeros((0, 3, 4, 4)), np.zeros(0, dtype=int), ["a"]),
        "wrong_images": wrong_images_figure([], [], [], [], ["a"]),
        "feature_variance": feature_variance_curves({}),
        "learning_curves": learning_curves([]),
        "confusion_matrix": confusion_matrix_figure(np.zeros((3, 3), dtype=int), ["a", "b", "c"]),
    }
    assert save_figures(figures, tmp_path) == []
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("classes", [2, 10, 60, 120])
def test_confusion_matrices_of_every_size_are_written(tmp_path, classes, recwarn):
    names = ["猫" * 40, "$x_{", "new\nline", "γάτα", "חתול"] + [f"<b>|{i}" for i in range(classes)]
    figure = confusion_matrix_figure(np.eye(classes, dtype=int), names[:classes])
    assert save_figures({"matrix": figure}, tmp_path) == ["matrix.png"]
    with Image.open(tmp_path / "matrix.png") as image:
        assert max(image.size) < 1600
        # matplotlib's version would make a new file of the same run.
        assert "Software" not in image.info
    # A glyph that no font has would be warned about, and drawn as a box.
    assert [str(warning.message) for warning in recwarn] == []


def test_a_count_stands_in_the_row_of_the_true_class():
    axes = confusion_matrix_figure(np.array([[5, 2], [0, 1234]]), ["cat", "dog"]).axes[0]
    counts = {text.get_position(): text.get_text() for text in axes.texts}
    assert counts == {(0, 0): "5", (1, 0): "2", (0, 1): "0", (1, 1): "1,234"}
    assert [label.get_text() for label in axes.get_yticklabels()] == ["cat", "dog"]


def test_a_method_keeps_its_style_and_a_panel_gets_no_legend():
    figure = Figure()
    left, right = figure.subplots(1, 2)
    styles = {"entame": {"color": "#D55E00", "linestyle": "-"}}
    for axes, names in ((left, ["base", "entame"]), (right, ["entame"])):
        runs = {name: [(STEPS, np.linspace(0, 1, len(STEPS)))] for name in names}
        assert accuracy_curves(runs, styles=styles, ax=axes) is figure
        colours = {curve.get_label(): curve.get_color() for curve in axes.get_lines()}
        assert colours["entame"] == "#D55E00"
    assert figure.legends == []
    assert len(accuracy_curves(runs).legends) == 1
