"""Write a model card: facts in, README.md out."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.modelcard import METRIC_TAGS

from ..files import write_file
from ..metrics import Evaluation, class_scores
from .markdown import escape, number, plain
from .update import metadata_comment, update_card

CARD_NAME = "README.md"

TEMPLATE = Path(__file__).with_name("template.md")

# Above this number of classes, the card lists only the worst of them.
MOST_LISTED, WORST = 100, 50


# The other methods are its peers.
METHODS_OF_ENTAME = ("entame", "mei", "fn", "informed")


@dataclass(frozen=True)
class CardFacts:
    """Hold the facts of a model card, which leaves out what is None or empty."""

    name: str
    # The model's class, or timm's name for it.
    architecture: str
    class_names: list[str]
    # Of the weights beside the card.
    evaluation: Evaluation
    # The model's id on the Hub; None for the folder that holds the card.
    repository: str | None = None
    # "transformers", "timm" (both libraries load it), or None for neither.
    library_name: str | None = None
    has_processor: bool = False
    # Whether some evaluated images are transparent or deeper than 8 bits.
    converts_images: bool = False
    is_adapter: bool = False
    # The id on the Hub of the model that was fine-tuned, and the name of one without an id.
    base_model: str | None = None
    base_name: str | None = None
    # As in the metadata.
    license: Mapping[str, str] = field(default_factory=dict)
    inherits_license: bool = False
    # Ids on the Hub, and the name of a dataset without one.
    datasets: Sequence[str] = ()
    dataset_name: str = ""
    dataset_config: str | None = None
    language: str | None = None
    # Added to the tags that every card has.
    tags: Sequence[str] = ()
    task: str = "image-classification"
    # Rows of the training table, such as {"training images": 4000}.
    training: Mapping[str, Any] = field(default_factory=dict)
    # See [`describe_adaptation`].
    adaptation: Mapping[str, Any] | None = None
    # Nλ², see [`noise_to_signal_ratio`].
    noise: float | None = None
    # Noise in the first error, with this head and with `base`.
    noise_share: float | None = None
    base_noise_share: float | None = None
    # Accuracy of a linear probe that is expected on unseen images.
    probe_accuracy: float | None = None
    hyperparameters: Mapping[str, Any] = field(default_factory=dict)
    # PNG files beside the card; and those that the Hub's widget shows, with their titles.
    pictures: Sequence[str] = ()
    examples: Mapping[str, str] = field(default_factory=dict)

    @property
    def uses_entame(self) -> bool:
        """Whether the method is one of ENTAME's."""
        return self.adaptation is not None and self.adaptation["method"] in METHODS_OF_ENTAME


def write_model_card(folder: str | Path, facts: CardFacts) -> None:
    """Write README.md into a folder, and keep what people wrote into the one that is there.

    Raises:
        InputError: the metadata of the README.md that is there cannot be read; the file is left as it is.
    """
    file = Path(folder, CARD_NAME)
    existing = file.read_bytes().decode("utf-8-sig") if file.exists() else None
    text = update_card(existing, render_card(facts))
    write_file(file, lambda draft: draft.write_bytes(text.encode()))


def render_card(facts: CardFacts) -> str:
    """Fill the template in: metadata and Markdown, with the marks that [`update_card`] looks for."""
    data, confusion = _metadata(facts), facts.evaluation.confusion
    card = ModelCard.from_template(
        data,
        template_path=str(TEMPLATE),
        facts=facts,
        images=None if confusion is None else int(confusion.sum()),
        class_rows=[] if confusion is None else _class_rows(confusion),
        metadata_comment=metadata_comment(data.to_dict()),
        escape=escape,
        number=number,
    )
    return f"{card.content}\n"


def _class_rows(confusion: Any) -> list[tuple[Any, ...]]:
    """List index, precision, recall, F1 and number of images by class; the worst classes where there are many."""
    rows = [(index, *scores) for index, scores in enumerate(zip(*class_scores(confusion), strict=True))]
    if len(rows) <= MOST_LISTED:
        return rows
    return sorted((row for row in rows if row[-1]), key=lambda row: row[3])[:WORST]


def _metadata(facts: CardFacts) -> ModelCardData:
    # As on timm's own cards: transformers loads these models too.
    libraries = ["timm", "transformers"] if facts.library_name == "timm" else []
    return ModelCardData(
        **facts.license,  # type: ignore[arg-type]
        base_model=facts.base_model,
        base_model_relation=("adapter" if facts.is_adapter else "finetune") if facts.base_model else None,
        datasets=list(facts.datasets) or None,
        library_name="peft" if facts.is_adapter else facts.library_name,
        pipeline_tag=facts.task,
        language=facts.language,
        tags=[
            "image-classification",
            *libraries,
            *(["entame"] if facts.uses_entame else []),
            "generated_from_trainer",
            *map(plain, facts.tags),
        ],
        model_name=plain(facts.name),
        widget=[{"src": file, "example_title": plain(title)} for file, title in facts.examples.items()] or None,
        **_results(facts),
    )


def _results(facts: CardFacts) -> dict[str, Any]:
    """List the metrics that the Hub knows by name, for `ModelCardData`."""
    # Test images come first: the others may have chosen the checkpoint.
    known = [
        (split, kind, name, value)
        for split, metrics in (("test", facts.evaluation.test), (facts.evaluation.split, facts.evaluation.metrics))
        for name, value in metrics.items()
        for kind in METRIC_TAGS
        # The Hub refuses numbers that JSON does not have.
        if (name == kind or name.startswith(f"{kind}_")) and math.isfinite(value)
    ]
    if not known:
        return {}
    name = facts.datasets[0] if facts.datasets else plain(facts.dataset_name) or "unknown"
    results = [
        EvalResult(
            task_type="image-classification",
            task_name="Image classification",
            dataset_type=name if facts.datasets else "unknown",
            dataset_name=name,
            dataset_config=facts.dataset_config,
            dataset_split=split,
            metric_type=kind,
            metric_name=metric.replace("_", " "),
            metric_value=value,
        )
        for split, kind, metric, value in known
    ]
    return {"metrics": list(dict.fromkeys(kind for _, kind, *_ in known)), "eval_results": results}
