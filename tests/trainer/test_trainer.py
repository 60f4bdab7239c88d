import copy
import math

import pytest
import timm
import torch
from conftest import OutOfMemoryTrainer, RandomImages, search_learning_rate
from transformers import Trainer, TrainingArguments, default_data_collator

from entame_hf import EntameConfig, EntameTrainer, EntameTrainingArguments, ZNormLinear, apply_entame, find_heads
from entame_hf.trainer.start import start_heads


def arguments(folder, kind=EntameTrainingArguments, **changes):
    defaults = {
        "max_steps": 3,
        "per_device_train_batch_size": 16,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "use_cpu": True,
    }
    return kind(str(folder), **{**defaults, **changes})


def head_of(model):
    return find_heads(model)[0].module


def history(trainer, key):
    return [entry[key] for entry in trainer.state.log_history if key in entry]


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


class TestDropIn:
    def test_a_script_that_swaps_the_name_trains_with_entame(self, tmp_path, tiny_vit):
        """Plain TrainingArguments, the very lines that stood there for Trainer."""
        args = arguments(tmp_path, TrainingArguments, learning_rate=3e-4)
        trainer = EntameTrainer(model=tiny_vit, args=args, train_dataset=RandomImages(64))
        trainer.train()
        assert isinstance(tiny_vit.classifier, ZNormLinear)
        assert history(trainer, "loss")[0] == pytest.approx(math.log(10), abs=1e-4)
        assert history(trainer, "energy/noise_share")[0] == pytest.approx(1 / 9, abs=1e-4)
        assert history(trainer, "learning_rate")[0] == 3e-4

    def test_gamma_is_the_learning_rate(self, tmp_path, tiny_vit):
        seen = {}
        args = arguments(tmp_path, learning_rate=1e-3, noise_lambda=100.0, max_steps=1)
        trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(16))
        create = trainer.create_optimizer
        trainer.create_optimizer = lambda *a: (seen.update(std=tiny_vit.classifier.weight.std()), create(*a))[1]
        trainer.train()
        assert seen["std"].item() == pytest.approx(1e-3 * 100 / 10, rel=0.15)

    def test_a_bare_timm_model_is_trained_in_place(self, tmp_path):
        model = timm.create_model("test_resnet", num_classes=10)
        before = weights(model)
        trainer = EntameTrainer(model, arguments(tmp_path), train_dataset=RandomImages(64))
        trainer.train()
        assert isinstance(model.fc, ZNormLinear)
        assert not torch.equal(model.conv1[0].weight, before["conv1.0.weight"])

    def test_what_the_constructor_and_evaluation_leave_alone(self, tmp_path, tiny_vit):
        before = weights(tiny_vit)
        trainer = EntameTrainer(tiny_vit, arguments(tmp_path), train_dataset=RandomImages(16))
        expected = Trainer(copy.deepcopy(tiny_vit), arguments(tmp_path)).evaluate(RandomImages(16))["eval_loss"]
        assert trainer.evaluate(RandomImages(16))["eval_loss"] == expected
        trainer.predict(RandomImages(16))
        torch.testing.assert_close(weights(tiny_vit), before, rtol=0, atol=0)
        assert type(tiny_vit.classifier) is torch.nn.Linear

    def test_operations_are_reported_as_by_trainer_and_parameters_counted_once(self, tmp_path, tiny_vit, monkeypatch):
        """Once a training for each size of a batch: here 16 and 8."""
        args = arguments(tmp_path, logging_strategy="no", energy_logging_steps=0)
        plain = Trainer(copy.deepcopy(tiny_vit), args, train_dataset=RandomImages(40))
        plain.train()
        counted, count = [], type(tiny_vit).num_parameters
        monkeypatch.setattr(type(tiny_vit), "num_parameters", lambda *a, **k: (counted.append(1), count(*a, **k))[1])
        ours = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(40))
        ours.train()
        assert ours.state.total_flos == plain.state.total_flos > 0
        assert len(counted) == 2

    def test_models_may_take_what_is_no_tensor(self, tmp_path):
        class Classifier(torch.nn.Module):
            def __init__(self):
                super().__init__()
                self.head = torch.nn.Linear(3 * 32 * 32, 10)

            def forward(self, input_ids, pixel_values, labels):
                logits = self.head(pixel_values.flatten(1))
                return {"loss": torch.nn.functional.cross_entropy(logits, labels), "logits": logits}

        trainer = EntameTrainer(
            Classifier(),
            arguments(tmp_path, max_steps=1),
            train_dataset=RandomImages(16),
            data_collator=lambda items: {"input_ids": ["a photo"] * len(items), **default_data_collator(items)},
            entame=EntameConfig(head="head"),
        )
        assert trainer.train().training_loss == pytest.approx(math.log(10), abs=1e-3)

    def test_arguments_have_the_papers_defaults(self, tmp_path):
        args = EntameTrainingArguments(str(tmp_path))
        assert (args.learning_rate, args.lr_scheduler_type, args.weight_decay) == (1e-4, "constant", 0.0)
        assert args.remove_unused_columns is False
        assert "adam" in args.optim

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"entame_method": "lp-ft"}, "base, base_wu, mei, fn, entame, informed, keep"),
            ({"phi_w": 0.0}, "phi_w"),
            ({"head_lr_multiplier": 0.0}, "head_lr_multiplier"),
            ({"head_warmup_steps": -1}, "head_warmup_steps"),
            ({"energy_logging_steps": -1}, "energy_logging_steps"),
            ({"znorm_momentum": 2.0}, "momentum"),
        ],
        ids=str,
    )
    def test_arguments_outside_their_domain_are_refused(self, tmp_path, change, message):
        with pytest.raises(ValueError, match=message):
            EntameTrainingArguments(str(tmp_path), **change)


@pytest.mark.parametrize("given", [{}, {"fp16": True}], ids=["unnamed", "named"])
def test_deepspeed_has_the_precision_that_its_launcher_asked_for(tmp_path, monkeypatch, given):
    # Where it is installed, what follows would set it up.
    monkeypatch.setattr(TrainingArguments, "__post_init__", lambda self: None)
    monkeypatch.setenv("ACCELERATE_MIXED_PRECISION", "bf16")
    assert not EntameTrainingArguments(str(tmp_path)).bf16
    monkeypatch.setenv("ACCELERATE_USE_DEEPSPEED", "true")
    args = EntameTrainingArguments(str(tmp_path), **given)
    assert (args.bf16, args.fp16) == ((False, True) if given else (True, False))


class TestHead:
    def drawn(self, folder, model, **changes):
        """Train without a learning rate, so that the head stays as it was drawn."""
        args = arguments(folder, learning_rate=0.0, max_steps=1, **changes)
        EntameTrainer(model, args, train_dataset=RandomImages(16)).train()
        return head_of(model).weight.detach().clone()

    def test_the_same_seed_gives_the_same_head(self, tmp_path, tiny_vit):
        first = self.drawn(tmp_path, copy.deepcopy(tiny_vit), seed=5)
        torch.rand(100)
        assert torch.equal(self.drawn(tmp_path, copy.deepcopy(tiny_vit), seed=5), first)
        assert not torch.equal(self.drawn(tmp_path, copy.deepcopy(tiny_vit), seed=6), first)

    def test_the_data_order_does_not_depend_on_the_method(self, tmp_path, tiny_vit):
        def order(method):
            seen = []

            class Watched(RandomImages):
                def __getitem__(self, index):
                    seen.append(index)
                    return super().__getitem__(index)

            args = arguments(tmp_path, entame_method=method, znorm_refresh_samples=0)
            EntameTrainer(copy.deepcopy(tiny_vit), args, train_dataset=Watched(64)).train()
            return seen

        assert order("entame") == order("keep") == order("base")

    @pytest.mark.parametrize(
        ("method", "std", "normalised"),
        [
            ("base", (2 / 10) ** 0.5, False),
            ("base_wu", (2 / 10) ** 0.5, False),
            ("mei", 1e-6, False),
            ("fn", (2 / 10) ** 0.5, True),
            ("entame", 1e-6, True),
        ],
    )
    def test_methods(self, tmp_path, tiny_vit, method, std, normalised):
        assert self.drawn(tmp_path, tiny_vit, entame_method=method).std().item() == pytest.approx(std, rel=0.15)
        assert isinstance(tiny_vit.classifier, ZNormLinear) == normalised

    def test_keep(self, tmp_path, tiny_vit):
        before = tiny_vit.classifier.weight.detach().clone()
        assert torch.equal(self.drawn(tmp_path, tiny_vit, entame_method="keep"), before)

    def test_model_init_gets_a_new_head_each_time(self, tmp_path):
        def model_init():
            return timm.create_model("test_vit", num_classes=10, img_size=32)

        trainer = EntameTrainer(
            args=arguments(tmp_path), model_init=model_init, train_dataset=RandomImages(64), compute_metrics=None
        )
        losses = []
        for _ in range(2):
            trainer.train()
            losses.append(history(trainer, "loss")[0])
        assert losses == pytest.approx([math.log(10)] * 2, abs=1e-4)

    @pytest.mark.runs
    def test_hyper_parameter_search_uses_each_trials_rate(self, tmp_path, tiny_vit):
        pytest.importorskip("optuna")
        stds = []

        class Watched(EntameTrainer):
            def create_optimizer(self, *args):
                stds.append(head_of(self.model).weight.std().item() / self.args.learning_rate)
                return super().create_optimizer(*args)

        search_learning_rate(Watched, arguments(tmp_path, noise_lambda=100.0, eval_strategy="epoch"), tiny_vit)
        assert stds == pytest.approx([10] * 3, rel=0.15)

    def test_an_adapted_model_is_not_wiped(self, tmp_path, tiny_vit):
        args = arguments(tmp_path)
        trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64))
        trainer.train()
        trainer.save_model(str(tmp_path / "adapted"))
        adapted = type(tiny_vit).from_pretrained(tmp_path / "adapted")
        before = weights(adapted)
        with pytest.raises(ValueError, match='EntameConfig\\(init="keep"\\)'):
            EntameTrainer(adapted, args, train_dataset=RandomImages(64)).train()
        with pytest.raises(ValueError, match='EntameConfig\\(init="keep"\\)'):
            trainer.train()
        torch.testing.assert_close(weights(adapted), before, rtol=0, atol=0)

    def test_an_adapted_model_goes_on_from_its_head(self, tmp_path, tiny_vit):
        """Its first loss is what the trained head gives, not ln C."""
        data = RandomImages(64)
        args = arguments(tmp_path, max_steps=40, per_device_train_batch_size=64, learning_rate=3e-3)
        trainer = EntameTrainer(tiny_vit, args, train_dataset=data)
        trainer.train()
        trainer.save_model(str(tmp_path / "adapted"))
        reached = trainer.evaluate(data)["eval_loss"]
        assert reached < 0.8 * math.log(10)
        adapted = type(tiny_vit).from_pretrained(tmp_path / "adapted")
        again = EntameTrainer(adapted, args, train_dataset=data, entame=EntameConfig(init="keep"))
        again.train()
        assert history(again, "loss")[0] == pytest.approx(reached, rel=0.02)
        assert again.evaluate(data)["eval_loss"] < reached

    def test_an_adapted_model_can_be_given_a_new_head(self, tmp_path, tiny_vit):
        EntameTrainer(tiny_vit, arguments(tmp_path), train_dataset=RandomImages(64)).train()
        with pytest.raises(ValueError, match="num_labels"):
            apply_entame(tiny_vit)
        apply_entame(tiny_vit, num_labels=4)
        trainer = EntameTrainer(tiny_vit, arguments(tmp_path), train_dataset=RandomImages(64, classes=4))
        trainer.train()
        assert history(trainer, "loss")[0] == pytest.approx(math.log(4), abs=1e-4)

    def test_what_apply_entame_was_given_is_used(self, tmp_path, tiny_vit):
        apply_entame(tiny_vit, EntameConfig(phi_w=1e-4, eps=1e-3))
        assert self.drawn(tmp_path, tiny_vit).std().item() == pytest.approx(1e-2, rel=0.15)
        assert tiny_vit.classifier.znorm.eps == 1e-3

    @pytest.mark.parametrize("bare", [False, True], ids=["transformers", "timm"])
    def test_what_the_arguments_ask_for_goes_before_apply_entame(self, tmp_path, tiny_vit, bare):
        keep = EntameConfig.for_method("keep")

        def model():
            return apply_entame(
                timm.create_model("test_resnet") if bare else copy.deepcopy(tiny_vit), keep, num_labels=12
            )

        assert self.drawn(tmp_path, model()).std().item() == pytest.approx(0.02, rel=0.2)
        assert self.drawn(tmp_path, model(), entame_method="entame").std().item() == pytest.approx(1e-6, rel=0.2)

    def test_a_bare_model_that_was_trained_is_not_wiped(self, tmp_path):
        model = timm.create_model("test_resnet", num_classes=10)
        EntameTrainer(model, arguments(tmp_path), train_dataset=RandomImages(64)).train()
        with pytest.raises(ValueError, match="keep"):
            EntameTrainer(model, arguments(tmp_path), train_dataset=RandomImages(64)).train()


class TestGradientAccumulation:
    @pytest.mark.parametrize("count", [32, 27], ids=["even", "ragged"])
    def test_losses_and_weights_do_not_depend_on_it(self, tmp_path, tiny_vit, count):
        """27 leaves a window of 11 in micro-batches of 4, 4 and 3."""

        def run(micro_batch, accumulation):
            model = copy.deepcopy(tiny_vit)
            args = arguments(
                tmp_path,
                max_steps=4,
                per_device_train_batch_size=micro_batch,
                gradient_accumulation_steps=accumulation,
                entame_method="keep",
                optim="sgd",
                learning_rate=0.1,
            )
            trainer = EntameTrainer(model, args, train_dataset=RandomImages(count))
            trainer.train()
            return history(trainer, "loss"), weights(model)

        whole_losses, whole = run(16, 1)
        losses, accumulated = run(4, 4)
        assert losses == pytest.approx(whole_losses, abs=1e-5)
        torch.testing.assert_close(accumulated, whole, rtol=1e-4, atol=1e-6)

    def test_a_loss_of_the_users_own_is_left_to_trainer(self, tmp_path, tiny_vit):
        def mean_over_the_window(outputs, labels, num_items_in_batch=None):
            total = torch.nn.functional.cross_entropy(outputs["logits"], labels, reduction="sum")
            return total / (len(labels) if num_items_in_batch is None else num_items_in_batch)

        def losses(kind):
            args = arguments(tmp_path, TrainingArguments, per_device_train_batch_size=4, gradient_accumulation_steps=4)
            more = {"entame": EntameConfig.for_method("keep")} if kind is EntameTrainer else {}
            trainer = kind(
                copy.deepcopy(tiny_vit),
                args,
                train_dataset=RandomImages(27),
                compute_loss_func=mean_over_the_window,
                **more,
            )
            trainer.train()
            return history(trainer, "loss")

        assert losses(EntameTrainer) == pytest.approx(losses(Trainer), abs=1e-6)


@pytest.mark.runs
def test_running_out_of_memory_is_tried_again(tmp_path, tiny_vit):
    """Also where it happens after steps that have trained the head."""

    trainer = OutOfMemoryTrainer(
        tiny_vit, arguments(tmp_path, auto_find_batch_size=True), train_dataset=RandomImages(64)
    )
    trainer.train()
    assert trainer.state.global_step == 3


def test_one_process_uses_one_of_several_gpus(tmp_path, tiny_vit, caplog):
    args = arguments(tmp_path, max_steps=1, znorm_refresh_samples=0)
    # As transformers counts them where nothing has launched the process.
    args._n_gpu = 2
    trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64))
    assert "Using one of 2 GPUs" in caplog.text
    assert "accelerate launch your_script.py" in caplog.text
    kinds = []
    tiny_vit.register_forward_pre_hook(lambda *_: kinds.append(type(trainer.model_wrapped)))
    trainer.train()
    assert kinds == [type(tiny_vit)]
    assert trainer.get_train_dataloader().batch_sampler.batch_size == args.per_device_train_batch_size


def test_evaluation_drops_no_image(tmp_path, tiny_vit):
    args = arguments(tmp_path, dataloader_drop_last=True, per_device_eval_batch_size=16)
    trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(40), eval_dataset=RandomImages(22))
    assert len(trainer.predict(RandomImages(22)).predictions) == 22
    assert len(trainer.get_train_dataloader()) == 2


def test_a_path_of_the_model_that_was_given(tmp_path):
    model = timm.create_model("test_resnet", num_classes=10)
    config = EntameConfig(head="fc")
    EntameTrainer(model, arguments(tmp_path), train_dataset=RandomImages(64), entame=config).train()
    assert isinstance(model.fc, ZNormLinear)


def test_a_head_without_a_bias_is_refused_before_it_is_trained():
    model = torch.nn.Sequential(torch.nn.Linear(6, 4, bias=False))
    with pytest.raises(ValueError, match="mei"):
        start_heads(model, EntameConfig(head="0"), learning_rate=1e-4, seed=0, batch_size=64)
