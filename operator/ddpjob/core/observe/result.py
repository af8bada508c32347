"""The result of a job: what rank 0 wrote to $DDP_RESULT_FILE, its termination message."""

import json
from collections.abc import Mapping

# Limits of a result, in entries and in characters of each key and value.
MAX_RESULT_ENTRIES = 32
MAX_RESULT_STRING = 256


def read_result(message: str) -> Mapping[str, str]:
    """Return the JSON object in a termination message as strings, at most 32 entries.

    The result is empty if the message is something else, such as the tail of a log.
    """
    try:
        data = json.loads(message)
    except (ValueError, RecursionError):
        return {}
    return result_of(data) if isinstance(data, dict) else {}


def result_of(data: Mapping[str, object]) -> Mapping[str, str]:
    """Return the entries of a JSON object as strings, at most 32."""
    entries = list(data.items())[:MAX_RESULT_ENTRIES]
    return {_as_string(key): _as_string(value) for key, value in entries}


def _as_string(value: object) -> str:
    try:
        text = value if isinstance(value, str) else json.dumps(value)
    except RecursionError:
        # The decoder accepts deeper objects than the encoder.
        text = "(nested too deeply)"
    # Half of a character is valid in JSON and not in UTF-8.
    return text[:MAX_RESULT_STRING].encode(errors="replace").decode()
