"""One run of `EntameTrainer`, in one process or in several, whose state is left in a file for each rank."""

import json
import sys
from contextlib import nullcontext
from pathlib import Path

import fsdp_on_cpu
import timm
import torch
from torch import nn
from transformers import TrainerCallback, ViTConfig, ViTForImageClassification

sys.path.insert(0, str(Path(__file__).parent.parent))
from conftest import TINY_VIT, RandomImages, WaitCounter

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.cli.launch import run_command


class Failing(TrainerCallback):
    """One process of several fails in the middle of a training."""

    def __init__(self, step: int) -> None:
        self.step = step

    def on_step_end(self, args, state, control, **kwargs):
        if state.global_step == self.step and args.process_index == 1:
            raise RuntimeError("this process has had enough")


class InDouble(TrainerCallback):
    """The statistics of the features too, which training begins with."""

    def on_train_begin(self, args, state, control, **kwargs):
        kwargs["model"].double()


def in_double(model, args, kwargs):
    """Sums in another order differ by less than any fault."""
    return args, {**kwargs, "pixel_values": kwargs["pixel_values"].double()}


def main(folder: str, options: str) -> None:
    changes = json.loads(options)
    if changes.pop("evaluate", False):
        # Here: trainings need none of what it imports.
        import evaluate_all

        evaluate_all.main(folder)
        return
    fails_at, batch_norm = changes.pop("fails_at", None), changes.pop("batch_norm", False)
    mixed, double = changes.pop("mixed", False), changes.pop("double", False)
    count, resume, base = changes.pop("count", 96), changes.pop("resume", None), changes.pop("from_pretrained", None)
    ignored = changes.pop("ignored", 0)
    blind_rank, waits = changes.pop("blind_rank", None), WaitCounter() if changes.pop("count_waits", False) else None
    dropout, masks = changes.pop("dropout", 0.0), []
    if changes.pop("fsdp_on_cpu", False):
        fsdp_on_cpu.allow()
    defaults = {"max_steps": 5, "optim": "sgd", "learning_rate": 0.1, "save_strategy": "no", "use_cpu": True}
    # Before the model: transformers partitions what it loads where the arguments ask for ZeRO-3.
    args = EntameTrainingArguments(folder, disable_tqdm=True, **{**defaults, **changes})
    torch.manual_seed(0)
    if batch_norm:
        model = timm.create_model("test_resnet", num_classes=10)
        if batch_norm != "own":
            # Each process normalises a part of the batch, unless it is told of the whole.
            model = nn.SyncBatchNorm.convert_sync_batchnorm(model)
    elif base is None:
        config = ViTConfig(num_labels=10, hidden_dropout_prob=dropout, attention_probs_dropout_prob=0.0, **TINY_VIT)
        model = ViTForImageClassification(config)
        drop = model.vit.embeddings.dropout
        drop.register_forward_hook(lambda layer, _, out: masks.append(out == 0) if layer.training else None)
    else:
        model = ViTForImageClassification.from_pretrained(base)
    if double:
        model.double().register_forward_pre_hook(in_double, with_kwargs=True)
    images = RandomImages(count)
    # Far more of some micro-batches and processes than of others.
    images.labels[:ignored] = -100
    if mixed:
        # Here: no other run needs what it imports.
        from mixed import MixedImages

        images = MixedImages(count)
    trainer = EntameTrainer(model, args, train_dataset=images, eval_dataset=RandomImages(22, seed=1))
    if double:
        trainer.add_callback(InDouble())
    if fails_at:
        trainer.add_callback(Failing(fails_at))
    if waits:
        trainer.add_callback(waits)
    if args.process_index == blind_rank:
        trainer.energies.watching, trainer.energies.observe = nullcontext, lambda *_: None
    trainer.train(resume_from_checkpoint=resume)
    if args.push_to_hub:
        trainer.push_to_hub()
    state = {
        "masks": masks[:],
        # An evaluation shares running statistics.
        "model": {name: values.clone() for name, values in model.state_dict().items()},
        "log": trainer.state.log_history,
        "waits": waits and waits.count,
        "copies_gradients": not getattr(trainer.model_wrapped, "gradient_as_bucket_view", True),
        "stepped": sum(1 for parameter in model.parameters() if trainer.optimizer.state.get(parameter)),
        "predictions": torch.tensor(trainer.predict(trainer.eval_dataset).predictions),
    }
    state["evaluated"] = model.state_dict()
    torch.save(state, Path(folder, f"rank{args.process_index}.pt"))


if __name__ == "__main__":
    # Several runs, one after the other: processes and libraries take longer to start than a run takes.
    run_command(lambda argv: [main(*run) for run in zip(argv[::2], argv[1::2], strict=True)], sys.argv[1:], "train.py")
