"""Kubernetes objects in a file, held to the schema of Kubernetes."""

from pathlib import Path

import kubernetes_validate
import yaml

SCHEMA = "1.31"


def objects(path: Path) -> dict[tuple[str, str], dict]:
    """Returns the objects of a file by kind and name."""
    found = list(yaml.safe_load_all(path.read_text()))
    for each in found:
        kubernetes_validate.validate(each, SCHEMA, strict=True)
    return {(each["kind"], each["metadata"]["name"]): each for each in found}
