"""What every section of a recipe is: frozen, with no unknown keys, and with a docstring under each field."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict


class Section(BaseModel):
    """A part of a recipe. Values are never rewritten once it is made."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, protected_namespaces=())

    def changed(self, *keys: str) -> list[str]:
        """Those of these keys whose values are not the defaults; a recipe that is written out has them all."""
        return [key for key in keys if getattr(self, key) != type(self).model_fields[key].default]
