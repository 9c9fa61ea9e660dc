# Continues processes.py: the HTTP server.


class Answer:
    """The state and result of one request."""

    def __init__(self, seconds):
        self.done = threading.Event()
        self.until = time.monotonic() + seconds
        # The limit is shorter than the client's, so that the client gets the error of a call that hangs.
        self.compute_until = time.monotonic() + seconds * 0.9
        self.token = random_secrets.token_urlsafe(16)
        self.body = None
        # The error instead of a body.
        self.refused = None


class Answers:
    """Answers by request. A repeated request gets the same answer and is not computed twice."""

    def __init__(self):
        self.lock = threading.Lock()
        self.by_key, self.by_token, self.size = {}, {}, 0

    def begin(self, key, seconds):
        """Returns the answer, and whether the caller must compute it; None if too many requests are running."""
        with self.lock:
            now = time.monotonic()
            for old in [k for k, answer in self.by_key.items() if answer.done.is_set() and answer.until < now]:
                self.drop(old)
            if key in self.by_key:
                return self.by_key[key], False
            if sum(not answer.done.is_set() for answer in self.by_key.values()) >= MAX_UNDER_WAY:
                return None, False
            answer = self.by_key[key] = Answer(seconds)
            self.by_token[answer.token] = answer
            return answer, True

    def finish(self, key, body, keep):
        with self.lock:
            answer = self.by_key[key]
            answer.body = body
            self.size += len(body)
            if not keep:
                # A repeated request is computed again. The results stay available at the status address of the first one.
                self.by_key[answer.token] = self.by_key.pop(key)
            for old in [k for k, kept in self.by_key.items() if kept.done.is_set()]:
                if self.size <= KEPT_BYTES:
                    break
                self.drop(old)
            answer.done.set()

    def forget(self, key):
        """Removes a finished answer that need not be given again from here."""
        with self.lock:
            if key in self.by_key and self.by_key[key].done.is_set():
                self.drop(key)

    def drop(self, key):
        answer = self.by_key.pop(key)
        self.by_token.pop(answer.token, None)
        self.size -= len(answer.body or b"")

    def under_way(self):
        with self.lock:
            return sum(not answer.done.is_set() for answer in self.by_key.values())


class Refused(Exception):
    """Error for a rejected request: an HTTP status and a reason."""

    def __init__(self, status, reason, code="refused"):
        super().__init__(reason)
        self.status, self.code = status, code


def verify(keys, headers, body):
    """Verifies the Standard Webhooks signature: one of the secrets must have signed exactly these bytes, recently."""
    if not keys:
        return
    name, stamp = headers.get("webhook-id", ""), headers.get("webhook-timestamp", "")
    if not (stamp.isascii() and stamp.isdigit() and len(stamp) < 16 and abs(time.time() - int(stamp)) <= TOLERANCE_S):
        raise Refused(401, "webhook-timestamp is missing or more than five minutes away from this clock")
    given = [s[3:].encode() for s in headers.get("webhook-signature", "").split(" ") if s.startswith("v1,")]
    for key in keys:
        digest = hmac.new(key, ("%s.%s." % (name, stamp)).encode() + body, hashlib.sha256).digest()
        if any(hmac.compare_digest(base64.b64encode(digest), signature) for signature in given):
            return
    raise Refused(401, "no signature in webhook-signature matches: check that the job's secret is this server's secret")


def no_constant(name):
    raise ValueError("%s is not valid JSON" % name)


def read_json(body):
    """Returns a request's body and its type. The body need not be an object; its type is then None."""
    try:
        request = json.loads(body, parse_constant=no_constant)
    except (ValueError, RecursionError) as error:
        raise Refused(400, "the body is not JSON: %s" % error) from None
    return request, request.get("type") if isinstance(request, dict) else None


def read_request(body):
    request, kind = read_json(body)
    if kind not in ("reward.ping", "reward.score.request"):
        raise Refused(422, "'type' must be reward.ping or reward.score.request")
    if kind == "reward.ping":
        return request
    if request.get("version") != "1":
        raise Refused(422, "'version' must be 1, the version of the reward contract")
    samples, job = request.get("samples"), request.get("job", {})
    if not isinstance(request.get("id"), str) or not isinstance(job, dict):
        raise Refused(422, "'id' must be a string and 'job' an object")
    if not isinstance(samples, list) or not samples:
        raise Refused(422, "'samples' must be a list of at least one sample")
    if len(samples) > MAX_SAMPLES:
        raise Refused(413, "a request may have at most %d samples" % MAX_SAMPLES)
    for index, sample in enumerate(samples):
        good = (
            isinstance(sample, dict)
            and isinstance(sample.get("sample_id"), str)
            and isinstance(sample.get("completion"), str)
            and isinstance(sample.get("prompt", ""), str)
            and isinstance(sample.get("messages"), (list, type(None)))
            and isinstance(sample.get("columns", {}), dict)
            and isinstance(sample.get("num_tokens", 0), int)
        )
        if not good:
            text = "samples[%d] must be an object with sample_id and completion, prompt, messages and columns"
            raise Refused(422, text % index)
    return request


def chunks(samples, size):
    """Divides samples into calls of at most `size` samples. A group is kept together if it fits into one call."""
    if not size:
        return [samples]
    calls, group_start = [[]], 0
    for index, sample in enumerate(samples):
        if index and sample.get("group_id") != samples[index - 1].get("group_id"):
            group_start = len(calls[-1])
        if len(calls[-1]) == size:
            # A group that does not fit moves to the next call as a whole, unless it fills a call alone.
            moved = calls[-1][group_start:] if group_start else []
            del calls[-1][len(calls[-1]) - len(moved) :]
            calls.append(moved)
            group_start = 0
        calls[-1].append(sample)
    return calls


def compute(server, function, request, key, answer):
    """Computes an answer on its own thread, since the client may disconnect and repeat the request."""
    samples, job = request["samples"], request.get("job", {})
    calls = chunks(samples, server.pool.batch_size)
    done = [None] * len(calls)

    def one(index):
        try:
            done[index] = server.pool.ask(function, calls[index], job, answer.compute_until)
        except Exception as error:
            say("a call of '%s' failed: %s" % (function, told(error)))
            done[index] = [failed("internal", told(error), retryable=True) for _ in calls[index]]

    threads = [threading.Thread(target=one, args=(index,), daemon=True) for index in range(1, len(calls))]
    for thread in threads:
        thread.start()
    one(0)
    for thread in threads:
        thread.join()
    results = [result for part in done for result in part]
    keep = not any(result.get("error", {}).get("retryable") for result in results)
    results = [dict(result, sample_id=sample["sample_id"]) for sample, result in zip(samples, results)]
    body = json.dumps({"version": "1", "id": request["id"], "results": results}).encode()
    server.answers.finish(key, body, keep)


class Handler(BaseHTTPRequestHandler):
    """Reads, checks and answers requests. A subclass defines `post` and `get` for its contract."""

    protocol_version = "HTTP/1.1"
    # Head and body are sent in one write: a second write would wait for the acknowledgement of the first.
    wbufsize = -1
    disable_nagle_algorithm = True
    # The timeout is longer than clients keep an idle connection, in seconds.
    timeout = 180

    def do_GET(self):
        try:
            self.check_caller()
            self.get(urllib.parse.urlsplit(self.path).path)
        except Refused as refused:
            self.refuse(refused)

    def get(self, path):
        if path.startswith("/status/"):
            return self.status(path[len("/status/") :])
        endpoints = ["/" + name for name in self.server.names_served]
        self.say(200, {"service": self.server.title, "contract": "1", "endpoints": endpoints})

    def status(self, token):
        """Answers a poll for the result of a request that was accepted with 202."""
        verify(self.server.keys, self.headers, b"")
        answer = self.server.answers.by_token.get(token)
        if answer is None:
            raise Refused(404, "request not found")
        if not answer.done.wait(1.0):
            return self.say(202, {"eta_ms": 1000})
        if answer.refused is not None:
            # The repeated request gets the error itself.
            raise Refused(404, "the request failed: send it again", answer.refused.code)
        self.reply(200, answer.body)

    def begun(self, key, request):
        """Returns the state of a request, and whether it is new."""
        deadline_ms = request.get("deadline_ms")
        good = isinstance(deadline_ms, (int, float)) and not isinstance(deadline_ms, bool) and deadline_ms > 0
        answer, is_new = self.server.answers.begin(key, min(deadline_ms / 1000.0, KEPT_S) if good else 300.0)
        if answer is None:
            raise Refused(429, "too many requests are waiting", "busy")
        return answer, is_new

    def say_accepted(self, request, answer):
        self.say(202, {"id": request["id"], "eta_ms": 1000, "status_url": "/status/" + answer.token})

    def do_POST(self):
        try:
            # The connection cannot be reused before the body was read.
            closes, self.close_connection = self.close_connection, True
            self.check_caller()
            kind = self.headers.get("content-type", "").split(";")[0].strip().lower()
            # A browser sends this content type to another origin only after a preflight request, which this server rejects.
            if kind != "application/json" and not self.server.keys:
                raise Refused(415, "'content-type: application/json' is required")
            length = self.headers.get("content-length", "")
            if not (length.isascii() and length.isdigit()):
                raise Refused(411, "a content-length is required")
            if int(length) > MAX_BYTES:
                raise Refused(413, "a request may have at most %d bytes" % MAX_BYTES)
            body = self.rfile.read(int(length))
            if len(body) < int(length):
                return
            self.close_connection = closes
            verify(self.server.keys, self.headers, body)
            self.post(body)
        except Refused as refused:
            self.refuse(refused)

    def served(self, *aliases):
        """Returns the name that the request's path asks for. A path in `aliases` means the only one that is served."""
        name = urllib.parse.unquote(urllib.parse.urlsplit(self.path).path).strip("/")
        names = self.server.names_served
        if name in names:
            return name
        if name in aliases and len(names) == 1:
            return names[0]
        raise Refused(404, "not found; the endpoints are: " + ", ".join("/" + name for name in names))

    def check_caller(self):
        """Rejects web pages of other origins, and host names that were redirected to this server (DNS rebinding)."""
        host = self.headers.get("host", "")
        name = host[: host.rindex("]") + 1] if host.startswith("[") and "]" in host else host.split(":")[0]
        name = name.lower().rstrip(".")
        if not any(name == own or (own.startswith("*.") and name.endswith(own[1:])) for own in self.server.names):
            if not is_address(name):
                text = "'%s' is not a name of this server: use the server's address, or start it with --allowed-hosts"
                raise Refused(421, text % host[:100])
        origin = self.headers.get("origin")
        if origin is not None and origin.split("://")[-1] != host:
            raise Refused(403, "requests from web pages of other origins are not allowed")

    def refuse(self, refused):
        headers = {"retry-after": "1"} if refused.status in (429, 503) else None
        self.say(refused.status, {"error": {"code": refused.code, "message": str(refused)}}, headers)

    def say(self, status, value, headers=None):
        self.reply(status, json.dumps(value).encode(), headers)

    def reply(self, status, body, headers=None):
        self.send_response(status)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if self.close_connection:
            self.send_header("connection", "close")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


class RewardHandler(Handler):
    """Answers requests of the reward contract."""

    def post(self, body):
        request = read_request(body)
        function = self.served("", "score")
        if request["type"] == "reward.ping":
            return self.say(200, {"max_batch_samples": MAX_SAMPLES, "modes": ["sync", "async"]})
        self.score(function, request, body)

    def score(self, function, request, body):
        key = (function, request["id"], hashlib.sha256(body).digest())
        answer, is_new = self.begun(key, request)
        if is_new:
            arguments = (self.server, function, request, key, answer)
            threading.Thread(target=compute, args=arguments, daemon=True).start()
        if answer.done.wait(SYNC_WAIT_S):
            return self.reply(200, answer.body)
        self.say_accepted(request, answer)


def is_address(name):
    for family, text in ((socket.AF_INET, name), (socket.AF_INET6, name.strip("[]"))):
        try:
            socket.inet_pton(family, text)
            return True
        except (OSError, ValueError):
            pass
    return False


class Server(ThreadingHTTPServer):
    """An HTTP server on an inherited socket. A subclass says what it serves: `title`, `under_way` and `stop`."""

    daemon_threads = True

    def __init__(self, listening, settings, handler):
        self.names_served = [name for target in settings["targets"] for name in target["functions"]]
        self.keys = [base64.b64decode(secret[len("whsec_") :]) for secret in settings["secrets"]]
        self.names = ["localhost", socket.gethostname().lower()] + [n.lower() for n in settings["allowed_hosts"]]
        self.places = threading.BoundedSemaphore(settings["max_connections"])
        self.address_family = listening.family
        super().__init__(listening.getsockname(), handler, bind_and_activate=False)
        self.socket.close()
        self.socket = listening

    def process_request(self, request, client_address):
        if self.places.acquire(blocking=False):
            return super().process_request(request, client_address)
        self.shutdown_request(request)

    def process_request_thread(self, request, client_address):
        try:
            super().process_request_thread(request, client_address)
        finally:
            self.places.release()

    def handle_error(self, request, client_address):
        error = sys.exc_info()[1]
        if not isinstance(error, (OSError, socket.timeout)):
            say("a request failed: " + told(error))


class RewardServer(Server):
    """Serves functions as rewards."""

    title = "rlood reward serve"

    def __init__(self, listening, settings):
        self.pool, self.answers = Pool(settings), Answers()
        super().__init__(listening, settings, RewardHandler)
        if settings["reload"]:
            threading.Thread(target=self.pool.watch, daemon=True).start()

    def under_way(self):
        return self.answers.under_way()

    def stop(self):
        self.pool.stop()


def serve(channel, settings, kind):
    """Runs the server process with a server of this class."""
    listening = socket.socket(fileno=os.dup(1))
    listening.setblocking(True)
    os.dup2(2, 1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    TITLE[:] = [kind.title]
    try:
        server = kind(listening, settings)
    except NotLoaded as error:
        report(channel, {"event": "failed", "code": error.code, "message": str(error)})
        os._exit(3)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    ending = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: ending.set())

    def listen():
        # A byte requests a graceful stop; the end of the channel requests an immediate one.
        orderly = channel.recv(1)
        if not orderly:
            end(server)
        ending.set()
        channel.recv(1)
        end(server)

    version = "%d.%d.%d" % sys.version_info[:3]
    report(channel, {"event": "ready", "functions": server.names_served, "python": version})
    threading.Thread(target=listen, daemon=True).start()
    # The wait has a time limit, because signals are not handled during an unlimited wait.
    while not ending.wait(3600):
        pass
    server.shutdown()
    until = time.monotonic() + DRAIN_S
    while server.under_way() and time.monotonic() < until:
        time.sleep(0.02)
    # The pause allows the last answers to be sent.
    time.sleep(0.1)
    end(server)


def report(channel, value):
    channel.sendall(json.dumps(value).encode() + b"\n")


def end(server):
    """Kills this process and all processes started by it or by the user's code, which are in its process group."""
    server.stop()
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)
    os._exit(0)


def main():
    channel = socket.socket(fileno=os.dup(0))
    channel.setblocking(True)
    settings = receive(channel)
    if settings is not None and "boot" in settings:
        BOOT.append(settings["boot"])
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    if settings is None:
        os._exit(0)
    if settings["role"] == "worker":
        work(channel, settings)
    elif settings["role"] == "environments":
        serve(channel, settings, EpisodeServer)
    else:
        serve(channel, settings, RewardServer)
