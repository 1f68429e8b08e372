"""The kinds of value that several groups of a recipe share.

Bounds stand in the annotation and only a default follows the equals sign. pydantic (2.14) takes a field declared with
``= Field(...)`` by position although its dataclass is keyword-only, and validates it before the others, where
validators do not see the fields declared above it.
"""

from __future__ import annotations

from typing import Annotated

from pydantic import BeforeValidator, Field

from astrai_train.optim.lr_schedule import check_duration

Name = Annotated[str, Field(min_length=1)]
"""A path or an id: any text but the empty one."""

ModuleName = Annotated[str, Field(pattern=r"^[A-Za-z_]\w*(\.\w+)*$")]
"""A module of the model, by class name or by (the end of) its dotted name; never a Python type (row CF2)."""

Share = Annotated[float, Field(ge=0, lt=1)]
"""A share that can be nothing but never the whole; also the decay of a moving average."""

Ratio = Annotated[float, Field(ge=0, le=1)]
"""A share up to and including the whole."""

Duration = Annotated[int | float, BeforeValidator(check_duration)]
"""A whole number of steps, or a share of the run (0 <= x < 1)."""
