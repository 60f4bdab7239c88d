"""The text of a model card: facts in, Markdown out."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..metrics import Evaluation
from ..plots.confusion import class_scores
from .markdown import escape, number, table

PAPER = "https://arxiv.org/abs/1905.10698"

HUB = "https://huggingface.co/"

BIBTEX = """\
@article{varno2019entame,
  title   = {Efficient Neural Task Adaptation by Maximum Entropy Initialization},
  author  = {Varno, Farshid and Soleimani, Behrouz Haji and Saghayi, Marzie and Di Jorio, Lisa and Matwin, Stan},
  journal = {arXiv preprint arXiv:1905.10698},
  year    = {2019}
}"""

METHODS = {
    "entame": "the head's weights were drawn from N(0, φ_w), so that its first output had maximum entropy, and its "
    "input was z-normalised across the batch",
    "mei": "the head's weights were drawn from N(0, φ_w), so that its first output had maximum entropy",
    "fn": "the head's weights were drawn from N(0, 2/C), and its input was z-normalised across the batch",
    "base": "the head's weights were drawn from N(0, 2/C), the paper's baseline",
    "base_wu": "the head's weights were drawn from N(0, 2/C), and the first step updated the head alone",
    "keep": "the head started as it was",
}

# The others are its peers.
OF_ENTAME = ("entame", "mei", "fn")

# Above this, classes are listed folded away; above that, only the worst of them.
MOST_OPEN, MOST_LISTED = 10, 100

WORST = 50


@dataclass(frozen=True)
class CardFacts:
    """What a model card says.

    Args:
        name (`str`): the model's.
        address (`str`): an id on the Hub, or "." for the folder that the card lies in.
        architecture (`str`): what the model is.
        base_model (`str`, *optional*): the id on the Hub of the model that was fine-tuned.
        base_name (`str`, *optional*): what to call it where it has no id.
        license (`dict`): `license`, `license_name` and `license_link`, as in the metadata; may be empty.
        inherits_license (`bool`): whether that is the base model's.
        datasets (`list[str]`): ids on the Hub.
        dataset_name (`str`): what to call data without an id; may be empty.
        class_names (`list[str]`): C names by index, in any script.
        library_name (`str`, *optional*):
            "transformers", or "timm" for a model that both load; None for one of your own.
        has_processor (`bool`): whether an image processor is saved beside the model.
        is_adapter (`bool`): whether peft puts what is saved on the base model.
        adaptation (`dict`, *optional*): see [`describe_adaptation`]; None for a model that was not trained here.
        noise (`float`, *optional*): Nλ², see [`noise_to_signal_ratio`].
        noise_share, base_noise_share (`float`, *optional*): of the first error, with this head and under `base`.
        hyperparameters (`dict`): names and values; empty for a model that was not trained here.
        evaluation ([`Evaluation`]): of these weights.
        pictures (list of `str`): names of the PNG files that lie beside the card.
    """

    name: str
    address: str
    architecture: str
    base_model: str | None
    base_name: str | None
    datasets: list[str]
    dataset_name: str
    class_names: list[str]
    library_name: str | None
    has_processor: bool
    adaptation: dict[str, Any] | None
    evaluation: Evaluation
    is_adapter: bool = False
    license: dict[str, Any] = field(default_factory=dict)
    inherits_license: bool = True
    hyperparameters: dict[str, Any] = field(default_factory=dict)
    noise: float | None = None
    noise_share: float | None = None
    base_noise_share: float | None = None
    pictures: Sequence[str] = ()


def card_text(facts: CardFacts) -> str:
    """Write the text of a model card.

    Args:
        facts ([`CardFacts`]): what is known; sections of what is not known are left out.

    Returns:
        `str`: Markdown without metadata.
    """
    sections = [
        f"# {escape(facts.name)}\n\n{_introduction(facts)}",
        _results(facts),
        _usage(facts),
        _training(facts),
        _license(facts),
        f"## Citation\n\n```bibtex\n{BIBTEX}\n```",
    ]
    return "\n\n".join(filter(None, sections))


def _introduction(facts: CardFacts) -> str:
    base = f"the local model “{escape(facts.base_name)}”" if facts.base_name else ""
    base = f"[{facts.base_model}]({HUB}{facts.base_model})" if facts.base_model else base
    data = ", ".join(f"[{name}]({HUB}datasets/{name})" for name in facts.datasets) or escape(facts.dataset_name)
    text = f"{escape(facts.architecture)}, fine-tuned{base and f' from {base}'} to tell {len(facts.class_names):,} "
    text += f"classes of images apart{data and f' on {data}'}."
    if facts.adaptation:
        method = facts.adaptation["method"]
        source = f"With [ENTAME]({PAPER})" if method in OF_ENTAME else "Without ENTAME"
        text += f" {source} (method `{method}`), {METHODS[method]}."
    if facts.is_adapter:
        text += " It is an adapter: peft puts it on the base model, without other code."
    elif facts.library_name:
        text += (
            " It is a stock model: timm and transformers load it"
            if facts.library_name == "timm"
            else " It is a stock model: transformers loads it"
        )
        text += " without other code."
    return text


def _results(facts: CardFacts) -> str:
    metrics, step, confusion = facts.evaluation
    if not metrics:
        return ""
    images = f" on {int(confusion.sum()):,} images" if confusion is not None else ""
    rows = [[escape(name.replace("_", " ")), number(value)] for name, value in metrics.items()]
    when = f", after optimizer step {step:,}" if step else ""
    text = f"## Results\n\nEvaluated{images}{when}:\n\n"
    text += table(["metric", "value"], rows)
    if confusion is not None:
        text += f"\n\n{_classes(facts.class_names, confusion)}"
    return text + _picture(facts, "confusion_matrix", "Confusion matrix")


def _classes(names: list[str], confusion: np.ndarray) -> str:
    scores = class_scores(confusion)
    order = np.arange(len(names))
    title = f"Precision, recall and F1 of all {len(names)} classes"
    if len(names) > MOST_LISTED:
        order = np.argsort(scores.f1, kind="stable")
        order = order[scores.support[order] > 0][:WORST]
        title = f"Precision, recall and F1 of the {len(order)} classes with the lowest F1"
    rows = [
        [str(i), escape(names[i]), *(f"{score[i]:.3f}" for score in scores[:3]), f"{scores.support[i]:,}"]
        for i in order
    ]
    text = table(["", "class", "precision", "recall", "F1", "images"], rows)
    if len(names) <= MOST_OPEN:
        return f"By class:\n\n{text}"
    return f"<details>\n<summary>{title}</summary>\n\n{text}\n\n</details>"


def _usage(facts: CardFacts) -> str:
    if facts.is_adapter:
        return _usage_of_adapter(facts)
    if facts.library_name is None:
        return ""
    image = 'Image.new("RGB", (320, 240))  # or Image.open("your image.jpg")'
    if facts.has_processor:
        transformers = f"""\
from PIL import Image
from transformers import pipeline

classify = pipeline("image-classification", model="{facts.address}")
image = {image}
print(classify(image))"""
    else:
        transformers = f"""\
from transformers import AutoModelForImageClassification

# No image processor was saved: prepare images as in training.
model = AutoModelForImageClassification.from_pretrained("{facts.address}")
print(model.config.id2label)"""
    text = f"## How to use\n\n```python\n{transformers}\n```"
    if facts.library_name == "timm":
        source = "local-dir" if facts.address == "." else "hf-hub"
        timm = f"""\
import timm
import torch
from PIL import Image

model = timm.create_model("{source}:{facts.address}", pretrained=True).eval()
transform = timm.data.create_transform(**timm.data.resolve_model_data_config(model), is_training=False)
image = {image}
with torch.no_grad():
    probabilities = model(transform(image).unsqueeze(0)).softmax(dim=-1)[0]
print(model.pretrained_cfg["label_names"][probabilities.argmax()], probabilities.max().item())"""
        text += f"\n\nor with timm:\n\n```python\n{timm}\n```"
    return text


def _usage_of_adapter(facts: CardFacts) -> str:
    if facts.base_model is None:
        return ""
    return f"""\
## How to use

```python
from peft import PeftModel
from transformers import AutoModelForImageClassification

# The base model's head is built for these classes and replaced by the adapter's.
base = AutoModelForImageClassification.from_pretrained(
    "{facts.base_model}", num_labels={len(facts.class_names)}, ignore_mismatched_sizes=True
)
model = PeftModel.from_pretrained(base, "{facts.address}").eval()
```"""


def _training(facts: CardFacts) -> str:
    if not facts.adaptation:
        return ""
    text = f"## Training\n\n{table(['', ''], _adaptation(facts, facts.adaptation))}"
    if facts.noise_share is not None:
        text += f"\n\nOf the first error's energy, {facts.noise_share:.1%} was noise"
        if facts.base_noise_share is not None and not facts.adaptation["method"].startswith("base"):
            text += (
                f"; a head drawn from N(0, 2/C) would have made that {facts.base_noise_share:.1%} on the same images"
            )
        text += "."
    text += _picture(facts, "learning_curves", "Losses and metrics over steps")
    text += _picture(facts, "noise_share", "Noise share of the error over steps")
    text += _picture(facts, "feature_variance", "Variance of the classifier's input over steps")
    if facts.hyperparameters:
        rows = [[f"`{name}`", escape(value)] for name, value in facts.hyperparameters.items()]
        text += f"\n\n{table(['hyper-parameter', 'value'], rows)}"
    versions = [[package, escape(version)] for package, version in facts.adaptation["versions"].items()]
    return f"{text}\n\n{table(['package', 'version'], versions)}"


def _adaptation(facts: CardFacts, adaptation: dict[str, Any]) -> list[list[str]]:
    rate, variance = adaptation["learning_rate"], adaptation["phi_w"]
    rows = [["method", f"`{adaptation['method']}`"], ["learning rate γ", number(rate)]]
    # Models that were saved before it was noted have none.
    if adaptation.get("head_lr"):
        asked, peaks = adaptation["head_lr"]["asked"], adaptation["head_lr"]["peak"]
        names = [f"`{path}` " for path in peaks] if len(peaks) > 1 else [""]
        rates = ", ".join(f"{name}{number(peak)}" for name, peak in zip(names, peaks.values(), strict=True))
        rows.append(["learning rate of the head", rates + (", measured in the first step" if asked == "auto" else "")])
    if adaptation["init"] == "mei":
        rows.append(["variance of the head's first weights, φ_w", number(variance)])
        if rate > 0:
            rows.append(["λ = C·√φ_w/γ", number(adaptation["num_labels"] * variance**0.5 / rate)])
    if facts.noise is not None:
        rows.append(["Nλ², noise over signal in the head after a first plain gradient step", number(facts.noise)])
    if adaptation["feature_norm"]:
        rows.append(["features", f"z-normalised across the batch, momentum {number(adaptation['momentum'])}"])
    else:
        rows.append(["features", "as they are"])
    return rows


def _license(facts: CardFacts) -> str:
    name = facts.license.get("license_name") or facts.license.get("license")
    if not name:
        return ""
    link = facts.license.get("license_link")
    text = f"[{escape(name)}]({link})" if link else escape(name)
    return f"## License\n\n{text}{', as the card of the base model says' if facts.inherits_license else ''}."


def _picture(facts: CardFacts, name: str, title: str) -> str:
    return f"\n\n![{title}]({name}.png)" if f"{name}.png" in facts.pictures else ""
