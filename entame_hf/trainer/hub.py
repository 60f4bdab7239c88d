"""What is asked of the Hub: may this model be pushed, and the push itself."""

from __future__ import annotations

import json
import shlex
import shutil
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub import CommitInfo, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    HTTPError,
    RemoteEntryNotFoundError,
    RepositoryNotFoundError,
)
from transformers.trainer import TRAINER_STATE_NAME, TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.hub import PushInProgress, hf_api

from ..errors import InputError, RunError
from .checkpoint import HEAD_STATE_NAME
from .resume import ResumableTrainer, forget_place

logger = logging.get_logger(__name__)

CARD = "README.md"

# A model, its card and its metrics. An output folder may hold anything else: checkpoints, notes, logs, and in the
# trainer's state and in tensorboard's files the paths of this machine.
PUSHED = ("*.json", "*.safetensors", "*.md", "*.png", "*.py")

NOT_PUSHED = ("*/*", HEAD_STATE_NAME, TRAINER_STATE_NAME)

# Seconds before an upload is tried again; what arrived is not sent twice.
PAUSES = (1, 4)

REFUSED = (400, 401, 403, 404)


def check_push(
    repo: str, *, token: str | None = None, private: bool | None = None, revision: str | None = None
) -> str:
    """Make sure that a model can be pushed; its repository and branch are made where they are missing.

    Args:
        repo (`str`): the repository, with its namespace or without, which is the user's then.
        token (`str`, *optional*): defaults to the one that the machine is logged in with.
        private (`bool`, *optional*): whether a new repository is private; defaults to what its owner has set.
        revision (`str`, *optional*): the branch, `"main"` by default.

    Returns:
        `str`: the repository with its namespace.

    Raises:
        InputError: there is no token, it may not write there, the name is taken by a data set or a Space, the
            repository is public and should be private, or the Hub cannot be reached.

    Example:

    ```python
    >>> from entame_hf.hub import check_push

    >>> check_push("my-model", private=True)  # doctest: +SKIP
    'me/my-model'
    ```
    """
    api = hf_api()
    if not (token or get_token()):
        raise InputError(
            "--push_to_hub needs a token, and there is none. Log in with `hf auth login` or set HF_TOKEN."
        )
    try:
        repo = api.create_repo(repo, token=token, private=private, exist_ok=True).repo_id
        api.auth_check(repo, token=token, write=True)
        if private and not api.model_info(repo, token=token).private:
            raise InputError(
                f"{repo} exists and is public: --hub_private_repo would not hide what is pushed. Make it private in "
                "its settings, or choose another --hub_model_id."
            )
        if revision is not None:
            api.create_branch(repo, branch=revision, token=token, exist_ok=True)
    except HFValidationError as error:
        raise InputError(f"--hub_model_id {repo} is no name of a repository: {error}") from error
    except RepositoryNotFoundError as error:
        raise InputError(
            f"--hub_model_id {repo}: the name is taken by a data set or a Space. Choose another one."
        ) from error
    except HfHubHTTPError as error:
        status = error.response.status_code
        if status == 401:
            raise InputError(
                "The Hub does not know this token. Log in with `hf auth login`, or set HF_TOKEN."
            ) from error
        if status == 403:
            raise InputError(
                f"The token may not write to --hub_model_id {repo}. Use one with write access to that namespace "
                "(https://huggingface.co/settings/tokens), or a name in a namespace of yours."
            ) from error
        raise InputError(f"The Hub refuses --hub_model_id {repo}: {reason_of(error)}.") from error
    # No connection, or HF_HUB_OFFLINE.
    except (HTTPError, OSError) as error:
        raise InputError(f"--push_to_hub, but the Hub cannot be reached: {reason_of(error)}.") from error
    return repo


def upload(
    repo: str, folder: str | Path, message: str, *, token: str | None, revision: str | None, **options: Any
) -> CommitInfo:
    """Upload a folder, and try again where that may help.

    Args:
        repo (`str`): the repository, with its namespace.
        folder (`str` or `Path`): what is uploaded.
        message (`str`): the commit's.
        token (`str`, *optional*): defaults to the one that the machine is logged in with.
        revision (`str`, *optional*): the branch, `"main"` by default.
        options: passed to `HfApi.upload_folder`.

    Returns:
        `huggingface_hub.CommitInfo`: the commit.
    """
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


def model_files() -> dict[str, list[str]]:
    """List what is pushed of a folder, as `HfApi.upload_folder` takes it, which adds to the lists it gets."""
    return {"allow_patterns": [*PUSHED], "ignore_patterns": [*NOT_PUSHED]}


def forget_local_base(folder: str | Path) -> None:
    """Leave of an adapter's base model, where that is a folder of this machine, its name alone.

    Args:
        folder (`str` or `Path`): what will be pushed; nothing happens where it holds no adapter.
    """
    file = Path(folder, "adapter_config.json")
    if file.is_file():
        config = json.loads(file.read_text(encoding="utf-8"))
        base = config.get("base_model_name_or_path")
        if base and Path(base).exists():
            config["base_model_name_or_path"] = Path(base).name
            file.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def card_on_hub(repo: str, *, token: str | None = None, revision: str | None = None) -> str | None:
    """Fetch the card that a repository has, and None where it has none."""
    try:
        file = hf_api().hf_hub_download(repo, CARD, token=token, revision=revision)
    except RemoteEntryNotFoundError:
        return None
    return Path(file).read_text(encoding="utf-8")


def upload_command(
    repo: str, folder: str | Path, *, private: bool | None, revision: str | None, exclude: Sequence[str] = ()
) -> str:
    """Build the command that pushes a folder as [`HubTrainer`] does.

    Args:
        repo (`str`): the repository, with its namespace.
        folder (`str` or `Path`): the folder, as its user calls it.
        private (`bool`, *optional*): whether a new repository is private.
        revision (`str`, *optional*): the branch, `"main"` by default.
        exclude (`Sequence[str]`, *optional*): patterns of what is not pushed either.

    Returns:
        `str`: a line for a shell.

    Example:

    ```python
    >>> from entame_hf.hub import upload_command

    >>> upload_command("me/my-model", "out", private=True, revision=None)[:38]
    'hf upload me/my-model out . --private '
    ```
    """
    parts = [_hf(), "upload", repo, str(folder), "."]
    parts += ["--private"] if private else []
    parts += ["--revision", revision] if revision else []
    parts += [part for pattern in PUSHED for part in ("--include", pattern)]
    parts += [part for pattern in (*NOT_PUSHED, *exclude) for part in ("--exclude", pattern)]
    return shlex.join(parts)


def _hf() -> str:
    """Name Hugging Face's command so that a shell finds it: in an environment that is not activated, by its path."""
    beside = Path(sys.executable).with_name("hf")
    return "hf" if shutil.which("hf") or not beside.exists() else str(beside)


def reason_of(error: BaseException) -> str:
    """Shorten what an exception says to its first line, which is the one for people."""
    lines = str(error).strip().splitlines()
    return lines[0].rstrip(".:") if lines else type(error).__name__


class HubTrainer(ResumableTrainer):
    """A [`Trainer`] that checks a push before it trains, keeps what is private, and survives a push that breaks."""

    hub_model_id: Any
    push_in_progress: Any = None

    # Trainer finds out about a read-only token, a missing branch or a public repository after the training.
    def init_hf_repo(self, token: str | None = None, private: bool | None = None) -> None:
        if not self.is_world_process_zero():
            return
        args = self.args
        self.hub_model_id = check_push(
            args.hub_model_id or Path(args.output_dir).absolute().name,
            token=token or args.hub_token,
            private=args.hub_private_repo if private is None else private,
            revision=args.hub_revision,
        )
        self.push_in_progress = None

    # A pickle of the arguments holds the token and paths of this machine, and nothing ever reads it. peft writes a
    # card of blanks and the base model's path, over one that is there.
    def _save(self, output_dir: str | None = None, state_dict: Any = None) -> None:
        folder = Path(output_dir or self.args.output_dir)
        card = folder / CARD
        before = card.read_bytes() if card.exists() else None
        super()._save(output_dir, state_dict)
        if not self.args.should_save:
            return
        (folder / TRAINING_ARGS_NAME).unlink(missing_ok=True)
        if before is None:
            card.unlink(missing_ok=True)
        else:
            card.write_bytes(before)

    # Trainer uploads whatever is in the folder, writes over a card that was edited on the Hub, and loses its way back
    # where the upload breaks.
    def push_to_hub(
        self,
        commit_message: str | None = "End of training",
        blocking: bool = True,
        token: str | None = None,
        revision: str | None = None,
        private: bool | None = None,
        **kwargs: Any,
    ) -> Any:
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        self.save_model(_internal_call=True)
        if not self.is_world_process_zero():
            return None
        forget_local_base(self.args.output_dir)
        if self.hub_model_id is None:
            self.init_hf_repo(token, private)
        repo, folder = str(self.hub_model_id), self.args.output_dir
        token, branch = token or self.args.hub_token, revision or self.args.hub_revision
        kept_back = [CARD]
        try:
            if revision is not None:
                hf_api().create_branch(repo, branch=revision, token=token, exist_ok=True)
            card = card_on_hub(repo, token=token, revision=branch)
            if card is not None:
                Path(folder, CARD).write_text(card, encoding="utf-8")
            # From here on, the card in the folder holds what people wrote into the Hub's.
            kept_back = []
            self.create_model_card(**{"model_name": repo.split("/")[-1], **kwargs})
            self._finish_current_push()
            send = partial(upload, repo, folder, str(commit_message), token=token, revision=branch, **model_files())
            return send() if blocking else hf_api().run_as_future(send)
        # Whatever it is, the training is done and must not be lost.
        except Exception as error:
            private = self.args.hub_private_repo if private is None else private
            command = upload_command(repo, folder, private=private, revision=branch, exclude=kept_back)
            raise RunError(
                f"The push to {repo} failed: {reason_of(error)}. Nothing is lost: all of it is in {folder}, and this "
                f"pushes it, logged in as somebody who may write there:\n{command}"
            ) from error

    # A checkpoint's folder is all that a push needs; Trainer copies it into the output folder and pushes that.
    def _push_from_checkpoint(self, checkpoint_folder: str) -> None:
        strategy = self.args.hub_strategy
        if not self.is_world_process_zero() or strategy == HubStrategy.END:
            return
        self._report_broken_pushes()
        if self.push_in_progress.jobs and not self.args.hub_always_push:
            return
        self.callback_handler.on_push_begin(self.args, self.state, self.control)
        forget_local_base(checkpoint_folder)
        message = f"Training in progress, step {self.state.global_step}"
        send = partial(
            upload, self.hub_model_id, checkpoint_folder, token=self.args.hub_token, revision=self.args.hub_revision
        )
        jobs: Any = [hf_api().run_as_future(send, message, **model_files())]
        if strategy != HubStrategy.EVERY_SAVE:
            forget_place(checkpoint_folder)
            name = "last-checkpoint" if strategy == HubStrategy.CHECKPOINT else Path(checkpoint_folder).name
            jobs.append(hf_api().run_as_future(send, f"{message}, checkpoint", path_in_repo=name))
        jobs = [*self.push_in_progress.jobs, *jobs]
        self.push_in_progress = PushInProgress(jobs)

    # Trainer never looks at what became of an upload.
    def _finish_current_push(self) -> None:
        super()._finish_current_push()
        self._report_broken_pushes()

    def _report_broken_pushes(self) -> None:
        jobs: Any = self.push_in_progress.jobs if self.push_in_progress else []
        for error in filter(None, (job.exception() for job in jobs if job.done())):
            logger.warning(f"An upload during the training failed: {reason_of(error)}. The next one sends everything.")
        jobs = [job for job in jobs if not job.done()]
        self.push_in_progress = PushInProgress(jobs)
