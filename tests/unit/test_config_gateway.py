"""How many gateways there may be, and where they may listen."""

from pathlib import Path

import pytest

from opengyre.config.load import load_config
from opengyre.seams.errors import ConfigError

EXAMPLE = Path(__file__).parents[2] / "examples" / "scripted.toml"


@pytest.mark.parametrize("port", [0, 65_533, 8000])
def test_each_gateway_process_has_a_port_of_its_own(port: int) -> None:
    config = load_config(EXAMPLE, [f"gateway.port={port}", "gateway.num_processes=3"])
    assert (config.gateway.port, config.gateway.num_processes) == (port, 3)


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (("gateway.port=65534", "gateway.num_processes=3"), "gateway.port = 65534: expected"),
        (("gateway.num_processes=0",), "gateway.num_processes = 0"),
    ],
)
def test_ports_that_do_not_exist_are_refused_in_words(sets: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError) as refused:
        load_config(EXAMPLE, sets)
    assert words in str(refused.value)
