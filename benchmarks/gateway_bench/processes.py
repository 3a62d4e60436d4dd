"""The processes of the gateway measurement: scripted engines, our gateway, the peers'.

Owns: starting, waiting until it answers, stopping, processor time. Must not know: what is measured.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import httpx
from gateway_bench.load import Target

ROOT = Path(__file__).resolve().parents[2]
MODEL = ROOT / "examples" / "quickstart" / "model"
BUILD = ROOT / "build" / "gateway-bench"
PEERS = {
    "rllm-model-gateway": "rllm-model-gateway==0.1.0",
    "smg": "smg==1.13.0",
    "vllm-router": "vllm-router==0.1.17",
}
KEY = "bench-key"
START_TIMEOUT_S = 30.0
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True, kw_only=True)
class Gateway:
    """A gateway that runs: where to ask, and its process."""

    target: Target
    pid: int

    def processor_s(self) -> float:
        """Of the process and the threads in it, so far."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / _TICKS_PER_S


def install_peers() -> dict[str, str]:
    """Into an environment of their own; why not, by peer, where one cannot be had."""
    python = BUILD / "peers" / "bin" / "python"
    if not python.exists():
        subprocess.run([sys.executable, "-m", "venv", BUILD / "peers"], check=True)
    missing = {}
    for name, requirement in PEERS.items():
        if (python.parent / name).exists():
            continue
        argv = [python, "-m", "pip", "install", "--quiet", requirement]
        made = subprocess.run(argv, capture_output=True, text=True, check=False)
        if made.returncode:
            missing[name] = (made.stderr.strip().splitlines() or ["pip failed"])[-1]
    return missing


@contextmanager
def engines(num: int, *, num_tokens: int, tokens_per_s: float) -> Iterator[list[str]]:
    """Scripted token servers, each in a process; their addresses."""
    ports = [_free_port() for _ in range(num)]
    started = [
        _start(
            f"engine-{port}",
            *(sys.executable, "-m", "opengyre.engines.token_server", "--model", MODEL),
            *("--port", port, "--num-tokens", num_tokens, "--tokens-per-s", tokens_per_s),
            "--log-emissions",
        )
        for port in ports
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url, process in zip(urls, started, strict=True):
            _wait(f"{url}/health", process)
        yield urls
    finally:
        for process in started:
            _stop(process)


@contextmanager
def gateway(name: str, urls: list[str]) -> Iterator[Gateway]:
    """Raises RuntimeError, with its last words, for one that does not start."""
    port = _free_port()
    process = _start(name, *_argv(name, port, urls))
    address = f"http://127.0.0.1:{port}"
    path = "/v1/chat/completions"
    if name == "opengyre":
        path = "/{session}" + path
    if name == "rllm-model-gateway":
        path = "/sessions/{session}" + path
    try:
        _wait(f"{address}/v1/models", process)
        target = Target(url=address, path=path, key=KEY if name == "opengyre" else "")
        yield Gateway(target=target, pid=process.pid)
    finally:
        _stop(process)


def _argv(name: str, port: int, urls: list[str]) -> list[object]:
    program = BUILD / "peers" / "bin" / name
    where: list[object] = ["--host", "127.0.0.1", "--port", port]
    if name == "opengyre":
        out = BUILD / f"records-{port}"
        each = [part for url in urls for part in ("--engine", url)]
        gyre = Path(sys.executable).with_name("gyre")
        return [gyre, "gateway", *each, "--model", MODEL, "--out", out, "--key", KEY, *where]
    if name == "rllm-model-gateway":
        each = [part for url in urls for part in ("--worker", url)]
        return [program, *each, "--store", "memory", "--log-level", "error", *where]
    more: list[object] = ["--worker-urls", *urls, "--prometheus-port", _free_port()]
    more += ["--disable-circuit-breaker", "--health-check-interval-secs", 1]
    more += ["--health-success-threshold", 1]
    return [program, *(["launch"] if name == "smg" else []), *more, *where]


def _start(name: str, *argv: object) -> "subprocess.Popen[bytes]":
    BUILD.mkdir(parents=True, exist_ok=True)
    with (BUILD / f"{name}.log").open("wb") as log:
        return subprocess.Popen([str(one) for one in argv], stdout=log, stderr=log)


def _wait(url: str, process: "subprocess.Popen[bytes]") -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while time.monotonic() < until_s:
        if process.poll() is not None:
            raise RuntimeError(f"{process.args[0]} ended with {process.returncode}")  # type: ignore[index]
        try:
            if httpx.get(url, headers={"authorization": f"Bearer {KEY}"}).status_code == 200:
                return
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise RuntimeError(f"{url} does not answer")


def _stop(process: "subprocess.Popen[bytes]") -> None:
    process.terminate()
    try:
        process.wait(8)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])
