# Continues games.py: serves classes as environments, idempotent by episode, attempt and turn.


# A request waits at most this long for an earlier request of its episode. In seconds.
EPISODE_WAIT_S = 20.0
# Maximum number of episodes with an object in memory. Further ones get a 429.
MAX_EPISODES = 20_000
# A stored episode without a request for this long is deleted. In seconds.
KEPT_ON_DISK_S = 7 * 86_400.0
# Time to wait for the lock of the state's folder, which the process before may still hold. In seconds.
LOCK_WAIT_S = 15.0


class Lost(Exception):
    """The recorded turns of an episode cannot be played again with the same answers."""


class Episode:
    """One attempt at an episode: its requests with their answers, and the object that plays it."""

    def __init__(self, key, kind):
        self.key, self.kind = key, kind
        self.lock = threading.Lock()
        # Requests with the bytes of their answers, in order. The first one is the reset.
        self.records = []
        # None until it is needed, and after an error: then it is made by playing the records again.
        self.game = None
        # The bytes of the last answer, as they were sent.
        self.sent = None
        self.used = time.monotonic()
        self.is_gone = False

    def last_turn(self):
        return turn_of(self.records[-1][0])

    def is_done(self):
        return bool(self.records[-1][1].get("done"))

    def play(self, request):
        """Returns the answer to a new request. The object is kept only if it answers, since an error may leave it half changed."""
        game, self.game = self.game, None
        if game is None:
            game = self.replayed()
        answer = dict({"version": "1", "id": request["id"]}, **game.answer(request))
        # What JSON cannot hold is noticed here, and an equal object is made for the next try.
        text = json.dumps(answer, allow_nan=False)
        self.game = game
        return json.loads(text), text

    def replayed(self):
        game = Game(self.kind, replaying=bool(self.records))
        for request, answer in self.records:
            again = dict({"version": "1", "id": request["id"]}, **game.answer(request))
            if json.loads(json.dumps(again)) != answer:
                raise Lost("the recorded request of turn %d got another answer when it was played again" % turn_of(request))
        game.replay(False)
        return game

    def close(self):
        self.is_gone = True
        try:
            if self.game is not None:
                self.game.close()
        except Exception as error:
            say("close of an episode failed: %s" % told(error))
        self.game = None


def turn_of(request):
    """Returns the number of a request's turn; -1 for the beginning."""
    return request["turn"] if request["type"] == "env.step.request" else -1


class State:
    """Keeps the requests and answers of each episode in a file of a folder. A record is on disk before its answer is sent."""

    def __init__(self, folder):
        import fcntl

        self.folder = folder
        os.makedirs(folder, mode=0o700, exist_ok=True)
        self.lock = open(os.path.join(folder, "lock"), "w")
        until = time.monotonic() + LOCK_WAIT_S
        while True:
            try:
                fcntl.flock(self.lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError:
                if time.monotonic() > until:
                    text = "%s is used by another process: give each server a folder of its own (--state)"
                    raise NotLoaded("state_in_use", text % folder) from None
                time.sleep(0.05)

    def path(self, key):
        return os.path.join(self.folder, hashlib.sha256(json.dumps(key).encode()).hexdigest()[:40] + ".jsonl")

    def append(self, key, request, text):
        path = self.path(key)
        is_new = not os.path.exists(path)
        line = json.dumps({"request": request, "answer": text}).encode() + b"\n"
        with open(path, "ab", buffering=0) as file:
            size = file.tell()
            try:
                file.write(line)
                os.fsync(file.fileno())
            except OSError:
                # Half a record must not stand before the next one.
                os.ftruncate(file.fileno(), size)
                raise
        if is_new:
            self.sync_folder()

    def sync_folder(self):
        folder = os.open(self.folder, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)

    def read(self, key):
        """Returns the records of an episode. A line that was cut by the end of a process was never answered, and is removed."""
        try:
            with open(self.path(key), "r+b") as file:
                whole = file.read()
                good = whole[: whole.rfind(b"\n") + 1]
                if len(good) < len(whole):
                    file.truncate(len(good))
        except FileNotFoundError:
            return []
        lines = [json.loads(line) for line in good.splitlines()]
        return [(line["request"], json.loads(line["answer"]), line["answer"].encode()) for line in lines]

    def delete(self, key):
        try:
            os.unlink(self.path(key))
        except FileNotFoundError:
            pass

    def delete_old(self):
        for name in os.listdir(self.folder):
            path = os.path.join(self.folder, name)
            try:
                if name.endswith(".jsonl") and time.time() - os.stat(path).st_mtime > KEPT_ON_DISK_S:
                    os.unlink(path)
            except FileNotFoundError:
                pass


class EpisodeServer(Server):
    """Serves classes as environments."""

    title = "rlood env serve"

    def __init__(self, listening, settings):
        self.kinds, self.pings = {}, {}
        for stream in (sys.stdout, sys.stderr):
            stream.reconfigure(errors="backslashreplace", line_buffering=True)
        sys.dont_write_bytecode = True
        sys.path[:] = [entry for entry in sys.path if entry]
        for target in read_targets(settings):
            self.kinds.update(load(target, "class"))
        for name, kind in self.kinds.items():
            self.pings[name] = self.examined(name, kind)
        self.state = State(settings["state"]) if settings["state"] else None
        self.forget_after = settings["forget_after_s"]
        self.lock = threading.Lock()
        self.episodes = {}
        self.answers, self.answering = Answers(), 0
        super().__init__(listening, settings, EpisodeHandler)
        threading.Thread(target=self.forget, daemon=True).start()

    def examined(self, name, kind):
        """Checks a class once, so that an error is known before an episode begins. Returns the answer to a ping."""
        try:
            game = Game(kind)
            tools = game.tools()
            game.close()
        except NotLoaded:
            raise
        except BaseException as error:
            raise NotLoaded("load_failed", "an object of class '%s' cannot be made: %s" % (name, told(error))) from error
        if not is_stepped(kind) and not tools:
            text = "class '%s' has neither a method step(message) nor public methods that can be tools"
            raise NotLoaded("class_not_usable", text % name)
        return {"version": "1", "tools": tools, "reply_modes": ["sync", "async"]}

    def under_way(self):
        return self.answering + self.answers.under_way()

    def stop(self):
        pass

    def episode(self, key, kind, begins):
        """Returns an episode: from memory, from disk, or a new one for its reset; else None."""
        with self.lock:
            episode = self.episodes.get(key)
            if episode is None:
                records = self.state.read(key) if self.state else []
                if not records and not begins:
                    return None
                if len(self.episodes) >= MAX_EPISODES:
                    raise Refused(429, "%d episodes are open" % MAX_EPISODES, "busy")
                episode = self.episodes[key] = Episode(key, kind)
                episode.records = [(request, answer) for request, answer, _ in records]
                episode.sent = records[-1][2] if records else None
            episode.used = time.monotonic()
            return episode

    def drop(self, episode, from_disk):
        """Forgets an episode. Its lock is held."""
        with self.lock:
            if self.episodes.get(episode.key) is episode:
                del self.episodes[episode.key]
        episode.close()
        if from_disk and self.state:
            self.state.delete(episode.key)

    def forget(self):
        """Forgets episodes without a request for some time. Those on disk come back with their next request."""
        cleaned = 0.0
        while True:
            if self.state and time.monotonic() - cleaned > 3600 or cleaned == 0.0:
                cleaned = time.monotonic()
                if self.state:
                    self.state.delete_old()
            time.sleep(min(self.forget_after / 4, 30.0))
            with self.lock:
                old = [e for e in self.episodes.values() if time.monotonic() - e.used > self.forget_after]
            for episode in old:
                if episode.lock.acquire(blocking=False):
                    try:
                        if time.monotonic() - episode.used > self.forget_after:
                            self.drop(episode, from_disk=False)
                    finally:
                        episode.lock.release()

    def answer(self, name, request):
        """Returns the bytes that answer a reset or a step."""
        key = (name, request["episode"]["id"], request["episode"]["attempt"])
        begins = request["type"] == "env.reset.request"
        until = time.monotonic() + EPISODE_WAIT_S
        while True:
            episode = self.episode(key, self.kinds[name], begins)
            if episode is None:
                raise Refused(404, "this episode is not known: it was never begun here, was closed, or was forgotten", "episode_lost")
            if not episode.lock.acquire(timeout=max(0.0, until - time.monotonic())):
                raise Refused(503, "an earlier request of the episode is still being answered", "busy")
            try:
                if not episode.is_gone:
                    return self.answer_locked(episode, request)
            finally:
                episode.lock.release()

    def answer_locked(self, episode, request):
        turn = turn_of(request)
        if episode.records:
            last = episode.last_turn()
            if turn == last and episode.records[-1][0]["id"] == request["id"]:
                return episode.sent
            if turn <= last:
                text = "turn %d was answered already, and the last one is turn %d"
                raise Refused(409, "the episode has begun already" if turn < 0 else text % (turn, last), "out_of_order")
            if episode.is_done():
                raise Refused(409, "the episode is over", "episode_over")
        elif turn >= 0:
            raise Refused(404, "this episode is not known: its beginning failed", "episode_lost")
        try:
            answer, text = episode.play(request)
        except Lost as lost:
            say("an episode of '%s' is lost: %s. Is the class a function of the row, the seed and the messages?" % (episode.key[0], lost))
            self.drop(episode, from_disk=True)
            raise Refused(404, str(lost), "episode_lost") from None
        except BaseException as error:
            what = str(error) if isinstance(error, Invalid) else told(error)
            where = "the beginning" if turn < 0 else "turn %d" % turn
            say("%s of an episode of '%s' failed: %s" % (where, episode.key[0], what))
            raise Refused(500, what[:MESSAGE_CHARS], "exception") from None
        if self.state:
            try:
                self.state.append(episode.key, request, text)
            except OSError as error:
                # The answer was never given, so the turn must not count as played.
                episode.game = None
                raise Refused(503, "the answer cannot be stored in the folder of --state: %s" % error, "not_stored") from None
        episode.records.append((request, answer))
        episode.sent = text.encode()
        return episode.sent


def compute_turn(server, name, request, key, answer):
    """Computes the answer to a reset or a step."""
    body = b""
    try:
        body = server.answer(name, request)
    except Refused as refused:
        answer.refused = refused
    except BaseException as error:
        say("a request to '%s' failed: %s" % (name, told(error)))
        answer.refused = Refused(500, told(error)[:MESSAGE_CHARS], "internal")
    server.answers.finish(key, body, keep=True)


class EpisodeHandler(Handler):
    """Answers requests of the environment contract."""

    def post(self, body):
        request, kind = read_json(body)
        name = self.served("", "env", "play")
        if kind == "env.ping":
            return self.say(200, dict(self.server.pings[name], id=request.get("id")))
        self.check(request, kind)
        if kind == "env.close.request":
            episode = self.server.episode(self.key(name, request), None, False)
            if episode is not None and episode.lock.acquire(timeout=EPISODE_WAIT_S):
                try:
                    self.server.drop(episode, from_disk=True)
                finally:
                    episode.lock.release()
            return self.say(200, {"version": "1", "id": request["id"]})
        with self.server.lock:
            self.server.answering += 1
        try:
            self.play(name, request, (name, request["id"], hashlib.sha256(body).digest()))
            self.wfile.flush()
        finally:
            with self.server.lock:
                self.server.answering -= 1

    def play(self, name, request, key):
        """Answers a reset or a step: at once, or with 202 if that takes longer."""
        answer, is_new = self.begun(key, request)
        if is_new:
            # On its own thread, since the client may disconnect and repeat the request.
            threading.Thread(target=compute_turn, args=(self.server, name, request, key, answer), daemon=True).start()
        if not answer.done.wait(SYNC_WAIT_S):
            return self.say_accepted(request, answer)
        # The episode has the answer to its last request; an error is given once, and the next try computes the answer again.
        self.server.answers.forget(key)
        if answer.refused is not None:
            raise answer.refused
        self.reply(200, answer.body)

    def key(self, name, request):
        return (name, request["episode"]["id"], request["episode"]["attempt"])

    def check(self, request, kind):
        if kind not in ("env.reset.request", "env.step.request", "env.close.request"):
            raise Refused(422, "'type' must be env.ping, env.reset.request, env.step.request or env.close.request")
        if request.get("version") != "1":
            raise Refused(422, "'version' must be 1, the version of the environment contract")
        episode = request.get("episode")
        if not isinstance(request.get("id"), str) or not isinstance(episode, dict):
            raise Refused(422, "'id' must be a string and 'episode' an object")
        if not isinstance(episode.get("id"), str) or not is_number(episode.get("attempt")):
            raise Refused(422, "'episode' must have an id and an attempt")
        if kind == "env.reset.request":
            if not isinstance(request.get("messages", []), list) or not isinstance(request.get("columns", {}), dict):
                raise Refused(422, "'messages' must be a list and 'columns' an object")
        if kind == "env.step.request":
            if not is_number(request.get("turn")):
                raise Refused(422, "'turn' must be a whole number from 0")
            calls = request["message"].get("tool_calls") if isinstance(request.get("message"), dict) else ()
            if not (calls is None or isinstance(calls, list) and all(isinstance(call, dict) for call in calls)):
                raise Refused(422, "'message' must be an object, and its 'tool_calls' a list of objects")


def is_number(value):
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0
