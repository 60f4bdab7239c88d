"""Options: what is typed, what a file says, and what a mistake is answered with."""

from __future__ import annotations

import json
from contextlib import suppress

import pytest
from transformers.integrations import integration_utils

from entame_hf import InputError
from entame_hf.cli.loading import training_parser
from entame_hf.cli.output_folder import save_options


@pytest.fixture(scope="module")
def parser():
    return training_parser("")


def written(folder, text, name="run.yaml"):
    file = folder / name
    file.write_text(text)
    return str(file)


@pytest.mark.parametrize(
    "argv",
    [
        ["--model-name-or-path", "m", "--learning-rate", "1e-3"],
        ["--model_name_or_path=m", "--learning-rate=1e-3"],
        ["--model_name_or_path", "m", "--learning_rate", "0.001"],
    ],
    ids=["hyphens", "equals", "underscores"],
)
def test_options_are_written_with_hyphens_or_underscores(parser, argv):
    assert parser.given(argv) == {"model_name_or_path": "m", "learning_rate": 1e-3}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("eval_strategy: no", {"eval_strategy": "no"}),
        ("eval_strategy: 'no'", {"eval_strategy": "no"}),
        ("bf16: no\npush_to_hub: off\nuse_cpu: on\ntorch_compile: yes",
         {"bf16": False, "push_to_hub": False, "use_cpu": True, "torch_compile": True}),
        ("learning_rate: 1e-6", {"learning_rate": 1e-6}),
        ("phi_w: 1e-10\nseed: 010", {"phi_w": 1e-10, "seed": 10}),
        ("run_name: 007\nmodel_revision: 1.10", {"run_name": "007", "model_revision": "1.10"}),
        ("run_name: 2026-01-01", {"run_name": "2026-01-01"}),
        ("seed:\nrun_name: ~\nhub_model_id: null", {}),
        ("hub-model-id: me/a", {"hub_model_id": "me/a"}),
        ("report_to: []", {"report_to": ["none"]}),
        ("report_to: [tensorboard, trackio]", {"report_to": ["tensorboard", "trackio"]}),
        ("report_to:\n- tensorboard\n- trackio", {"report_to": ["tensorboard", "trackio"]}),
        ("report_to: tensorboard", {"report_to": ["tensorboard"]}),
        ("optim_args: {momentum: 0.9, nesterov: true}", {"optim_args": "momentum=0.9,nesterov=True"}),
        ("optim_args: {momentum: 1, nesterov: off}", {"optim_args": "momentum=1,nesterov=False"}),
        ("optim_args: momentum=0.9", {"optim_args": "momentum=0.9"}),
    ],
)  # fmt: skip
def test_a_yaml_file_means_what_a_person_means(parser, tmp_path, text, expected):
    assert parser.given([written(tmp_path, text)]) == expected


def test_numbers_within_mappings_are_numbers(parser, tmp_path):
    text = "lr_scheduler_kwargs: {min_lr: 1e-6, num_decay_steps: 2e-1, decay_type: linear}"
    found = json.loads(parser.given([written(tmp_path, text)])["lr_scheduler_kwargs"])
    assert found == {"min_lr": 1e-6, "num_decay_steps": 0.2, "decay_type": "linear"}


def test_a_json_file_is_read_as_well(parser, tmp_path):
    options = {"learning_rate": 1e-6, "report_to": [], "bf16": False, "seed": None, "optim_args": {"momentum": 0.9}}
    found = parser.given([written(tmp_path, json.dumps(options), "run.json")])
    assert found == {"learning_rate": 1e-6, "report_to": ["none"], "bf16": False, "optim_args": "momentum=0.9"}


def test_typed_options_take_precedence_over_a_file(parser, tmp_path):
    file = written(tmp_path, "seed: 1\nlearning_rate: 1e-3\nreport_to: [trackio]")
    found = parser.given([file, "--seed", "2", "--report-to", "none"])
    assert found == {"seed": 2, "learning_rate": 1e-3, "report_to": ["none"]}


@pytest.mark.parametrize("argv", [["--report_to", "tensorboard", "trackio"], ["--report_to", "tensorboard,trackio"]])
def test_several_trackers_are_separated_by_spaces_or_commas(parser, argv):
    assert parser.given(argv)["report_to"] == ["tensorboard", "trackio"]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("seed: 1\nseed: 2", "sets `seed` twice"),
        ("learning-rate: 1\nlearning_rate: 2", "sets `learning_rate` twice"),
        ("lr_scheduler_kwargs: {a: 1, a: 2}", "sets `a` twice"),
        ("- a", "must hold one mapping"),
        ("", "must hold one mapping"),
        ("a: [", "run.yaml cannot be read"),
        ("seed: [1, 2]", "`seed` takes one value"),
        ("optim_args: {betas: [0.9, 0.95]}", "betas takes one value"),
        ("learning_rat: 1", "Unknown option --learning_rat. Did you mean --learning_rate?"),
        ("normalization: bogus", "--normalization"),
    ],
)
def test_a_file_that_cannot_be_meant_is_refused(parser, tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        parser.given([written(tmp_path, text)])


@pytest.mark.parametrize("text", ['{"seed": 1, "seed": 2}', '{"lr_scheduler_kwargs": {"a": 1, "a": 2}}'])
def test_a_json_key_twice_is_refused(parser, tmp_path, text):
    with pytest.raises(InputError, match="twice"):
        parser.given([written(tmp_path, text, "run.json")])


@pytest.mark.parametrize(("text", "message"), [("[1]", "one mapping"), ("{", "run.json cannot be read")])
def test_a_damaged_json_file_is_refused(parser, tmp_path, text, message):
    with pytest.raises(InputError, match=message):
        parser.given([written(tmp_path, text, "run.json")])


def test_every_option_is_the_same_in_the_file_of_a_run(parser, tmp_path):
    for name, option in parser.options.items():
        given = {}
        # Those that allow words alone hold them in their type.
        words = next(iter(getattr(option.type, "args", ())), ())
        for typed in option.choices or [*words, "underflow_overflow", "true", "1", "0.5", '{"a": 1}']:
            with suppress(InputError):
                given = given or parser.given([f"--{name}", str(typed)])
        assert given or name in ("help", "help_all"), name
        save_options(tmp_path, given)
        kept = {} if name in ("hub_token", "inspect", "overwrite", "resume_from_checkpoint") else given
        assert parser.given([str(tmp_path / "run.yaml")]) == kept, name


def test_a_file_that_is_missing_or_no_text_is_refused(parser, tmp_path):
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x00")
    for name in ("none.yaml", "binary.yaml"):
        with pytest.raises(InputError, match=f"{name} cannot be read"):
            parser.given([str(tmp_path / name)])


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("--lr", "--learning_rate"),
        ("-lr", "--learning_rate"),
        ("--learnin_rate", "--learning_rate"),
        ("--epochs", "--num_train_epochs"),
        ("--batch-size=8", "--per_device_train_batch_size"),
        ("--model", "--model_name_or_path"),
        ("--data_dirs", "--data_dir"),
        ("--num_workers", "--dataloader_num_workers"),
        ("--entame-methd", "--entame_method"),
        ("--modell", "--model_name_or_path"),
        ("--optimiser", "--optim"),
    ],
)
def test_a_mistyped_option_is_answered_with_the_right_one(parser, typed, meant):
    with pytest.raises(InputError, match=f"Unknown option .*Did you mean {meant}[?]"):
        parser.given([typed, "1"])


@pytest.mark.parametrize(
    ("argv", "message"),
    [
        (["--eval_strategy", "epochs"], "--eval_strategy: 'epochs' is unknown. Did you mean epoch[?]"),
        (["--lr_scheduler_type", "cosin"], "Did you mean cosine[?]"),
        (["--optim", "adamw"], "Did you mean adamw_torch[?]"),
        (["--augmentation", "flipp"], "Did you mean flip[?] Use one of none, flip"),
        (["--recipe", "recomended"], "Did you mean recommended[?] Use one of paper, recommended"),
        (["--entame_method", "inform"], "Did you mean informed[?]"),
        (["--seed", "x"], "--seed: 'x' is no whole number"),
        (["--learning_rate", "fast"], "--learning_rate: 'fast' is no number"),
        (["--bf16", "maybe"], "--bf16: 'maybe' is neither true nor false"),
        (["--seed"], "--seed: expected one argument"),
        (["--seed", "1", "2"], "Unexpected argument '2'"),
        (["--seed", "1", "run.yaml"], "a file of options comes first"),
    ],
)
def test_a_mistyped_value_is_answered_with_what_is_allowed(parser, argv, message):
    with pytest.raises(InputError, match=message):
        parser.given(argv)


@pytest.mark.parametrize("name", ["do_train", "do_eval", "neftune_noise_alpha", "batch_eval_metrics", "use_cache"])
def test_options_without_effect_are_refused(parser, name):
    assert name not in parser.options
    with pytest.raises(InputError, match=f"--{name} has no effect on this command"):
        parser.given([f"--{name}", "true"])


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ("wandbb", "--report_to: 'wandbb' is unknown. Did you mean wandb[?]"),
        ("comet_ml", "--report_to comet_ml needs the package comet_ml: pip install comet_ml"),
        ("tensorboard azure_ml", "needs the package azureml-core: pip install azureml-core"),
    ],
)
def test_a_missing_tracker_is_answered_with_its_package(parser, monkeypatch, names, message):
    monkeypatch.setattr("entame_hf.cli.arguments.find_spec", lambda module: module == "tensorboard" or None)
    with pytest.raises(InputError) as error:
        parser.build(parser.given(["--report_to", *names.split(), "--use_cpu"]))
    assert message.replace("[?]", "?") in parser.named(str(error.value))


def test_every_tracker_of_transformers_is_known(parser):
    for name in integration_utils.INTEGRATION_TO_CALLBACK:
        assert parser.given(["--report_to", name])["report_to"] == [name]


@pytest.mark.parametrize(
    ("message", "typed"),
    [
        ("`seed=1` or `seed`", "--seed 1 or --seed"),
        ('`entame_method="keep"`', "--entame_method keep"),
        ("`overwrite=True`, `trust_remote_code`", "--overwrite, --trust_remote_code"),
        ("`find_heads` and `optim_args=a=1`", "`find_heads` and --optim_args a=1"),
        ("`data_dir=my photos`", "--data_dir 'my photos'"),
    ],
)
def test_parameters_in_messages_become_options(parser, message, typed):
    assert parser.named(message) == typed


class TestDefaults:
    def build(self, parser, *argv):
        return parser.build(parser.given([*argv, "--use_cpu"]))[2]

    def test_the_best_weights_are_kept(self, parser):
        args = self.build(parser)
        assert (args.eval_strategy, args.save_strategy, args.load_best_model_at_end) == ("epoch", "epoch", True)
        assert (args.metric_for_best_model, args.greater_is_better) == ("accuracy", True)

    def test_checkpoints_follow_evaluations(self, parser):
        args = self.build(parser, "--eval_steps", "50")
        assert (args.eval_strategy, args.save_strategy, args.eval_steps, args.save_steps) == ("steps", "steps", 50, 50)
        assert args.load_best_model_at_end

    @pytest.mark.parametrize(
        "argv",
        [
            ["--eval_strategy", "no"],
            ["--save_strategy", "no"],
            ["--save_steps", "100"],
            ["--eval_steps", "50", "--save_steps", "75"],
        ],
        ids=" ".join,
    )
    def test_the_last_weights_are_kept_where_the_best_cannot_be(self, parser, argv):
        assert not self.build(parser, *argv).load_best_model_at_end

    def test_patience_needs_evaluations(self, parser):
        with pytest.raises(InputError, match="`patience=2` counts evaluations, and there are none"):
            self.build(parser, "--patience", "2", "--eval_strategy", "no")
