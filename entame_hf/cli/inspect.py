"""Show what each method would do to a model in its first step; nothing is trained or written."""

from __future__ import annotations

from typing import Any

from transformers import set_seed

from ..config import EntameConfig
from ..data import batch_loader
from ..energy import inspect_head
from .arguments import WITHOUT_EFFECT, ModelArguments, RunArguments, check_given
from .console import say
from .data_arguments import DataArguments
from .demo import DEFAULTS, load_demo
from .launch import options_named
from .loading import INPUTS, load, load_data, set_up
from .options import OptionParser
from .ranking import RankingArguments, check_ranking, probe_dataset, rank_checkpoints, ranking_table


def main(argv: list[str]) -> None:
    """Run `entame inspect`."""
    parser = inspect_parser()
    with options_named(parser.named):
        given = parser.given(argv)
        models = given.pop("models", None)
        if models:
            rank(parser, given, models)
        else:
            inspect(parser, given)


def inspect_parser() -> OptionParser:
    """Build the parser of `inspect`."""
    kinds = [ModelArguments, DataArguments, RunArguments, RankingArguments]
    return OptionParser(kinds, "Show what each method would do in the first step.", without=WITHOUT_EFFECT)


def rank(parser: OptionParser, given: dict[str, Any], models: list[str]) -> None:
    """Rank checkpoints on data by a linear probe."""
    model_args, data_args, args, *_ = parser.build(given)
    check_ranking(models, model_args, data_args, args)
    set_up(args)
    ranking = rank_checkpoints(models, load_data(model_args, data_args, args), model_args, data_args, args)
    if args.process_index == 0:
        print(ranking_table(ranking))


def inspect(parser: OptionParser, given: dict[str, Any]) -> None:
    """Inspect a model on data, or the demonstration's where neither is given."""
    if any(name in given for name in INPUTS):
        model_args, data_args, args, *_ = parser.build(given)
        check_given(model_args, data_args, args)
        set_up(args)
        model, data = load(load_data(model_args, data_args, args), model_args, data_args, args)
    else:
        model_args, data_args, args, *_ = parser.build({**DEFAULTS, **given})
        set_up(args)
        model, data = load_demo(model_args, data_args, args)
    _show(model, data.train, args)


def _show(model: Any, train: Any, args: RunArguments) -> None:
    model.to(args.device)
    labels = getattr(train, "labels", None)
    # A stream has no rows to choose from, and a probe is about one class an image.
    probe = None if labels is None or labels.ndim > 1 else probe_dataset(model, train, args)
    if args.process_index != 0:
        return
    set_seed(args.seed)
    loader = batch_loader(train, args.per_device_train_batch_size, args.device, shuffle=True)
    batches = (batch.to(args.device) for batch in loader)
    given = {name: value for name in ("phi_w", "noise_lambda") if (value := getattr(args, name)) is not None}
    config = EntameConfig(**given)
    say(str(inspect_head(model, batches, config, learning_rate=args.learning_rate, seed=args.seed)))
    if probe is not None:
        say(str(probe))
