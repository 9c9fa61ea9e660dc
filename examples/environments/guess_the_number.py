"""An environment for rlood with the standard library only: the model guesses a number, and is told whether it is higher or lower.

    python3 guess_the_number.py [PORT]

It keeps contract version 1: the last answer of each episode is kept and given again when the same request is repeated. Episodes are in
memory, so a restart forgets them, and rlood begins them again.
"""

import json
import random
import re
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

episodes = {}  # (episode, attempt) -> {"secret", "low", "high", "id", "answer"}


def reset(request):
    episode = request["episode"]
    secret = random.Random(episode["seed"]).randint(1, 20)  # the same for all episodes of a group
    episodes[episode["id"], episode["attempt"]] = {"secret": secret}
    return {"messages": [{"role": "user", "content": "Guess my number from 1 to 20. Answer with a number."}]}


def step(request):
    state = episodes.get((request["episode"]["id"], request["episode"]["attempt"]))
    if state is None:
        return None  # 404: this server has forgotten the episode
    if state.get("id") == request["id"]:
        return state["answer"]
    numbers = re.findall(r"\d+", request["message"]["content"])
    guess = int(numbers[-1][:6]) if numbers else None
    if guess == state["secret"]:
        answer = {"messages": [], "reward": 1.0, "done": True}
    else:
        hint = "That is no number." if guess is None else "Higher." if guess < state["secret"] else "Lower."
        reward = 0.0 if request["final"] else None  # the last turn: pay now
        answer = {"messages": [{"role": "user", "content": hint}], "reward": reward, "done": False}
    state.update(id=request["id"], answer=answer)
    return answer


class Handler(BaseHTTPRequestHandler):
    def do_POST(self):
        request = json.loads(self.rfile.read(int(self.headers["content-length"])))
        kinds = {"env.ping": lambda _: {}, "env.reset.request": reset, "env.step.request": step}
        answer = kinds.get(request["type"], lambda _: {})(request)
        body = json.dumps({"version": "1", "id": request["id"], **(answer or {})}).encode()
        self.send_response(404 if answer is None else 200)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


if __name__ == "__main__":
    port = int(sys.argv[1]) if len(sys.argv) > 1 else 8700
    print(f"listening on http://127.0.0.1:{port}", flush=True)
    ThreadingHTTPServer(("127.0.0.1", port), Handler).serve_forever()
