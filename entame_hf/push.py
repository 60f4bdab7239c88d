"""Pushing a training: checked before its first step, and never the end of one that went well."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

from transformers.trainer import TRAINING_ARGS_NAME
from transformers.trainer_utils import HubStrategy
from transformers.utils import logging
from transformers.utils.hub import PushInProgress, hf_api

from .errors import RunError
from .hub import CARD, card_on_hub, check_push, forget_local_base, model_files, reason_of, upload, upload_command
from .resume import ResumableTrainer, forget_place

logger = logging.get_logger(__name__)


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
