"""Base of every section: frozen, unknown keys are refused, attribute docstrings are the help text."""

from typing import Annotated

from pydantic import AfterValidator, BaseModel, ConfigDict


class Section(BaseModel):
    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
    )


MAX_NAME = 200


def is_name(text: str) -> bool:
    """Returns whether a text can be part of a metric's name, of a table and of a line of the console."""
    return "/" not in text and text.isprintable() and len(text) <= MAX_NAME


def _check_import_path(value: str) -> str:
    module, _, attribute = value.partition(":")
    if not module or not attribute:
        raise ValueError("is not an import path; write it as `package.module:function`")
    return value


ImportPath = Annotated[str, AfterValidator(_check_import_path)]
