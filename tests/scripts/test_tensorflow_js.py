"""Models of TensorFlow.js: their files are read, and they give the original's outputs."""

from __future__ import annotations

import base64

import numpy as np
import pytest
import torch
from reproduction import tensorflow_js as source
from reproduction.sources import load_model
from torch.nn.functional import avg_pool2d

from entame_hf import InputError

pytestmark = pytest.mark.reproduction
# What TensorFlow.js 4.22 computes for `smooth(side)`: probabilities of the package's own five classes.
OUTPUTS = {
    "mobilenetv2": (224, [0.0434367, 0.0056712, 0.9440537, 0.0063034, 0.0005351]),
    "inception_v3": (299, [7.1002e-5, 1.4130e-6, 0.9999237, 3.5851e-6, 3.1849e-7]),
}


def test_weights_are_read_from_minified_javascript(tmp_path):
    (tmp_path / "model.min.js").write_text(
        '!function(e){}(function(){return{1:[function(e,t){t.exports={modelTopology:{keras_version:"2.2.4",'
        'model_config:{config:{layers:[{config:{name:"conv2d_10",use_bias:!1}},{config:{name:"conv2d_9",a:!0}}]}}},'
        'weightsManifest:[{paths:["a"],weights:[{name:"conv2d_9/kernel",shape:[2,2],dtype:"float32",'
        'quantization:{min:-.5,scale:.25,dtype:"uint8"}},{name:"conv2d_10/bias",shape:[1],dtype:"float32"}]}]}},{}]}})'
    )
    raw = bytes([0, 1, 2, 255]) + np.float32(1.5).tobytes()
    for index, part in enumerate((raw[:3], raw[3:])):
        text = f'function(){{return "x";t.exports="{base64.b64encode(part).decode()}"}}'
        (tmp_path / f"group1-shard{index + 1}of2.min.js").write_text(text)
    names, weights = source.read_model(tmp_path)
    assert names == ["conv2d_9", "conv2d_10"]
    assert weights["conv2d_9/kernel"].tolist() == [[-0.5, -0.25], [0.0, 63.25]]
    assert weights["conv2d_10/bias"].tolist() == [1.5]


def test_missing_files_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(source, "FOLDER", tmp_path)
    with pytest.raises(InputError, match="The suite that names the model says how to get it"):
        load_model("inception_v3", 3)


def test_border_averages_leave_the_padding_out():
    images = torch.randn(2, 3, 5, 7)
    (found,) = source._without_padding(None, (avg_pool2d(images, 3, 1, 1),))
    torch.testing.assert_close(found, avg_pool2d(images, 3, 1, 1, count_include_pad=False))


def smooth(side):
    y, x, channel = (torch.arange(size, dtype=torch.float64) for size in (side, side, 3))
    waves = torch.sin(y[:, None] / (17 + channel))[:, None] * torch.cos(x[:, None] / (11 + 2 * channel))
    return (0.5 + 0.3 * waves).permute(2, 0, 1)[None].float()


@pytest.mark.parametrize("name", OUTPUTS)
def test_original_outputs(name):
    folder, side, expected = source.FOLDER / source.TENSORFLOW_JS[name][0], *OUTPUTS[name]
    if not folder.is_dir():
        pytest.skip("needs the package that scripts/suites/contest_real.yaml names")
    model, (_, weights) = source.tensorflow_js(name).eval(), source.read_model(folder)
    with torch.no_grad():
        features = model.forward_head(model.forward_features(smooth(side)), pre_logits=True)
    for index in (1, 2, 3):
        features = features @ weights[f"dense_{index}/kernel"] + weights[f"dense_{index}/bias"]
        features = features.relu() if index < 3 else features
    torch.testing.assert_close(features.softmax(1)[0], torch.tensor(expected), rtol=1e-3, atol=1e-6)
