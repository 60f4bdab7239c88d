"""What the package leans on in other libraries and their documentation does not promise.

A new release that changes one of these names fails the test of that name.
"""

import ast
import inspect
import re
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

import datasets
import evaluate
import pytest
import torch
import torch.distributed.fsdp._common_utils
from accelerate import Accelerator
from accelerate.hooks import ModelHook, add_hook_to_module
from torch import nn
from torch.optim.lr_scheduler import LambdaLR
from transformers import PreTrainedConfig, Trainer, TrainingArguments, modeling_utils
from transformers.optimization import GreedyLR

import entame_hf
from entame_hf import EntameTrainer

# Every method of Trainer that EntameTrainer overrides, with the parameters that Trainer calls it with.
OVERRIDDEN = {
    "__init__": "self model args data_collator train_dataset eval_dataset processing_class model_init "
    "compute_loss_func compute_metrics callbacks optimizers optimizer_cls_and_kwargs preprocess_logits_for_metrics",
    "create_accelerator_and_postprocess": "self",
    "call_model_init": "self trial",
    "train": "self resume_from_checkpoint trial ignore_keys_for_eval",
    "_init_training_state": "self max_steps num_update_steps_per_epoch num_train_epochs resume_from_checkpoint trial",
    "create_optimizer": "self model",
    "create_scheduler": "self num_training_steps optimizer",
    "get_train_dataloader": "self",
    "get_eval_dataloader": "self eval_dataset",
    "get_test_dataloader": "self test_dataset",
    "get_batch_samples": "self epoch_iterator num_batches device",
    "compute_loss": "self model inputs return_outputs num_items_in_batch",
    "training_step": "self model inputs num_items_in_batch",
    "floating_point_ops": "self inputs",
    "evaluation_loop": "self dataloader description prediction_loss_only ignore_keys metric_key_prefix",
    "prediction_step": "self model inputs prediction_loss_only ignore_keys",
    "log": "self logs start_time",
    "save_metrics": "self split metrics combined",
    "save_state": "self",
    "save_model": "self output_dir _internal_call",
    "_save": "self output_dir state_dict",
    "_save_checkpoint": "self model trial",
    "_load_from_checkpoint": "self resume_from_checkpoint model",
    "_load_best_model": "self",
    "init_hf_repo": "self token private",
    "create_model_card": "self language license tags model_name finetuned_from tasks dataset_tags dataset "
    "dataset_args",
    "push_to_hub": "self commit_message blocking token revision private kwargs",
}

# Who calls the private ones.
CALLED_FROM = {
    "_init_training_state": "_inner_training_loop",
    "_save": "save_model",
    "_save_checkpoint": "_maybe_log_save_evaluate",
    "_load_from_checkpoint": "train",
    "_load_best_model": "_finalize_training",
}


def a_trainer(folder):
    return Trainer(nn.Linear(1, 1), TrainingArguments(str(folder), report_to="none", use_cpu=True))


def a_scheduler():
    return LambdaLR(torch.optim.SGD(nn.Linear(1, 1).parameters()), lambda _: 1.0)


def words_of(module):
    """Attributes that a library sets on objects of others, as its source names them."""
    return SimpleNamespace(**dict.fromkeys(re.findall(r"_[a-z]\w+", inspect.getsource(module))))


# Every private attribute that the package uses: the library, and an object of the kind that has it.
PRIVATE = {
    "_train_batch_size": ("transformers", a_trainer),
    "_get_train_sampler": ("transformers", a_trainer),
    "_get_eval_sampler": ("transformers", a_trainer),
    "_get_output_dir": ("transformers", a_trainer),
    "_finish_current_push": ("transformers", a_trainer),
    "_n_gpu": ("transformers", lambda folder: a_trainer(folder).args),
    "_name_or_path": ("transformers", lambda _: PreTrainedConfig()),
    "_C": ("torch", lambda _: torch),
    "_current_graph_task_id": ("torch", lambda _: torch._C),
    "_modules": ("torch", lambda _: nn.Linear(1, 1)),
    "_parameters": ("torch", lambda _: nn.Linear(1, 1)),
    "_forward_hooks": ("torch", lambda _: nn.Linear(1, 1)),
    "_buffers": ("torch", lambda _: nn.Linear(1, 1)),
    "_is_replica": ("torch", lambda _: nn.Linear(1, 1)._replicate_for_data_parallel()),
    "_orig_mod": ("torch", lambda _: torch.compile(nn.Linear(1, 1))),
    "_fsdp_wrapped_module": ("torch", lambda _: words_of(torch.distributed.fsdp._common_utils)),
    "_dataloaders": ("accelerate", lambda _: Accelerator(cpu=True)),
    "_hf_hook": ("accelerate", lambda _: add_hook_to_module(nn.Linear(1, 1), ModelHook())),
    "_is_hf_initialized": ("transformers", lambda _: words_of(modeling_utils)),
    "_apply": ("torch", lambda _: nn.Module),
    "_load_from_state_dict": ("torch", lambda _: nn.Module),
    "_last_lr": ("torch", lambda _: a_scheduler()),
    "_init_lrs": ("transformers", lambda _: GreedyLR(torch.optim.SGD(nn.Linear(1, 1).parameters()))),
    "_fingerprint": ("datasets", lambda _: datasets.Dataset.from_dict({"x": [1]})),
    "_indices": ("datasets", lambda _: datasets.Dataset.from_dict({"x": [1]})),
    "_ex_iterable": ("datasets", lambda _: datasets.IterableDataset.from_generator(lambda: iter([{}]))),
    "_resolve_features": ("datasets", lambda _: datasets.IterableDataset),
    "_info": ("evaluate", lambda _: evaluate.Metric),
    "_compute": ("evaluate", lambda _: evaluate.Metric),
}

# The standard library documents these, or they are no attributes but parts of names.
DOCUMENTED = {"_asdict", "_fields", "_replace", "_exit"}
PARTS_OF_NAMES = {"_delta", "_runtime", "_per_second", "_time", "_loss"}


@pytest.mark.parametrize("name", OVERRIDDEN)
def test_trainer_calls_what_is_overridden_with_the_same_parameters(name):
    found = " ".join(inspect.signature(getattr(Trainer, name)).parameters)
    known = OVERRIDDEN[name]
    assert found == known, f"transformers {version('transformers')} changed Trainer.{name}({known}) to ({found})"


@pytest.mark.parametrize("name", sorted(set(OVERRIDDEN) - {"__init__", "create_model_card"}))
def test_overrides_take_the_parameters_of_trainer(name):
    assert list(inspect.signature(getattr(EntameTrainer, name)).parameters) == OVERRIDDEN[name].split()


def test_the_constructor_has_trainers_parameters_and_two_more():
    own = list(inspect.signature(EntameTrainer.__init__).parameters)
    assert own == [*OVERRIDDEN["__init__"].split(), "entame", "class_weights"]


def test_every_override_is_listed_and_at_most_five_are_private():
    overridden = {name for name in vars(EntameTrainer) if callable(getattr(Trainer, name, None))}
    assert overridden - vars(object).keys() | {"__init__"} == OVERRIDDEN.keys()
    assert {name for name in OVERRIDDEN if re.match("_[a-z]", name)} == CALLED_FROM.keys()
    assert len(CALLED_FROM) <= 5


def test_the_trainer_is_one_short_file():
    assert len(Path(inspect.getfile(EntameTrainer)).read_text().splitlines()) < 450


def test_trainer_still_builds_optimizer_and_scheduler_apart():
    loop = inspect.getsource(Trainer._inner_training_loop) + inspect.getsource(Trainer._prepare_for_training)
    assert "self.create_optimizer_and_scheduler(" not in loop


@pytest.mark.parametrize("name", CALLED_FROM)
def test_trainer_still_calls_its_private_methods(name):
    source = inspect.getsource(getattr(Trainer, CALLED_FROM[name]))
    assert f"self.{name}(" in source, (
        f"transformers {version('transformers')} no longer calls Trainer.{name} from {CALLED_FROM[name]}"
    )


@pytest.mark.parametrize("name", PRIVATE)
def test_private_attributes_are_still_there(name, tmp_path):
    library, owner = PRIVATE[name]
    assert hasattr(owner(tmp_path), name), f"{library} {version(library)} has no {name} any more"


def test_every_private_attribute_of_a_library_is_listed():
    private = re.compile(r"_[A-Za-z]\w*")
    root = Path(entame_hf.__file__).parent
    trees = {file.relative_to(root): ast.parse(file.read_text()) for file in root.rglob("*.py")}
    own: set[str] = set()
    used: dict[str, Path] = {}
    for file, tree in trees.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                own.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                own.add(node.id)
            elif isinstance(node, ast.Attribute):
                if isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name) and node.value.id == "self":
                    own.add(node.attr)
                else:
                    used.setdefault(node.attr, file)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                used.setdefault(node.value, file)
            elif isinstance(node, ast.alias):
                used.setdefault(node.name.rpartition(".")[2], file)
    # The names of the demonstration's checkpoint are the checkpoint's own.
    found = {n: f for n, f in used.items() if private.fullmatch(n) and n not in own and f.name != "demo.py"}
    unlisted = found.keys() - PRIVATE.keys() - DOCUMENTED - PARTS_OF_NAMES
    assert not unlisted, {name: str(found[name]) for name in unlisted}
