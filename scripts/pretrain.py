"""Pretrain a timm model without any download, on glyphs and fractals that are drawn on the fly.

    python scripts/pretrain.py --model resnet50 --output_dir out/sources/resnet50
    python scripts/pretrain.py --model vgg16 --learning_rate 1e-4 --output_dir out/sources/vgg16

The suites use resnet50, densenet121, vgg16, vit_small_patch8_224, swin_tiny_patch4_window7_224 and convnext_tiny; any
timm classifier that takes 64 pixels works. The folder is a source for `scripts/reproduce.py` and loads with
`AutoModelForImageClassification.from_pretrained`. The last line printed describes the training, as JSON.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import timm
import torch
from reproduction.source_task import CLASSES, MEAN, SIDE, STD, SourceTask
from transformers import PreTrainedModel, set_seed

from entame_hf import EntameTrainer, EntameTrainingArguments
from entame_hf.metrics import metrics_of_predictions, predicted_classes
from entame_hf.patch import as_transformers

TEST_SIZE = 5000


def source_model(name: str) -> PreTrainedModel:
    """Build a timm model with random weights for the source task's images."""
    # Models with position embeddings are built for one size.
    defaults: Any = timm.get_pretrained_cfg(name)
    sized: dict[str, Any] = {"img_size": SIDE} if defaults.fixed_input_size else {}
    model = as_transformers(timm.create_model(name, num_classes=CLASSES, **sized))
    model.config.pretrained_cfg |= {
        "input_size": [3, SIDE, SIDE],
        "mean": [MEAN] * 3,
        "std": [STD] * 3,
        "crop_pct": 1.0,
    }
    # The fastest layout for convolutions.
    return model.to(memory_format=torch.channels_last)


def pretrain(options: argparse.Namespace) -> EntameTrainer:
    args = EntameTrainingArguments(
        str(options.output_dir),
        # There are no pretrained features yet.
        entame_method="keep",
        energy_logging_steps=0,
        seed=options.seed,
        max_steps=options.steps,
        per_device_train_batch_size=options.batch,
        per_device_eval_batch_size=500,
        learning_rate=options.learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=options.steps // 20,
        weight_decay=0.05,
        bf16=torch.cuda.is_available(),
        dataloader_pin_memory=False,
        logging_steps=max(options.steps // 10, 1),
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )
    # Sizes stay the same, so cuDNN may time its kernels.
    torch.backends.cudnn.benchmark = True
    set_seed(options.seed)
    trainer = EntameTrainer(
        source_model(options.model),
        args,
        train_dataset=SourceTask(options.steps * options.batch, options.seed),
        eval_dataset=SourceTask(TEST_SIZE, options.seed, evaluation=True),
        compute_metrics=metrics_of_predictions(),
        preprocess_logits_for_metrics=predicted_classes,
    )
    trainer.train()
    return trainer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="NAME", help="an architecture of timm")
    parser.add_argument("--output_dir", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--batch", type=int, default=512)
    parser.add_argument(
        "--learning_rate", type=float, default=5e-4, help="peak learning rate of AdamW with a cosine schedule"
    )
    parser.add_argument("--seed", type=int, default=0, help="seed of the weights, the fractals and the images")
    options = parser.parse_args()
    if not timm.is_model(options.model):
        parser.error(
            f"--model {options.model} is not a timm architecture. Give one of timm.list_models(), such as resnet50."
        )
    if min(options.steps, options.batch) < 1:
        parser.error(f"--steps {options.steps} and --batch {options.batch} must be 1 or more.")
    if (options.output_dir / "config.json").exists():
        parser.error(f"--output_dir {options.output_dir} holds a model already. Remove it, or give another folder.")
    trainer = pretrain(options)
    trained = next(line for line in reversed(trainer.state.log_history) if "train_runtime" in line)
    accuracy = trainer.evaluate()["eval_accuracy"]
    trainer.save_model()
    record = {
        "model": options.model,
        "source_accuracy": accuracy,
        "steps": options.steps,
        "batch": options.batch,
        "learning_rate": options.learning_rate,
        "seed": options.seed,
        "seconds": round(trained["train_runtime"], 1),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
        "torch": torch.__version__,
        "command": " ".join(sys.argv),
    }
    (options.output_dir / "pretraining.json").write_text(json.dumps(record) + "\n")
    print(json.dumps(record))


if __name__ == "__main__":
    main()
