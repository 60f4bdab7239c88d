"""Pushing to the Hub: the check before a run, and the push itself."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from huggingface_hub import CommitInfo, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers import TrainerCallback, TrainerState
from transformers.trainer import TRAINER_STATE_NAME
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, HubStrategy
from transformers.utils import CONFIG_NAME, IMAGE_PROCESSOR_NAME, PROCESSOR_NAME, logging
from transformers.utils.hub import PushInProgress, hf_api

from ..errors import InputError, RunError
from ..files import write_text
from .checkpoint import HEAD_STATE_NAME, forget_local_base
from .provenance import PROVENANCE
from .resume import MANIFEST

logger = logging.get_logger(__name__)

CARD = "README.md"

# A model, its card and its metrics. An output folder may hold anything else: checkpoints, notes, logs, and in the
# trainer's state and in tensorboard's files the paths of this machine.
PUSHED = ("*.json", "*.safetensors", "*.md", "*.png", "*.py")

NOT_PUSHED = ("*/*", HEAD_STATE_NAME, TRAINER_STATE_NAME, MANIFEST, PROVENANCE)

# Weights of an earlier model, which would be loaded instead of the pushed ones, or beside them.
REPLACED = ("model.safetensors", "model-*-of-*.safetensors", "model.safetensors.index.json", "adapter_*")

# Files of an image processor. transformers prefers them to the one that a timm model's config describes.
PROCESSORS = (IMAGE_PROCESSOR_NAME, PROCESSOR_NAME)

# Seconds before an upload is tried again; what arrived is not sent twice.
PAUSES = (1, 4)

REFUSED = (400, 401, 403, 404)


def check_push(repo: str, token: str | None = None, private: bool | None = None, revision: str | None = None) -> str:
    """Check that a model can be pushed, and create its repository and branch if they are missing.

    Raises:
        InputError: there is no token, it may not write there, the name is taken by a dataset or a Space, the
            repository is public and should be private, or the Hub cannot be reached.
    """
    api = hf_api()
    if not (token or get_token()):
        raise InputError(
            "`push_to_hub` needs a token, and there is none. Log in with `hf auth login` or set HF_TOKEN."
        )
    try:
        repo = api.create_repo(repo, token=token, private=private, exist_ok=True).repo_id
        api.auth_check(repo, token=token, write=True)
        if private and not api.model_info(repo, token=token).private:
            raise InputError(
                f"{repo} exists and is public: `hub_private_repo` would not hide what is pushed. Make it private in "
                "its settings, or choose another `hub_model_id`."
            )
        if revision is not None:
            api.create_branch(repo, branch=revision, token=token, exist_ok=True)
    except HFValidationError as error:
        raise InputError(f"`hub_model_id={repo}` is no name of a repository: {error}") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"`hub_model_id={repo}`: the name is taken by a dataset or a Space. Choose another one."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise InputError(
                "The Hub does not know this token. Log in with `hf auth login`, or set HF_TOKEN."
            ) from error
        if status == 403:
            raise InputError(
                f"The token may not write to `hub_model_id={repo}`. Use one with write access to that namespace "
                "(https://huggingface.co/settings/tokens), or a name in a namespace of yours."
            ) from error
        raise InputError(f"The Hub refuses `hub_model_id={repo}`: {reason_of(error)}.") from error
    # No connection, or HF_HUB_OFFLINE.
    except (HTTPError, OSError) as error:
        raise InputError(f"`push_to_hub` is set, but the Hub cannot be reached: {reason_of(error)}.") from error
    return repo


def upload(
    repo: str, folder: str | Path, message: str, *, token: str | None, revision: str | None, **options: Any
) -> CommitInfo:
    """Upload a folder, and try again after a failure that may pass."""
    send = partial(
        hf_api().upload_folder,
        repo_id=repo,
        folder_path=folder,
        commit_message=message,
        token=token,
        revision=revision,
        **options,
    )
    for pause in PAUSES:
        try:
            return send()
        # The client repeats the requests that carry files, but not always the one that commits them.
        except HTTPError as error:
            if isinstance(error, HfHubHTTPError) and error.response.status_code in REFUSED:
                raise
            logger.warning(f"The upload to {repo} broke ({reason_of(error)}); trying again in {pause} s.")
            time.sleep(pause)
    return send()


def replaced_files(folder: str | Path) -> list[str]:
    """List patterns of files that a repository must not keep of an earlier model when a folder's is pushed."""
    config = Path(folder, CONFIG_NAME)
    is_timm = config.is_file() and json.loads(config.read_text(encoding="utf-8")).get("model_type") == "timm_wrapper"
    return [*REPLACED, *(PROCESSORS if is_timm else ())]


def model_files(folder: str | Path) -> dict[str, list[str]]:
    """List the patterns of files for `HfApi.upload_folder`, which changes the lists that it gets."""
    removed = replaced_files(folder)
    return {"allow_patterns": [*PUSHED], "ignore_patterns": [*NOT_PUSHED], "delete_patterns": removed}


def card_on_hub(repo: str, *, token: str | None = None, revision: str | None = None) -> str | None:
    """Fetch a repository's card; None if it has none."""
    try:
        file = hf_api().hf_hub_download(repo, CARD, token=token, revision=revision)
    except RemoteEntryNotFoundError:
        return None
    return Path(file).read_text(encoding="utf-8")


def upload_command(
    repo: str, folder: str | Path, *, private: bool | None, revision: str | None, exclude: Sequence[str] = ()
) -> str:
    """Build the shell's command that pushes a folder as [`EntameTrainer`] does, without what `exclude` names."""
    parts = [_hf(), "upload", repo, str(folder), "."]
    parts += ["--private"] if private else []
    parts += ["--revision", revision] if revision else []
    parts += [part for pattern in PUSHED for part in ("--include", pattern)]
    parts += [part for pattern in (*NOT_PUSHED, *exclude) for part in ("--exclude", pattern)]
    parts += [part for pattern in replaced_files(folder) for part in ("--delete", pattern)]
    return shlex.join(parts)


def _hf() -> str:
    """Return the `hf` command, with its path if the environment is not activated."""
    beside = Path(sys.executable).with_name("hf")
    return "hf" if shutil.which("hf") or not beside.exists() else str(beside)


def reason_of(error: BaseException) -> str:
    """Return the first line of an exception's message."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


class HubTarget(NamedTuple):
    """Say where a model is pushed."""

    repo: str
    token: str | None = None
    revision: str | None = None
    private: bool | None = None


def push_folder(
    target: HubTarget, folder: str, message: str, write_card: Callable[[], None], blocking: bool = True
) -> Any:
    """Push the model of a folder, with a card that keeps what people wrote into the one on the Hub.

    `write_card` updates the card in the folder. Without `blocking`, a future of the upload is returned.

    Raises:
        RunError: the push failed; the message has the command that pushes the folder.
    """
    repo, token, revision, private = target
    forget_local_base(folder)
    kept_back = [CARD]
    try:
        if revision is not None:
            hf_api().create_branch(repo, branch=revision, token=token, exist_ok=True)
        card = card_on_hub(repo, token=token, revision=revision)
        if card is not None:
            write_text(Path(folder, CARD), card)
        # From here on, the card in the folder holds what people wrote into the Hub's.
        kept_back = []
        write_card()
        send = partial(upload, repo, folder, message, token=token, revision=revision, **model_files(folder))
        return send() if blocking else hf_api().run_as_future(send)
    # Whatever it is, the training is done and must not be lost.
    except Exception as error:
        command = upload_command(repo, folder, private=private, revision=revision, exclude=kept_back)
        raise RunError(
            f"The push to {repo} failed: {reason_of(error)}. Nothing is lost: all of it is in {folder}, and this "
            f"pushes it, once you are logged in with write access:\n{command}"
        ) from error


class CheckpointUploads(TrainerCallback):
    """Push each checkpoint after it is written, as `hub_strategy` asks.

    `Trainer` pushes all of the output folder, with a pickle of the arguments that holds the token. Its
    `push_in_progress` keeps the uploads, and `train()` waits for them.
    """

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def on_train_begin(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if state.is_world_process_zero:
            # Of a run that was killed.
            for links in Path(str(args.output_dir)).glob(f".{PREFIX_CHECKPOINT_DIR}-*"):
                shutil.rmtree(links, ignore_errors=True)

    def on_save(self, args: Any, state: TrainerState, control: Any, **kwargs: Any) -> None:
        if not (args.push_to_hub and state.is_world_process_zero) or args.hub_strategy == HubStrategy.END:
            return
        running = self.trainer.push_in_progress
        if running is not None and not running.is_done() and not args.hub_always_push:
            return
        folder = Path(str(args.output_dir), f"{PREFIX_CHECKPOINT_DIR}-{state.global_step}")
        try:
            links = _link(folder)
        # A full disk, where files are copied, must not end the training.
        except OSError as error:
            _warn(error)
            return
        self.trainer.callback_handler.on_push_begin(args, state, control)
        message = f"Training in progress, step {state.global_step}"
        repo, token, branch = self.trainer.hub_model_id, args.hub_token, args.hub_revision
        send = partial(upload, repo, links, token=token, revision=branch)
        sent: list[Future[Any]] = [hf_api().run_as_future(send, message, **model_files(links))]
        if args.hub_strategy in (HubStrategy.CHECKPOINT, HubStrategy.ALL_CHECKPOINTS):
            name = "last-checkpoint" if args.hub_strategy == HubStrategy.CHECKPOINT else folder.name
            sent.append(hf_api().run_as_future(send, f"{message}, checkpoint", path_in_repo=name))
        for job in sent:
            # Trainer never looks at what became of an upload.
            job.add_done_callback(_report_failure)
        # One after the other: this is the last one.
        sent.append(hf_api().run_as_future(shutil.rmtree, links, ignore_errors=True))
        jobs: Any = [*(running.jobs if running else []), *sent]
        self.trainer.push_in_progress = PushInProgress(jobs)


def _link(folder: Path) -> Path:
    """Link a checkpoint's files in a hidden folder beside it: the checkpoint may be removed during its upload."""

    def link(source: str, target: str) -> None:
        try:
            os.link(source, target)
        # Not every file system has links.
        except OSError:
            shutil.copyfile(source, target)

    links = folder.with_name(f".{folder.name}")
    shutil.rmtree(links, ignore_errors=True)
    try:
        return Path(shutil.copytree(folder, links, copy_function=link))
    except OSError:
        shutil.rmtree(links, ignore_errors=True)
        raise


def _report_failure(job: Future[Any]) -> None:
    if not job.cancelled() and (error := job.exception()) is not None:
        _warn(error)


def _warn(error: BaseException) -> None:
    logger.warning(f"An upload during the training failed: {reason_of(error)}. The next one sends everything.")
