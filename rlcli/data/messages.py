"""Conversations as files have them, brought to one form: role and content as the chat templates know them."""

from __future__ import annotations

import json
from typing import Any

from rlcli.data.rows import BadRow, Message

_ROLES = {
    "user": "user", "human": "user", "prompter": "user",
    "assistant": "assistant", "gpt": "assistant", "chatgpt": "assistant", "model": "assistant", "bot": "assistant",
    "system": "system", "developer": "developer",
    "tool": "tool", "observation": "tool", "function": "tool", "ipython": "tool", "function_response": "tool", "tool_response": "tool",
    "function_call": "assistant", "tool_call": "assistant",
}
_FORM = 'messages like [{"role": "user", "content": "..."}]'
_PASSED = ("tool_calls", "tool_call_id", "name", "reasoning_content")


def messages_of(value: Any, column: str) -> list[Message]:
    """A list of messages in either form (role/content or from/value). Raises BadRow."""
    if not isinstance(value, list) or not value:
        raise BadRow(column, _FORM, value)
    return [message_of(item, column) for item in value]


def message_of(item: Any, column: str) -> Message:
    """One message. Raises BadRow for an unknown role, a part that is no text, or no content."""
    if not isinstance(item, dict):
        raise BadRow(column, _FORM, item)
    given = item.get("role", item.get("from"))
    role = _ROLES.get(given.lower()) if isinstance(given, str) else None
    if role is None:
        raise BadRow(column, f"a role among {', '.join(_ROLES)}", given)
    message: Message = {"role": role, "content": ""}
    for key in _PASSED:
        if item.get(key):
            message[key] = item[key]
    content = item["content"] if "content" in item else item.get("value")
    calls = _calls(content) if str(given).lower() in ("function_call", "tool_call") else None
    if calls:
        message["tool_calls"] = calls
    elif content is not None or "tool_calls" not in message:
        message["content"] = content_of(content, column)
    weight = item.get("loss_weight", item.get("weight"))
    if role == "assistant" and weight is not None and not weight:
        message["train"] = False
    return message


def content_of(content: Any, column: str) -> str:
    """Text, or a list of text parts. Raises BadRow for anything else (pictures, sound, nothing)."""
    if isinstance(content, str):
        return content
    if isinstance(content, list) and content:
        return "".join(_part(part, column) for part in content)
    raise BadRow(column, "messages with text as content", content)


def _part(part: Any, column: str) -> str:
    text = part if isinstance(part, str) else None
    if isinstance(part, dict) and part.get("type", "text") == "text":
        text = part.get("text") if isinstance(part.get("text"), str) else part.get("value")
    if not isinstance(text, str):
        raise BadRow(column, "text parts alone (no pictures or sound)", part)
    return text


def _calls(content: Any) -> list[dict[str, Any]] | None:
    """Tool calls from the text of a function_call turn; none where it is not JSON with a name: it stays text then."""
    try:
        value = json.loads(content) if isinstance(content, str) else content
    except ValueError:
        return None
    calls = value if isinstance(value, list) else [value]
    if not all(isinstance(call, dict) and isinstance(call.get("name"), str) for call in calls):
        return None
    return [{"type": "function", "function": {"name": call["name"], "arguments": call.get("arguments", {})}} for call in calls]


def tools_of(value: Any, column: str) -> list[Any] | None:
    """A list of tools, or its text in JSON; none where empty."""
    if value in (None, "", []):
        return None
    try:
        tools = json.loads(value) if isinstance(value, str) else value
    except ValueError:
        tools = None
    if not isinstance(tools, list):
        raise BadRow(column, "a list of tools, or that list as JSON text", value)
    return tools or None
