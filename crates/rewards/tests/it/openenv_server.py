"""A server of the package `openenv` for the tests: openenv_server.py text|tools CAPACITY. It says its port on standard output."""

import socket
import sys
from typing import Any, Optional

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server.http_server import create_app
from openenv.core.env_server.interfaces import Environment
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation
from openenv.core.env_server.types import Action, Observation, State


class Guess(Action):
    word: str


class Said(Observation):
    text: str = ""


class Counting(Environment):
    """Counts its steps, and pays 1 for the third."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        super().__init__()
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, level: int = 0, **_: Any) -> Said:
        self._state = State(episode_id=episode_id, step_count=0)
        return Said(text="seed %s, level %s" % (seed, level))

    def step(self, action: Guess, **_: Any) -> Said:
        self._state.step_count += 1
        tries = self._state.step_count
        is_over = tries == 3
        return Said(text="try %d: %s" % (tries, action.word), reward=1.0 if is_over else None, done=is_over)

    @property
    def state(self) -> State:
        return self._state


class Adding(MCPEnvironment):
    """Has one tool."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self):
        tools = FastMCP("adding")

        @tools.tool
        def add(a: int, b: int) -> int:
            """Adds two numbers."""
            return a + b

        super().__init__(tools)
        self._state = State(episode_id="", step_count=0)

    def reset(self, seed: Optional[int] = None, episode_id: Optional[str] = None, **_: Any) -> Observation:
        return Observation()

    def _step_impl(self, action: Any, **_: Any) -> Observation:
        return Observation(done=True)

    @property
    def state(self) -> State:
        return self._state


def main():
    kind, capacity = sys.argv[1], int(sys.argv[2])
    forms = {"text": (Counting, Guess, Said), "tools": (Adding, CallToolAction, CallToolObservation)}
    app = create_app(*forms[kind], env_name=kind, max_concurrent_envs=capacity)
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    print("port %d" % listener.getsockname()[1], flush=True)
    uvicorn.Server(uvicorn.Config(app, log_level="warning")).run(sockets=[listener])


main()
