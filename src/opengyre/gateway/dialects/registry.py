"""The protocols by the name that a turn's record has."""

from opengyre.gateway.dialects.anthropic import Anthropic
from opengyre.gateway.dialects.dialect import Dialect
from opengyre.gateway.dialects.openai_chat import OpenAIChat
from opengyre.gateway.dialects.openai_responses import OpenAIResponses

OPENAI_CHAT: Dialect = OpenAIChat()
OPENAI_RESPONSES: Dialect = OpenAIResponses()
ANTHROPIC: Dialect = Anthropic()
DIALECTS: dict[str, Dialect] = {one.name: one for one in (OPENAI_CHAT, OPENAI_RESPONSES, ANTHROPIC)}
