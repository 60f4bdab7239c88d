import json

import pytest

from entame_hf import EntameConfig


@pytest.mark.parametrize(
    ("method", "init", "feature_norm"),
    [
        ("base", "he_fan_out", False),
        ("base_wu", "he_fan_out", False),
        ("mei", "mei", False),
        ("fn", "he_fan_out", True),
        ("entame", "mei", True),
        ("keep", "keep", False),
    ],
)
def test_methods_of_the_paper(method, init, feature_norm):
    config = EntameConfig.for_method(method)
    assert (config.init, config.feature_norm) == (init, feature_norm)


def test_entame_is_the_default():
    assert EntameConfig.for_method("entame") == EntameConfig()


def test_survives_json():
    config = EntameConfig(init="keep", phi_w=1e-10, momentum=0.5, head=["a.b", "c"])
    assert EntameConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config


def test_phi_w_from_lambda_is_equation_20():
    config = EntameConfig(noise_lambda=100.0)
    assert config.weight_variance(num_classes=10, learning_rate=1e-4) == pytest.approx((1e-4 * 100 / 10) ** 2)
    assert EntameConfig().weight_variance(10) == 1e-12


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"init": "xavier"}, "mei, he_fan_out, ridge, keep"),
        ({"phi_w": 0.0}, "`phi_w=0.0` must be a positive"),
        ({"phi_w": -1e-12}, "positive"),
        ({"phi_w": float("nan")}, "positive"),
        ({"noise_lambda": 0.0}, "`noise_lambda=0.0` must be a positive"),
        ({"eps": 0.0}, "eps"),
        ({"phi_w": "1e-10"}, "positive number"),
        ({"momentum": 0.0}, "momentum"),
        ({"momentum": 1.5}, "momentum"),
        ({"momentum": "0.5"}, "positive number"),
        ({"eps": True}, "positive number"),
        ({"feature_norm": "no"}, "`feature_norm='no'` must be True or False"),
        ({"sync": 0}, "`sync=0` must be True or False"),
    ],
    ids=str,
)
def test_values_outside_their_domain_are_refused(values, message):
    with pytest.raises(ValueError, match=message):
        EntameConfig(**values)


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match="base, base_wu, mei, fn, entame, informed, keep"):
        EntameConfig.for_method("lp-ft")
    with pytest.raises(ValueError, match="no field phi"):
        EntameConfig.from_dict({"phi": 1})


def test_lambda_without_a_rate_is_refused():
    with pytest.raises(ValueError, match="learning_rate"):
        EntameConfig(noise_lambda=1.0).weight_variance(10)
