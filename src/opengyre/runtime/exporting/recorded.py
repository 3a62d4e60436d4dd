"""What a folder of records holds: where each record lies, and what the run tells of executions.

Must not know: rows. Invariants: reads only; a damaged record hides nothing but itself.
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from opengyre.gateway.rendering.renderer import ModelRenderer, load_renderer
from opengyre.runtime.exporting.trained import trained_paths
from opengyre.seams.errors import ConfigError
from opengyre.seams.records import SegmentRef
from opengyre.store.observations import PathDigest
from opengyre.store.outcomes import ExecutionOutcome, read_outcomes
from opengyre.store.run_folder import RunFolder, read_json
from opengyre.store.segments import Damage, SegmentReader, segment_numbers
from opengyre.trajectory.turns import TRAINED_ROLES


@dataclass(slots=True, kw_only=True)
class ExportTotals:
    """What was exported, and a line for everything that could not be."""

    num_rows: int = 0
    num_executions: int = 0
    problems: list[str] = field(default_factory=list)
    num_unfinished: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Recorded:
    """A run folder, or that of a gateway on its own: then no run tells of its executions."""

    tokens: Path
    renderer: ModelRenderer
    has_run: bool
    outcomes: dict[str, ExecutionOutcome]
    trained: dict[str, list[PathDigest]]
    trained_roles: Sequence[str]
    refs: dict[str, list[SegmentRef]]
    totals: ExportTotals


def open_recorded(folder: Path, *, model: Path | None = None) -> Recorded:
    """Find every record. `model`: where the model's tokenizer is now, if not where it was.

    Raises ConfigError if `folder` holds no records, or the tokenizer is not there.
    """
    run = RunFolder(folder)
    if not run.tokens.is_dir():
        raise ConfigError(f"{folder}: no records in it (a run or a gateway makes tokens/*.seg)")
    config = read_json(run.config_json)
    source = model or _model_of(run, config)
    _check_tokenizer(source, config.get("tokenizer_sha256"))
    renderer = load_renderer(source, allow_rerender=True)
    has_run = run.db.exists()
    totals = ExportTotals()
    return Recorded(
        tokens=run.tokens,
        renderer=renderer,
        has_run=has_run,
        outcomes=read_outcomes(run.db) if has_run else {},
        trained=trained_paths(run.db) if has_run else {},
        trained_roles=config.get("training", {}).get("trained_roles", TRAINED_ROLES),
        refs=_find_records(run.tokens, totals),
        totals=totals,
    )


def _find_records(tokens: Path, totals: ExportTotals) -> dict[str, list[SegmentRef]]:
    """Where the records of each execution lie, in the order they were written."""
    refs: dict[str, list[SegmentRef]] = {}

    def on_damage(damage: Damage) -> None:
        totals.num_unfinished += damage.is_at_end
        if not damage.is_at_end:
            totals.problems.append(str(damage))

    reader = SegmentReader(tokens)
    for segment in segment_numbers(tokens):
        for header in reader.scan_headers(segment, on_damage=on_damage):
            refs.setdefault(header.execution, []).append(header.ref)
    return refs


def _check_tokenizer(model: Path, recorded_sha256: Any) -> None:
    """Another tokenizer would read other text out of the ids."""
    path = model / "tokenizer.json"
    if recorded_sha256 is None or not path.is_file():
        return
    if hashlib.sha256(path.read_bytes()).hexdigest() != recorded_sha256:
        raise ConfigError(f"{model}: not the tokenizer that was recorded; say --model FOLDER")


def _model_of(run: RunFolder, config: dict[str, Any]) -> Path:
    """What config.json names: `model.path` of a run, `model` of a gateway on its own."""
    model = config.get("model")
    path = model.get("path") if isinstance(model, dict) else model
    if not isinstance(path, str):
        raise ConfigError(f"{run.config_json}: names no model; say --model FOLDER")
    if not Path(path).is_dir():
        raise ConfigError(f"{path}: the model that was recorded is not there; say --model FOLDER")
    return Path(path)
