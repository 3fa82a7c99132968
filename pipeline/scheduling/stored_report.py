"""Reports that lie in the store as JSON, written by whatever build was there."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import Self

from pydantic import BaseModel, ConfigDict, ValidationError


class StoredReport(BaseModel, ABC):
    """One of a kind, `field` is its name among them."""

    model_config = ConfigDict(frozen=True, extra="ignore")

    @property
    @abstractmethod
    def field(self) -> str:
        """Its name on the board."""

    @classmethod
    def decode(cls, reports: Iterable[bytes]) -> list[Self]:
        """Read what lies in the store, by name; what another build wrote and we cannot read is left out."""
        decoded = []
        for report in reports:
            try:
                decoded.append(cls.model_validate_json(report))
            except ValidationError:
                continue
        return sorted(decoded, key=lambda report: report.field)
