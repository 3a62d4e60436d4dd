"""The protocols by the name that a turn's record has."""

from opengyre.gateway.dialects.dialect import Dialect
from opengyre.gateway.dialects.openai_chat import OpenAIChat

OPENAI_CHAT: Dialect = OpenAIChat()
DIALECTS: dict[str, Dialect] = {one.name: one for one in (OPENAI_CHAT,)}
