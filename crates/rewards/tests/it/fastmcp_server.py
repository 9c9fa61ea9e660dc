"""A server of the package `fastmcp` for the tests. It says its port on standard output."""

import socket

import uvicorn
from fastmcp import FastMCP

server = FastMCP("numbers")


@server.tool
def add(a: int, b: int) -> int:
    """Adds two numbers."""
    return a + b


@server.tool
def fail() -> str:
    """Always fails."""
    raise ValueError("it broke")


@server.tool
def hidden() -> str:
    """Not allowed in the test."""
    return "hidden"


def main():
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print("port %d" % listener.getsockname()[1], flush=True)
    app = server.http_app(path="/mcp")
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


main()
