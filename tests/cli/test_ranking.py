"""Checkpoints ranked by what their features say of the images, before any is fine-tuned."""

from __future__ import annotations

import re

import pytest
from cli_folders import hf_folder, photos, timm_folder  # noqa: F401

from entame_hf import InputError
from entame_hf.cli.inspect import main


def test_checkpoints_are_ranked_by_the_probe(photos, timm_folder, hf_folder, capsys):  # noqa: F811
    models = [str(hf_folder), str(timm_folder)]
    main(["--models", *models, "--data_dir", str(photos), "--use_cpu", "--image_cache_gb", "0"])
    lines = capsys.readouterr().out.splitlines()
    start = next(index for index, line in enumerate(lines) if line.startswith("Linear probe on 102 training images"))
    found = {name: float(cells[0].rstrip("%")) for name, *cells in map(str.split, lines[start + 2 :])}
    assert set(found) == set(models)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    assert max(found.values()) > 80
    assert "32×32" in lines[-1]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--model_name_or_path", "c"], "give one of them"),
        ([], "No data"),
        (["--data_dir", "PHOTOS"], "Cannot load"),
    ],
    ids=["one model too", "no data", "unknown model"],
)
def test_what_cannot_be_ranked_is_refused(photos, options, said):  # noqa: F811
    options = [str(photos) if option == "PHOTOS" else option for option in options]
    with pytest.raises(InputError, match=said):
        main(["--models", "nowhere/a", "nowhere/b", "--use_cpu", *options])


def test_inspect_says_what_to_expect_before_any_training(photos, timm_folder, capsys):  # noqa: F811
    main(["--model_name_or_path", str(timm_folder), "--data_dir", str(photos), "--use_cpu", "--image_cache_gb", "0"])
    assert re.search(r"Before any training: \d+\.\d% expected on unseen images", capsys.readouterr().out)
