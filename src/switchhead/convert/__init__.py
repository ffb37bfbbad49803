"""Layers from other code, and back."""

from switchhead.convert.authors import from_authors, to_authors

__all__ = ["from_authors", "to_authors"]
