"""A forecaster that is fed row by row, at constant cost and memory however long the series runs.

stream = StreamingForecaster(forecaster, start="2024-12-31 23:00")     # date of the first row
stream.observe(rows)                         # any number of new rows [n, C]
stream.forecast()                            # [horizon, C, outputs], in the units of the rows
stream.save("now.safetensors")               # a small file, for this forecaster alone
other = stream.fork()                        # goes its own way
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from .. import checks
from ..files import write_whole
from ..mixers.base import map_tensors, named_tensors, rebuild
from ..models.cache import pack_tensors, read_tensors
from .forecaster import Forecaster
from .model import StreamState

FORMAT = "trellis-stream"
FORMAT_VERSION = 1
_PARTS = ("rows", "sums", "hidden")


class StreamingForecaster:
    """The state of one stream of all channels of a forecaster."""

    def __init__(
        self,
        forecaster: Forecaster,
        start: Any = None,
        place: int | None = None,
    ):
        """start: the date of the first row that will be observed, such as "2024-12-31 23:50" or a
        date of datetime, numpy or pandas. A forecaster with a season needs it to know what is usual
        then; any other can do without.
        place: in the place of `start`, where the first row stands in its cycle, such as 6 for a
        stream of hours that begins at 6 o'clock.

        Raises ValueError if the forecaster was trained with another normaliser, has a season and
        neither is given, or if both are.
        """
        if place is not None:
            if start is not None:
                raise ValueError(f"give start or place, not both; got {start!r} and {place!r}")
            place = int(place) if isinstance(place, np.integer) else place
            checks.at_least("place", place, 0)
        elif start is not None:
            place = forecaster.place_of(start)
        elif forecaster.season is not None:
            raise ValueError(
                f"this forecaster has a season of {forecaster.season} rows: give start, the date "
                "of the first row, such as '2024-12-31 23:50', or place"
            )
        self.forecaster, self.place = forecaster, (place or 0) % (forecaster.season or 1)
        self.state = forecaster.model.init_state(len(forecaster.names))
        self._scaler = forecaster.scaler()

    @property
    def seen(self) -> int:
        """How many rows were observed."""
        return self.state.seen

    @property
    def nbytes(self) -> int:
        """The size of the state in bytes. It does not grow, unless the mixer is attention."""
        return sum(tensor.numel() * tensor.element_size() for _, tensor in self._tensors())

    @torch.no_grad()
    def observe(self, rows: Any) -> None:
        """Folds new rows [n, C], or one row [C], into the state.

        Raises ValueError, and leaves the state as it was, if a number is missing or the shape is
        another.
        """
        names = self.forecaster.names
        try:
            values = np.asarray(rows, dtype=np.float64)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"rows must be numbers, {len(names)} in each row; got a {type(rows).__name__} "
                f"({error})"
            ) from error
        if values.ndim == 1 and len(values):
            values = values[None]
        if values.ndim != 2 or values.shape[1] != len(names):
            raise ValueError(
                f"rows must have shape [n, {len(names)}], a column for each of "
                f"{', '.join(names[:3])}{' ...' if len(names) > 3 else ''}; got "
                f"{list(np.shape(rows))}"
            )
        if not len(values):
            return
        scaled = self._scaler.scaled(values, self.place + self.seen)
        bad = np.argwhere(~np.isfinite(scaled))
        if len(bad):
            row, column = bad[0]
            raise ValueError(
                "rows must be finite numbers, not far too large for their column; row "
                f"{row}, column {names[column]!r} is {values[row, column]}: repeat the last number"
            )
        self.state = self.forecaster.model.observe(torch.from_numpy(scaled).T, self.state)

    @torch.no_grad()
    def forecast(self) -> np.ndarray:
        """The forecasts [horizon, C, outputs] of the rows to come. The state stays as it is.

        Raises ValueError before the first row.
        """
        if not self.seen:
            raise ValueError("a forecast needs at least one row; call observe first")
        out = self.forecaster.model.forecast(self.state).sort(-1).values  # [C, H, outputs]
        rows = out.permute(1, 2, 0).double().numpy()
        return self._scaler.undo(rows, self.place + self.seen).swapaxes(1, 2)

    def fork(self) -> StreamingForecaster:
        """An independent stream that has observed the same rows."""
        other = StreamingForecaster(self.forecaster, place=self.place)
        state = self.state
        parts = {name: getattr(state, name).clone() for name in _PARTS}
        layers = tuple(map_tensors(torch.Tensor.clone, layer) for layer in state.layers)
        other.state = StreamState(**parts, layers=layers, seen=state.seen)
        return other

    def save(self, path: str | Path) -> None:
        """Writes the state to a safetensors file, whole or not at all.

        The file carries a checksum, and a fingerprint of the forecaster: `load` refuses it for any
        other.
        """
        tensors = {name: t.detach().cpu().contiguous().clone() for name, t in self._tensors()}
        content = {
            "fingerprint": self._fingerprint(), "seen": str(self.seen), "place": str(self.place),
        }  # fmt: skip
        write_whole(Path(path), pack_tensors(FORMAT, FORMAT_VERSION, tensors, content))

    @classmethod
    def load(cls, path: str | Path, forecaster: Forecaster) -> StreamingForecaster:
        """Reads a stream that `save` wrote for this very forecaster.

        Raises FileNotFoundError, or ValueError if the file is cut, changed, of another kind or of
        another forecaster.
        """
        path = Path(path)
        if not path.is_file():
            raise FileNotFoundError(f"there is no stream at {path}")
        tensors, content = read_tensors(path, FORMAT, FORMAT_VERSION)
        stream = cls(forecaster, place=int(content.get("place", 0)))
        if content.get("fingerprint") != stream._fingerprint():
            raise ValueError(
                f"{path} belongs to a forecaster with another configuration, scale or other weights"
            )
        if {name for name, _ in stream._tensors()} != set(tensors):
            raise ValueError(f"{path} does not hold the state of this forecaster's blocks")
        layers = tuple(
            rebuild(layer, tensors, f"layers.{n}") for n, layer in enumerate(stream.state.layers)
        )
        parts = {name: tensors[name] for name in _PARTS}
        stream.state = StreamState(**parts, layers=layers, seen=int(content["seen"]))
        return stream

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        found = [(name, getattr(self.state, name)) for name in _PARTS]
        for number, layer in enumerate(self.state.layers):
            found += [(f"layers.{number}.{name}", t) for name, t in named_tensors(layer)]
        return found

    def _fingerprint(self) -> str:
        cycle = self.forecaster.cycle
        parts = [self.forecaster.model.fingerprint(), self.forecaster.scalers]
        if cycle is not None:
            parts.append(cycle.tolist())
        return hashlib.sha256(json.dumps(parts).encode()).hexdigest()
