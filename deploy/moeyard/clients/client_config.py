"""What a client of a server takes from its environment."""

import os

API_KEY_VARIABLE = "MOEYARD_API_KEY"


def api_key() -> str | None:
    """The key of `moeyard bench` and `moeyard chat` where --api-key is not given; None without one.

    A name of our own: a key meant for api.openai.com is not sent to whatever host is measured.
    """
    return os.environ.get(API_KEY_VARIABLE) or None
