"""Input tensors for the models of models.json: the same bytes for the same model and seed, in every
process.
"""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np


def make(model: dict[str, Any], seed: int = 0) -> dict[str, np.ndarray]:
    """Returns one array per input of a models.json entry.

    Each input says its "dtype" and "shape" and how it is filled: "normal" (standard normal),
    "uniform" and "integers" (from "low" up to but not including "high"), or "constant" ("value").
    """
    return {name: _fill(name, spec, seed) for name, spec in model["inputs"].items()}


def _fill(name: str, spec: dict[str, Any], seed: int) -> np.ndarray:
    # crc32 and not hash(): the latter differs from process to process.
    random = np.random.default_rng([seed, zlib.crc32(name.encode())])
    shape, dtype = spec["shape"], np.dtype(spec["dtype"])
    fill = spec["fill"]
    if fill == "normal":
        return random.standard_normal(shape).astype(dtype)
    if fill == "uniform":
        return random.uniform(spec["low"], spec["high"], shape).astype(dtype)
    if fill == "integers":
        return random.integers(spec["low"], spec["high"], shape).astype(dtype)
    if fill == "constant":
        return np.full(shape, spec["value"], dtype)
    raise ValueError(f"input {name!r}: unknown fill {fill!r}")
