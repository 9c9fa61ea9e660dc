# Continues functions.py: the server's worker processes. rlood concatenates the files to one program (python.rs).


class Worker:
    """A process that has loaded the functions."""

    def __init__(self, pool, targets, generation):
        self.generation = generation
        self.modules = []
        self.channel, theirs = socket.socketpair()
        try:
            self.process = subprocess.Popen([sys.executable, "-c", BOOT[0]], stdin=theirs, stdout=2, cwd=pool.cwd)
        finally:
            theirs.close()
        source = SOURCE.encode()
        self.channel.settimeout(pool.load_timeout)
        try:
            self.channel.sendall(b"%08x" % len(source) + source)
            send(self.channel, {"role": "worker", "targets": targets})
            answer = receive(self.channel)
        except OSError:
            answer = {}
        if answer is None or "ready" not in answer:
            self.kill()
            shown = ", ".join(target["shown"] for target in targets)
            if answer is None:
                how = "the process that loads %s ended (%s): its last words are on standard error"
                raise NotLoaded("load_failed", how % (shown, ended(self.process)))
            if "failed" in answer:
                raise NotLoaded(answer["failed"]["code"], answer["failed"]["message"])
            raise NotLoaded("load_timeout", "%s was not loaded within %d s" % (shown, pool.load_timeout))
        self.modules = answer["ready"]

    def ask(self, task, timeout):
        """Returns the results. Raises TimeoutError or ConnectionError, after which the process cannot be used."""
        self.channel.settimeout(max(timeout, 0.001))
        # Before Python 3.10, socket.timeout is not TimeoutError.
        try:
            send(self.channel, task)
            answer = receive(self.channel)
        except socket.timeout:
            raise TimeoutError from None
        if answer is None:
            raise ConnectionError
        self.modules = answer["modules"]
        return answer["results"]

    def kill(self):
        self.channel.close()
        self.process.kill()
        self.process.wait()


def ended(process):
    try:
        code = process.wait(2)
    except subprocess.TimeoutExpired:
        return "it closed its connection"
    if code >= 0:
        return "exit code %d" % code
    try:
        return signal.Signals(-code).name
    except ValueError:
        return "signal %d" % -code


class Pool:
    """The worker processes, and the version of the functions that they have loaded."""

    def __init__(self, settings):
        self.settings = settings
        self.processes, self.batch_size = settings["processes"], settings["batch_size"]
        self.call_timeout, self.load_timeout = settings["call_timeout_s"], settings["load_timeout_s"]
        self.cwd = os.getcwd()
        self.idle = queue.Queue()
        self.lock = threading.Lock()
        self.generation = 0
        self.all = set()
        self.trouble = None
        self.targets = read_targets(settings)
        # The first worker shows whether the functions can be loaded at all.
        self.add(Worker(self, self.targets, 0))
        self.loaded_at = time.strftime("%H:%M:%S")
        for _ in range(self.processes - 1):
            self.replace(0)

    def add(self, worker):
        with self.lock:
            if worker.generation == self.generation:
                self.all.add(worker)
                self.idle.put(worker)
                return
        worker.kill()

    def replace(self, generation):
        """Starts one more worker in the background, with retries until it has loaded or the functions change."""

        def start():
            wait = 0.5
            while generation == self.generation:
                try:
                    self.add(Worker(self, self.targets, generation))
                    self.trouble = None
                    return
                except NotLoaded as error:
                    self.trouble = str(error)
                    say("%s; retrying in %.1f s" % (error, wait))
                time.sleep(wait)
                wait = min(wait * 2, 30.0)

        threading.Thread(target=start, daemon=True).start()

    def forget(self, worker):
        with self.lock:
            self.all.discard(worker)
        worker.kill()

    def ask(self, function, samples, job, until):
        """Returns the results for a list of samples from one call of the function."""
        while True:
            try:
                worker = self.idle.get(timeout=max(0.001, until - time.monotonic()))
            except queue.Empty:
                why = self.trouble or "all %d processes are busy (--processes)" % self.processes
                return [failed("not_in_time", why, retryable=True) for _ in samples]
            if worker.generation == self.generation:
                break
            self.forget(worker)
        limit = min(self.call_timeout, until - time.monotonic())
        try:
            results = worker.ask({"function": function, "samples": samples, "job": job}, limit)
        except TimeoutError:
            text = "function '%s' did not return within %.0f s: its process was killed and replaced (--timeout)"
            problem = failed("timeout", text % (function, limit))
        except (OSError, ValueError):
            how = ended(worker.process)
            text = "function '%s' died (%s) while computing these samples: its process was replaced; see standard error"
            problem = failed("process_died", text % (function, how))
        else:
            self.release(worker)
            return results
        say(problem["error"]["message"])
        self.forget(worker)
        self.replace(worker.generation)
        return [problem for _ in samples]

    def release(self, worker):
        if worker.generation == self.generation:
            self.idle.put(worker)
        else:
            self.forget(worker)

    def reload(self):
        """Loads the current files. If they cannot be loaded, the previous version stays in use."""
        generation = self.generation + 1
        try:
            targets = read_targets(self.settings)
            first = Worker(self, targets, generation)
        except NotLoaded as error:
            say("reload failed, the version of %s stays in use: %s" % (self.loaded_at, error))
            return
        with self.lock:
            self.generation, self.targets, self.trouble = generation, targets, None
        self.loaded_at = time.strftime("%H:%M:%S")
        self.add(first)
        for _ in range(self.processes - 1):
            self.replace(generation)
        say("reloaded %s" % ", ".join(target["shown"] for target in targets))

    def watched(self):
        with self.lock:
            files = {f for worker in self.all for f in worker.modules}
        return files | {target["file"] for target in self.targets if target["file"]}

    def watch(self):
        seen = stamps(self.watched())
        while True:
            time.sleep(WATCH_S)
            now = stamps(self.watched())
            # A module that has just been imported has not changed.
            if all(seen.get(path, stamp) == stamp for path, stamp in now.items()):
                seen.update(now)
                continue
            # An editor may still be writing the file.
            while True:
                time.sleep(0.1)
                then, now = now, stamps(self.watched())
                if then == now:
                    break
            seen = now
            self.reload()

    def stop(self):
        with self.lock:
            workers = list(self.all)
        for worker in workers:
            worker.process.kill()


def stamps(files):
    found = {}
    for path in files:
        try:
            status = os.stat(path)
            found[path] = (status.st_mtime_ns, status.st_size, status.st_ino)
        except OSError:
            found[path] = None
    return found


def read_targets(settings):
    """Returns the targets with the content of their files."""
    targets = []
    for target in settings["targets"]:
        target = dict(target, source=None)
        if target["file"] is not None:
            try:
                with open(target["file"], "rb") as file:
                    source = file.read()
            except OSError as error:
                raise NotLoaded("file_not_found", "%s cannot be read: %s" % (target["shown"], error.strerror)) from None
            expected = target.get("sha256")
            if expected and hashlib.sha256(source).hexdigest() != expected:
                text = "%s has changed since the job was submitted: its SHA-256 is not %s…"
                raise NotLoaded("file_changed", text % (target["shown"], expected[:12]))
            target["source"] = base64.b64encode(source).decode()
        targets.append(target)
    return targets
