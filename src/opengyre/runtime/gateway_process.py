"""The gateway's process: wires the HTTP gateway, the recorder and the engine links together.

Must not know: roles, steps, groups. Invariant: a turn is told to the controller only after its
bytes are synced.
"""

import asyncio
import json
from pathlib import Path
from typing import Any

from opengyre.config.root import RunConfig
from opengyre.gateway.gateway import Gateway
from opengyre.runtime import messages as m
from opengyre.runtime.child import Child, run_child
from opengyre.seams.records import TurnRecord
from opengyre.store.segments import SegmentWriter
from opengyre.transport.engine_link import RemoteEngine
