# Continues tools.py: plays one episode with an object of the user's class.


# Fields of a step's request that `step` gets if it has a parameter of the name.
STEP_FIELDS = ("turn", "text", "finish_reason", "num_tokens", "turns_left", "tokens_left")
ROLES = ("tool", "user")


class Invalid(Exception):
    """Error for a value that the user's class returned."""


def is_stepped(kind):
    return callable(getattr(kind, "step", None))


def tool_methods(kind):
    """Returns the names of a class's tools, as TRL's environment_factory has them: its public methods."""
    import inspect

    if not isinstance(kind, type):
        kind = type(kind)
    names = [name for name, _ in inspect.getmembers(kind, predicate=inspect.isfunction)]
    return [name for name in names if name not in ("reset", "get_reward") and not name.startswith("_")]


ASYNC = []
ASYNC_LOCK = threading.Lock()


def finished(value):
    """Waits for an awaitable on the loop of asynchronous methods, which runs in a thread of its own."""
    import asyncio
    import inspect

    if not inspect.isawaitable(value):
        return value
    with ASYNC_LOCK:
        if not ASYNC:
            ASYNC.append(asyncio.new_event_loop())
            threading.Thread(target=ASYNC[0].run_forever, daemon=True).start()

    async def wait():
        return await value

    return asyncio.run_coroutine_threadsafe(wait(), ASYNC[0]).result()


def chosen(function, first, fields):
    """Returns the arguments of a method: the first positional one if `first` is given, and those of its parameters that fields name."""
    import inspect

    parameters = list(inspect.signature(function).parameters.values())
    positional = [first] if first is not None else []
    named = [p for p in parameters[len(positional) :] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    missing = [p.name for p in named if p.default is p.empty and p.name not in fields]
    if missing:
        text = "%s requires '%s', which it cannot get; there are: %s"
        raise Invalid(text % (function.__name__, missing[0], ", ".join(fields) or "none"))
    if any(p.kind == p.VAR_KEYWORD for p in parameters):
        return positional, dict(fields)
    wanted = {p.name for p in named}
    return positional, {name: value for name, value in fields.items() if name in wanted}


class Game:
    """An object of the user's class, in one episode."""

    def __init__(self, kind, replaying=False):
        self.object = kind()
        self.stepped = is_stepped(self.object)
        self.replay(replaying)

    def replay(self, on):
        """Tells the object whether recorded turns are played again: its attribute `replaying`."""
        try:
            self.object.replaying = on
        except AttributeError:
            # An object with __slots__ has no place for it.
            pass

    def close(self):
        # A class of tools may have a tool of this name.
        if self.stepped and callable(getattr(self.object, "close", None)):
            finished(self.object.close())

    def answer(self, request):
        """Returns the answer to a request, without version and id."""
        if request["type"] == "env.reset.request":
            return self.reset(request)
        return checked_step(self.step(request) if self.stepped else self.call_tools(request))

    def reset(self, request):
        function = getattr(self.object, "reset", None)
        returned = None
        if callable(function):
            returned = finished(function(**self.reset_arguments(function, request)))
        if isinstance(returned, tuple) and len(returned) == 2 and isinstance(returned[1], dict):
            # Gymnasium's observation and info.
            returned = returned[0]
        answer = {"messages": []}
        if isinstance(returned, dict):
            answer.update((name, returned[name]) for name in ("messages", "tools", "session") if name in returned)
            returned = returned.get("content")
        if isinstance(returned, str):
            answer["messages"] = [{"role": "user", "content": returned}]
        elif isinstance(returned, list):
            answer["messages"] = returned
        elif returned is not None:
            raise Invalid("reset returned %s, not a text, messages, a dict or None" % described(returned))
        if "tools" not in answer:
            answer["tools"] = self.tools()
        return checked_reset(answer)

    def reset_arguments(self, function, request):
        """Returns row and seed, and the row's columns, as far as reset's parameters name them."""
        import inspect

        columns = request.get("columns") or {}
        row = dict(columns, prompt=request.get("messages"))
        names = inspect.signature(function).parameters
        fields = {"seed": request["episode"].get("seed"), "params": (request.get("environment") or {}).get("params")}
        fields["limits"] = request.get("limits")
        takes_all = any(p.kind == p.VAR_KEYWORD for p in names.values())
        if "row" in names:
            fields.update(row=row)
        elif takes_all:
            # As TRL: the row alone, and what reset names.
            fields = dict({name: value for name, value in fields.items() if name in names}, **row)
        else:
            fields.update(row)
        return chosen(function, None, fields)[1]

    def tools(self):
        return [schema_of(tool) if callable(tool) else tool for tool in self.listed()]

    def listed(self):
        """Returns the tools: a class with step lists them in its attribute `tools`, else they are its public methods."""
        if not self.stepped:
            return [getattr(self.object, name) for name in tool_methods(self.object)]
        tools = getattr(self.object, "tools", None) or []
        tools = finished(tools()) if callable(tools) else tools
        # In the body of a class, a method is a function that does not know its object.
        own = type(self.object)
        is_method = lambda tool: callable(tool) and vars(own).get(getattr(tool, "__name__", "")) is tool
        return [getattr(self.object, tool.__name__) if is_method(tool) else tool for tool in tools]

    def methods(self):
        return {tool.__name__: tool for tool in self.listed() if callable(tool)}

    def step(self, request):
        """Asks a class with `step(message)`. Calls of its methods are carried out here; then step gets the last message alone."""
        message = request.get("message") or {}
        calls = message.get("tool_calls") or []
        methods = self.methods() if calls else {}
        if not methods:
            return self.ask(request, message)
        messages = [self.call(methods, call) for call in calls]
        if not request.get("final"):
            return {"messages": messages, "reward": None, "done": False}
        return dict(self.ask(request, message), messages=messages)

    def ask(self, request, message):
        fields = {name: request[name] for name in STEP_FIELDS if name in request}
        fields["final"] = bool(request.get("final"))
        positional, named = chosen(self.object.step, message, fields)
        returned = finished(self.object.step(*positional, **named))
        calls = [call.get("id") for call in message.get("tool_calls") or []]
        answer = {"messages": [], "reward": None, "done": False}
        if isinstance(returned, dict):
            unknown = set(returned) - {"messages", "content", "reward", "done", "metrics", "session"}
            if unknown:
                text = "step returned the field '%s'; known fields: messages, content, reward, done, metrics, session"
                raise Invalid(text % sorted(unknown)[0])
            answer.update((name, value) for name, value in returned.items() if name != "content")
            observation = returned.get("messages", returned.get("content"))
        elif isinstance(returned, tuple) and len(returned) in (2, 3):
            observation = returned[0]
            answer.update(zip(("reward", "done"), returned[1:]))
        elif isinstance(returned, tuple) and len(returned) == 5:
            # Gymnasium's observation, reward, terminated, truncated, info.
            observation = returned[0]
            answer.update(reward=returned[1], done=bool(returned[2] or returned[3]))
        elif isinstance(returned, str) or returned is None:
            observation = returned
        else:
            raise Invalid("step returned %s, not a dict, a tuple or a text" % described(returned))
        answer["messages"] = messages_of(observation, calls)
        return answer

    def call_tools(self, request):
        """Carries out the calls of a message, as TRL does. The episode is over for a message without calls."""
        calls = (request.get("message") or {}).get("tool_calls") or []
        methods = self.methods() if calls else {}
        messages = [self.call(methods, call) for call in calls]
        over = not calls or bool(request.get("final"))
        return {"messages": messages, "reward": self.reward() if over else None, "done": False}

    def call(self, methods, call):
        """Carries out a call. An exception of the tool is a text for the model, in the form that TRL gives it."""
        function = call.get("function") or {}
        name = function.get("name")
        try:
            if name not in methods:
                raise ValueError("Tool %s not found." % name)
            arguments = json.loads(function.get("arguments") or "{}")
            content = text_of(finished(methods[name](**arguments)))
        except Invalid:
            raise
        except Exception as error:
            content = str({"error": str(error)})
        return {"role": "tool", "tool_call_id": call.get("id"), "name": name, "content": content}

    def reward(self):
        """Returns get_reward(), else the attribute reward; None if there is neither."""
        if callable(getattr(self.object, "get_reward", None)):
            return finished(self.object.get_reward())
        value = getattr(self.object, "reward", None)
        return None if callable(value) else value


def text_of(result):
    """Returns a tool's result as text, as TRL does. Blocks of text are joined; other blocks cannot be shown."""
    blocks = isinstance(result, list) and all(isinstance(block, dict) and "type" in block for block in result)
    if not blocks or not result:
        return str(result)
    if any(block["type"] != "text" or not isinstance(block.get("text"), str) for block in result):
        raise Invalid("a tool returned a block that is no text; an episode's messages are texts")
    return "".join(block["text"] for block in result)


def messages_of(observation, calls):
    """Returns an observation as messages: one of role tool for each call, else one of role user."""
    if observation is None:
        observation = []
    if isinstance(observation, str):
        observation = [observation]
    if not isinstance(observation, list):
        raise Invalid("an observation must be a text, or a list of texts or messages, not %s" % described(observation))
    messages, open_calls = [], list(calls)
    for part in observation:
        if isinstance(part, str):
            part = {"role": "tool" if open_calls else "user", "content": part}
        if isinstance(part, dict) and part.get("role") == "tool" and open_calls:
            part = dict(part)
            part.setdefault("tool_call_id", open_calls[0])
            open_calls.pop(0)
        messages.append(part)
    return messages


def checked_messages(messages, roles):
    if not isinstance(messages, list):
        raise Invalid("messages must be a list, not %s" % described(messages))
    for index, message in enumerate(messages):
        good = isinstance(message, dict) and message.get("role") in roles and isinstance(message.get("content"), str)
        if not good:
            text = "messages[%d] must have a role (%s) and a text as content, not %s"
            raise Invalid(text % (index, " or ".join(roles), described(message)))


def checked_reset(answer):
    checked_messages(answer["messages"], ("system", "user"))
    if not isinstance(answer["tools"], list):
        raise Invalid("tools must be a list, not %s" % described(answer["tools"]))
    return answer


def checked_step(answer):
    checked_messages(answer["messages"], ROLES)
    try:
        answer["reward"] = as_number(answer["reward"])
    except (TypeError, ValueError, OverflowError):
        raise Invalid("the reward is %s, not a finite number or None" % described(answer["reward"])) from None
    # A comparison of arrays gives a value that only looks like True or False.
    answer["done"] = bool(answer["done"])
    metrics = answer.get("metrics")
    if metrics is not None:
        if not isinstance(metrics, dict):
            raise Invalid("metrics must be a dict, not %s" % described(metrics))
        answer["metrics"] = {str(name): plain(value) for name, value in metrics.items()}
    return answer
