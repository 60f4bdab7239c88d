import copy
import math

import pytest
import timm
import torch
from conftest import CLASSIFIERS, RandomImages
from torch import nn
from torch.nn.functional import cross_entropy, one_hot

from entame_hf import (
    EntameConfig,
    EntameTrainer,
    EntameTrainingArguments,
    InputError,
    apply_entame,
    error_energy,
    find_heads,
    inspect_head,
)
from entame_hf.patch import set_trained

CLASSES = 10


def batches_of(data, size=16, pairs=False):
    for start in range(0, len(data), size):
        images, labels = data.images[start : start + size], data.labels[start : start + size]
        yield (images, labels) if pairs else {"pixel_values": images, "labels": labels}


def everything(model):
    return {name: tensor.clone() for name, tensor in [*model.named_parameters(), *model.named_buffers()]}


class TestEveryKindOfModel:
    def test_the_table_and_the_model_as_it_was(self, classifier):
        factory, side, _ = classifier
        model = factory(CLASSES).eval()
        next(iter(model.children())).train()
        modes = [module.training for module in model.modules()]
        before, generator = everything(model), torch.get_rng_state()
        report = inspect_head(model, batches_of(RandomImages(16, side)))
        assert torch.equal(torch.get_rng_state(), generator)
        torch.testing.assert_close(everything(model), before, rtol=0, atol=0)
        assert [module.training for module in model.modules()] == modes
        assert not any(head.module._forward_hooks for head in find_heads(model))
        assert list(report.methods) == ["base", "keep", "mei", "fn", "entame"]
        assert report.examples == 16
        assert report.mean_of_heads
        for method, noisy in (("mei", "base"), ("entame", "fn")):
            start = report.methods[method]
            assert start.loss == pytest.approx(math.log(CLASSES), abs=1e-3)
            assert start.entropy == pytest.approx(math.log(CLASSES), abs=1e-5)
            assert start.noise_share == pytest.approx(1 / 9, abs=1e-4)
            assert start.features < 1e-8 * report.methods[noisy].features
        assert report.methods["entame"].first_update_noise < 1e-3


def test_a_head_that_waits_for_its_first_batch_goes_on_waiting(tiny_vit):
    """A kept head over normalised features is rewritten by the first batch that it is trained on: not by this one."""
    logits = inspect_head(tiny_vit, batches_of(RandomImages(16))).methods["keep"].loss
    apply_entame(tiny_vit, EntameConfig(init="keep"))
    before = everything(tiny_vit)
    report = inspect_head(tiny_vit, batches_of(RandomImages(16)))
    torch.testing.assert_close(everything(tiny_vit), before, rtol=0, atol=0)
    assert tiny_vit.classifier.znorm.unfold_next
    assert report.methods["keep"].loss == pytest.approx(logits, rel=1e-4)


class TestValues:
    @pytest.mark.parametrize("method", ["base", "mei", "fn", "entame"])
    def test_are_what_the_trainer_logs_at_its_first_step(self, tmp_path, tiny_vit, method):
        data = RandomImages(16)
        start = inspect_head(copy.deepcopy(tiny_vit), batches_of(data), seed=3).methods[method]
        args = EntameTrainingArguments(
            str(tmp_path),
            entame_method=method,
            max_steps=1,
            seed=3,
            per_device_train_batch_size=16,
            save_strategy="no",
            report_to="none",
            use_cpu=True,
            disable_tqdm=True,
        )
        trainer = EntameTrainer(tiny_vit, args, train_dataset=data)
        trainer.train()
        log = next(entry for entry in trainer.state.log_history if "energy/total" in entry)
        for name in ("entropy", "noise_share", "features", "features_share"):
            assert getattr(start, name) == pytest.approx(log[f"energy/{name}"], rel=1e-3), name

    @pytest.mark.parametrize("feature_norm", [False, True])
    def test_noise_and_signal_against_their_definition(self, tiny_vit, feature_norm):
        """Of a head that normalises, estimates and labels come back through the batch's statistics."""
        data, method = RandomImages(16), "fn" if feature_norm else "base"
        start = inspect_head(tiny_vit, batches_of(data)).methods[method]
        model = apply_entame(
            copy.deepcopy(tiny_vit), EntameConfig.for_method(method), generator=torch.Generator().manual_seed(42)
        )
        model = model.double().train()
        seen = []
        model.classifier.register_forward_pre_hook(lambda module, args: seen.append(args[0]))
        logits = model(data.images.double()).logits
        (x,) = seen
        estimates, labels = logits.detach().softmax(-1), one_hot(data.labels, CLASSES)
        noise, signal = (torch.autograd.grad(logits, x, part, retain_graph=True)[0] for part in (estimates, labels))
        error = (noise - signal).square().sum(-1).mean().item()
        assert start.features == pytest.approx(error, rel=1e-3)
        assert start.first_update_noise == pytest.approx(noise.square().sum(-1).mean().item() / error, rel=1e-3)
        assert start.loss == pytest.approx(cross_entropy(logits, data.labels).item(), rel=1e-4)

    def test_several_batches_count_by_their_examples(self, tiny_vit):
        data = RandomImages(24)
        whole = inspect_head(tiny_vit, batches_of(data, 24))
        parts = inspect_head(tiny_vit, batches_of(data, 16))
        assert parts.examples == whole.examples == 24
        for method in ("base", "keep", "mei"):
            assert vars(parts.methods[method]) == pytest.approx(vars(whole.methods[method]), rel=1e-3)
        assert inspect_head(tiny_vit, batches_of(data, 4), num_batches=2).examples == 8

    def test_soft_and_ignored_labels(self, tiny_vit):
        data = RandomImages(16)
        hard = inspect_head(tiny_vit, batches_of(data))
        rows = one_hot(data.labels, CLASSES).float()
        soft = inspect_head(tiny_vit, [(data.images, rows)])
        assert vars(soft.methods["base"]) == pytest.approx(vars(hard.methods["base"]), rel=1e-4)
        labels = torch.where(torch.arange(16) < 8, data.labels, -100)
        some = inspect_head(tiny_vit, [(data.images, labels)])
        first = inspect_head(tiny_vit, [(data.images[:8], data.labels[:8])])
        assert some.examples == 8
        assert vars(some.methods["base"]) == pytest.approx(vars(first.methods["base"]), rel=1e-3)

    def test_shared_features_come_back_together(self):
        class Pair(nn.Module):
            def __init__(self):
                super().__init__()
                self.body, self.one, self.two = nn.Linear(6, 8), nn.Linear(8, 4), nn.Linear(8, 4)

            def forward(self, x):
                x = self.body(x)
                return (self.one(x) + self.two(x)) / 2

        torch.manual_seed(0)
        model, x, labels = Pair(), torch.randn(12, 6), torch.arange(12) % 4
        report = inspect_head(model, [(x, labels)], EntameConfig(head=["one", "two"]))
        error = model(x).softmax(-1) - one_hot(labels, 4)
        expected = (error @ (model.one.weight + model.two.weight) / 2).square().sum(-1).mean().item()
        assert report.mean_of_heads
        assert report.methods["keep"].features == pytest.approx(expected, rel=1e-4)

    def test_a_model_that_does_more_with_its_heads_output_says_so(self):
        model = nn.Sequential(nn.Linear(6, 4), nn.ReLU())
        report = inspect_head(model, [(torch.randn(12, 6), torch.arange(12) % 4)], EntameConfig(head="0"))
        assert not report.mean_of_heads
        assert "does more" in str(report)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
    def test_half_precision(self, tiny_vit, dtype):
        full = inspect_head(tiny_vit, batches_of(RandomImages(16))).methods
        half = inspect_head(tiny_vit.to(dtype), batches_of(RandomImages(16))).methods
        assert half["mei"].features == pytest.approx(full["mei"].features, rel=0.05)
        assert half["base"].loss == pytest.approx(full["base"].loss, rel=0.05)

    def test_a_head_without_normalisation_is_no_obstacle(self, tiny_vit):
        report = inspect_head(tiny_vit, batches_of(RandomImages(16)), EntameConfig(feature_norm=False))
        assert list(report.methods) == ["base", "keep", "mei"]
        assert '"mei"' in report.advice


class TestAdvice:
    def test_a_new_head(self, tiny_vit):
        report = inspect_head(tiny_vit, batches_of(RandomImages(16)))
        assert report.advice.startswith('Start the head at maximum entropy (entame_method="entame")')
        assert "\n" not in report.advice
        assert report.advice in str(report)

    @pytest.mark.parametrize("seed", range(8))
    def test_two_classes(self, seed):
        """A noise share of 1 is no reason against maximum entropy, and a lucky guess is no knowledge."""
        torch.manual_seed(seed)
        factory, side, _ = CLASSIFIERS["timm-resnet"]
        report = inspect_head(factory(2), batches_of(RandomImages(32, side, classes=2), 32))
        assert report.methods["mei"].noise_share == pytest.approx(1, abs=1e-3)
        assert report.advice.startswith("Start")

    @pytest.mark.parametrize("method", ["mei", "entame"])
    def test_a_head_at_maximum_entropy(self, tiny_vit, method):
        apply_entame(tiny_vit, EntameConfig.for_method(method))
        assert inspect_head(tiny_vit, batches_of(RandomImages(16))).advice.startswith("Train as it is")

    def test_weights_too_large_for_maximum_entropy(self, tiny_vit):
        report = inspect_head(tiny_vit, batches_of(RandomImages(16)), EntameConfig(noise_lambda=1e6))
        assert report.methods["entame"].entropy < 2
        assert report.advice.startswith("Lower phi_w or noise_lambda")

    def test_a_head_that_knows_the_classes(self, tmp_path):
        torch.manual_seed(0)
        data = RandomImages(40)
        data.images += 3 * data.labels.view(-1, 1, 1, 1)
        model = timm.create_model("test_resnet", num_classes=CLASSES)
        optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
        for _ in range(40):
            optimizer.zero_grad()
            cross_entropy(model(data.images), data.labels).backward()
            optimizer.step()
        report = inspect_head(model, batches_of(data, 40))
        assert report.methods["keep"].loss < math.log(CLASSES) / 2
        assert report.advice.startswith("Keep this head")

    def test_an_adapted_model_that_has_begun_to_learn(self, tiny_vit):
        apply_entame(tiny_vit)
        data = RandomImages(40)
        with torch.no_grad():
            features = []
            tiny_vit.classifier.register_forward_pre_hook(lambda module, args: features.append(args[0]))
            tiny_vit.train()(data.images)
            x = features[0]
            x = (x - x.mean(0)) / (x.var(0, unbiased=False) + 1e-5).sqrt()
            # One step of gradient descent on the head.
            tiny_vit.classifier.weight += 0.1 * (one_hot(data.labels, CLASSES).float() - 1 / CLASSES).T @ x / 40
        tiny_vit.classifier._forward_pre_hooks.clear()
        set_trained(tiny_vit)
        report = inspect_head(tiny_vit, batches_of(data, 40))
        assert math.log(CLASSES) / 2 < report.methods["keep"].loss < math.log(CLASSES)
        assert report.advice.startswith("Keep this head")


class TestInputThatCannotBeUsed:
    @pytest.mark.parametrize(
        ("batches", "message"),
        [
            ([], "no labelled image"),
            ([torch.randn(4, 3, 32, 32)], "A batch is a Tensor"),
            ([{"pixel_values": torch.randn(4, 3, 32, 32)}], "mapping of pixel_values"),
            ([(torch.randn(4, 3, 32, 32), torch.tensor([0, 1, 2, 10]))], "Label 10 is none of the head's 10 classes"),
            ([(torch.randn(4, 3, 32, 32), torch.rand(4, 3))], r"shape \(4, 3\)"),
            ([(torch.randn(4, 3, 32, 32), torch.full((4,), -100))], "no labelled image"),
        ],
        ids=["none", "images", "unlabelled", "label", "rows", "ignored"],
    )
    def test_is_named(self, tiny_vit, batches, message):
        before = everything(tiny_vit)
        with pytest.raises(InputError, match=message):
            inspect_head(tiny_vit.eval(), batches)
        torch.testing.assert_close(everything(tiny_vit), before, rtol=0, atol=0)
        assert not tiny_vit.training

    def test_a_head_that_is_not_used(self, tiny_vit):
        tiny_vit.spare = nn.Linear(32, CLASSES)
        with pytest.raises(InputError, match="did not use spare"):
            inspect_head(tiny_vit, batches_of(RandomImages(4)), EntameConfig(head=["classifier", "spare"]))


def test_energies_agree_with_error_energy(tiny_vit):
    data = RandomImages(16)
    start = inspect_head(tiny_vit, batches_of(data, pairs=True)).methods["keep"]
    energy = error_energy(tiny_vit.train()(data.images).logits, data.labels)
    assert start.noise_share == pytest.approx(float(energy.noise_share), rel=1e-4)
    assert start.entropy == pytest.approx(float(energy.entropy), rel=1e-4)
