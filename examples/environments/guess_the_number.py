"""An environment for rlood with the standard library only: the model guesses a number, and is told whether it is higher or lower.

    python3 guess_the_number.py [PORT]

A whole server of contract version 1, without `rlood env serve`: the last answer of each episode is kept and given again when the same
request is repeated, and a turn is never taken twice. Episodes are in memory, so a restart forgets them, and rlood begins them again.
Signatures are not verified: see examples/reward_service/service.py for that.
"""

import json
import random
import re
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

episodes = {}  # (episode, attempt) -> {"secret", "turn", "id", "answer"}
lock = threading.Lock()


class Refused(Exception):
    """An HTTP status instead of an answer."""


def reset(episode):
    secret = random.Random(episode["seed"]).randint(1, 20)  # the same for all episodes of a group
    answer = {"messages": [{"role": "user", "content": "Guess my number from 1 to 20. Answer with a number."}]}
    return {"secret": secret}, answer


def step(state, request):
    numbers = re.findall(r"\d+", request["message"]["content"])
    guess = int(numbers[-1][:6]) if numbers else None
    if guess == state["secret"]:
        return {"messages": [], "reward": 1.0, "done": True}
    hint = "That is no number." if guess is None else "Higher." if guess < state["secret"] else "Lower."
    reward = 0.0 if request["final"] else None  # the last turn: pay now
    return {"messages": [{"role": "user", "content": hint}], "reward": reward, "done": False}


def play(request):
    """Answers a request about an episode."""
    if request.get("version") != "1" or not isinstance(request.get("episode"), dict):
        raise Refused(422)
    episode, is_reset = request["episode"], request["type"] == "env.reset.request"
    key = (episode["id"], episode["attempt"])
    if request["type"] == "env.close.request":
        episodes.pop(key, None)
        return {}
    if request["type"] not in ("env.reset.request", "env.step.request"):
        raise Refused(422)
    state, turn = episodes.get(key), -1 if is_reset else request["turn"]
    if state is None and not is_reset:
        raise Refused(404)  # this server has forgotten the episode
    if state is None:
        state, answer = reset(episode)
    elif request["id"] == state["id"]:
        return state["answer"]  # the same question again
    elif turn <= state["turn"] or state["answer"].get("done"):
        raise Refused(409)
    else:
        answer = step(state, request)
    episodes[key] = dict(state, turn=turn, id=request["id"], answer=answer)
    return answer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        status, answer, request = 200, {}, {}
        try:
            request = json.loads(self.rfile.read(int(self.headers["content-length"])))
            if request["type"] != "env.ping":
                with lock:
                    answer = play(request)
        except Refused as refused:
            status = refused.args[0]
        except (ValueError, KeyError, TypeError):
            status, request = 400, {}
        body = json.dumps({"version": "1", "id": request.get("id"), **answer}).encode()
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8700
    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    print(f"listening on http://127.0.0.1:{server.server_address[1]}", flush=True)
    server.serve_forever()
