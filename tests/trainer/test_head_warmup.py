"""Steps that update the heads only, and the head learning rate that is given."""

import copy

import pytest
import torch
from conftest import RandomImages
from test_trainer import arguments, history, weights

from entame_hf import EntameTrainer


class TestHeadWarmup:
    @pytest.mark.parametrize("accumulation", [1, 2], ids=["whole", "accumulated"])
    def test_only_the_head_moves_and_the_backbone_has_no_optimizer_state(self, tmp_path, tiny_vit, accumulation):
        before = weights(tiny_vit)
        args = arguments(
            tmp_path, max_steps=2, head_warmup_steps=2, entame_method="base", gradient_accumulation_steps=accumulation
        )
        trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64))
        trainer.train()
        moved = {name for name, tensor in tiny_vit.state_dict().items() if not torch.equal(tensor, before[name])}
        assert moved == {"classifier.weight", "classifier.bias"}
        state = trainer.optimizer.state
        assert {id(parameter) for parameter in state} == {id(p) for p in tiny_vit.classifier.parameters()}

    def test_equals_training_with_a_frozen_backbone(self, tmp_path, tiny_vit):
        """Clipping included: gradients that are thrown away must not count towards the norm."""

        def head(freeze, **changes):
            model = copy.deepcopy(tiny_vit)
            if freeze:
                model.vit.requires_grad_(False)
            args = arguments(
                tmp_path, entame_method="base", optim="sgd", learning_rate=0.5, max_grad_norm=0.1, **changes
            )
            EntameTrainer(model, args, train_dataset=RandomImages(64)).train()
            return model.classifier.weight.detach()

        torch.testing.assert_close(head(False, head_warmup_steps=3), head(True))

    def test_the_backbone_moves_afterwards(self, tmp_path, tiny_vit):
        before = weights(tiny_vit)
        args = arguments(tmp_path, max_steps=2, entame_method="base_wu")
        assert args.warmup_steps_of_head() == 1
        trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64))
        trainer.train()
        backbone = [name for name in before if name.endswith("weight") and not name.startswith("classifier")]
        assert any(not torch.equal(tiny_vit.state_dict()[name], before[name]) for name in backbone)
        steps = {
            int(trainer.optimizer.state[p]["step"]) for p in tiny_vit.vit.parameters() if p in trainer.optimizer.state
        }
        assert steps == {1}


class TestHeadLearningRate:
    def test_the_heads_get_a_group_of_their_own(self, tmp_path, tiny_vit):
        args = arguments(tmp_path, head_lr_multiplier=10.0, lr_scheduler_type="linear", weight_decay=0.1)
        trainer = EntameTrainer(tiny_vit, args, train_dataset=RandomImages(64))
        trainer.train()
        heads = {id(parameter) for parameter in tiny_vit.classifier.parameters()}
        groups = trainer.optimizer.param_groups
        assert sum(len(group["params"]) for group in groups) == len(list(tiny_vit.parameters()))
        for group in groups:
            own = {id(parameter) in heads for parameter in group["params"]}
            assert len(own) == 1
            assert group["initial_lr"] == pytest.approx(1e-3 if own == {True} else 1e-4)
        decays = {group["weight_decay"] for group in groups if id(group["params"][0]) in heads}
        assert decays == {0.0, 0.1}
        assert history(trainer, "learning_rate")[0] == pytest.approx(1e-4)

    def test_the_first_adam_step_is_that_much_larger(self, tmp_path, tiny_vit):
        def first_step(multiplier):
            model = copy.deepcopy(tiny_vit)
            args = arguments(tmp_path, max_steps=1, head_lr_multiplier=multiplier, entame_method="mei")
            EntameTrainer(model, args, train_dataset=RandomImages(16)).train()
            return model.classifier.bias.detach().abs().max().item()

        assert first_step(10.0) == pytest.approx(10 * first_step(1.0), rel=1e-3)
