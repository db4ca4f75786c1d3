"""A strict table of a scenario file: unknown keys, wrong types and NaN are refused where they enter."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from sim.errors import unknown


class Table(BaseModel):
    """Base of every TOML table. Integers pass for floats; strings and booleans never pass for numbers."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True, allow_inf_nan=False)

    @model_validator(mode="before")
    @classmethod
    def _keys_are_known(cls, data: Any) -> Any:
        """An unknown key is answered with the nearest known one."""
        if isinstance(data, dict):
            known = [field.alias or name for name, field in cls.model_fields.items()]
            for key in data:
                if key not in known:
                    kind = f"key of kind {data['kind']!r}:" if "kind" in data else "key"
                    what = unknown(kind, str(key), known)
                    raise PydanticCustomError("unknown_key", "{what}", {"key": str(key), "what": what})
        return data


SMALLEST, LARGEST = 1e-30, 1e30  # of any figure but 0, so that what is computed from them stays within float64


def _within_reach(value: float) -> float:
    if value and not SMALLEST <= abs(value) <= LARGEST:
        raise ValueError(f"{value:g} must be from {SMALLEST:g} to {LARGEST:g}")
    return value


Positive = Annotated[float, Field(gt=0), AfterValidator(_within_reach)]
NonNegative = Annotated[float, Field(ge=0), AfterValidator(_within_reach)]
Count = Annotated[int, Field(ge=1, le=2**53)]


def one_of(kind: str, names: Iterable[str]) -> AfterValidator:
    """A string that must be one of `names`; anything else is answered with the nearest of them."""
    known = tuple(names)

    def check(name: str) -> str:
        if name not in known:
            raise ValueError(unknown(kind, name, known))
        return name

    return AfterValidator(check)
