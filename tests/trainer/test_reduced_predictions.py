"""What a card tells of predictions that are no logits any more."""

import pytest
import torch
from conftest import RandomImages
from transformers import Trainer

from entame_hf import EntameTrainer, EntameTrainingArguments


def probabilities(logits, labels):
    return logits.softmax(-1)


def two_best(logits, labels):
    return logits.topk(2).indices


def two_largest(logits, labels):
    return logits.topk(2).values


@pytest.mark.parametrize("reduce", [None, probabilities, two_best, two_largest])
def test_only_what_is_known_of_predictions_is_told(tmp_path, tiny_vit, reduce):
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True)
    trainer = EntameTrainer(
        tiny_vit,
        args,
        eval_dataset=RandomImages(20),
        preprocess_logits_for_metrics=reduce,
        compute_metrics=lambda prediction: {},
    )
    trainer.evaluate()
    known = trainer.evaluations.current(trainer.state)
    if reduce in (two_best, two_largest):
        assert known.confusion is None
        assert known.errors is None
    else:
        assert known.confusion.sum() == 20
        logits = torch.from_numpy(Trainer(tiny_vit, args, eval_dataset=None).predict(RandomImages(20)).predictions)
        largest = logits.softmax(-1).max(-1).values
        assert known.errors.confidence == pytest.approx(largest[known.errors.indices], rel=1e-4)


def test_a_card_names_the_split_that_was_evaluated(tmp_path, tiny_vit):
    args = EntameTrainingArguments(str(tmp_path), use_cpu=True, disable_tqdm=True)
    images, other = RandomImages(20), RandomImages(20, seed=1)
    images.name, other.name = "validation", "test"
    trainer = EntameTrainer(tiny_vit, args, eval_dataset=images, compute_metrics=lambda prediction: {})
    for dataset, split in ((None, "validation"), (other, "test"), (images, "validation"), (RandomImages(9), None)):
        trainer.evaluate(dataset)
        assert trainer.evaluations.current(trainer.state).split == split
