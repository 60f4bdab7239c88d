"""The license of a base model, from its card."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from urllib.parse import quote, urlsplit

import yaml
from huggingface_hub import ModelCard
from huggingface_hub.errors import EntryNotFoundError
from huggingface_hub.utils import validate_repo_id

from .markdown import plain


def is_hub_id(name: str | None) -> bool:
    """Tell whether a name is an id on the Hub: well-formed, and no path on this machine."""
    try:
        validate_repo_id(name or "")
    except ValueError:
        return False
    return not Path(str(name)).exists()


@cache
def license_of(base: str | None) -> dict[str, str]:
    """Read `license`, `license_name` and `license_link` from a base model's card; empty where it cannot be read.

    `base` is an id on the Hub or a local folder. A link has the scheme http or https.
    """
    file = Path(base or "", "README.md")
    if not base or not (file.is_file() or is_hub_id(base)):
        return {}
    try:
        values = ModelCard.load(file if file.is_file() else base, ignore_metadata_errors=True).data.to_dict()
    # Offline and not in the cache; no such model or card; not a card.
    except (OSError, EntryNotFoundError, ValueError, yaml.YAMLError):
        return {}
    found = {key: values.get(key) for key in ("license", "license_name", "license_link")}
    if not isinstance(found["license"], str):
        return {}
    found["license_link"] = _web_link(found["license_link"], None if file.is_file() else base)
    return {key: plain(value) for key, value in found.items() if isinstance(value, str)}


def _web_link(link: object, repository: str | None) -> str | None:
    """Complete a link to a file of a repository; None for all but http and https."""
    if not isinstance(link, str):
        return None
    # A browser drops control characters: "java\nscript:" is a scheme too.
    link = quote(plain(link), safe="/:?#@!$&'*+,;=%~")
    parts = urlsplit(link)
    if parts.scheme in ("http", "https") and parts.netloc:
        return link
    is_file = repository and not parts.scheme and not parts.netloc
    return f"https://huggingface.co/{repository}/blob/main/{link.lstrip('/')}" if is_file else None
