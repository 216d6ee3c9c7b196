"""Registration with transformers' Auto classes, without importing transformers before it is used.

The configuration is registered as soon as transformers' own table of configurations exists. The
model classes are registered when the first TrellisConfig is made, which is before any Auto class
can look for them: importing them together with the table would run into half-imported modules.
"""

from __future__ import annotations

import functools
import importlib.abc
import importlib.util
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

CONFIG_TABLE = "transformers.models.auto.configuration_auto"


def register_on_import() -> None:
    """Register TrellisConfig now, or once transformers' table of configurations is imported."""
    table = sys.modules.get(CONFIG_TABLE)
    if table is not None and hasattr(table, "AutoConfig"):
        _register_config(table)
    else:
        sys.meta_path.insert(0, _AfterImport(CONFIG_TABLE, _register_config))


def _register_config(table: ModuleType) -> None:
    from .config import TrellisConfig

    table.AutoConfig.register("trellis", TrellisConfig, exist_ok=True)


@functools.cache
def register_models() -> None:
    """Register the model classes with AutoModel and AutoModelForCausalLM."""
    from transformers import AutoModel, AutoModelForCausalLM

    from .config import TrellisConfig
    from .modeling import TrellisForCausalLM, TrellisModel

    AutoModel.register(TrellisConfig, TrellisModel, exist_ok=True)
    AutoModelForCausalLM.register(TrellisConfig, TrellisForCausalLM, exist_ok=True)


class _AfterImport(importlib.abc.MetaPathFinder):
    """Calls `action` with module `name` once it has been imported."""

    def __init__(self, name: str, action: Callable[[ModuleType], None]):
        self.name, self.action = name, action

    def find_spec(self, fullname: str, path: Any = None, target: Any = None) -> Any:
        if fullname != self.name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec is not None and spec.loader is not None:
            run = spec.loader.exec_module

            def run_and_act(module: ModuleType) -> None:
                run(module)
                self.action(module)

            spec.loader.exec_module = run_and_act  # type: ignore[method-assign]
        return spec
