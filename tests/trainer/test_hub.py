"""What happens between a training and the Hub: the real client, and a Hub on loopback that fails on demand."""

from __future__ import annotations

import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
from hub_server import HubServer

pytestmark = pytest.mark.runs

# A Hub of the process's own, from before the client is imported; its faults are set from within.
PRELUDE = """
import os, sys
from itertools import repeat
from pathlib import Path
sys.path.insert(0, {tests!r})
from hub_server import READ, STRANGER, WRITE, HubServer
hub = HubServer().__enter__()
os.environ.update(hub.environment(Path("home")))
import huggingface_hub
import entame_hf.trainer.hub
from entame_hf import InputError, RunError
entame_hf.trainer.hub.PAUSES = (0.01, 0.01)
"""
TRAINER = """
import shutil, subprocess, timm, torch
from conftest import RandomImages
from entame_hf import EntameTrainer, EntameTrainingArguments

def trainer(name, out="out", **changes):
    torch.manual_seed(0)
    defaults = dict(max_steps=4, per_device_train_batch_size=16, save_steps=2, eval_strategy="steps", eval_steps=2,
                    learning_rate=1e-3, load_best_model_at_end=True, disable_tqdm=True, use_cpu=True,
                    push_to_hub=True, hub_model_id=f"ada/{name}")
    args = EntameTrainingArguments(out, **{**defaults, **changes})
    data = RandomImages(48)
    return EntameTrainer(timm.create_model("test_resnet", num_classes=10), args, train_dataset=data, eval_dataset=data)

def pushed(name, revision="main"):
    return hub.repos["models", f"ada/{name}"].files(revision)
"""


def in_a_process(folder: Path, *code: str) -> str:
    """Run code in a process of its own, with a Hub of its own, and return what it wrote."""
    script = PRELUDE.format(tests=str(Path(__file__).parents[1])) + "".join(textwrap.dedent(part) for part in code)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])}
    result = subprocess.run(
        [sys.executable, "-c", script], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return result.stdout + result.stderr


def test_a_push_is_checked_before_the_training(tmp_path):
    in_a_process(
        tmp_path,
        """
        from entame_hf.trainer.hub import check_push

        def refused(reason, repo, **options):
            try:
                check_push(repo, **options)
            except InputError as error:
                assert reason in str(error), error
                assert not any(token in str(error) for token in (WRITE, READ, STRANGER)), error
                assert os.getcwd() not in str(error), error
            else:
                raise AssertionError(f"{repo} was not refused")

        assert check_push("new", private=True, revision="dev") == "ada/new"
        assert hub.repos["models", "ada/new"].private
        assert set(hub.repos["models", "ada/new"].branches) == {"main", "dev"}
        assert check_push("ada/new", private=True, revision="dev") == "ada/new"
        hub.add("models", "ada/public")
        hub.add("models", "eve/hers")
        hub.add("datasets", "ada/pictures")
        assert check_push("ada/public") == "ada/public"
        refused("is public", "ada/public", private=True)
        refused("may not write", "ada/public", token=READ)
        refused("may not write", "ada/another", token=READ)
        refused("may not write", "eve/mine")
        refused("may not write", "eve/hers")
        refused("taken by a dataset", "ada/pictures")
        refused("no name of a repository", "ada/b/c")
        refused("does not know this token", "new", token="hf_nonsense")
        hub.faults["create"] = repeat(500)
        refused("The Hub refuses", "ada/unlucky")
        os.environ["HF_TOKEN"] = ""
        refused("hf auth login", "ada/new")
        hub.faults["create"] = repeat("drop")
        refused("cannot be reached", "ada/new", token=WRITE)
        """,
    )


def test_a_push_that_stumbles_arrives_one_that_falls_says_how_to_go_on_and_none_wipes_a_card(tmp_path):
    output = in_a_process(
        tmp_path,
        TRAINER,
        """
        once = dict(save_strategy="no", load_best_model_at_end=False)
        run = trainer("model", hub_private_repo=True, hub_revision="dev", **once)
        run.train()
        Path("out/notes.txt").write_text("mine")
        repo = hub.repos["models", "ada/model"]
        for fault in (500, 409, "drop"):
            hub.faults["commit"] = iter([fault])
            Path("out/eval_results.json").write_text(f'"{fault}"')
            run.push_to_hub()
            assert pushed("model", "dev")["eval_results.json"] == f'"{fault}"'.encode()
        assert repo.messages == ["initial commit"] + ["End of training"] * 3
        assert set(pushed("model")) == {".gitattributes"}
        files = {".gitattributes", "README.md", "config.json", "eval_results.json", "model.safetensors"}
        assert files <= set(pushed("model", "dev"))
        assert not {"notes.txt", "entame_head.safetensors", "training_args.bin"} & set(pushed("model", "dev"))

        for fault in (403, "drop"):
            del hub.repos["models", "ada/model"]
            run.init_hf_repo()
            hub.faults["commit"] = repeat(fault)
            try:
                run.push_to_hub()
            except RunError as error:
                message = str(error)
            assert "Nothing is lost: all of it is in out" in message
            assert not any(secret in message for secret in (os.getcwd(), WRITE)), message
            hub.faults.clear()
            subprocess.run(message.splitlines()[-1], shell=True, check=True, env={**os.environ, "HF_HUB_OFFLINE": "0"})
            assert files <= set(pushed("model", "dev"))
            assert hub.repos["models", "ada/model"].private
            assert pushed("model", "dev")["model.safetensors"] == Path("out/model.safetensors").read_bytes()

        repo = hub.repos["models", "ada/model"]
        edited = repo.files("dev")["README.md"] + b"\\nWords of a person.\\n"
        repo.commit("dev", {**repo.files("dev"), "README.md": edited}, "edit")
        run.push_to_hub()
        assert b"Words of a person." in pushed("model", "dev")["README.md"]
        assert b"ENTAME" in pushed("model", "dev")["README.md"]

        # What an earlier model left is loaded instead of the pushed one; other files are somebody's own.
        left = ["adapter_config.json", "adapter_model.safetensors", "model-00001-of-00002.safetensors",
                "model.safetensors.index.json", "preprocessor_config.json"]
        kept = ["last-checkpoint/adapter_config.json", "last-checkpoint/model.safetensors", "tokens.txt"]
        repo.commit("dev", {**repo.files("dev"), **dict.fromkeys([*left, *kept], b"{}")}, "an earlier model")
        run.push_to_hub()
        assert not set(left) & set(pushed("model", "dev"))
        assert files | set(kept) <= set(pushed("model", "dev"))

        received = b"".join(hub.received)
        for secret in (os.getcwd(), WRITE, "mine"):
            assert secret.encode() not in received, secret
        """,
    )
    assert str(tmp_path) not in output


@pytest.mark.parametrize("links", [True, False])
def test_a_checkpoint_that_is_uploaded_may_be_removed_meanwhile(tmp_path, links):
    output = in_a_process(
        tmp_path,
        TRAINER,
        """
        from threading import Event
        from transformers import TrainerCallback

        removed, send = Event(), entame_hf.trainer.hub.upload

        def upload(*args, **kwargs):
            assert removed.wait(30)
            return send(*args, **kwargs)

        class Wait(TrainerCallback):
            def on_save(self, args, state, control, **kwargs):
                if state.global_step == 4:
                    assert not os.path.exists("out/checkpoint-2")
                    removed.set()

        entame_hf.trainer.hub.upload = upload
        os.makedirs("out/.checkpoint-1")
        run = trainer("slow", hub_strategy="checkpoint", save_total_limit=1, load_best_model_at_end=False)
        run.add_callback(Wait())
        """,
        "" if links else "def refuse(*paths): raise OSError\nos.link = refuse\n",
        """
        run.train()
        messages = hub.repos["models", "ada/slow"].messages[1:]
        assert messages == [f"Training in progress, step 2{end}" for end in ("", ", checkpoint")], messages
        assert "last-checkpoint/optimizer.pt" in pushed("slow")
        assert b'"global_step": 2' in pushed("slow")["last-checkpoint/trainer_state.json"]
        assert [path for path in os.listdir("out") if "checkpoint" in path] == ["checkpoint-4"], os.listdir("out")
        """,
    )
    assert "upload" not in output


def test_a_checkpoint_that_cannot_be_copied_for_its_upload_ends_no_training(tmp_path):
    output = in_a_process(
        tmp_path,
        TRAINER,
        """
        def refuse(*paths, **options):
            raise OSError(28, "No space left on device")

        run = trainer("full", hub_strategy="every_save", load_best_model_at_end=False)
        os.link = shutil.copyfile = refuse
        run.train()
        assert run.state.global_step == 4
        assert os.path.exists("out/checkpoint-4/model.safetensors")
        assert [path for path in os.listdir("out") if ".checkpoint" in path] == [], os.listdir("out")
        assert not hub.repos["models", "ada/full"].messages[1:]
        """,
    )
    assert output.count("An upload during the training failed") == 2
    assert "No space left on device" in output


@pytest.mark.slow
def test_pushing_during_the_training(tmp_path):
    output = in_a_process(
        tmp_path,
        TRAINER,
        """
        from huggingface_hub import snapshot_download

        hub.faults["commit"] = iter([403])
        run = trainer("saves", hub_strategy="every_save", hub_always_push=True)
        run.train()
        assert hub.repos["models", "ada/saves"].messages[1:] == ["Training in progress, step 4"]
        assert set(pushed("saves")) == {".gitattributes", "config.json", "model.safetensors"}
        assert pushed("saves")["model.safetensors"] == Path("out/checkpoint-4/model.safetensors").read_bytes()

        whole = trainer("checkpoints", out="whole", hub_strategy="checkpoint", hub_always_push=True)
        whole.train()
        whole.push_to_hub()
        last = snapshot_download("ada/checkpoints", allow_patterns="last-checkpoint/*") + "/last-checkpoint"
        assert os.path.exists(last + "/optimizer.pt")
        shutil.rmtree("whole/checkpoint-4")
        resumed = trainer("checkpoints", out="whole", hub_strategy="checkpoint", max_steps=6)
        resumed.train(resume_from_checkpoint=last)
        expected = trainer("other", out="other", max_steps=6)
        expected.train()
        torch.testing.assert_close(resumed.model.state_dict(), expected.model.state_dict(), rtol=0, atol=0)
        received = b"".join(hub.received)
        for secret in (os.getcwd(), WRITE):
            assert secret.encode() not in received, secret
        assert not list(Path().rglob("training_args.bin"))
        """,
    )
    assert "An upload during the training failed: 403" in output


def test_the_server_keeps_private_what_is_private(tmp_path):
    with HubServer() as hub:
        hub.add("models", "ada/secret", private=True)
        code = """
            from huggingface_hub import HfApi
            from huggingface_hub.errors import RepositoryNotFoundError
            assert HfApi().model_info("ada/secret").private
            for token in (False, "hf_somebody_else"):
                try:
                    HfApi().model_info("ada/secret", token=token)
                except RepositoryNotFoundError:
                    continue
                raise AssertionError(token)
        """
        environment = {**os.environ, **hub.environment(tmp_path)}
        subprocess.run([sys.executable, "-c", textwrap.dedent(code)], env=environment, check=True)


def test_an_adapter_says_nothing_of_the_folder_its_base_came_from(tmp_path):
    in_a_process(
        tmp_path,
        TRAINER,
        """
        from conftest import TINY_VIT
        from peft import LoraConfig, get_peft_model
        from transformers import ViTConfig, ViTForImageClassification

        base = Path.cwd() / "private" / "base"
        ViTForImageClassification(ViTConfig(num_labels=10, **TINY_VIT)).save_pretrained(base)
        lora = LoraConfig(target_modules=["q_proj"], modules_to_save=["classifier"])
        model = get_peft_model(ViTForImageClassification.from_pretrained(base), lora)
        args = EntameTrainingArguments("out", max_steps=2, save_steps=1, use_cpu=True, push_to_hub=True,
                                       hub_model_id="ada/adapter", hub_strategy="all_checkpoints")
        adapting = EntameTrainer(model, args, train_dataset=RandomImages(16))
        adapting.train()
        adapting.push_to_hub()
        files = pushed("adapter")
        assert "checkpoint-1/adapter_config.json" in files, sorted(files)
        for name in ("adapter_config.json", "checkpoint-1/adapter_config.json"):
            assert b'"base_model_name_or_path": "base"' in files[name], files[name]
        assert not any(str(Path.cwd()).encode() in content for content in files.values())
        adapting.train(resume_from_checkpoint="out/checkpoint-1")
        """,
    )
