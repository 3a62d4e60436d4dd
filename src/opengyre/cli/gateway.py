"""`gyre gateway`: records what any agent asks of a model, token for token.

Owns: its options, its output, the end by a signal. Must not know: how a call is recorded.
"""

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from opengyre.cli.errors import ExitCode
from opengyre.cli.options import command_of

if TYPE_CHECKING:
    from opengyre.runtime.recording.standalone import Ready, StandaloneSettings, Totals

KINDS = ("auto", "vllm", "sglang")


@dataclass(frozen=True, slots=True, kw_only=True)
class GatewayOptions:
    """What `gyre gateway` is told."""

    engines: Annotated[
        list[str],
        typer.Option("--engine", metavar="URL", help="a vLLM or SGLang server; may be repeated"),
    ]
    model: Annotated[
        Path, typer.Option("--model", metavar="FOLDER", help="its config.json and tokenizer.json")
    ]
    out: Annotated[
        Path, typer.Option("--out", metavar="DIR", help="records go here; an old one goes on")
    ]
    kind: Annotated[str, typer.Option("--kind", help="vllm, sglang or auto")] = "auto"
    host: Annotated[str, typer.Option("--host", help="address to listen on")] = "127.0.0.1"
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="port to listen on; 0: a free one")
    ] = 0
    key: Annotated[
        str | None,
        typer.Option(
            "--key", envvar="GYRE_GATEWAY_KEY", help="what clients send (default: a new one)"
        ),
    ] = None
    engine_key: Annotated[
        str, typer.Option("--engine-key", envvar="GYRE_ENGINE_KEY", help="what the engines ask for")
    ] = ""
    profile: Annotated[
        str,
        typer.Option("--profile", metavar="NAME|FILE", help="labels the calls of this harness"),
    ] = ""
    context_tokens: Annotated[
        int | None,
        typer.Option("--context-tokens", min=1, help="no prompt + answer is longer than this"),
    ] = None
    allow_rerender: Annotated[
        bool,
        typer.Option(
            "--allow-rerender", help="a model of no known family: every turn is rendered anew"
        ),
    ] = False
    as_json: Annotated[
        bool, typer.Option("--json", help="one JSON line at the start and one at the end")
    ] = False


def run(options: GatewayOptions) -> None:
    """Serve agents and record their exact tokens, until Ctrl-C."""
    import asyncio

    settings = _settings(options)
    totals = asyncio.run(_serve(settings, options))
    _print_end(totals, options)
    raise typer.Exit(ExitCode.INTERRUPTED if totals.num_cut else ExitCode.DONE)


gateway = command_of(GatewayOptions, run)


def _settings(options: GatewayOptions) -> "StandaloneSettings":
    import secrets

    from opengyre.engines.probe import EngineKind
    from opengyre.runtime.recording.standalone import StandaloneSettings
    from opengyre.seams.errors import ConfigError

    if options.kind not in KINDS:
        raise ConfigError(f"--kind {options.kind}: expected one of {', '.join(KINDS)}")
    if options.key is not None and not (options.key.isascii() and options.key.isprintable()):
        raise ConfigError("--key: expected printable ASCII characters")
    if options.key is not None and not options.key.strip():
        raise ConfigError("--key is empty")
    return StandaloneSettings(
        engines=tuple(dict.fromkeys(options.engines)),
        model=options.model,
        out=options.out,
        key=options.key or secrets.token_urlsafe(24),
        engine_key=options.engine_key,
        kind=EngineKind(options.kind),
        host=options.host,
        port=options.port,
        profile=options.profile,
        context_tokens=options.context_tokens,
        allow_rerender=options.allow_rerender,
    )


async def _serve(settings: "StandaloneSettings", options: GatewayOptions) -> "Totals":
    """A signal ends it in order; a second one ends it at once."""
    import asyncio
    import signal

    from opengyre.runtime.recording.standalone import serve
    from opengyre.seams.errors import BoundaryError, ConfigError, leaves

    until = asyncio.Event()
    loop = asyncio.get_running_loop()

    def leave() -> None:
        until.set()
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.remove_signal_handler(one)

    def on_ready(ready: "Ready") -> None:
        for one in (signal.SIGINT, signal.SIGTERM):
            loop.add_signal_handler(one, leave)
        _print_ready(ready, settings, options)

    try:
        return await serve(settings, on_ready=on_ready, until=until)
    except BaseExceptionGroup as group:
        known = [one for one in leaves(group) if isinstance(one, (ConfigError, BoundaryError))]
        if not known:
            raise
        raise known[0] from None


def _print_ready(ready: "Ready", settings: "StandaloneSettings", options: GatewayOptions) -> None:
    if options.as_json:
        told = {"event": "ready", **asdict(ready), "key": settings.key, "out": str(settings.out)}
        typer.echo(json.dumps(told))
        return
    rows = [
        ("base url", f"{ready.address}/NAME/v1   (any NAME is a session; /v1 alone is 'default')"),
        ("key", settings.key),
        *(("engine", words) for words in ready.engines),
        ("records", f"{settings.out}, {ready.num_known_sessions} sessions known"),
    ]
    for name, text in rows:
        typer.echo(f"  {name:<10} {text}")
    typer.echo("  Ctrl-C ends it")


def _print_end(totals: "Totals", options: GatewayOptions) -> None:
    if options.as_json:
        typer.echo(json.dumps({"event": "end", **asdict(totals)}))
        return
    typer.echo(
        f"recorded {totals.num_turns} turns of {totals.num_sessions} sessions, "
        f"{totals.num_tokens} sampled tokens; {totals.num_moves} moves between engines, "
        f"{totals.num_cut} requests cut at the end"
    )
