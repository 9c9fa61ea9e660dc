"""RLOO training of language models: a client for the server, and the server itself as the package's binary."""

from .client import Client
from .errors import Error
from .server import find_rlood_bin, serve

__all__ = ["Client", "Error", "find_rlood_bin", "serve"]
