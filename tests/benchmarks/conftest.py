"""Makes `benchmarks` importable from the checkout: it is no part of the wheel, and nothing else of the checkout may be found beside it."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path

FOLDER = Path(__file__).parents[2] / "benchmarks"

if "benchmarks" not in sys.modules:
    spec = importlib.util.spec_from_file_location("benchmarks", FOLDER / "__init__.py", submodule_search_locations=[str(FOLDER)])
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["benchmarks"] = module
    spec.loader.exec_module(module)
