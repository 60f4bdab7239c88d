"""Write a model card: facts in, README.md out."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from huggingface_hub import EvalResult, ModelCard, ModelCardData
from transformers.modelcard import METRIC_TAGS

from ..files import write_file
from ..metrics import class_scores
from .facts import CardFacts
from .markdown import escape, number, plain
from .update import metadata_comment, update_card

CARD_NAME = "README.md"

TEMPLATE = Path(__file__).with_name("template.md")

# Above this number of classes, the card lists only the worst of them.
MOST_LISTED, WORST = 100, 50


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
    known = [
        (kind, name, value)
        for name, value in facts.evaluation.metrics.items()
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
            metric_type=kind,
            metric_name=metric.replace("_", " "),
            metric_value=value,
        )
        for kind, metric, value in known
    ]
    return {"metrics": list(dict.fromkeys(kind for kind, *_ in known)), "eval_results": results}
